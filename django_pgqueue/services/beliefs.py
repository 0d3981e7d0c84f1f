"""What this process believes of queues and connections, and what it has told already."""

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

#: The hooks registered in a connection's current transaction: the list they stand in, a hook for each queue, and
#: how many messages it tells of. Django replaces that list at commit, at rollback and when a savepoint rolls
#: back, so its identity tells whether a hook seen earlier may be gone.
Hooks = tuple[list[Any] | None, dict[str, Callable[[], None]], dict[str, int]]

# A process that uses ever new queues forgets them all after this many, and looks again.
MAX_REMEMBERED = 10_000


class Beliefs:
    """
    What one process believes. Only what is committed and was seen is believed; the database decides.

    Threads share it: each step on it is one operation on a dict or a set.
    """

    def __init__(self) -> None:
        #: Monotonic time until which a queue's row is believed to be there and fresh.
        self.declared: dict[Key, float] = {}
        #: Every queue that was ever there, so that a vanished queue is told from a first use.
        self.known: set[Key] = set()
        #: Monotonic time of the last wake-up that was sent.
        self.notified: dict[Key, float] = {}
        #: Monotonic time of the last heartbeat of a process that claims by hand, by consumer id and alias.
        self.beaten: dict[tuple[UUID, str], float] = {}
        #: Who claims by hand, by process id: what a child inherits through fork is the parent's.
        self.claimers: dict[int, UUID] = {}
        #: Declarations and pairs of aliases that a warning was logged for.
        self.warned: set[Hashable] = set()
        #: Whether the default isolation of a connection is READ COMMITTED, by psycopg's connection.
        self.read_committed: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        #: What follows the commit of a connection's transaction.
        self.hooks: WeakKeyDictionary[BaseDatabaseWrapper, Hooks] = WeakKeyDictionary()

    @staticmethod
    def key_of(connection: BaseDatabaseWrapper, name: str) -> Key:
        """Return the key of a queue: its name is unique only together with its database."""
        return connection.alias, connection.settings_dict["NAME"], name

    def is_fresh(self, key: Key) -> bool:
        """Tell whether the queue is believed to be there, and to have been refreshed within DECLARE_TTL."""
        return time.monotonic() < self.declared.get(key, 0.0)

    def is_known(self, connection: BaseDatabaseWrapper, name: str) -> bool:
        """
        Tell whether this process had known the queue.

        Ask before a row is made: another thread may come to know the new row before this one tells of it.
        """
        return self.key_of(connection, name) in self.known

    def remember(self, connection: BaseDatabaseWrapper, name: str) -> None:
        """Believe in a queue whose row was written or seen. Inside a transaction it may still vanish: no belief."""
        if connection.get_autocommit():
            key = self.key_of(connection, name)
            for remembered in (self.declared, self.known, self.notified):
                if len(remembered) >= MAX_REMEMBERED:
                    remembered.clear()
            self.declared[key] = time.monotonic() + settings.DECLARE_TTL
            self.known.add(key)

    def doubt(self, connection: BaseDatabaseWrapper, name: str) -> None:
        """Stop believing that the queue is there. It stays known."""
        self.declared.pop(self.key_of(connection, name), None)

    def forget(self) -> None:
        """Forget which queues this process declared; the next publish looks again."""
        self.declared.clear()
        self.known.clear()

    def age(self, seconds: float) -> None:
        """Let all beliefs be ``seconds`` older. For tests that move time."""
        for times in (self.declared, self.notified, self.beaten):
            for key in list(times):
                times[key] -= seconds  # type: ignore[index]  # each has keys of its own

    def is_first(self, told: Hashable) -> bool:
        """Tell whether this is the first time that a warning about it is to be logged."""
        is_first = told not in self.warned
        self.warned.add(told)
        return is_first


#: Those of this process.
beliefs = Beliefs()
