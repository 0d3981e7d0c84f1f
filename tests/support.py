"""
What the tests of several modules use: sessions, rows in any state, waiting for a condition.

A session is a database connection of its own. `second_session()` is plain psycopg, as another
program would be; `Session` is a thread with Django connections of its own, driven step by step, so
that a test can hold a transaction open here while something else happens there.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar
from uuid import uuid4

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.db.models.functions import Now

from django_pgqueue.models import MessageQueue, MessageQueueItem

T = TypeVar("T")

#: Seconds after which a step that should have happened counts as not happening.
DEADLINE = 30.0


def busy() -> float:
    """
    Return how many programs want each core: 1 where none has to wait.

    What a test allows for something to happen is multiplied by it, so that a busy machine fails no test.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], T], timeout: float = DEADLINE, what: str = "") -> T:
    """Return the first true value of `condition()`, else fail after `timeout` seconds; a busy machine has more."""
    timeout *= busy()
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what or condition}"
        time.sleep(0.005)
    return value


def mostly_full(values: Iterable[T], *kept: T) -> list[Any]:
    """Return parameters for a test of which only the kept ones belong to the gate; the others are marked `full`."""
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.full)
        for value in values
    ]


# --- Sessions -------------------------------------------------------------------------------------


def connect(**options: Any) -> psycopg.Connection[Any]:
    """Return a psycopg connection to the test database, in autocommit."""
    name = connections["default"].settings_dict["NAME"]
    return psycopg.connect(os.environ["DATABASE_URL"], **{"dbname": name, "autocommit": True, **options})


@contextmanager
def second_session(**options: Any) -> Iterator[psycopg.Connection[Any]]:
    """Give a session that knows nothing of Django: what psql or another program would be."""
    session = connect(**options)
    try:
        yield session
    finally:
        session.close()


class Session:
    """
    A thread with Django connections of its own.

    `run(function, …)` calls there and returns the result; `start(function, …)` returns a future,
    for a call that is expected to wait. `begin()`, `commit()` and `rollback()` drive an `atomic()`
    block there. What is left open at the end is rolled back.
    """

    def __init__(self, using: str = "default") -> None:
        self.using = using
        self._blocks: list[transaction.Atomic] = []

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1)
        self.pid: int = self.run(self._pid)
        return self

    def __exit__(self, *exception: object) -> None:
        # A call that still waits for a lock must not hold up the end of a failed test.
        with connect() as admin:
            admin.execute("SELECT pg_cancel_backend(%s)", [self.pid])
        self.start(self._end).result(DEADLINE * busy())
        self._thread.shutdown()

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.start(function, *args, **kwargs).result(DEADLINE * busy())

    def start(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> "Future[T]":
        return self._thread.submit(function, *args, **kwargs)

    def begin(self, **options: Any) -> None:
        self.run(self._begin, options)

    def commit(self) -> None:
        self.run(self._leave, None)

    def rollback(self) -> None:
        self.run(self._leave, RuntimeError)

    def sql(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.run(fetch, statement, params, self.using)

    def _pid(self) -> int:
        return int(fetch("SELECT pg_backend_pid()", using=self.using)[0][0])

    def _begin(self, options: dict[str, Any]) -> None:
        block = transaction.atomic(using=self.using, **options)
        block.__enter__()
        self._blocks.append(block)

    def _leave(self, error: type[Exception] | None) -> None:
        self._blocks.pop().__exit__(error, error and error(), None)

    def _end(self) -> None:
        while self._blocks:
            self._leave(RuntimeError)
        connections.close_all()


@contextmanager
def sessions(count: int, using: str = "default") -> Iterator[list[Session]]:
    """Give `count` Django sessions."""
    opened: list[Session] = []
    try:
        for _ in range(count):
            opened.append(Session(using).__enter__())
        yield opened
    finally:
        for session in opened:
            session.__exit__()


def in_threads(count: int, function: Callable[[int], T], timeout: float = 60.0) -> list[T]:
    """
    Call `function(number)` in `count` threads, released together, and return the results in order.

    Each thread closes its Django connections. The first exception of any of them is raised.
    """
    barrier = threading.Barrier(count)

    def call(number: int) -> T:
        try:
            connection.ensure_connection()
            barrier.wait(DEADLINE * busy())
            return function(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(call, number) for number in range(count)]
        return [future.result(timeout * busy()) for future in futures]


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and close the connections that its synchronous parts opened in their thread."""

    async def run() -> T:
        try:
            return await coroutine
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(run())


def drop_connections() -> None:
    """Close this thread's connection, and those of the pool where there is one: a server that went away ended them."""
    connection.close()
    connection.close_pool()


def fetch(statement: str, params: Sequence[Any] = (), using: str = "default") -> list[tuple[Any, ...]]:
    """Run a statement on this thread's Django connection and return its rows."""
    with connections[using].cursor() as cursor:
        cursor.execute(statement, params)
        return cursor.fetchall() if cursor.description else []


# --- Locks ----------------------------------------------------------------------------------------

LOCK_WAITS = """
SELECT DISTINCT activity.pid, activity.wait_event, left(activity.query, 200)
FROM pg_stat_activity AS activity LEFT JOIN pg_locks AS lock ON lock.pid = activity.pid AND NOT lock.granted
WHERE activity.datname = current_database() AND (activity.wait_event_type = 'Lock' OR lock.pid IS NOT NULL)
"""


def is_waiting(pid: int) -> bool:
    """Tell whether this backend waits for a lock now."""
    with connect() as admin:
        return any(row[0] == pid for row in admin.execute(LOCK_WAITS).fetchall())


@contextmanager
def lock_waits() -> Iterator[list[tuple[Any, ...]]]:
    """Watch the database from beside, and collect every wait for a lock that is seen meanwhile."""
    seen: list[tuple[Any, ...]] = []
    stop = threading.Event()

    def watch() -> None:
        with connect() as admin:
            while True:
                seen.extend(admin.execute(LOCK_WAITS).fetchall())
                if stop.wait(0.002):
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


# --- Rows in any state ----------------------------------------------------------------------------


def make_queue(name: str, *, idle: float = 0, **columns: Any) -> MessageQueue:
    """Make a queue's row, last active `idle` seconds ago."""
    queue = MessageQueue.objects.create(name=name, **columns)
    return backdate(queue.name, idle)


def backdate(name: str, idle: float) -> MessageQueue:
    """Let a queue's row look as if it was last active `idle` seconds ago."""
    MessageQueue.objects.filter(name=name).update(last_active=Now() - seconds(idle))
    return MessageQueue.objects.get(name=name)


def make_message(
    queue: str,
    payload: Any = None,
    *,
    due_in: float | None = None,
    expires_in: float | None = None,
    lease: float | None = None,
    **columns: Any,
) -> MessageQueueItem:
    """
    Make a message's row in any state; times are seconds from now, negative ones are past.

    `lease`: when its lease ends; a negative one has lapsed. The queue's row must be there.
    """
    times: dict[str, Any] = {"queue": queue}
    if due_in is not None:
        times["read_after"] = Now() + seconds(due_in)
    if expires_in is not None:
        times["expires_at"] = Now() + seconds(expires_in)
    if lease is not None:
        times.update(lease_expires_at=Now() + seconds(lease), lease_token=uuid4())
        times["delivery_count"] = columns.get("delivery_count", 1)
    # In one transaction: a consumer that runs beside sees the row in its final state only.
    with transaction.atomic():
        item = MessageQueueItem.objects.create(queue_id=queue, payload={} if payload is None else payload, **columns)
        MessageQueueItem.objects.filter(pk=item.pk).update(**times)
        item.refresh_from_db()
    return item


def seconds(value: float) -> Any:
    """Return an interval for use in a query."""
    return timedelta(seconds=value)


def payloads(name: str) -> list[Any]:
    """Return what is stored on a queue, in the order of publishing."""
    return list(MessageQueueItem.objects.filter(queue=name).order_by("id").values_list("payload", flat=True))


def version(name: str) -> tuple[Any, ...]:
    """Return what identifies the version of a queue's row: any update of it changes this."""
    (row,) = fetch("SELECT xmin, ctid, last_active FROM django_pgqueue_messagequeue WHERE name = %s", [name])
    return row


def age_of(name: str) -> float:
    """Return how many seconds ago a queue was last active, by the database's clock."""
    ((age,),) = fetch(
        "SELECT extract(epoch FROM statement_timestamp() - last_active)::float8"
        " FROM django_pgqueue_messagequeue WHERE name = %s",
        [name],
    )
    return float(age)


def locker(name: str) -> str:
    """Return the xmax of a queue's row: any lock taken on it, even one since released, changes this."""
    ((xmax,),) = fetch("SELECT xmax::text FROM django_pgqueue_messagequeue WHERE name = %s", [name])
    return str(xmax)


def delete_queue(name: str) -> None:
    """Delete a queue's row by hand, from a session that knows nothing of Django."""
    with connect() as admin:
        admin.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = %s", [name])
