"""What this process believes about queues and connections, and which warnings it has logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper

from django_pgqueue.conf import settings

#: Alias, database, queue.
Key = tuple[str, str, str]

#: The hooks registered in a connection's current transaction: Django's list of hooks, the hook of each queue, and the
#: number of messages that each hook reports. Django replaces the list at commit, at rollback and when a savepoint
#: is rolled back, so the list's identity shows whether a hook seen earlier may have been discarded.
Hooks = tuple[list[Any] | None, dict[str, Callable[[], None]], dict[str, int]]

# After this many queues, a process forgets them all and asks the database again.
MAX_REMEMBERED = 10_000


class Beliefs:
    """
    What one process believes about the database, which has the last word. Only committed rows are believed.

    Threads share it. Every access is one operation on a dict or a set.
    """

    def __init__(self) -> None:
        #: Monotonic time until which a queue's row is believed to exist and to be fresh.
        self.declared: dict[Key, float] = {}
        #: Every queue that this process has seen, to distinguish a vanished queue from a first use.
        self.known: set[Key] = set()
        #: Monotonic time of the last wake-up that was sent.
        self.notified: dict[Key, float] = {}
        #: Monotonic time of the last heartbeat of a process that claims by hand, by consumer id and alias.
        self.beaten: dict[tuple[UUID, str], float] = {}
        #: The consumer id of a process that claims by hand, by process id: a forked child inherits its parent's entry.
        self.claimers: dict[int, UUID] = {}
        #: Declarations and pairs of aliases for which a warning was logged.
        self.warned: set[Hashable] = set()
        #: Whether the default isolation of a connection is READ COMMITTED, by psycopg's connection.
        self.read_committed: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        #: The hooks of each connection's current transaction.
        self.hooks: WeakKeyDictionary[BaseDatabaseWrapper, Hooks] = WeakKeyDictionary()

    @staticmethod
    def key_of(connection: BaseDatabaseWrapper, name: str) -> Key:
        """Return the key of a queue, whose name is unique only within its database."""
        return connection.alias, connection.settings_dict["NAME"], name

    def is_fresh(self, key: Key) -> bool:
        """Return whether the queue is believed to exist and to have been refreshed within DECLARE_TTL."""
        return time.monotonic() < self.declared.get(key, 0.0)

    def is_known(self, connection: BaseDatabaseWrapper, name: str) -> bool:
        """
        Return whether this process has seen the queue.

        Call this before creating the row: another thread may see the new row before this one reports it.
        """
        return self.key_of(connection, name) in self.known

    def remember(self, connection: BaseDatabaseWrapper, name: str) -> None:
        """Believe that a queue exists whose row was written or read. Not inside a transaction, which may roll back."""
        if connection.get_autocommit():
            key = self.key_of(connection, name)
            for remembered in (self.declared, self.known, self.notified):
                if len(remembered) >= MAX_REMEMBERED:
                    remembered.clear()
            self.declared[key] = time.monotonic() + settings.DECLARE_TTL
            self.known.add(key)

    def doubt(self, connection: BaseDatabaseWrapper, name: str) -> None:
        """Stop believing that the queue exists. It stays known."""
        self.declared.pop(self.key_of(connection, name), None)

    def forget(self) -> None:
        """Forget which queues this process declared; the next publish asks the database again."""
        self.declared.clear()
        self.known.clear()

    def age(self, seconds: float) -> None:
        """Make all beliefs ``seconds`` older. For tests that move time."""
        for times in (self.declared, self.notified, self.beaten):
            for key in list(times):
                times[key] -= seconds  # type: ignore[index]  # each has keys of its own

    def is_first(self, told: Hashable) -> bool:
        """Return whether this is the first warning about this subject, and record it as logged."""
        is_first = told not in self.warned
        self.warned.add(told)
        return is_first


#: The beliefs of this process.
beliefs = Beliefs()
