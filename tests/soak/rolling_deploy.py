"""
Case B95: two versions of the package on one database, side by side, and back again.

`python -m tests.soak.rolling_deploy --seconds 60`: so many seconds a phase. The old version is that of
the revision OLD, taken out of the checkout's history. Each version runs a publisher, a consumer and a
reaper, each a process of its own that imports nothing but that version of the package.

The phases: (1) the new version's migrations are applied while the old version runs, and it goes on;
(2) both run; (3) the new one alone; (4) the old one alone, on the new tables.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.soak import main
from tests.support.databases import empty_database
from tests.support.processes import ROOT, database_url
from tests.support.sessions import second_session
from tests.support.waiting import wait_until

#: The version before. It published, consumed and reaped with one migration.
OLD = "3c53d2f"

# Runs with one version of the package on its path, of a project that has no other app.
CHILD = """
import json, os, signal, sys, threading, time
import django
from django.conf import settings
import environ

database = environ.Env().db("DATABASE_URL")
database["HOST"] = database.get("OPTIONS", {}).pop("host", database["HOST"])
settings.configure(
    SECRET_KEY="x", USE_TZ=True, INSTALLED_APPS=["django_pgqueue"], DATABASES={"default": database},
    PGQUEUE={"LEASE": 10, "POLL_INTERVAL": 1, "DECLARE_TTL": 1, "HEARTBEAT_INTERVAL": 2, "REAP_IDLE_AFTER": 7,
             "BACKOFF": {"base": 0.2, "jitter": 0}})
django.setup()
import django_pgqueue
from django.core.management import call_command
from django.db import transaction
from django_pgqueue import Queue, Reject

version, role = sys.argv[1:3]
assert os.path.abspath(django_pgqueue.__file__).startswith(os.path.abspath(sys.path[0])), django_pgqueue.__file__
standing = Queue("standing", max_deliveries=4)
passing = Queue("passing", auto_deleted=True, ttl=3600)

def tell(*what):
    # One write: two threads tell at once.
    os.write(1, f"{json.dumps(what)}\\n".encode())

def handle(message):
    what = message.payload
    if what["kind"] == "retried" and message.delivery_count == 1:
        raise ValueError("at first")
    tell("handled", what["by"], message.queue, what["key"])
    if what["kind"] == "rejected":
        raise Reject("no")

for queue in (standing, passing):
    queue.handler(concurrency=2)(handle)

def publish():
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    number = 0
    while not stop.is_set():
        def new(kind):
            nonlocal number
            number += 1
            return {"by": version, "kind": kind, "key": f"{version}.{os.getpid()}.{number}"}
        for queue in (standing, passing):
            one = new("rejected" if number % 50 < 2 else "retried" if number % 20 < 2 else "plain")
            queue.publish(one)
            many = [new("plain") for _ in range(3)]
            with transaction.atomic():
                queue.publish_many(many)
            later = new("plain")
            queue.publish(later, delay=0.5)
            tell("published", queue.name, [what["key"] for what in (one, *many, later)])
        stop.wait(0.05)
    # For whoever runs next: due when this version is gone.
    for queue in (standing, passing):
        left = [new("plain") for _ in range(10)]
        queue.publish_many(left, delay=2)
        tell("published", queue.name, [what["key"] for what in left])
        tell("left", queue.name, [what["key"] for what in left])

if role == "migrate":
    call_command("migrate", verbosity=0)
elif role == "check":
    call_command("check", databases=["default"], fail_level="ERROR")
elif role == "publisher":
    publish()
elif role == "consumer":
    call_command("consume_queues", prefetch=5)
elif role == "reaper":
    call_command("reap_queues", interval=0.5, verbosity=0)
elif role == "drainer":
    call_command("consume_queues", drain=True)
"""

RUNNING = ("publisher", "consumer", "reaper")
# Seconds that a process may take to do what it is asked.
WAIT_TIMEOUT = 60.0

COLUMNS = """
SELECT table_name, column_name, is_nullable = 'NO' AND column_default IS NULL AND is_identity = 'NO'
FROM information_schema.columns
WHERE table_schema = 'public' AND table_name LIKE 'django\\_pgqueue\\_%'
"""


class Version:
    """One version's processes, and what they have told."""

    def __init__(self, name: str, package: Path, url: str, folder: Path) -> None:
        self.name = name
        self._package = package
        self._url = url
        self._folder = folder
        self._started = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.outputs: list[tuple[str, Path]] = []

    def start(self, role: str) -> None:
        self._started += 1
        out = self._folder / f"{self.name}-{role}-{self._started}"
        self.outputs.append((role, out))
        # The script beside the package, because its folder comes first on the path.
        script = self._package / "child.py"
        script.write_text(CHILD)
        with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
            self._running[role] = subprocess.Popen(
                [sys.executable, "-W", "error", str(script), self.name, role],
                cwd=self._package,
                env={**os.environ, "DATABASE_URL": self._url, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def end(self, role: str, number: int | None = signal.SIGTERM) -> None:
        """Stop a process, or with None wait for its own end, which must be a good one."""
        process = self._running.pop(role)
        if number is not None:
            assert process.poll() is None, f"{self.name} {role} ended by itself: {self.errors()}"
            process.send_signal(number)
        status = process.wait(WAIT_TIMEOUT)
        assert status == 0, f"{self.name} {role} ended with {status}: {self.errors()}"

    def run(self, role: str) -> None:
        self.start(role)
        self.end(role, None)

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def errors(self) -> str:
        """Return what its processes wrote to their errors, the end of it."""
        return "\n".join(out.with_suffix(".err").read_text()[-2000:] for _, out in self.outputs)

    def told(self, *roles: str) -> Iterator[list[Any]]:
        for role, out in self.outputs:
            if role in roles:
                for line in out.read_text().splitlines(keepends=True):
                    # A line that is just being written has no end yet.
                    if line.endswith("\n"):
                        yield json.loads(line)

    def published(self) -> list[str]:
        return [key for what, *rest in self.told("publisher") if what == "published" for key in rest[1]]

    def left(self) -> list[str]:
        return [key for what, *rest in self.told("publisher") if what == "left" for key in rest[1]]

    def handled(self) -> list[tuple[str, str]]:
        """Return which version had published, and the key, of each message handled here."""
        return [(rest[0], rest[2]) for what, *rest in self.told("consumer", "drainer") if what == "handled"]


def missing_history() -> str:
    """Return why there is no old version to be had here, or nothing if there is."""

    def git(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)

    try:
        if git("rev-parse", "--show-cdup").stdout.strip() or git("rev-parse", "--git-dir").returncode:
            return "this is not a git checkout"
    except FileNotFoundError:
        return "there is no git"
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true" and git("cat-file", "-e", OLD).returncode:
        return "this is a shallow clone"
    return ""


def take_out(folder: Path) -> None:
    """Write the old version's package into a folder."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OLD, "django_pgqueue"], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


@contextmanager
def two_versions() -> Iterator[tuple[Version, Version, str]]:
    """Give the old and the new version, on one new database, whose name is the third."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        name = stack.enter_context(empty_database())
        url = database_url(path=f"/{name}")
        versions = []
        for which in ("old", "new"):
            package = folder / which
            package.mkdir()
            if which == "old":
                take_out(package)
            else:
                (package / "django_pgqueue").symlink_to(ROOT / "django_pgqueue")
            version = Version(which, package, url, folder)
            stack.callback(version.kill)
            versions.append(version)
        yield versions[0], versions[1], name


def run(seconds: float) -> dict[str, Any]:
    """Walk through the phases, `seconds` each, and return the ledger."""
    with two_versions() as (old, new, database):
        old.run("migrate")
        before = columns(database)
        for role in RUNNING:
            old.start(role)
        wait_until(lambda: old.handled(), WAIT_TIMEOUT, what="the old version's first message")
        # 1. The new tables under the old code, which runs on.
        new.run("migrate")
        new.run("check")
        after = columns(database)
        check_columns(before, after)
        progress(seconds, (old, old))
        # 2. Both.
        for role in RUNNING:
            new.start(role)
        wait_until(lambda: new.published(), WAIT_TIMEOUT, what="the new version's first message")
        progress(seconds, (old, old), (new, new), (old, new), (new, old))
        # 3. The new one alone: also what the old one left.
        for role in RUNNING:
            old.end(role)
        wait_until(
            lambda: set(old.left()) <= {key for _, key in new.handled()}, WAIT_TIMEOUT, what="the old one's rest"
        )
        progress(seconds, (new, new))
        # 4. Back: the old code on the new tables.
        for role in RUNNING:
            new.end(role)
        for role in RUNNING:
            old.start(role)
        wait_until(
            lambda: set(new.left()) <= {key for _, key in old.handled()}, WAIT_TIMEOUT, what="the new one's rest"
        )
        progress(seconds, (old, old))
        for role in RUNNING:
            old.end(role)
        # What was published last is due in a moment, and what is retried is.
        wait_until(lambda: waiting(database) == 0 or old.run("drainer"), WAIT_TIMEOUT, what="an empty queue")
        return ledger(old, new, database)


def progress(seconds: float, *pairs: tuple[Version, Version]) -> None:
    """Let it go on for a while; each pair's second must handle messages that its first had published."""
    began = time.monotonic()
    before = {(by.name, at.name): count(by, at) for by, at in pairs}

    def has_progressed() -> bool:
        return all(count(by, at) > before[by.name, at.name] for by, at in pairs)

    wait_until(
        lambda: time.monotonic() - began >= seconds and has_progressed(),
        seconds + WAIT_TIMEOUT,
        what=f"messages to be handled, of {[(by.name, at.name) for by, at in pairs]}",
    )


def count(by: Version, at: Version) -> int:
    """Count the messages of one version that were handled by another."""
    return sum(1 for publisher, _ in at.handled() if publisher == by.name)


def columns(database: str) -> dict[tuple[str, str], bool]:
    """Return the columns of the tables, and whether each must be given a value."""
    with second_session(dbname=database) as session:
        return {(table, column): must for table, column, must in session.execute(COLUMNS).fetchall()}


def check_columns(before: dict[tuple[str, str], bool], after: dict[tuple[str, str], bool]) -> None:
    """Assert that whoever knows only the columns of before can go on writing and reading."""
    assert not before.keys() - after.keys(), f"columns dropped: {before.keys() - after.keys()}"
    tables = {table for table, _ in before}
    demanded = {column for column, must in after.items() if must and column[0] in tables} - {
        column for column, must in before.items() if must
    }
    assert not demanded, f"columns that the old version does not know and that have no default: {demanded}"


def waiting(database: str) -> int:
    """Count the messages that are still to be handled."""
    with second_session(dbname=database) as session:
        row = session.execute(
            "SELECT count(*) FROM django_pgqueue_messagequeueitem WHERE dead_lettered_at IS NULL"
        ).fetchone()
        return int(row[0])


def ledger(old: Version, new: Version, database: str) -> dict[str, Any]:
    """Account for every message, once; raise AssertionError where that is not possible."""
    published = Counter([*old.published(), *new.published()])
    handled = Counter(key for version in (old, new) for _, key in version.handled())
    with second_session(dbname=database) as session:
        letters = session.execute(
            "SELECT payload ->> 'key', payload ->> 'kind' FROM django_pgqueue_messagequeueitem"
        ).fetchall()
    dead = Counter(key for key, _ in letters)
    figures = {
        "published": {"old": len(old.published()), "new": len(new.published())},
        "handled": {f"{by.name} by {at.name}": count(by, at) for by in (old, new) for at in (old, new)},
        "dead": sum(dead.values()),
        "lost": len(published - handled),
        "duplicates": sum((handled - published).values()),
    }
    assert max(published.values()) == 1, figures
    assert not published.keys() - handled.keys(), f"lost: {sorted(published.keys() - handled.keys())[:10]} {figures}"
    assert not handled.keys() - published.keys(), figures
    # A rejected message is a dead letter, one each, of both versions; no other message is one.
    assert {kind for _, kind in letters} == {"rejected"} and max(dead.values()) == 1, figures
    assert {key.partition(".")[0] for key in dead} == {"old", "new"}, figures
    return figures


if __name__ == "__main__":
    main(run, seconds=60)
