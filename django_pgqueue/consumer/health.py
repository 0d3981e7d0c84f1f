"""
Liveness and readiness of a consumer process, reported over HTTP or in a file.

A process is alive if its claiming thread makes progress. If it is not alive, a restart helps. A process is ready if
it is alive, the database is available, and no due message on its queues is older than the target. If it is not ready, a
restart does not help.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from django.db import connections

from django_pgqueue.conf import settings
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.runtime.connections import own_connection
from django_pgqueue.runtime.loop import DATABASE_FAULTS, LONGEST_RETRY, run_every
from django_pgqueue.services import diagnosing, session

logger = logging.getLogger("django_pgqueue")

# In seconds, between two checks of the queues and two writes of the file.
INTERVAL = 5.0
# In seconds, for each check.
STATEMENT_TIMEOUT = 3.0
# In seconds beyond its longest sleep, after which the claiming thread counts as stuck.
TURN_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a probe. Ages are in seconds; None: there is none, or the database does not answer."""

    alive: bool
    ready: bool
    listening: bool
    last_claim_age: float | None
    oldest_due_age: float | None
    held: int
    handled: int


class Health:
    """
    Checks and reports the health of a consumer.

    ``target``: the maximum age in seconds of the oldest due message for the process to be ready (None: no maximum).
    """

    def __init__(self, consumer: Consumer, target: float | None = None) -> None:
        self.consumer = consumer
        self.target = target
        self._has_database = False
        self._oldest_due_age: float | None = None
        self._looked = -math.inf

    def report(self) -> Report:
        """Return the report as of the last ``look()``. May be called from any thread; does not use the database."""
        condition = self.consumer.condition()
        sleep = max(settings.POLL_INTERVAL, LONGEST_RETRY)
        is_fresh = condition.turn_age is None or condition.turn_age < sleep + TURN_TIMEOUT
        # While the database is unavailable, a new process would wait for it as well.
        alive = condition.stopping or is_fresh or not self._has_database
        has_looked = time.monotonic() - self._looked < 3 * INTERVAL
        is_late = self.target is not None and (self._oldest_due_age or 0.0) > self.target
        return Report(
            alive=alive,
            ready=(
                alive
                and condition.connected
                and self._has_database
                and has_looked
                and not is_late
                and not condition.stopping
            ),
            listening=condition.listening,
            last_claim_age=condition.claim_age,
            oldest_due_age=self._oldest_due_age,
            held=condition.held,
            handled=condition.handled,
        )

    def look(self) -> None:
        """Measure the oldest due age of the consumer's queues, apart from paused ones."""
        using = self.consumer.using
        try:
            with session.bounded(STATEMENT_TIMEOUT, using):
                backlogs = diagnosing.backlogs(using, self.consumer.queues)
        except DATABASE_FAULTS:
            # The consumer itself logs the outage.
            if not connections[using].in_atomic_block:
                connections[using].close()
            self._has_database, self._oldest_due_age = False, None
        else:
            ages = [each.oldest_due_age for each in backlogs if not each.paused]
            self._has_database = True
            self._oldest_due_age = max((age for age in ages if age is not None), default=None)
        self._looked = time.monotonic()

    @contextmanager
    def reporting(self, *, file: Path | None = None, address: tuple[str, int] | None = None) -> Iterator[None]:
        """
        Check every ``INTERVAL`` seconds, write the file while the process is alive, and serve HTTP at the address.

        Raises ``OSError`` if the file cannot be written or the port is in use. The file is removed at the end.
        """
        stop = threading.Event()
        if file is not None:
            self._write(file)
        server = None if address is None else _Server(address, self)
        threads = [threading.Thread(target=self._watch, args=(file, stop), name="pgqueue health", daemon=True)]
        if server is not None:
            threads.append(threading.Thread(target=server.serve_forever, name="pgqueue probes", daemon=True))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if server is not None:
                server.shutdown()
                server.server_close()
            for thread in threads:
                thread.join(timeout=1.0)
            if file is not None:
                file.unlink(missing_ok=True)

    def _watch(self, file: Path | None, stop: threading.Event) -> None:
        def run_once() -> None:
            self.look()
            if file is not None and self.report().alive and not stop.is_set():
                self._write(file)

        using = self.consumer.using
        with own_connection(using, "health"):
            run_every(lambda: INTERVAL, run_once, stop, alias=using, loop="health")

    def _write(self, file: Path) -> None:
        # Replaced atomically, because a probe may read the file at any time.
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            fresh.write_text(json.dumps(asdict(self.report())) + "\n")
            fresh.replace(file)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], health: Health) -> None:
        self.health = health
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Probe)

    def handle_error(self, request: object, client_address: object) -> None:
        """Do not log probes that disconnect."""
        if not isinstance(sys.exception(), ConnectionError):
            logger.exception("probe not answered")


class _Probe(BaseHTTPRequestHandler):
    """``/livez`` and ``/readyz``: status 200 or 503, with the report as JSON in both cases."""

    server: _Server
    timeout = 5.0

    def do_GET(self) -> None:
        report = self.server.health.report()
        answers = {"/livez": report.alive, "/readyz": report.ready}
        path = self.path.partition("?")[0]
        if path not in answers:
            self.send_error(404, "use /livez or /readyz")
            return
        body = json.dumps(asdict(report)).encode()
        self.send_response(200 if answers[path] else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests, because probes come every few seconds."""
