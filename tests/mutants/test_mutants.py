"""The mutants: each applies, a change chooses its own, and only a test that fails notices one."""

import datetime
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutants.choice import PARTS, Change, find_change, named, part_of, touched
from tests.mutants.lists import all_mutants, faults
from tests.mutants.mutant import Mutant
from tests.mutants.place import changed
from tests.mutants.servers import needs_server
from tests.mutants.verdict import Outcome, run_tests

TODAY = datetime.date(2026, 12, 1)


def mutant(
    change: str = "it adds one", *, file: str = "a.py", old: str = "+ 0", tests: str = "tests/test_a.py"
) -> Mutant:
    return Mutant("a promise", change, file, old, "+ 1", (tests,))


# --- The lists ------------------------------------------------------------------------------------


def test_every_mutant_applies() -> None:
    """When this fails: the lines name the mutants to mend; the text of each stands once, and its tests are there."""
    assert faults(all_mutants()) == []


def test_every_mutant_is_still_python() -> None:
    """A change that cannot be imported would be noticed by any test."""
    package = Path(__file__).parent.parent.parent
    for each in all_mutants():
        source = (package / each.path).read_text()
        compile(source.replace(each.old, each.new), str(each), "exec", dont_inherit=True)


def test_what_does_not_apply_is_named(tmp_path: Path) -> None:
    """A text that is gone, or stands twice, and a test that is not there; a test's parameters and class are known."""
    write(tmp_path, "django_pgqueue/a.py", "one = 1 + 0\ntwo = 2 + 0\nthree = 3\n")
    write(tmp_path, "tests/test_a.py", "class TestA:\n    def test_it(self): ...\n\nasync def test_that(): ...\n")
    fine = [
        mutant(str(i), old=f"{i} + 0", tests=f"tests/test_a.py{test}") for i, test in ((1, ""), (2, "::test_that[1]"))
    ]
    assert faults([*fine, mutant(old="= 3", tests="tests/test_a.py::TestA::test_it")], tmp_path) == []
    assert faults([mutant()], tmp_path) == ["a promise: it adds one: its text stands 2 times in a.py"]
    assert faults([mutant(file="b.py")], tmp_path) == ["a promise: it adds one: its text stands 0 times in b.py"]
    assert faults([mutant(old="= 3", tests="tests/test_a.py::test_it")], tmp_path) == [
        "a promise: it adds one: there is no test tests/test_a.py::test_it"
    ]
    assert faults([fine[0], fine[0]], tmp_path) == ["a promise: 1: 2 mutants have this name"]


# --- The choice -----------------------------------------------------------------------------------


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A repository in `tmp_path` with two files and their tests."""
    for name in ("PGQUEUE_BASE", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for key in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{key}_NAME", "A test")
        monkeypatch.setenv(f"GIT_{key}_EMAIL", "test@example.com")

    def run(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    run("init", "--quiet")
    for name in ("django_pgqueue/a.py", "django_pgqueue/b.py", "tests/test_a.py", "tests/test_b.py"):
        write(tmp_path, name, "".join(f"# {name}, line {i}\n" for i in range(20)))
    run("add", ".")
    run("commit", "--quiet", "--message=first")
    return run


def paths(root: Path, **environment: str) -> set[str]:
    change = find_change(root, environment)
    assert change is not None
    return set(change.paths)


def test_what_is_committed_and_what_is_not_is_the_change(git: Callable[..., None], tmp_path: Path) -> None:
    """Since the parent commit: committed, staged, not staged, not known to git."""
    write(tmp_path, "django_pgqueue/a.py", "committed")
    git("commit", "--quiet", "--all", "--message=second")
    assert paths(tmp_path) == {"django_pgqueue/a.py"}
    write(tmp_path, "django_pgqueue/b.py", "staged")
    git("add", ".")
    write(tmp_path, "tests/test_a.py", "not staged")
    write(tmp_path, "tests/test_new.py", "new")
    assert paths(tmp_path) == {"django_pgqueue/a.py", "django_pgqueue/b.py", "tests/test_a.py", "tests/test_new.py"}


def test_the_base_is_the_variable_else_the_newest_tag_else_the_parent(git: Callable[..., None], tmp_path: Path) -> None:
    """A tag of another branch is no base."""
    git("tag", "landed-1")
    for number, name in enumerate(("django_pgqueue/a.py", "django_pgqueue/b.py", "tests/test_a.py"), start=2):
        write(tmp_path, name, "changed")
        git("commit", "--quiet", "--all", f"--message={number}", f"--date=2026-01-0{number}T00:00:00")
    git("branch", "other")
    assert paths(tmp_path) == {"django_pgqueue/a.py", "django_pgqueue/b.py", "tests/test_a.py"}
    git("tag", "-d", "landed-1")
    assert paths(tmp_path) == {"tests/test_a.py"}
    assert paths(tmp_path, PGQUEUE_BASE="HEAD~2") == {"django_pgqueue/b.py", "tests/test_a.py"}
    git("checkout", "--quiet", "-b", "elsewhere", "HEAD~1")
    git("commit", "--quiet", "--allow-empty", "--message=elsewhere")
    git("tag", "landed-2")
    git("checkout", "--quiet", "other")
    assert paths(tmp_path) == {"tests/test_a.py"}
    with pytest.raises(subprocess.CalledProcessError):
        paths(tmp_path, PGQUEUE_BASE="no-such-commit")


def test_a_pure_rename_touches_nothing(git: Callable[..., None], tmp_path: Path) -> None:
    """One with a change in it touches the new name."""
    git("mv", "django_pgqueue/a.py", "django_pgqueue/c.py")
    git("mv", "django_pgqueue/b.py", "django_pgqueue/d.py")
    with (tmp_path / "django_pgqueue/d.py").open("a") as file:
        file.write("# one more\n")
    git("commit", "--quiet", "--all", "--message=second")
    assert paths(tmp_path) == {"django_pgqueue/d.py"}


def test_a_mutant_is_touched_by_its_file_by_its_test_and_by_its_own_arrival(
    git: Callable[..., None], tmp_path: Path
) -> None:
    """A list that moves adds none."""
    mutants = [
        mutant(),
        mutant("by its test", file="x.py"),
        mutant("not", file="b.py", tests="tests/test_b.py::test_it"),
        mutant("new", file="b.py", tests="tests/test_b.py"),
    ]
    write(tmp_path, "tests/mutants/old.py", '        "not",\n' * 20)
    git("add", ".")
    git("commit", "--quiet", "--message=second")
    write(tmp_path, "django_pgqueue/a.py", "changed")
    git("mv", "tests/mutants/old.py", "tests/mutants/moved.py")
    with (tmp_path / "tests/mutants/moved.py").open("a") as file:
        file.write('        "new",\n')
    change = find_change(tmp_path, {"PGQUEUE_BASE": "HEAD"})
    assert change is not None
    assert [change.touches(each) for each in mutants] == [True, False, False, True]
    by_test = Change("HEAD", frozenset({"tests/test_a.py"}))
    assert [by_test.touches(each) for each in mutants] == [True, True, False, False]


def test_all_others_are_tried_within_eight_days(git: Callable[..., None], tmp_path: Path) -> None:
    """Each on one of them, and a mutant that is touched on all."""
    mutants = [mutant(f"change {i}", file="b.py", tests="tests/test_b.py") for i in range(40)]
    write(tmp_path, "django_pgqueue/a.py", "changed")
    git("commit", "--quiet", "--all", "--message=second")
    days = [
        touched([mutant(), *mutants], tmp_path, TODAY + datetime.timedelta(days=number)).mutants
        for number in range(PARTS)
    ]
    assert all(day[0] == mutant() for day in days)
    assert sorted(each.change for day in days for each in day[1:]) == sorted(each.change for each in mutants)
    # The same on every machine and in every process.
    assert part_of(mutant()) == 7


def test_without_a_history_the_days_eighth_is_taken_and_said(tmp_path: Path, git: Callable[..., None]) -> None:
    """A first commit has no parent, and an unpacked archive is no repository."""
    assert find_change(tmp_path, {}) is None
    mutants = [mutant(f"change {i}") for i in range(40)]
    choice = touched(mutants, tmp_path, TODAY)
    assert 0 < len(choice.mutants) < 20
    assert choice.reason.startswith("no history to tell what the change touches, ")


def test_words_choose_by_promise_or_change() -> None:
    """One of the words is enough, and no word chooses all."""
    mutants = [mutant("red"), mutant("blue")]
    assert named(mutants, ["red", "green"]) == mutants[:1]
    assert named(mutants, ["promise"]) == named(mutants, []) == mutants


# --- The place ------------------------------------------------------------------------------------


def test_a_test_that_stops_the_server_gets_its_own(tmp_path: Path) -> None:
    """It says so itself, by a fixture of its file, or by a mark; the others share one."""
    write(
        tmp_path,
        "test_a.py",
        "import pytest\nfrom tests import cluster\n"
        "@pytest.fixture\ndef stopped(pg): ...\n"
        "@pytest.fixture\ndef twice(stopped): ...\n"
        "@pytest.fixture\ndef switch():\n    if cluster.cluster is None: ...\n"
        "def test_itself(server): ...\n"
        "def test_fixture(twice): ...\n"
        "def test_condition(switch): ...\n"
        "@pytest.mark.usefixtures('server')\ndef test_mark(): ...\n"
        "class TestA:\n    async def test_method(self, server): ...\n"
        "def test_not(monkeypatch): ...\n",
    )
    names = ("itself", "fixture", "condition", "mark[1]", "not")
    assert [needs_server(tmp_path, f"test_a.py::test_{name}") for name in names] == [True, True, True, True, False]
    assert needs_server(tmp_path, "test_a.py::TestA::test_method")
    assert needs_server(tmp_path, "test_a.py")
    write(tmp_path, "test_b.py", "def test_not(monkeypatch): ...\n")
    assert not needs_server(tmp_path, "test_b.py")


def test_a_mutant_may_be_outside_the_package() -> None:
    """In the example project, say: a change is known by the path that git has."""
    assert mutant(file="../example_project/live/views.py").path == "example_project/live/views.py"


# --- The verdict ----------------------------------------------------------------------------------

TREE = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--no-such-option"]\n',
    "conftest.py": "import pytest\n@pytest.fixture\ndef bad(): raise ValueError\n",
    "sums.py": "def plus(number):\n    return number + 1\n",
    "test_it.py": """
import pytest, time
from sums import plus

def test_plus(): assert plus(1) == 2
def test_skips(): pytest.skip("not here")
def test_errs(bad): ...
def test_hangs(): time.sleep(60)
""",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        write(tmp_path, name, text)
    return tmp_path


def try_tests(tree: Path, *tests: str, timeout: float = 60) -> Outcome:
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run_tests(tree, [f"test_it.py::{test}" for test in tests], environment, timeout=timeout)


def test_only_a_test_that_fails_notices(tree: Path) -> None:
    """Not one that is skipped, nor an error before the test, nor a change that cannot be imported."""
    assert try_tests(tree, "test_plus").all_passed
    assert try_tests(tree, "test_plus", "test_skips").verdict == "lives"
    assert try_tests(tree, "test_skips").verdict == "skipped"
    assert not try_tests(tree, "test_skips").all_passed
    assert try_tests(tree, "test_errs").verdict == "broken"
    assert try_tests(tree, "test_gone").verdict == "pytest ended with 4"
    with changed(tree / "sums.py", "return", "return return", 1):
        assert try_tests(tree, "test_plus").verdict.startswith("pytest ended with ")
    with changed(tree / "sums.py", "+ 1", "+ 2", 2):
        assert try_tests(tree, "test_plus").verdict == "noticed"


def test_a_test_that_hangs_notices(tree: Path) -> None:
    """It is ended after its time."""
    outcome = try_tests(tree, "test_hangs", timeout=3)
    assert outcome.verdict == "noticed"
    assert "still running after 3 s" in outcome.output


def test_changes_of_one_size_are_not_taken_for_each_other(tree: Path) -> None:
    """Each is compiled, though all are written within a second; then the file is as it was, its time too."""
    path = tree / "sums.py"
    before = path.read_bytes(), path.stat().st_mtime_ns
    for number, new in enumerate(("+ 2", "+ 3", "+ 4"), start=1):
        with changed(path, "+ 1", new, number):
            assert try_tests(tree, "test_plus").verdict == "noticed", new
    assert try_tests(tree, "test_plus").verdict == "lives"
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
