"""Runs it all: starts the server and the processes, injects the faults, waits for recovery, closes the ledger."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from django_pgqueue.devdb import DevCluster, throwaway
from example_project.demo.conductor import Conductor
from example_project.demo.ledger import Ledger, Verdict
from example_project.demo.processes import Fleet
from tests.chaos import plan
from tests.chaos.plan import Fault, Plan

# Seconds after which a fault counts as not recovered from, and those without any change in what is left
# at the end after which that is stuck.
RECOVERY_LIMIT = 60.0
STALLED = 10 * plan.LEASE


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
        injected = {one.fault.kind for one in self.injected}
        return [
            *self.verdict.problems,
            *(f"never injected: {kind}" for kind in self.plan.kinds if kind not in injected),
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
        os.environ.update(environment(cluster))
        import django

        # What follows imports models, and so do the modules that it imports.
        django.setup()
        pooler = _pooler(stack, cluster)
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        conductor = Chaos(Plan(seed, seconds, pooler is not None), cluster, pooler, folder)
        stack.callback(conductor.fleet.end)
        return conductor.run()


def environment(cluster: DevCluster) -> dict[str, str]:
    """Return what this process and the others have in their environment."""
    return {
        "DATABASE_URL": cluster.url,
        "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
        "PGQUEUE_SETTINGS": json.dumps(plan.SETTINGS),
        "PYTHONWARNINGS": "error",
    }


def _pooler(stack: contextlib.ExitStack, cluster: DevCluster) -> Any:
    """Start a PgBouncer if there is one."""
    from tests.support.pgbouncer import PgBouncer, find_pgbouncer

    if find_pgbouncer() is None:
        return None
    return stack.enter_context(PgBouncer(pool_size=12, server=cluster.url))


class Chaos(Conductor):
    """One run, on a server and a pooler (None: there is none) that are up."""

    def __init__(self, plan_: Plan, cluster: DevCluster, pooler: Any, folder: Path) -> None:
        from tests.chaos.faults import Injector

        ledger = Ledger(expired=plan.EXPIRED, bound=plan.BOUND)
        super().__init__(folder, ledger, Fleet(folder, "tests.chaos.child"), STALLED)
        self.plan = plan_
        self.cluster = cluster
        pooled = {"DATABASE_URL": pooler.url("postgres"), "CHAOS_DIRECT_URL": cluster.url} if pooler else {}
        for role in self.plan.roles:
            self.fleet.add(role, pooled if role.is_pooled else {})
        self.injector = Injector(cluster, pooler, self.fleet, self.agenda, self.wait)
        self.injected: list[Injected] = []
        self.problems = self.fleet.problems
        self._start = time.monotonic()
        self._expect(self._start)

    def run(self) -> Result:
        from django.core.management import call_command

        from example_project.demo import notes, tables

        call_command("migrate", verbosity=0)
        notes.open_file(self.folder, "idle")
        self.fleet.start("publisher", "consumer", "subscriber", "reaper")
        if not self._recover(since=self._start):
            self.problems.append(f"not all queues were at work after {RECOVERY_LIMIT:.0f} s")
        self._inject()
        self._come_to_rest()
        self.fleet.stop(self.fleet.of_kind("publisher"))
        seconds = time.monotonic() - self._start
        self.settle()
        self.fleet.stop(self.fleet.of_kind("consumer", "subscriber", "reaper"))
        self.read_notes()
        result = Result(self.plan, self.ledger.close(tables.remains()), self.injected, self.problems)
        result.versions = versions(self.cluster)
        result.seconds, result.drained = seconds, time.monotonic() - self._start
        return result

    def see(self, source: str, note: dict[str, Any]) -> None:
        if note["note"] in ("handled", "heard") and note["sent"] > self._since:
            self._handled.setdefault(note["queue"], note["at"])
            # By its key, a message tells who published it.
            self._active |= {source, note["key"].partition("/")[0]}

    def _expect(self, since: float) -> None:
        """Look from now on at messages that were published since then."""
        self._since = since
        #: When the first of them was handled, by place, and the processes that published or handled any.
        self._handled: dict[str, float] = {}
        self._active: set[str] = set()

    # --- The faults ---

    def _inject(self) -> None:
        from tests.chaos.faults import NotPossible

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
        self._expect(since)
        deadline = time.monotonic() + RECOVERY_LIMIT
        while time.monotonic() < deadline:
            self.step()
            if self._handled.keys() >= set(self.plan.places):
                return max(self._handled[place] for place in self.plan.places)
        return None

    def _come_to_rest(self) -> None:
        """End what still lasts of the faults, and wait until every process has shown that it works."""
        self.agenda.run(everything=True)
        self._expect(time.monotonic())
        slots = self.fleet.of_kind("publisher", "consumer", "subscriber")
        silent = [slot.name for slot in slots]
        while silent and time.monotonic() < self._since + RECOVERY_LIMIT:
            self.step()
            silent = [slot.name for slot in slots if slot.source not in self._active]
        self.problems += [f"{name} runs and does nothing any more" for name in silent]


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
