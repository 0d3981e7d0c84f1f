"""
Run frequent statements on a project's own connections, as prepared statements.

Django does not prepare statements, and planning an INSERT takes about as long as running it. Publishing therefore uses
psycopg's own cursor. Django's cursor takes about as much time again, quotes half a megabyte of messages into the
statement, and its default kind cannot prepare. Statements are prepared after a few uses of a connection.

Nothing is prepared through a pooler, which may run each transaction in a different session of the server. Django's
cursors are used if something watches or replaces them: a debug mode, a tracer, a test that counts queries, an engine
that sets the search path.

As always with psycopg's prepared statements, a rollback sends DEALLOCATE ALL, which removes them from the session.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from psycopg.pq import TransactionStatus

from django_pgqueue.runtime.connections import PREPARE_THRESHOLD, is_direct

# Statements with these command tags remove all prepared statements of the session.
ENDING = ("DISCARD ALL", "DEALLOCATE ALL")

# Execute wrappers that do not need to see the statements that publish.
INDIFFERENT: set[Any] = set()

# Django's methods that create a cursor.
CURSORS = ("cursor", "_cursor", "_prepare_cursor", "make_cursor", "create_cursor")
_cursors_of = attrgetter(*CURSORS)


@dataclass(slots=True)
class Hot:
    """How often a project's connection was used, and whether it may prepare statements."""

    uses: int = 0
    #: Whether statements may be prepared. None: not checked yet.
    may_prepare: bool | None = None


# By psycopg's connection. A value must not refer to its connection, which would then never be garbage-collected.
_hot: WeakKeyDictionary[Any, Hot] = WeakKeyDictionary()


def fetch_ids(connection: BaseDatabaseWrapper, statement: str, params: dict[str, Any]) -> list[int]:
    """Run a statement on a project's connection and return the ids in its rows. Errors are Django's."""
    return [row[0] for row in fetch_rows(connection, statement, params)]


def fetch_rows(connection: BaseDatabaseWrapper, statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Run a statement on a project's connection and return its rows. Errors are Django's."""
    # Inside a transaction, a connection that does not work has ended the transaction.
    if not connection.in_atomic_block:
        connection.close_if_health_check_failed()
    # The caller has opened the connection, but the health check may have closed it.
    if connection.connection is None:
        connection.ensure_connection()
    if is_watched(connection):
        with connection.cursor() as watched:
            watched.execute(statement, params)
            rows: list[tuple[Any, ...]] = watched.fetchall()
            return rows
    # The checks of Django's cursor before a statement.
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        return _execute(connection.connection, statement, params)


def _execute(raw: psycopg.Connection[Any], statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    hot = _hot.get(raw)
    if hot is None:
        hot = _hot[raw] = Hot()
    hot.uses += 1
    # A new cursor each time, because a cursor that is kept would keep its connection open.
    cursor = psycopg.Cursor(raw)
    if hot.uses <= PREPARE_THRESHOLD:
        # A connection that runs few statements, for one request, gains nothing from preparing them.
        return cursor.execute(statement, params).fetchall()
    if hot.may_prepare is None:
        hot.may_prepare = is_direct(raw)
        if hot.may_prepare:
            factory: Any = raw.cursor_factory
            raw.cursor_factory = _noticing(factory)
    threshold = raw.prepare_threshold
    # Without a threshold, psycopg ignores ``prepare``. The threshold is restored for the project's statements: with a
    # threshold that none of them reaches, psycopg would remember the text of a hundred of them.
    raw.prepare_threshold = PREPARE_THRESHOLD if hot.may_prepare else None
    try:
        return cursor.execute(statement, params, prepare=hot.may_prepare).fetchall()
    except psycopg.errors.InvalidSqlStatementName:
        # The prepared statement was removed unseen, for example by a DO block.
        if raw.info.transaction_status != TransactionStatus.IDLE:
            raise
        _forget(raw)
        return cursor.execute(statement, params, prepare=hot.may_prepare).fetchall()
    finally:
        raw.prepare_threshold = threshold


@lru_cache
def _noticing(factory: Any) -> Any:
    """
    Return a cursor class that detects when the project's own statements remove prepared statements.

    psycopg does not detect this for statements that it does not prepare, and not always for others. A later publish
    would fail and abort the caller's transaction.
    """

    class Noticing(factory):  # type: ignore[misc]
        def execute(self, *args: Any, **kwargs: Any) -> Any:
            execute = super().execute
            done = execute(*args, **kwargs)
            if self.statusmessage in ENDING:
                _forget(self.connection)
            return done

    return Noticing


def _forget(raw: psycopg.Connection[Any]) -> None:
    """Make psycopg forget what it has prepared. Every rollback does so, also inside a transaction."""
    with raw.transaction(force_rollback=True):
        pass


def is_watched(connection: BaseDatabaseWrapper) -> bool:
    """Return whether anything counts, logs, traces or replaces the statements of Django's cursors."""
    execute = CursorWrapper.execute
    raw = connection.connection
    return (
        any(getattr(wrapper, "__func__", wrapper) not in INDIFFERENT for wrapper in connection.execute_wrappers)
        or connection.queries_logged
        or not vars(connection).keys().isdisjoint(CURSORS)
        or not _are_django_s(_cursors_of(type(connection)))
        or type(execute) is not FunctionType
        or execute.__globals__["__name__"] != CursorWrapper.__module__
        or type(raw) is not psycopg.Connection
        or not raw.cursor_factory.__module__.startswith(("django.", __name__))
    )


@lru_cache
def _are_django_s(functions: tuple[Any, ...]) -> bool:
    return all(type(each) is FunctionType and each.__globals__["__name__"].startswith("django.") for each in functions)
