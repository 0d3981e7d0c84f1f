"""What a handler does to its connections ends with its message."""

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

# Seconds after which a handler's idle connection is tested before it is used again.
CONNECTION_IDLE = 1.0

# Statements whose effect on the session outlives their transaction: settings, role, locks, temporary
# tables; a DO or CALL may do any of that. What ends with the transaction is not among them.
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
    Give each message usable connections with the session as it is at the start, whatever the one before did.

    For the connections of one thread. That a session was changed is told by the statements that went
    through Django: asking the server would cost every message a round trip.
    """

    def __init__(self) -> None:
        self._used = time.monotonic()
        self._outages = 0
        self._traced: set[str] = set()
        # Asking Django for them costs more than a short handler.
        self._connections: dict[str, BaseDatabaseWrapper] = {}

    def watch(self) -> None:
        """Watch this thread's connections. Opens none."""
        for connection in connections.all():
            self._watch(connection)

    def _watch(self, connection: BaseDatabaseWrapper) -> None:
        self._connections[connection.alias] = connection
        connect = connection.connect

        def connect_afresh() -> None:
            connect()
            # What receivers of connection_created did to the session, they do to each.
            self._traced.discard(connection.alias)

        connection.connect = connect_afresh  # type: ignore[method-assign]
        connection.execute_wrappers.append(self._trace)

    def _trace(self, execute: Callable[..., Any], statement: Any, params: Any, many: Any, context: Any) -> Any:
        text = statement if isinstance(statement, str) else as_text(statement)
        if LEAVES_TRACES.search(text):
            self._traced.add(context["connection"].alias)
        return execute(statement, params, many, context)

    def is_needed(self, outages: int) -> bool:
        """Connections may have died: the database was away, or they were idle for a while."""
        return outages != self._outages or time.monotonic() - self._used > CONNECTION_IDLE

    @property
    def has_open(self) -> bool:
        """Whether any connection is open: else no handler has done anything to one. May be asked in any thread."""
        return any(connection.connection is not None for connection in self._connections.values())

    def before(self, outages: int) -> None:
        """Drop connections that died."""
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
        Drop connections that the handler broke, changed or left in a transaction; give those of a pool back.

        Returns whether it left a transaction open.
        """
        self._used = time.monotonic()
        left_open = False
        for connection in list(self._connections.values()):
            # With DEBUG on, Django would keep them all.
            connection.queries_log.clear()
            if connection.connection is None:
                continue
            # Autocommit is off by the handler, or by the settings: then it is the handler who has to commit.
            is_switched = connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
            # What goes back to a pool is handed on as it is; others are looked at before they are used again.
            is_suspect = connection.errors_occurred or (is_pooled(connection) and has_unread(connection))
            if connection.in_atomic_block or is_switched or is_in_transaction(connection):
                left_open = True
                self._drop(connection)
            elif connection.alias in self._traced or (is_suspect and not is_usable(connection)):
                self._drop(connection)
            elif is_pooled(connection):
                # Kept, it would be missing to the other workers of a pool that is smaller than they are many.
                connection.close()
            else:
                connection.errors_occurred = False
        self._traced.clear()
        return left_open

    def _drop(self, connection: BaseDatabaseWrapper) -> None:
        with contextlib.suppress(*DATABASE_FAULTS):
            if is_pooled(connection):
                # First, or the pool would hand it on as it is.
                connection.connection.close()
            connection.close()
        # A fresh wrapper too: the old one may believe that it is inside a transaction.
        del connections[connection.alias]
        self._watch(connections[connection.alias])

    def close(self) -> None:
        """Close this thread's connections."""
        connections.close_all()


# What publishes changes nothing in the session. So handlers publish as everybody does.
INDIFFERENT.add(ConnectionGuard._trace)


def is_usable(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether a connection works, and leave it outside a transaction."""
    usable: bool = connection.is_usable()
    if usable and not connection.autocommit:
        connection.rollback()
    return usable


def has_unread(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the server sent something that nobody asked for: mostly that it ended the session."""
    if connection.vendor != "postgresql":
        return False
    raw = connection.connection
    if raw.closed:
        return True
    # Not select(): that takes no file descriptor above 1023.
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the session is in a transaction that Django knows nothing of: a BEGIN by hand."""
    if connection.vendor != "postgresql":
        return False
    status = connection.connection.info.transaction_status
    return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR, TransactionStatus.ACTIVE)


def is_pooled(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether Django's connection comes from psycopg's pool."""
    return bool(connection.settings_dict.get("OPTIONS", {}).get("pool"))


def as_text(statement: Any) -> str:
    """Return the text of a statement that is composed of ``psycopg.sql`` objects."""
    return str(statement.as_string(None)) if isinstance(statement, Composable) else str(statement)
