"""
Real processes on the test database: workers and the other commands, ended by pid.

A worker's settings are short (lease 3 s, poll 1 s, heartbeat 1 s) unless a test says otherwise.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from django.db import connections

from django_pgqueue import Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import QueueConsumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from tests.support.waiting import DEADLINE, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent

SHORT = {"LEASE": 3, "POLL_INTERVAL": 1, "HEARTBEAT_INTERVAL": 1, "BACKOFF": {"base": 0.2, "jitter": 0}}


class Worker:
    """A running command."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    @property
    def output(self) -> str:
        """What it has written so far, to both streams."""
        return self._log.read_text()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL it, stopped or not, and wait for its end."""
        self._process.kill()
        self._process.wait(DEADLINE)

    def wait(self, timeout: float = DEADLINE) -> int:
        """Wait for its end and return the exit status."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s; its output: {self.output}") from None

    def stop(self, timeout: float = DEADLINE) -> int:
        """SIGTERM it, wait for its end and return the exit status."""
        self.send(signal.SIGTERM)
        return self.wait(timeout)

    def cpu_seconds(self) -> float:
        """Return the processor time used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_beating(self) -> bool:
        """Tell whether it has started to consume: its first heartbeat is written."""
        assert self.is_running, self.output
        return QueueConsumer.objects.filter(pid=self.pid).exists()


def database_url(**parts: str) -> str:
    """Return the URL of the test database, with `parts` of it (netloc, path, query) as given."""
    path = f"/{connections['default'].settings_dict['NAME']}"
    return urlunsplit(urlsplit(os.environ["DATABASE_URL"])._replace(**{"path": path, **parts}))


def environment(
    queues: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
    url: str | None = None,
    tasks: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return the environment in which a command is on the test database, or on that of `url`."""
    return {
        **({} if tasks is None else {"PGQUEUE_TEST_TASKS": json.dumps(tasks)}),
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DATABASE_URL": url or database_url(),
        "PGQUEUE_SETTINGS": json.dumps({**SHORT, **(settings or {})}),
        "TESTAPP_QUEUES": json.dumps([{"name": one} if isinstance(one, str) else one for one in queues]),
        "PYTHONWARNINGS": "error",
    }


@contextmanager
def command(
    *arguments: str,
    queues: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
    url: str | None = None,
    module: str = "django",
    tasks: Mapping[str, Any] | None = None,
) -> Iterator[Worker]:
    """Start a management command, or another module; kill it at the end if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=environment(queues, settings, url, tasks),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        running = Worker(process, log)
        try:
            yield running
        finally:
            if running.is_running:
                running.kill()


@contextmanager
def worker(
    *arguments: str,
    queues: Sequence[Any] = ("work",),
    settings: Mapping[str, Any] | None = None,
    url: str | None = None,
    tasks: Mapping[str, Any] | None = None,
) -> Iterator[Worker]:
    """
    Start `consume_queues` and wait until it consumes. Queues are as in `testapp.queues`, or names.

    `tasks`: Django's setting `TASKS`.
    """
    with command("consume_queues", *arguments, queues=queues, settings=settings, url=url, tasks=tasks) as running:
        wait_until(running.is_beating, what="the worker's first heartbeat")
        yield running


def run(
    *arguments: str,
    queues: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
    stdin: str | bytes = b"",
    timeout: float = 60.0,
    url: str | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a management command to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "django", *arguments],
        cwd=ROOT,
        env=environment(queues, settings, url),
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@contextmanager
def consuming(consumer: Consumer) -> Iterator[Consumer]:
    """Run a consumer in a thread of this process; stop it at the end, and raise what it raised."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(consumer.run)
        try:
            yield consumer
        finally:
            consumer.stop()
            future.result(DEADLINE)


def drain(queue: Queue, timeout: float = DEADLINE, **options: Any) -> list[Any]:
    """Consume a queue until it is empty, and return the payloads in the order in which they were handled."""
    seen: list[Any] = []
    consumer = Consumer([make_handler(queue, lambda message: seen.append(message.payload))], drain=True, **options)
    # In a thread, so that one that never ends fails the test.
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(consumer.run)
        try:
            future.result(timeout)
        finally:
            consumer.stop(now=True)
    return seen


@contextmanager
def reaping(idle_for: float) -> Iterator[list[str]]:
    """Run the reaper in a tight loop in a thread of this process, and collect the queues that it reaps."""
    stop = threading.Event()
    reaped: list[str] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                reaped.extend(Reaper("default", idle_for=idle_for).run_once().queues)
        finally:
            connections.close_all()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield reaped
    finally:
        stop.set()
        thread.join(DEADLINE)
