"""
Sessions: database connections of their own.

`second_session()` is plain psycopg, as another program would be. `Session` is a thread with Django connections of its
own, driven step by step, so that a test can hold a transaction open here while something else happens there.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import psycopg
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

from tests.support.waiting import DEADLINE, T, busy


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
