"""
A statement that a project's own connection runs often, prepared.

Django prepares nothing by itself, and planning an INSERT anew each time takes about as long as running it.
So what publishes runs by a cursor of psycopg's own: Django's costs as much again, quotes half a megabyte of
messages into the statement, and its usual kind cannot prepare. After some uses of a connection it prepares.

Nothing is prepared through a pooler, which may give each transaction another session of the server. And
where something watches or changes Django's cursors (a debug mode, a tracer, a test that counts, an engine
that sets the search path) these are used.

As for everybody whom psycopg prepares statements for, a rollback ends all of the session's: it sends DEALLOCATE ALL.
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

# Statements with these tags end all that is prepared in the session.
ENDING = ("DISCARD ALL", "DEALLOCATE ALL")

# Functions that are wrapped around a connection's statements, and need not see those that publish.
INDIFFERENT: set[Any] = set()

# What makes a cursor in Django.
CURSORS = ("cursor", "_cursor", "_prepare_cursor", "make_cursor", "create_cursor")
_cursors_of = attrgetter(*CURSORS)


@dataclass(slots=True)
class Hot:
    """How often a project's connection was used."""

    uses: int = 0
    #: Whether statements may be prepared. None: not asked yet.
    may_prepare: bool | None = None


# By psycopg's connection. Nothing in it may refer to the connection, or that would never be collected.
_hot: WeakKeyDictionary[Any, Hot] = WeakKeyDictionary()


def fetch_ids(connection: BaseDatabaseWrapper, statement: str, params: dict[str, Any]) -> list[int]:
    """Run a statement on a project's connection and return the ids in its rows. Errors are Django's."""
    return [row[0] for row in fetch_rows(connection, statement, params)]


def fetch_rows(connection: BaseDatabaseWrapper, statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Run a statement on a project's connection and return its rows. Errors are Django's."""
    # Inside a transaction the connection is there, or that is over.
    if not connection.in_atomic_block:
        connection.close_if_health_check_failed()
    # Whoever has come here has looked for the connection before; it may just have been closed.
    if connection.connection is None:
        connection.ensure_connection()
    if is_watched(connection):
        with connection.cursor() as watched:
            watched.execute(statement, params)
            rows: list[tuple[Any, ...]] = watched.fetchall()
            return rows
    # As Django's cursor does before a statement.
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        return _execute(connection.connection, statement, params)


def _execute(raw: psycopg.Connection[Any], statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    hot = _hot.get(raw)
    if hot is None:
        hot = _hot[raw] = Hot()
    hot.uses += 1
    # Made each time: kept by a connection, it would keep that connection open.
    cursor = psycopg.Cursor(raw)
    if hot.uses <= PREPARE_THRESHOLD:
        # A connection that is opened for a request and its few statements gains nothing.
        return cursor.execute(statement, params).fetchall()
    if hot.may_prepare is None:
        hot.may_prepare = is_direct(raw)
        if hot.may_prepare:
            factory: Any = raw.cursor_factory
            raw.cursor_factory = _noticing(factory)
    threshold = raw.prepare_threshold
    # Without a threshold psycopg prepares nothing, whatever it is told. The project's statements keep theirs: with
    # one that none reaches it would remember the text of a hundred of them.
    raw.prepare_threshold = PREPARE_THRESHOLD if hot.may_prepare else None
    try:
        return cursor.execute(statement, params, prepare=hot.may_prepare).fetchall()
    except psycopg.errors.InvalidSqlStatementName:
        # Ended where nobody sees it: by a DO block, say.
        if raw.info.transaction_status != TransactionStatus.IDLE:
            raise
        _forget(raw)
        return cursor.execute(statement, params, prepare=hot.may_prepare).fetchall()
    finally:
        raw.prepare_threshold = threshold


@lru_cache
def _noticing(factory: Any) -> Any:
    """
    Return a class of cursors that sees to what the project's statements end.

    psycopg does not where it does not prepare them, nor always where it does: a later publish would fail,
    and abort the caller's transaction.
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
    """Let psycopg forget what it has prepared, which each rollback does, inside a transaction too."""
    with raw.transaction(force_rollback=True):
        pass


def is_watched(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether somebody counts, logs, traces or replaces what goes through Django's cursors."""
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
