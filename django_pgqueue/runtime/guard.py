"""Undo what a handler did to its connections, before the next message."""

from __future__ import annotations

import contextlib
import re
import select
import time
from collections.abc import Callable
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus
from psycopg.sql import Composable

from django_pgqueue.runtime.loop import DATABASE_FAULTS
from django_pgqueue.runtime.prepared import INDIFFERENT

# In seconds. A handler's connection that was idle for longer is tested before it is used again.
CONNECTION_IDLE = 1.0

# Statements whose effect on the session outlives their transaction: settings, role, locks and temporary tables. A DO or
# CALL may do any of these. Statements whose effect ends with the transaction are excluded.
LEAVES_TRACES = re.compile(
    r"""(?:^|;)\s*(?:(?:--[^\n]*\n|/\*.*?\*/)\s*)*(?:
        set\s(?!\s*(?:local|transaction|constraints)\b) | reset\b | discard\b | listen\b | load\b | do\b | call\b
        | declare\b | prepare\s(?!\s*transaction\b) | create\s+(?:global\s+|local\s+)?temp(?:orary)?\b
    )
    | \bset_config\s*\((?![^()]*\btrue\s*\)) | \bpg_(?:try_)?advisory_lock""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)


class ConnectionGuard:
    """
    Provide each message with usable connections in a clean session, whatever the previous handler did.

    Guards the connections of one thread. It detects changes to the session from the statements that pass through
    Django, because asking the server would cost a round trip for each message.
    """

    def __init__(self) -> None:
        self._used = time.monotonic()
        self._outages = 0
        self._traced: set[str] = set()
        # Getting them from Django takes longer than a short handler.
        self._connections: dict[str, BaseDatabaseWrapper] = {}

    def watch(self) -> None:
        """Start to watch this thread's connections, without opening any."""
        for connection in connections.all():
            self._watch(connection)

    def _watch(self, connection: BaseDatabaseWrapper) -> None:
        self._connections[connection.alias] = connection
        connect = connection.connect

        def connect_afresh() -> None:
            connect()
            # Changes by receivers of connection_created are part of a clean session.
            self._traced.discard(connection.alias)

        connection.connect = connect_afresh  # type: ignore[method-assign]
        connection.execute_wrappers.append(self._trace)

    def _trace(self, execute: Callable[..., Any], statement: Any, params: Any, many: Any, context: Any) -> Any:
        text = statement if isinstance(statement, str) else as_text(statement)
        if LEAVES_TRACES.search(text):
            self._traced.add(context["connection"].alias)
        return execute(statement, params, many, context)

    def is_needed(self, outages: int) -> bool:
        """Return whether connections may be broken: there was an outage, or they were idle for a while."""
        return outages != self._outages or time.monotonic() - self._used > CONNECTION_IDLE

    @property
    def has_open(self) -> bool:
        """Whether any connection is open. If not, no handler has changed one. May be read from any thread."""
        return any(connection.connection is not None for connection in self._connections.values())

    def before(self, outages: int) -> None:
        """Close broken connections."""
        is_needed = self.is_needed(outages)
        if is_needed:
            self._outages = outages
            self._used = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.connection is None or connection.in_atomic_block:
                continue
            if (is_needed or has_unread(connection)) and not is_usable(connection):
                self._drop(connection)

    def after(self) -> bool:
        """
        Close connections that the handler broke, changed or left in a transaction. Return pooled ones to their pool.

        Returns whether the handler left a transaction open.
        """
        self._used = time.monotonic()
        left_open = False
        for connection in list(self._connections.values()):
            # With DEBUG=True, Django would keep every query.
            connection.queries_log.clear()
            if connection.connection is None:
                continue
            # The handler has changed autocommit. If the settings turn it off, the handler has to commit.
            is_switched = connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
            # A pool passes a connection on unchecked. Other connections are checked before their next use.
            is_suspect = connection.errors_occurred or (is_pooled(connection) and has_unread(connection))
            if connection.in_atomic_block or is_switched or is_in_transaction(connection):
                left_open = True
                self._drop(connection)
            elif connection.alias in self._traced or (is_suspect and not is_usable(connection)):
                self._drop(connection)
            elif is_pooled(connection):
                # The pool may have fewer connections than there are workers.
                connection.close()
            else:
                connection.errors_occurred = False
        self._traced.clear()
        return left_open

    def _drop(self, connection: BaseDatabaseWrapper) -> None:
        with contextlib.suppress(*DATABASE_FAULTS):
            if is_pooled(connection):
                # Closed first, or the pool would reuse it unchanged.
                connection.connection.close()
            connection.close()
        # A new wrapper as well, because the old one may believe that it is inside a transaction.
        del connections[connection.alias]
        self._watch(connections[connection.alias])

    def close(self) -> None:
        """Close this thread's connections."""
        connections.close_all()


# Publishing does not change the session, so a guard does not keep handlers from publishing with prepared statements.
INDIFFERENT.add(ConnectionGuard._trace)


def is_usable(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a connection works. Leaves it outside a transaction."""
    usable: bool = connection.is_usable()
    if usable and not connection.autocommit:
        connection.rollback()
    return usable


def has_unread(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server sent something unrequested, which is usually the end of the session."""
    if connection.vendor != "postgresql":
        return False
    raw = connection.connection
    if raw.closed:
        return True
    # Not select(), which does not support file descriptors above 1023.
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the session is in a transaction that Django does not know of, from a BEGIN by hand."""
    if connection.vendor != "postgresql":
        return False
    status = connection.connection.info.transaction_status
    return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR, TransactionStatus.ACTIVE)


def is_pooled(connection: BaseDatabaseWrapper) -> bool:
    """Return whether Django's connection comes from psycopg's pool."""
    return bool(connection.settings_dict.get("OPTIONS", {}).get("pool"))


def as_text(statement: Any) -> str:
    """Return the text of a statement, which may be composed of ``psycopg.sql`` objects."""
    return str(statement.as_string(None)) if isinstance(statement, Composable) else str(statement)
