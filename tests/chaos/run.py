"""Runs it all: starts the server and the processes, injects the faults, waits for recovery, closes the ledger."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from django_pgqueue.devdb import DevCluster, throwaway
from tests.chaos import plan
from tests.chaos.faults import Injector, NotPossible
from tests.chaos.ledger import Handled, Item, Ledger, Verdict
from tests.chaos.notes import Notes, read
from tests.chaos.plan import Fault, Plan
from tests.chaos.processes import Agenda, Fleet, Slot, environment

TICK = 0.05
# Seconds after which a fault counts as not recovered from, and those without any change in what is left
# at the end after which that is stuck.
RECOVERY_LIMIT = 60.0
STALLED = 10 * plan.LEASE

RECOVERED = "SELECT queue, min(handled) FROM chaos_handled WHERE sent > %s AND queue = ANY (%s) GROUP BY queue"
ACTIVE = "SELECT DISTINCT pid::text, split_part(key, '/', 1) FROM chaos_handled WHERE sent > %s"
UNSETTLED = "SELECT count(*) FROM django_pgqueue_messagequeueitem WHERE dead_lettered_at IS NULL"
HANDLED = "SELECT message_id, key, queue, sent, handled FROM chaos_handled WHERE queue <> %s"
HEARD = "SELECT pid, key FROM chaos_handled WHERE queue = %s"
ITEMS = """
SELECT id,
       payload->>'key',
       coalesce(dead_lettered_from, queue_id, orphaned_from),
       queue_id,
       dead_lettered_at IS NOT NULL
FROM django_pgqueue_messagequeueitem
"""


@dataclass
class Injected:
    """A fault that was injected: when (seconds from the start), and after how long it was over (None: never)."""

    fault: Fault
    at: float
    done: dict[str, Any]
    recovery: float | None


@dataclass
class Result:
    """What a run came to."""

    plan: Plan
    verdict: Verdict
    injected: list[Injected] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    #: From the first process to the end of the last publisher, and to the end of everything.
    seconds: float = 0.0
    drained: float = 0.0

    def all_problems(self) -> list[str]:
        """Return in words what is wrong; nothing is when there are none."""
        missing = plan.not_injected(self.plan.kinds, [one.fault.kind for one in self.injected])
        return [
            *self.verdict.problems,
            *(f"never injected: {kind}" for kind in missing),
            *(
                f"not recovered from within {RECOVERY_LIMIT:.0f} s: {one.fault.kind} at {one.at:.1f} s"
                for one in self.injected
                if one.recovery is None
            ),
            *self.problems,
        ]


def run(seconds: float, seed: int, *, keep: Path | None = None) -> Result:
    """
    Inject faults for ``seconds``, and each kind once at the least, and return what came of it.

    ``keep``: a folder for the notes and the processes' output.
    """
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(throwaway(durable=True))
        os.environ.update(environment({"DATABASE_URL": cluster.url}))
        pooler = _pooler(stack, cluster)
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        _migrate(cluster)
        conductor = Conductor(Plan(seed, seconds, pooler is not None), cluster, pooler, folder)
        stack.callback(conductor.fleet.end)
        return conductor.run()


def _pooler(stack: contextlib.ExitStack, cluster: DevCluster) -> Any:
    """Start a PgBouncer if there is one. Sets Django up, which its module needs."""
    import django

    django.setup()
    from tests.pgbouncer import PgBouncer, find_pgbouncer

    if find_pgbouncer() is None:
        return None
    return stack.enter_context(PgBouncer(pool_size=12, server=cluster.url))


def _migrate(cluster: DevCluster) -> None:
    from django.core.management import call_command
    from django.db import connections

    from tests.chaos.handlers import TABLE

    call_command("migrate", verbosity=0)
    connections.close_all()
    with psycopg.connect(cluster.url) as connection:
        connection.execute(TABLE)


class Conductor:
    """One run, on a server and a pooler (None: there is none) that are up."""

    def __init__(self, plan: Plan, cluster: DevCluster, pooler: Any, folder: Path) -> None:
        self.plan = plan
        self.cluster = cluster
        self.folder = folder
        direct = {"DATABASE_URL": cluster.url}
        pooled = {"DATABASE_URL": pooler.url("postgres"), "CHAOS_DIRECT_URL": cluster.url} if pooler else direct
        self.fleet = Fleet(Slot(role, folder, pooled if role.is_pooled else direct) for role in plan.roles)
        self.agenda = Agenda()
        self.injector = Injector(cluster, pooler, self.fleet, self.agenda, Notes(folder, "idle"), self.wait)
        self.injected: list[Injected] = []
        self.problems = self.fleet.problems
        self._monitor: psycopg.Connection[Any] | None = None
        self._start = time.monotonic()

    def run(self) -> Result:
        self.fleet.start()
        if not self._recover(since=self._start):
            self.problems.append(f"not all queues were at work after {RECOVERY_LIMIT:.0f} s")
        self._inject()
        self._come_to_rest()
        self.fleet.stop(self.fleet.of_kind("publisher"))
        seconds = time.monotonic() - self._start
        self._drain()
        self.fleet.stop(self.fleet.of_kind("consumer", "subscriber", "reaper"))
        result = Result(self.plan, self._close(), self.injected, self.problems, versions(self.cluster))
        result.seconds, result.drained = seconds, time.monotonic() - self._start
        return result

    def wait(self, seconds: float) -> None:
        """Let the run go on for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._tick(left)

    def _tick(self, longest: float = TICK) -> None:
        self.agenda.run()
        self.fleet.supervise()
        time.sleep(min(longest, TICK))

    # --- The faults ---

    def _inject(self) -> None:
        deadline = time.monotonic() + self.plan.seconds
        for number, fault in enumerate(self.plan.schedule()):
            self.wait(fault.gap)
            if number >= len(self.plan.kinds) and time.monotonic() > deadline:
                return
            before = time.monotonic()
            try:
                done = self.injector.inject(fault)
            except NotPossible:
                say(f"{before - self._start:6.1f} s  {fault.kind}: not possible now")
                continue
            over = self._recover(since=time.monotonic())
            recovery = None if over is None else over - before
            self.injected.append(Injected(fault, before - self._start, done, recovery))
            took = "NOT RECOVERED" if recovery is None else f"{recovery:6.2f} s"
            say(f"{before - self._start:6.1f} s  {fault.kind:20} {took}  {fault.details} {done or ''}")

    def _recover(self, *, since: float) -> float | None:
        """Wait until a message that was published since then is handled on each queue; return when that was."""
        deadline = time.monotonic() + RECOVERY_LIMIT
        while time.monotonic() < deadline:
            self._tick()
            times = dict(self._look(RECOVERED, since, self.plan.places))
            if len(times) == len(self.plan.places):
                return max(times.values())
        return None

    def _look(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement, none while the server is away."""
        try:
            if self._monitor is None:
                self._monitor = psycopg.connect(self.cluster.url, autocommit=True, connect_timeout=5)
            return self._monitor.execute(statement, params).fetchall()
        except psycopg.Error:
            if self._monitor is not None:
                self._monitor.close()
            self._monitor = None
            return []

    # --- The end ---

    def _come_to_rest(self) -> None:
        """End what still lasts of the faults, and wait until every process has shown that it works."""
        self.agenda.run(everything=True)
        since = time.monotonic()
        silent: list[str] = []
        while time.monotonic() < since + RECOVERY_LIMIT:
            self._tick()
            active = {name for row in self._look(ACTIVE, since) for name in row}
            slots = self.fleet.of_kind("publisher", "consumer", "subscriber")
            silent = [slot.name for slot in slots if active.isdisjoint({str(slot.pid), f"{slot.name}.{slot.pid}"})]
            if not silent:
                return
        self.problems += [f"{name} runs and does nothing any more" for name in silent]

    def _drain(self) -> None:
        """Wait until nothing is left to be settled, or nothing changes any more."""
        left, since = -1, time.monotonic()
        while time.monotonic() - since < STALLED:
            self._tick()
            rows = self._look(UNSETTLED)
            if rows and rows[0][0] != left:
                left, since = rows[0][0], time.monotonic()
            if left == 0:
                return

    def _close(self) -> Verdict:
        ledger = Ledger(atomic=(plan.ATOMIC, plan.AUTO_ATOMIC, plan.POOLED), expired=plan.EXPIRED, bound=plan.BOUND)
        for note in read(self.folder):
            ledger.read(note)
        with psycopg.connect(self.cluster.url) as connection:
            handled = [Handled(*row) for row in connection.execute(HANDLED, [plan.LIVE])]
            items = [Item(*row) for row in connection.execute(ITEMS)]
            heard = connection.execute(HEARD, [plan.LIVE]).fetchall()
        return ledger.close(handled, items, heard)


def versions(cluster: DevCluster) -> dict[str, str]:
    """Return what the run was on."""
    import platform
    from importlib.metadata import version

    import django

    with psycopg.connect(cluster.url) as connection:
        server = connection.info.parameter_status("server_version") or ""
    return {
        "python": platform.python_version(),
        "django": django.get_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "postgresql": server,
        "django-pg-messagequeue": version("django-pg-messagequeue"),
    }


def say(line: str) -> None:
    """Tell how it goes."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
