"""
A statement that a project's own connection runs often, prepared.

Django prepares nothing by itself, and planning an INSERT anew each time takes about as long as running it.
So what publishes runs by a cursor of psycopg's own: Django's costs as much again, quotes half a megabyte of
messages into the statement, and its usual kind cannot prepare. After some uses of a connection it prepares.

Nothing is prepared through a pooler, which may give each transaction another session of the server. And
where something watches Django's cursors (a debug mode, a tracer, a test that counts) these are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from django_pgqueue.loop import PREPARE_THRESHOLD, is_direct


@dataclass(slots=True)
class Hot:
    """A cursor on a project's connection, and how often it was used."""

    cursor: psycopg.Cursor[Any]
    uses: int = 0
    #: Whether statements may be prepared. None: not asked yet.
    is_direct: bool | None = None


# By psycopg's connection.
_hot: WeakKeyDictionary[Any, Hot] = WeakKeyDictionary()


def fetch_ids(connection: BaseDatabaseWrapper, statement: str, params: dict[str, Any]) -> list[int]:
    """Run a statement on a project's connection and return the ids in its rows. Errors are Django's."""
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    if is_watched(connection):
        with connection.cursor() as watched:
            watched.execute(statement, params)
            return [row[0] for row in watched.fetchall()]
    # As Django's cursor does before a statement.
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        return [row[0] for row in _execute(connection.connection, statement, params)]


def _execute(raw: psycopg.Connection[Any], statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    hot = _hot.get(raw)
    if hot is None:
        hot = _hot[raw] = Hot(psycopg.Cursor(raw))
    hot.uses += 1
    if hot.uses <= PREPARE_THRESHOLD:
        # A connection that is opened for a request and its few statements gains nothing.
        return hot.cursor.execute(statement, params).fetchall()
    if hot.is_direct is None:
        hot.is_direct = is_direct(raw)
    threshold = raw.prepare_threshold
    # Without a threshold psycopg prepares nothing, whatever it is told. The project's statements keep theirs.
    raw.prepare_threshold = PREPARE_THRESHOLD if hot.is_direct else None
    try:
        return hot.cursor.execute(statement, params, prepare=hot.is_direct).fetchall()
    finally:
        raw.prepare_threshold = threshold


def is_watched(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether somebody counts, logs, traces or replaces what goes through Django's cursors."""
    execute = CursorWrapper.execute
    return (
        bool(connection.execute_wrappers)
        or connection.queries_logged
        or "cursor" in vars(connection)
        or type(execute) is not FunctionType
        or execute.__globals__["__name__"] != CursorWrapper.__module__
    )
