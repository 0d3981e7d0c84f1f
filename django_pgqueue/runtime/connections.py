"""The library's own connections, which come from no pool, and the handling of connections after a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver

# How often a statement runs before it is prepared: psycopg's own default.
PREPARE_THRESHOLD = 5


# A peer that disappears without closing the connection causes no error. With these options, the kernel detects it.
# The project's OPTIONS take precedence.
CONNECT_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


# The connections of loops, open or not.
_own: WeakSet[BaseDatabaseWrapper] = WeakSet()


def dedicated_connection(alias: str, purpose: str) -> BaseDatabaseWrapper:
    """
    Return a new, unopened connection to ``alias`` that comes from no pool.

    A pooled connection would keep listening after it was returned to the pool, and might not be available while
    handlers use all of a small pool. The connection is in autocommit. Test database names, engine subclasses and
    OPTIONS are honoured.
    """
    connection = connections[alias].copy()
    # Also for a project that commits by hand: without autocommit, each statement would begin a transaction.
    connection.settings_dict["AUTOCOMMIT"] = True
    options = connection.settings_dict["OPTIONS"] = {**CONNECT_OPTIONS, **connection.settings_dict.get("OPTIONS", {})}
    options.pop("pool", None)
    options["application_name"] = f"django_pgqueue {purpose}"
    return connection


@contextmanager
def own_connection(alias: str, purpose: str) -> Iterator[None]:
    """Replace this thread's ``connections[alias]`` with a dedicated connection, and close it at the end."""
    before = connections[alias]
    if before.in_atomic_block:
        # Inside a TestCase: another connection would not see its rows.
        yield
        return
    dedicated = dedicated_connection(alias, purpose)
    # Django prepares statements only with server-side binding.
    dedicated.settings_dict["OPTIONS"]["server_side_binding"] = True
    _own.add(dedicated)
    connections[alias] = dedicated
    try:
        yield
    finally:
        connections[alias] = before
        dedicated.close()


@receiver(connection_created)
def _prepare_statements(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """
    Let a loop's few statements be planned once, because planning a claim takes longer than running it.

    Nothing is prepared through a pooler, which may run each transaction in a different session of the server.
    """
    if connection not in _own or not is_direct(connection.connection):
        return
    connection.connection.prepare_threshold = PREPARE_THRESHOLD
    with connection.cursor() as cursor:
        # Plans are kept. A plan from when the table was empty must not scan the table when it is full, and a statement
        # that runs for a millisecond is not worth compiling.
        cursor.execute("SET enable_seqscan = off")
        cursor.execute("SET jit = off")
        # The statements are written so that one plan fits all parameters. Planning each claim anew took as long as a
        # third of its work.
        cursor.execute("SET plan_cache_mode = force_generic_plan")
        # The connection is idle between two heartbeats or claims. A timeout would close it each time, and delay the
        # next wake-up.
        cursor.execute("SET idle_session_timeout = 0")


def is_direct(raw: psycopg.Connection[Any]) -> bool:
    """
    Return whether a connection goes directly to the server.

    Through a pooler, the process id from the start of the protocol is not that of the server's session.
    """
    row = raw.execute("SELECT pg_backend_pid()").fetchone()
    return row is not None and row[0] == raw.info.backend_pid


# The connections that a forked child inherited. They are kept, because psycopg warns when a connection is
# garbage-collected without being closed.
_inherited: list[object] = []


def _forget_inherited() -> None:
    """
    Make a forked child open its own connections.

    Two processes that share a connection receive each other's answers, and closing it in the child would close it for
    the parent. Django does not detect a fork.
    """
    for connection in connections.all(initialized_only=True):
        _inherited.append(connection)
        del connections[connection.alias]
        pools = getattr(connection, "_connection_pools", None)
        if pools:
            _inherited.append(dict(pools))
            pools.clear()


os.register_at_fork(after_in_child=_forget_inherited)
