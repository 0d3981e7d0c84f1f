"""Connections of the library's own: dedicated, outside any pool, and what a fork leaves of them."""

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

# How often a loop runs a statement before it is prepared: psycopg's own default.
PREPARE_THRESHOLD = 5


# A peer that is gone without a word reports no error by itself; these let the kernel give it up. What
# OPTIONS says wins.
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

    A pooled one would keep LISTENing after it was given back, or be missing when a small pool is
    used up by handlers. It is in autocommit. Test database names, engine subclasses and OPTIONS are honoured.
    """
    connection = connections[alias].copy()
    # A project that commits by hand does not do so here: each statement would begin a transaction.
    connection.settings_dict["AUTOCOMMIT"] = True
    options = connection.settings_dict["OPTIONS"] = {**CONNECT_OPTIONS, **connection.settings_dict.get("OPTIONS", {})}
    options.pop("pool", None)
    options["application_name"] = f"django_pgqueue {purpose}"
    return connection


@contextmanager
def own_connection(alias: str, purpose: str) -> Iterator[None]:
    """Let ``connections[alias]`` of this thread be a dedicated connection, and close it at the end."""
    before = connections[alias]
    if before.in_atomic_block:
        # Inside a TestCase: another connection would not see its rows.
        yield
        return
    dedicated = dedicated_connection(alias, purpose)
    # Values that are bound by the server: Django's other cursor never prepares a statement.
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
    Let a loop's few statements be planned once, not each time: planning a claim takes longer than running it.

    Not through a pooler, which may give each transaction another session of the server.
    """
    if connection not in _own or not is_direct(connection.connection):
        return
    connection.connection.prepare_threshold = PREPARE_THRESHOLD
    with connection.cursor() as cursor:
        # The plans are kept: one made while the table is empty must not scan it when it is full.
        # Nor is a plan that is made once and runs for a millisecond worth compiling.
        cursor.execute("SET enable_seqscan = off")
        cursor.execute("SET jit = off")
        # The statements are written so that one plan serves all: making a claim's anew each time took as long
        # as a third of its work.
        cursor.execute("SET plan_cache_mode = force_generic_plan")
        # Between two beats or looks it is idle by trade: each time a loss, a return, and a late wake-up.
        cursor.execute("SET idle_session_timeout = 0")


def is_direct(raw: psycopg.Connection[Any]) -> bool:
    """
    Tell whether a connection goes to the server itself.

    Through a pooler the process id that the protocol told at the start is not that of the session.
    """
    row = raw.execute("SELECT pg_backend_pid()").fetchone()
    return row is not None and row[0] == raw.info.backend_pid


# What a forked child got from its parent. Kept: when it is collected it complains of not being closed.
_inherited: list[object] = []


def _forget_inherited() -> None:
    """
    Let a forked child make connections of its own.

    Two processes that speak on one connection get each other's answers, and closing it in the child would
    close the parent's. Django does not notice a fork.
    """
    for connection in connections.all(initialized_only=True):
        _inherited.append(connection)
        del connections[connection.alias]
        pools = getattr(connection, "_connection_pools", None)
        if pools:
            _inherited.append(dict(pools))
            pools.clear()


os.register_at_fork(after_in_child=_forget_inherited)
