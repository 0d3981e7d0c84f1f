"""Run the library's own statements, in autocommit or in a READ COMMITTED transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import IsolationLevel

from django_pgqueue.runtime.prepared import fetch_rows
from django_pgqueue.services.beliefs import beliefs

logger = logging.getLogger("django_pgqueue")


@contextmanager
def own_cursor(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """
    Yield a cursor for one of the library's own statements.

    In autocommit, if the default isolation level is stricter than READ COMMITTED, the statement runs in a transaction
    that is READ COMMITTED. At a stricter level, claims with SKIP LOCKED would fail with 40001.
    """
    if not connection.get_autocommit() or _defaults_to_read_committed(connection):
        with connection.cursor() as cursor:
            yield cursor
    else:
        with own_transaction(connection) as cursor:
            yield cursor


def is_read_committed(using: str) -> bool:
    """Return whether Django's transactions on this alias are READ COMMITTED. Call it outside of a transaction."""
    connection = connections[using]
    connection.ensure_connection()
    # Set by OPTIONS["isolation_level"]. None: the server's default applies.
    level = connection.connection.isolation_level
    if level is None:
        return _defaults_to_read_committed(connection)
    return bool(level == IsolationLevel.READ_COMMITTED)


# READ_COMMITTED - set the isolation level of the transaction that has just begun. Runs before its first statement.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


def make_read_committed(using: str) -> None:
    """Make the current transaction READ COMMITTED. It must not have run any statement yet."""
    with connections[using].cursor() as cursor:
        cursor.execute(READ_COMMITTED)


@contextmanager
def own_transaction(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Yield a cursor in a transaction of the library's own."""
    is_outermost = connection.get_autocommit()
    with transaction.atomic(using=connection.alias, durable=True), connection.cursor() as cursor:
        if is_outermost:
            cursor.execute(READ_COMMITTED)
        yield cursor


# DEFAULT_ISOLATION - read the isolation level of a statement outside a transaction.
DEFAULT_ISOLATION = "SELECT current_setting('default_transaction_isolation')"


def _defaults_to_read_committed(connection: BaseDatabaseWrapper) -> bool:
    raw = connection.connection
    if raw not in beliefs.read_committed:
        with connection.cursor() as cursor:
            cursor.execute(DEFAULT_ISOLATION)
            beliefs.read_committed[raw] = cursor.fetchone()[0] == "read committed"
    return beliefs.read_committed[raw]


def run(using: str, statement: str, **params: Any) -> list[tuple[Any, ...]]:
    with own_cursor(connections[using]) as cursor:
        cursor.execute(statement, params)
        return cursor.fetchall() if cursor.description else []


def run_often(connection: BaseDatabaseWrapper, statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Run one of the library's own statements on a project's connection, prepared where possible. Returns its rows."""
    if not connection.get_autocommit() or _defaults_to_read_committed(connection):
        return fetch_rows(connection, statement, params)
    with own_transaction(connection) as cursor:
        cursor.execute(statement, params)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def once_committed(tell: Callable[[], object], using: str) -> None:
    """Call ``tell`` immediately, or when the current transaction commits. It is not called after a rollback."""
    if connections[using].in_atomic_block:
        transaction.on_commit(tell, using=using, robust=True)
    else:
        tell()


# SECONDS_UNTIL - return the seconds until a time, by the database's clock, or 0 if it is past. No lock.
SECONDS_UNTIL = "SELECT greatest(date_part('epoch', %(due)s::timestamptz - statement_timestamp()), 0)"


def seconds_until(due: datetime, using: str) -> float:
    """Return the seconds until a time, by the database's clock, or 0 if it is past."""
    ((seconds,),) = run(using, SECONDS_UNTIL, due=due)
    return float(seconds)


def warn_of_other_transaction(connection: BaseDatabaseWrapper) -> None:
    """Log a warning, once, if a publish is about to commit while a transaction is open on another database."""
    if len(connections.settings) == 1:
        return
    for other in connections.all(initialized_only=True):
        pair = other.alias, connection.alias
        if other.in_atomic_block and beliefs.is_first(pair):
            logger.warning("publish is not part of the open transaction transaction=%s queue_database=%s", *pair)


def refuse_transaction(connection: BaseDatabaseWrapper) -> None:
    # The same rule as atomic(durable=True), including the exception for TestCase's own transaction.
    blocks = connection.atomic_blocks
    if (blocks and not getattr(blocks[-1], "_from_testcase", False)) or (
        not blocks and not connection.get_autocommit()
    ):
        raise RuntimeError("claim() cannot be called inside a transaction: its leases could roll back")


# NOW - read the database's clock.
NOW = "SELECT statement_timestamp()"


def now(using: str) -> datetime:
    """Return the current time by the database's clock."""
    value: datetime
    ((value,),) = run(using, NOW)
    return value


# STATEMENT_TIMEOUT - cancel this transaction's statements after %(limit)s, for example 5000ms.
STATEMENT_TIMEOUT = "SELECT set_config('statement_timeout', %(limit)s, true)"


def limit_statements(seconds: float, using: str) -> None:
    """Limit each following statement of the current transaction to this many seconds."""
    run(using, STATEMENT_TIMEOUT, limit=f"{round(seconds * 1000)}ms")


@contextmanager
def bounded(seconds: float, using: str) -> Iterator[None]:
    """
    Limit each statement in the block to this many seconds, so that it does not wait for a locked table.

    Does nothing inside a transaction, which would keep the limit.
    """
    if connections[using].in_atomic_block:
        yield
        return
    with transaction.atomic(using=using):
        limit_statements(seconds, using)
        yield
