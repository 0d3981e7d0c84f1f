"""Run pytest, and judge by it whether a mutant was noticed."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

# A mutant may hang a test (a publisher that waits for ever, say): then it is noticed too.
TIMEOUT = 300
# pytest's exit statuses: https://docs.pytest.org/en/stable/reference/exit-codes.html
PASSED, FAILED = 0, 1
OPTIONS = (
    *("-x", "-q", "--no-header", "-p", "no:cacheprovider"),
    # Its report header alone imports all of Hypothesis, which takes as long as a test.
    *("-p", "no:hypothesispytest"),
    # The project's options are for whole runs: one process is enough for a test or two.
    *("-o", "addopts="),
)
# What a run of its own must not inherit. Bytecode is written so that only the changed module is compiled again.
UNSET = ("DATABASE_URL", "PGQUEUE_TEST_SERVER", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS")

NOTICED = "noticed"

_running: set["subprocess.Popen[bytes]"] = set()


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest ended with: its exit status, what became of the tests, and what it wrote."""

    status: int
    ran: int = 0
    failed: int = 0
    skipped: int = 0
    output: str = ""
    hung: bool = False

    @property
    def verdict(self) -> str:
        """Return "noticed", or why the run does not count as that."""
        if self.hung or (self.status == FAILED and self.failed):
            return NOTICED
        if self.status == PASSED:
            return "lives" if self.ran > self.skipped else "skipped"
        return "broken" if self.status == FAILED else f"pytest ended with {self.status}"

    @property
    def all_passed(self) -> bool:
        return self.status == PASSED and self.ran > 0 and not self.skipped


def run_tests(
    tree: Path, tests: Iterable[str], environment: Mapping[str, str], *options: str, timeout: float = TIMEOUT
) -> Outcome:
    """Run tests in a tree, for `timeout` seconds at the most; what they started ends with them."""
    report, log = tree / "report.xml", tree / "report.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={report}", *options, *tests]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=clean(environment), stdout=output, stderr=output, start_new_session=True
        )
    _running.add(process)
    try:
        status, hung = process.wait(timeout), False
    except subprocess.TimeoutExpired:
        status, hung = FAILED, True
    finally:
        _end(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    if hung:
        return Outcome(status, output=f"{text}\nstill running after {timeout} s", hung=True)
    ran, failed, skipped = _counts(report)
    return Outcome(status, ran, failed, skipped, text)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what is only meant for it, with these variables added."""
    inherited = {key: value for key, value in os.environ.items() if key not in UNSET}
    return {key: value for key, value in inherited.items() if not key.startswith("PYTEST_XDIST")} | environment


def end_all() -> None:
    """End the runs that are under way."""
    for process in tuple(_running):
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _running.discard(process)


def _counts(report: Path) -> tuple[int, int, int]:
    """Return how many tests ran, failed and were skipped; an error around a test is none of these."""
    if not report.exists():
        return 0, 0, 0
    (suite,) = ElementTree.parse(report).iter("testsuite")
    return int(suite.attrib["tests"]), int(suite.attrib["failures"]), int(suite.attrib["skipped"])
