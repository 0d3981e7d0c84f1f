"""
Run handlers in the transaction of a ``TestCase`` as if they were in autocommit.

On a worker's connection, which is in autocommit, a failed statement does not affect earlier or later ones. Inside a
transaction, the first failure would abort everything, including the test's own data.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus

from django_pgqueue.consumer.handler import Handler

# Django's own statements for a handler's atomic(). A savepoint around them would end with theirs.
SAVEPOINTS = re.compile(r"\s*(?:SAVEPOINT|RELEASE|ROLLBACK)\b", re.IGNORECASE)


def as_in_worker(handler: Handler) -> Handler:
    """Return the handler with each statement outside of its own ``atomic()`` isolated, as in autocommit."""
    # With ack="atomic", a failed statement aborts the transaction in a worker, too.
    besides = handler.queue.using if handler.ack == "atomic" else None
    block = functools.partial(standing_alone, besides)
    wrap = _wrapped_async if handler.is_async else _wrapped
    on_loop = handler.async_function and _wrapped_async(handler.async_function, block)
    return replace(handler, function=wrap(handler.function, block), async_function=on_loop)


def _wrapped(function: Callable[[Any], Any], block: Callable[[], AbstractContextManager[None]]) -> Callable[[Any], Any]:
    @functools.wraps(function, updated=())
    def handle(argument: Any) -> Any:
        with block():
            return function(argument)

    return handle


def _wrapped_async(
    function: Callable[[Any], Any], block: Callable[[], AbstractContextManager[None]]
) -> Callable[[Any], Any]:
    @functools.wraps(function, updated=())
    async def handle(argument: Any) -> Any:
        entered = block()
        # The test's connections belong to the thread for synchronous code.
        await sync_to_async(entered.__enter__)()
        try:
            return await function(argument)
        finally:
            await sync_to_async(entered.__exit__)(None, None, None)

    return handle


@contextmanager
def standing_alone(besides: str | None = None) -> Iterator[None]:
    """Isolate each statement in this thread's open transactions, except on the alias ``besides``."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block and connection.alias != besides:
                stack.enter_context(_in_autocommit(connection))
        yield


@contextmanager
def _in_autocommit(connection: BaseDatabaseWrapper) -> Iterator[None]:
    depth = len(connection.savepoint_ids)
    needs_rollback = connection.needs_rollback
    raw = connection.connection

    def run_alone(execute: Callable[..., Any], statement: Any, params: Any, many: Any, context: Any) -> Any:
        is_own = isinstance(statement, str) and SAVEPOINTS.match(statement)
        if is_own or len(connection.savepoint_ids) > depth:
            return execute(statement, params, many, context)
        # Django sets this when save() fails. The failed statement was rolled back, and nothing else should be.
        connection.needs_rollback = False
        # psycopg's own savepoint, because Django does not count or log it.
        with raw.transaction():
            return execute(statement, params, many, context)

    raw.execute("SAVEPOINT pgqueue_handler")
    try:
        with connection.execute_wrapper(run_alone):
            yield
    finally:
        if raw.info.transaction_status == TransactionStatus.INERROR:
            # A statement without Django's cursors failed, so everything that the handler did must be rolled back.
            raw.execute("ROLLBACK TO SAVEPOINT pgqueue_handler")
        raw.execute("RELEASE SAVEPOINT pgqueue_handler")
        connection.needs_rollback = needs_rollback
