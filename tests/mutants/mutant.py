"""What a mutant is."""

from dataclasses import dataclass
from posixpath import normpath


@dataclass(frozen=True)
class Mutant:
    """
    One change that breaks a promise.

    `old` must stand exactly once in `file`, a path from the package's folder, and `new` replaces it. `tests` are
    pytest's names of the tests that must notice.
    """

    promise: str
    change: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.promise}: {self.change}"

    @property
    def path(self) -> str:
        """The path of the file that is changed, from the root of the tree."""
        return normpath(f"django_pgqueue/{self.file}")

    @property
    def test_files(self) -> tuple[str, ...]:
        """The paths of the files of its tests, from the root of the tree."""
        return tuple(dict.fromkeys(test.partition("::")[0] for test in self.tests))
