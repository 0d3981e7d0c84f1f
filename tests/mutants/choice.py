"""
Which mutants a run tries.

`touched()` takes those whose file or whose test's file a change touches, and those that the change adds, and
an eighth of the rest, another one each day, so that within eight days all are tried.
"""

import datetime
import os
import subprocess
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant

PARTS = 8
TAGS = "refs/tags/landed-*"


@dataclass(frozen=True)
class Change:
    """What the work tree has changed since `base`: the paths, and the lines that were added to the lists of mutants."""

    base: str
    paths: frozenset[str]
    added: str = ""

    def touches(self, mutant: Mutant) -> bool:
        return not self.paths.isdisjoint((mutant.path, *mutant.test_files)) or f'"{mutant.change}",' in self.added


@dataclass(frozen=True)
class Choice:
    """The mutants that a run tries, and why there are no more."""

    mutants: Sequence[Mutant]
    reason: str


def named(mutants: Sequence[Mutant], words: Sequence[str]) -> list[Mutant]:
    """Return those whose promise or change holds one of the words; without words, all."""
    return [mutant for mutant in mutants if not words or any(word in str(mutant) for word in words)]


def touched(mutants: Sequence[Mutant], root: Path, day: datetime.date) -> Choice:
    """Return those that the change in `root` touches and the day's eighth of the rest."""
    change = find_change(root, os.environ)
    chosen = [mutant for mutant in mutants if change is not None and change.touches(mutant)]
    part = [mutant for mutant in mutants if mutant not in chosen and part_of(mutant) == day.timetuple().tm_yday % PARTS]
    since = f"{len(chosen)} touched since {change.base}" if change else "no history to tell what the change touches"
    return Choice([*chosen, *part], f"{since}, {len(part)} of the {len(mutants) - len(chosen)} others by the day")


def part_of(mutant: Mutant) -> int:
    """Return the number of the mutant's eighth, the same on each machine and wherever its file moves."""
    return zlib.crc32(str(mutant).encode()) % PARTS


def find_change(root: Path, environment: Mapping[str, str]) -> Change | None:
    """
    Return what has changed in the work tree, committed or not, and None where there is nothing to compare it with.

    It is compared with `PGQUEUE_BASE`, else with the newest tag `landed-*`, else with the parent commit. A file that
    was only renamed has not changed. Raise `CalledProcessError` where `PGQUEUE_BASE` names no commit.
    """
    base = environment.get("PGQUEUE_BASE") or _newest_tag(root) or _parent(root)
    if base is None:
        return None
    compared = ("diff", "--no-ext-diff", "--find-renames", base)
    paths = {*_changed(_git(root, *compared, "--name-status", "-z"))}
    paths |= {*_git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")} - {""}
    # Of all tests, so that a list that has moved is known by what it was.
    diff = _git(root, *compared, "--unified=0", "--", "tests")
    return Change(base, frozenset(paths), "\n".join(line for line in diff.splitlines() if line.startswith("+")))


def _newest_tag(root: Path) -> str | None:
    try:
        listed = _git(
            root, "for-each-ref", "--merged=HEAD", "--sort=-creatordate", "--format=%(refname:short)", "--count=1", TAGS
        )
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None
    return listed.strip() or None


def _parent(root: Path) -> str | None:
    try:
        return _git(root, "rev-parse", "--short", "--verify", "HEAD^").strip()
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None


def _changed(listed: str) -> Iterator[str]:
    """Read `git diff --name-status -z`: a status and a path, or two paths after a rename or a copy."""
    fields = iter(listed.split("\0")[:-1])
    for status in fields:
        path = next(fields)
        if status[0] in "RC":
            path = next(fields)
        if status != "R100":
            yield path


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
