"""The faults. Each is injected by a method of its name, with the details that the schedule gives it."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import psycopg

from django_pgqueue.devdb import DevCluster, StopMode
from tests.chaos.notes import Notes
from tests.chaos.plan import Fault
from tests.chaos.processes import Agenda, Fleet, Slot

# Seconds for which a fault that the present state does not allow is tried, and between two attempts.
PATIENCE, RETRY = 10.0, 0.02
# Seconds for which a fault waits until it does most harm.
HARM_WITHIN = 3.0

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
# What a process holds and has to come again when it dies, other than by expiring.
HOLDS = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem AS item
JOIN django_pgqueue_queueconsumer AS consumer ON consumer.id = item.leased_by
WHERE consumer.pid = %s AND item.lease_expires_at > statement_timestamp() AND item.expires_at IS NULL
"""
LOCK = "SELECT FROM django_pgqueue_messagequeue WHERE name = %s FOR UPDATE"
WAITING = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem
WHERE queue_id = %s AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
"""
DELETE = "DELETE FROM django_pgqueue_messagequeue WHERE name = %s"
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
        notes: Notes,
        wait: Callable[[float], None],
    ) -> None:
        self.cluster = cluster
        self.pooler = pooler
        self.fleet = fleet
        self.agenda = agenda
        self.notes = notes
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
        def terminate(admin: psycopg.Connection[Any]) -> dict[str, Any]:
            pids = sorted(pid for (pid,) in admin.execute(SESSIONS))
            chosen = random.Random(seed).sample(pids, round(share * len(pids)))
            for pid in chosen:
                admin.execute("SELECT pg_terminate_backend(%s)", [pid])
            return {"terminated": len(chosen)} if chosen else {}

        return self._until_possible(terminate)

    # --- Workers ---

    def kill_workers(self, *, workers: list[str], down: float) -> dict[str, Any]:
        slots = self._running(workers)
        held = self._hold(slots[0])
        for slot in slots:
            slot.kill()
            self.agenda.add(down, slot.start)
        return {"held": held}

    def stop_workers(self, *, workers: list[str], seconds: float) -> dict[str, Any]:
        slots = self._running(workers)
        held = self._hold(slots[0])
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
            slot.shift = shifts[slot.name]
            slot.start()
        # What ends as told takes its time for that.
        return {"ended_within": round(ended - started, 2)}

    def _running(self, names: list[str]) -> list[Slot]:
        slots = [self.fleet[name] for name in names]
        for slot in slots:
            # Killed a moment ago, and not back yet.
            slot.start()
        return slots

    def _hold(self, consumer: Slot) -> int:
        """Wait until it holds messages, and return how many."""
        deadline = time.monotonic() + HARM_WITHIN
        held = 0
        with contextlib.suppress(psycopg.OperationalError), self._admin() as admin:
            while not held and time.monotonic() < deadline:
                self.wait(RETRY)
                (held,) = admin.execute(HOLDS, [consumer.pid]).fetchone() or (0,)
        return held

    # --- In the database ---

    def delete_queues(self, *, queues: list[str]) -> dict[str, Any]:
        harmless = time.monotonic() + HARM_WITHIN
        orphans: dict[str, int] = {}

        def delete(admin: psycopg.Connection[Any]) -> dict[str, Any]:
            admin.execute("SET lock_timeout = '1s'")
            is_late = time.monotonic() > harmless
            for name in queues:
                if name not in orphans and (count := self._delete(admin, name, even_empty=is_late)) is not None:
                    orphans[name] = count
            # One may be locked for longer than this waits.
            return {"orphans": orphans} if len(orphans) == len(queues) or (orphans and is_late) else {}

        return self._until_possible(delete)

    def _delete(self, admin: psycopg.Connection[Any], name: str, *, even_empty: bool) -> int | None:
        """Delete a queue's row and return how many waiting messages that cut loose. None: it was not deleted."""
        # A session that is idle in its transaction, or a handler that is stopped in one, holds the row.
        with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected), admin.transaction():
            # Locked first, so that nobody publishes to it between the count and the deletion.
            admin.execute(LOCK, [name])
            (orphans,) = admin.execute(WAITING, [name]).fetchone() or (0,)
            if (orphans or even_empty) and admin.execute(DELETE, [name]).rowcount:
                return int(orphans)
        return None

    def idle_in_transaction(self, *, queue: str, seconds: float, commits: bool) -> None:
        """Publish in a transaction, by plain SQL, and leave it at that for a while."""
        self._idle_sessions += 1
        key = f"idle/{self._idle_sessions}"
        payload = {"key": key, "sent": time.monotonic(), "delay": 0, "fate": "handle"}
        self.notes.add("trying", keys=[key], delay=0, fates=["handle"], brief=False, topic=False)
        session = None

        def publish(admin: psycopg.Connection[Any]) -> dict[str, Any]:
            nonlocal session
            session = psycopg.connect(self.cluster.url, connect_timeout=5)
            try:
                (message_id,) = session.execute(PUBLISH, [queue, json.dumps(payload)]).fetchone() or (0,)
            except psycopg.errors.ForeignKeyViolation:  # deleted or reaped, and not made again yet
                session.close()
                return {}
            return {"id": message_id}

        message_id = self._until_possible(publish)["id"]
        assert session is not None
        self.agenda.add(seconds, lambda: self._end_idle(session, key, message_id, commits=commits))

    def _end_idle(self, session: psycopg.Connection[Any], key: str, message_id: int, *, commits: bool) -> None:
        try:
            session.commit() if commits else session.rollback()
        except psycopg.Error:
            # No fault is injected while this runs: the session was ended before, and never got the commit.
            commits = False
        finally:
            session.close()
        if commits:
            self.notes.add("committed", keys=[key], ids=[message_id])
        else:
            self.notes.add("undone", keys=[key], refused=False)

    def _until_possible(self, inject: Callable[[psycopg.Connection[Any]], dict[str, Any]]) -> dict[str, Any]:
        """Try until it does something."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(psycopg.OperationalError), self._admin() as admin:
                if done := inject(admin):
                    return done
            self.wait(RETRY)
        raise NotPossible

    @contextlib.contextmanager
    def _admin(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.cluster.url, autocommit=True, connect_timeout=5) as admin:
            yield admin


def _continuing(slot: Slot) -> Callable[[], None]:
    """Return what lets this process go on, and none that took its place."""
    stopped = slot.process

    def go_on() -> None:
        if slot.process is stopped:
            slot.send(signal.SIGCONT)

    return go_on
