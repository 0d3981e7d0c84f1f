"""The faults. Each is injected by a method of its name, with the details that the schedule gives it."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import psycopg

from django_pgqueue.devdb import DevCluster, StopMode
from example_project.demo.faults import RETRY, delete_queue, hold, if_there
from example_project.demo.notes import note
from example_project.demo.processes import Agenda, Fleet, Slot
from example_project.demo.tables import fetch
from tests.chaos import clock
from tests.chaos.plan import Fault

# Seconds for which a fault that the present state does not allow is tried.
INJECT_TIMEOUT = 10.0
# Seconds for which a fault waits until it does most harm.
HARM_WITHIN = 3.0

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
# The bare form that is documented for psql and triggers.
PUBLISH = "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES (%s, %s) RETURNING id"


class Pooler(Protocol):
    """What is needed of PgBouncer."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class NotPossible(Exception):
    """The fault could not be injected."""


class Injector:
    """Injects faults. ``wait(seconds)`` lets the run go on meanwhile."""

    def __init__(
        self,
        cluster: DevCluster,
        pooler: Pooler | None,
        fleet: Fleet,
        agenda: Agenda,
        wait: Callable[[float], None],
    ) -> None:
        self.cluster = cluster
        self.pooler = pooler
        self.fleet = fleet
        self.agenda = agenda
        self.wait = wait
        self._idle_sessions = 0

    def inject(self, fault: Fault) -> dict[str, Any]:
        """
        Inject a fault and return what was really done.

        It has taken effect on return: what is published from now on is published after it. Raises
        ``NotPossible``.
        """
        return getattr(self, fault.kind)(**fault.details) or {}

    # --- The server and the pooler ---

    def restart_fast(self, *, down: float) -> None:
        self._restart("fast", down)

    def restart_immediate(self, *, down: float) -> None:
        self._restart("immediate", down)

    def _restart(self, mode: StopMode, down: float) -> None:
        self.cluster.stop(mode)
        self.wait(down)
        self.cluster.start()

    def restart_pgbouncer(self, *, down: float) -> None:
        assert self.pooler is not None
        self.pooler.stop()
        self.wait(down)
        self.pooler.start()

    def terminate_sessions(self, *, share: float, seed: int) -> dict[str, Any]:
        def terminate() -> dict[str, Any]:
            pids = sorted(pid for (pid,) in fetch(SESSIONS))
            chosen = random.Random(seed).sample(pids, round(share * len(pids)))
            for pid in chosen:
                fetch("SELECT pg_terminate_backend(%s)", pid)
            return {"terminated": len(chosen)} if chosen else {}

        return self._until_possible(terminate)

    # --- Workers ---

    def kill_workers(self, *, workers: list[str], down: float) -> dict[str, Any]:
        slots = self._running(workers)
        held = hold(slots[0], self.wait, HARM_WITHIN)
        for slot in slots:
            slot.kill()
            self.agenda.add(down, slot.start)
        return {"held": held}

    def stop_workers(self, *, workers: list[str], seconds: float) -> dict[str, Any]:
        slots = self._running(workers)
        held = hold(slots[0], self.wait, HARM_WITHIN)
        for slot in slots:
            slot.send(signal.SIGSTOP)
            self.agenda.add(seconds, _continuing(slot))
        return {"held": held}

    def shift_clocks(self, *, shifts: dict[str, float]) -> dict[str, Any]:
        slots = [self.fleet[name] for name in shifts]
        started = time.monotonic()
        self.fleet.stop(slots)
        ended = time.monotonic()
        for slot in slots:
            slot.environment[clock.VARIABLE] = str(shifts[slot.name])
            slot.start()
        # What ends as told takes its time for that.
        return {"ended_within": round(ended - started, 2)}

    def _running(self, names: list[str]) -> list[Slot]:
        slots = [self.fleet[name] for name in names]
        for slot in slots:
            # Killed a moment ago, and not back yet.
            slot.start()
        return slots

    # --- In the database ---

    def delete_queues(self, *, queues: list[str]) -> dict[str, Any]:
        harmless = time.monotonic() + HARM_WITHIN
        orphans: dict[str, int] = {}

        def delete() -> dict[str, Any]:
            is_late = time.monotonic() > harmless
            for name in queues:
                if name not in orphans and (cut_loose := delete_queue(name, even_empty=is_late)):
                    orphans[name] = cut_loose[1]
            # One may be locked for longer than this waits.
            return {"orphans": orphans} if len(orphans) == len(queues) or (orphans and is_late) else {}

        return self._until_possible(delete)

    def idle_in_transaction(self, *, queue: str, seconds: float, commits: bool) -> None:
        """Publish in a transaction, by plain SQL, and leave it at that for a while."""
        self._idle_sessions += 1
        key = f"idle/{self._idle_sessions}"
        payload = {"key": key, "sent": time.monotonic(), "fate": "handle"}
        note("trying", keys=[key], delay=0, fates=["handle"], topic=False)
        session = None

        def publish() -> dict[str, Any]:
            nonlocal session
            try:
                session = psycopg.connect(self.cluster.url, connect_timeout=5)
                (message_id,) = session.execute(PUBLISH, [queue, json.dumps(payload)]).fetchone() or (0,)
            except psycopg.Error:  # the server is away; or the queue was deleted or reaped, and not made again yet
                if session:
                    session.close()
                return {}
            return {"id": message_id}

        message_id = self._until_possible(publish)["id"]
        assert session is not None
        self.agenda.add(seconds, lambda: _end_idle(session, key, message_id, commits=commits))

    def _until_possible(self, inject: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Try until it does something."""
        deadline = time.monotonic() + INJECT_TIMEOUT
        while time.monotonic() < deadline:
            with if_there():
                if done := inject():
                    return done
            self.wait(RETRY)
        raise NotPossible


def _end_idle(session: psycopg.Connection[Any], key: str, message_id: int, *, commits: bool) -> None:
    try:
        session.commit() if commits else session.rollback()
    except psycopg.Error:
        # No fault is injected while this runs: the session was ended before, and never got the commit.
        commits = False
    finally:
        session.close()
    if commits:
        note("committed", keys=[key], ids=[message_id], expires=[None], marked=False)
    else:
        note("undone", keys=[key], refused=False)


def _continuing(slot: Slot) -> Callable[[], None]:
    """Return what lets this process go on, and none that took its place."""
    stopped = slot.process

    def go_on() -> None:
        if slot.process is stopped:
            slot.send(signal.SIGCONT)

    return go_on
