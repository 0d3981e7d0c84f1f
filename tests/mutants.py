"""
Break each promise on purpose, and see a test turn red.

    python -m tests.mutants            # all of them
    python -m tests.mutants fencing    # those whose promise holds the word

A mutant is one small change to the package, made in a copy of the tree, and the tests that must
notice. A promise whose mutant turns nothing red is not tested. Exit status 1 when a mutant lives,
when its change does not apply any more, or when its tests fail without it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import (
    mutants_letters,
    mutants_list,
    mutants_operating,
    mutants_seeing,
    mutants_speed,
    mutants_tasks,
    mutants_testing,
    mutants_topics,
)
from tests.mutants_list import Mutant

ROOT = Path(__file__).resolve().parent.parent
# What a copy needs: the package, the example project, the tests, the pages that they read, the settings of the tools.
COPIED = ("django_pgqueue", "example_project", "tests", "docs", "manage.py", "dev.py", "pyproject.toml", "README.md")
# A mutant may hang a test (a publisher that waits for ever, say): then it is noticed too.
TIMEOUT = 300
# pytest's exit statuses: https://docs.pytest.org/en/stable/reference/exit-codes.html
PASSED, FAILED = 0, 1


MODULES = (
    mutants_list,
    mutants_operating,
    mutants_topics,
    mutants_letters,
    mutants_speed,
    mutants_seeing,
    mutants_tasks,
    mutants_testing,
)


@dataclass(frozen=True)
class Result:
    """What became of a mutant: "noticed", or why it does not count."""

    mutant: Mutant
    verdict: str
    output: str = ""


def copy_tree(into: Path) -> None:
    """Copy what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, into / name)


def run_tests(tree: Path, tests: tuple[str, ...], timeout: float = TIMEOUT) -> tuple[int, str]:
    """Run tests in a tree, for `timeout` seconds at the most. Returns pytest's exit status and its output."""
    environment = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as expired:
        return FAILED, f"still running after {expired.timeout} s"
    return done.returncode, done.stdout + done.stderr


def try_mutant(mutant: Mutant) -> Result:
    """Apply one mutant in a fresh copy and run its tests."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        target = tree / "django_pgqueue" / mutant.file
        source = target.read_text(encoding="utf-8")
        if source.count(mutant.old) != 1:
            return Result(mutant, f"does not apply: its text stands {source.count(mutant.old)} times in {mutant.file}")
        target.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        status, output = run_tests(tree, mutant.tests)
        if status == PASSED:
            # A race is not lost every time.
            status, output = run_tests(tree, mutant.tests)
    if status == FAILED:
        return Result(mutant, "noticed")
    return Result(mutant, "lives" if status == PASSED else f"pytest ended with {status}", output)


def unbroken_output(mutants: list[Mutant]) -> str | None:
    """Run the tests of all mutants without any. Returns what they say if they fail."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory(prefix="pgqueue-mutant-") as folder:
        copy_tree(Path(folder))
        status, output = run_tests(Path(folder), tests, TIMEOUT * len(mutants))
    return None if status == PASSED else output


def main() -> int:
    """Run the mutants that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose promise or change holds one of these words")
    # Tests mostly wait.
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="how many at once")
    parser.add_argument(
        "--unbroken", action="store_true", help="the tests have just passed without any mutant: don't run them first"
    )
    options = parser.parse_args()
    mutants = [
        mutant
        for module in MODULES
        for mutant in module.MUTANTS
        if not options.words or any(word in f"{mutant.promise} {mutant.change}" for word in options.words)
    ]
    if not mutants:
        parser.error("no mutant has such a word")
    if not options.unbroken and (output := unbroken_output(mutants)) is not None:
        print(output[-4000:], "\nthe tests fail without any mutant")
        return 1
    lives = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(try_mutant, mutants):
            print(f"{result.verdict:8}  {result.mutant.promise}: {result.mutant.change}", flush=True)
            if result.verdict != "noticed":
                lives += 1
                print(result.output[-2000:])
    print(f"{len(mutants) - lives} mutants noticed, {lives} not")
    return 1 if lives else 0


if __name__ == "__main__":
    sys.exit(main())
