"""
Django's own tests of its Tasks, run on this package's backend and a real database.

    python -m tests.task_backend.conformance

runs them for the Django that is installed, and writes docs/tasks-conformance.md.

They come from the source distribution of the very Django that is installed, from the package index, into
`.django-sources/`. Two of its backends are replaced: the dummy one, which only stores tasks, by ours; the immediate
one by ours with a consumer that runs what was enqueued before `enqueue()` returns.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import django

import dev

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / ".django-sources"
RECORD = ROOT / "docs" / "results" / "tasks-conformance.json"
PAGE = ROOT / "docs" / "tasks-conformance.md"

OURS = "django_pgqueue.task_backend.PGQueueBackend"
DRAINED = "tests.support.drained.DrainedBackend"
SECONDS = 300
PASSED = "passed"


IS_DUMMY = "asks for an instance of Django's dummy backend"
HAS_RESULTS = "reads the list of results, which only the dummy backend has"
NO_PRIORITY = "needs priorities, which this backend does not support"
IS_IMMEDIATE = "tests that the immediate backend does not support something"

# These cannot pass. Each must fail, or it has no place here.
EXCEPTED = {
    "TaskTestCase.test_chained_using": NO_PRIORITY,
    "TaskTestCase.test_enqueue_task": HAS_RESULTS,
    "TaskTestCase.test_enqueue_task_async": HAS_RESULTS,
    "TaskTestCase.test_get_backend": IS_DUMMY,
    "TaskTestCase.test_invalid_priority": NO_PRIORITY,
    "TaskTestCase.test_refresh_result": "calls refresh() on the event loop, where Django allows no database access",
    "TaskTestCase.test_using_correct_backend": IS_DUMMY,
    "TaskTestCase.test_using_priority": NO_PRIORITY,
    "DummyBackendTestCase.test_clear": "calls clear(), which only the dummy backend has",
    "DummyBackendTestCase.test_enqueue_task": HAS_RESULTS,
    "DummyBackendTestCase.test_enqueue_task_async": HAS_RESULTS,
    "DummyBackendTestCase.test_refresh_result": HAS_RESULTS,
    "DummyBackendTestCase.test_refresh_result_async": HAS_RESULTS,
    "DummyBackendTestCase.test_using_correct_backend": IS_DUMMY,
    "ImmediateBackendTestCase.test_cannot_get_result": IS_IMMEDIATE,
    "ImmediateBackendTestCase.test_cannot_pass_run_after": IS_IMMEDIATE,
    "ImmediateBackendTestCase.test_cannot_refresh_result": IS_IMMEDIATE,
    "ImmediateBackendTestCase.test_throws_keyboard_interrupt": (
        "expects KeyboardInterrupt in the thread that enqueues; a worker treats any exception of a task as a failure"
    ),
    "ImmediateBackendTestCase.test_using_correct_backend": "asks for an instance of Django's immediate backend",
}


class Suite(NamedTuple):
    """One of Django's test cases, and what stands in for its backend."""

    module: str
    case: str
    backend: str
    tasks: dict[str, Any]


def tasks(backend: str, *queues: str) -> dict[str, Any]:
    return {"default": {"BACKEND": backend, "QUEUES": list(queues)}}


SUITES = (
    Suite(
        "test_tasks",
        "TaskTestCase",
        OURS,
        {
            **tasks(OURS, "default", "queue_1"),
            "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend", "QUEUES": []},
            "missing": {"BACKEND": "does.not.exist"},
        },
    ),
    Suite("test_dummy_backend", "DummyBackendTestCase", OURS, tasks(OURS)),
    Suite("test_immediate_backend", "ImmediateBackendTestCase", DRAINED, tasks(DRAINED)),
)


def fetch() -> Path | None:
    """
    Return the folder of the tests of the Django that is installed, fetched where they are not here yet.

    None: the index cannot be reached.
    """
    folder = SOURCES / django.__version__
    if not (folder / "tests" / "tasks").is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            if not download(Path(scratch)):
                return None
            (archive,) = Path(scratch).glob("*.tar.gz")
            unpack(archive, folder)
    return folder / "tests"


def download(into: Path) -> bool:
    """Download Django's source distribution. Returns whether the index was reached; raises where it was and failed."""
    # An environment may have none; then the Python that it was made of has.
    python = next((each for each in (sys.executable, sys._base_executable) if dev.has_pip(each)), sys.executable)
    command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--no-binary", ":all:", "--dest", str(into), f"Django=={django.__version__}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode == 0:
        return True
    # What pip says where it could not ask anybody.
    if "Failed to establish a new connection" in done.stderr or "from versions: none" in done.stderr:
        return False
    raise RuntimeError(f"pip download failed: {done.stderr[-2000:]}")


def unpack(archive: Path, folder: Path) -> None:
    """Take the tests of Tasks out of a source distribution."""
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if "/tests/tasks/" in member.name]
        tar.extractall(scratch, members, filter="data")
        (root,) = Path(scratch).iterdir()
        # Somebody else may have been faster.
        if not folder.exists():
            root.rename(folder)


class Verdict(NamedTuple):
    """How one test ended: "passed", or the last line of its error."""

    name: str
    outcome: str


def run(folder: Path) -> list[Verdict]:
    """Run all of them. Django is set up, and the database may be used."""
    sys.path.insert(0, str(folder))
    try:
        return [verdict for suite in SUITES for verdict in run_suite(suite)]
    finally:
        sys.path.remove(str(folder))


def run_suite(suite: Suite) -> Iterator[Verdict]:
    from django.test import TransactionTestCase, override_settings

    theirs = getattr(importlib.import_module(f"tasks.{suite.module}"), suite.case)
    # The first base opens the database, and empties it after each test. Their setUp() clears the dummy.
    ours = type(suite.case, (TransactionTestCase, theirs), {"setUp": lambda self: None})
    case = override_settings(TASKS=suite.tasks, PGQUEUE={"MAX_DELIVERIES": 1})(ours)
    for name in unittest.defaultTestLoader.getTestCaseNames(case):
        result = unittest.TestResult()
        # In a suite, which enters what holds for the class.
        unittest.TestSuite([case(name)])(result)
        troubles = [text for _, text in (*result.errors, *result.failures)]
        yield Verdict(f"{suite.case}.{name}", troubles[0].strip().splitlines()[-1] if troubles else PASSED)


def minor() -> str:
    """Return the version of Django, as the page names it."""
    return ".".join(django.__version__.split(".")[:2])


def record(verdicts: list[Verdict]) -> None:
    """Keep what was found, beside what is kept of other versions, and write the page."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept[minor()] = {"version": django.__version__, "tests": {name: outcome == PASSED for name, outcome in verdicts}}
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page())


HEAD = """\
# Conformance of the Tasks backend

This page shows the results of Django's own tests of its Tasks on `PGQueueBackend` and a real PostgreSQL. The tests are
taken unchanged from Django's source distribution, except that two backends are replaced: the dummy backend, which
stores tasks, by `PGQueueBackend`, and the immediate backend by `PGQueueBackend` with a consumer that has run the task
before `enqueue()` returns. This project's tests run them on each version of Django that has Tasks. They fail if a test
fails that is not excepted here, or if an excepted test passes.

`python -m tests.task_backend.conformance` generates this page.
"""


def page() -> str:
    """Return what docs/tasks-conformance.md should be."""
    kept = json.loads(RECORD.read_text())
    versions = sorted(kept)
    names = sorted({name for found in kept.values() for name in found["tests"]}, key=lambda name: name.split("."))
    lines = [HEAD, "| | " + " | ".join(f"Django {kept[version]['version']}" for version in versions) + " |"]
    lines.append("| --- |" + " --- |" * len(versions))
    for outcome in (PASSED, "excepted"):
        counts = [sum(cell(kept[version], name) == outcome for name in names) for version in versions]
        lines.append(f"| {outcome} | {' | '.join(map(str, counts))} |")
    lines += ["", "## Excepted", "", "| test | why |", "| --- | --- |"]
    lines += [f"| `{name}` | {reason} |" for name, reason in EXCEPTED.items()]
    lines += ["", "## All of them", "", f"| test | {' | '.join(versions)} |", "| --- |" + " --- |" * len(versions)]
    lines += [f"| `{name}` | {' | '.join(cell(kept[version], name) for version in versions)} |" for name in names]
    return "\n".join(lines) + "\n"


def cell(found: dict[str, Any], name: str) -> str:
    outcome = found["tests"].get(name)
    if outcome is None:
        return "does not exist"
    if outcome:
        return PASSED
    return "excepted" if name in EXCEPTED else "failed"


def main() -> int:
    """Run them on a database of their own, and write down what was found."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from django.test.utils import setup_databases, setup_test_environment, teardown_databases

    folder = fetch()
    if folder is None:
        sys.exit("The package index cannot be reached.")
    setup_test_environment()
    databases = setup_databases(verbosity=0, interactive=False)
    try:
        verdicts = run(folder)
    finally:
        teardown_databases(databases, verbosity=0)
    record(verdicts)
    failed = [verdict for verdict in verdicts if verdict.outcome != PASSED and verdict.name not in EXCEPTED]
    for verdict in failed:
        sys.stderr.write(f"{verdict.name}: {verdict.outcome}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
