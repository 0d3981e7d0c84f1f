"""The declared attributes of a queue, and the values derived from them and from the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

from django_pgqueue.backoff import backoff_delay, check_backoff
from django_pgqueue.conf import database_alias, settings
from django_pgqueue.message import Message
from django_pgqueue.schema import P, Schema, Validation, misfit, validation_of
from django_pgqueue.services.declaring import Declaration
from django_pgqueue.validation import Seconds, check_bool, check_count, check_name, check_seconds, check_ttl


class Attributes(Generic[P]):
    """The validated attributes of a queue. For an attribute that is None, the current setting applies."""

    def __init__(
        self,
        name: str,
        *,
        durable: bool,
        auto_deleted: bool,
        exclusive: bool,
        dead_letter: str | None,
        max_deliveries: int | None,
        ttl: Seconds | None,
        lease: Seconds | None,
        backoff: Mapping[str, float] | Callable[[int], float] | None,
        schema: Schema[P] | type[P] | Callable[[Any], P] | None,
        using: str | None,
    ) -> None:
        self.name = check_name(name)
        if dead_letter is not None and check_name(dead_letter) == name:
            raise ValueError(f"queue {name!r} cannot be its own dead-letter queue")
        self.durable = check_bool(durable, "durable")
        self.auto_deleted = check_bool(auto_deleted, "auto_deleted")
        self.exclusive = check_bool(exclusive, "exclusive")
        self.dead_letter = dead_letter
        self._max_deliveries = None if max_deliveries is None else check_count(max_deliveries, "max_deliveries")
        self._ttl = check_ttl(ttl)
        self._lease = None if lease is None else check_seconds(lease, "lease", zero=False)
        self._backoff = backoff if backoff is None or callable(backoff) else check_backoff(backoff)
        self.validation: Validation[P] | None = None if schema is None else validation_of(schema)
        self._using = using
        #: The names of the topics that the queue is bound to.
        self.topics: set[str] = set()
        self._declaration: Declaration | None = None

    @property
    def using(self) -> str:
        """The alias of the queue's database. Raises ``ImproperlyConfigured`` if the alias does not exist."""
        return database_alias(self._using)

    @property
    def declaration(self) -> Declaration:
        """The attributes as stored in the queue's row."""
        max_deliveries = self._max_deliveries or settings.MAX_DELIVERIES
        bindings = tuple((topic, self.copy_ttl) for topic in sorted(self.topics)) if self.topics else ()
        kept = self._declaration
        if kept is None or (kept.max_deliveries, kept.bindings) != (max_deliveries, bindings):
            self._declaration = kept = Declaration(
                self.name,
                self.durable,
                self.auto_deleted,
                self.exclusive,
                self.dead_letter,
                max_deliveries,
                bindings,
            )
        return kept

    @property
    def copy_ttl(self) -> float | None:
        """
        The seconds after which copies of a topic's messages expire, as a binding stores them. None: the default.

        Stored for auto-deleted queues, so that orphaned copies still expire if the row is deleted by hand.
        """
        return settings.EPHEMERAL_TTL if self._ttl is None and self.auto_deleted else self._ttl

    @property
    def lease(self) -> float:
        """The lease of a claim, in seconds."""
        return self._lease or settings.LEASE

    def retry_delay(self, delivery_count: int) -> float:
        """Return the delay of a retry after this many deliveries, in seconds."""
        return backoff_delay(self._backoff or settings.BACKOFF, delivery_count)

    def times(self, delay: Seconds, ttl: Seconds | None) -> tuple[float, float | None]:
        """Return the delay of a message and the seconds from now until it expires (None: it never expires)."""
        delay = check_seconds(delay, "delay")
        if ttl is None:
            ttl = self._ttl
        if ttl is None:
            ttl = settings.EPHEMERAL_TTL if self.auto_deleted else settings.DEFAULT_TTL
        ttl = check_ttl(ttl)
        # The TTL counts from the due time.
        return delay, None if ttl is None or ttl == math.inf else delay + ttl

    def load(self, message: Message) -> Message[P]:
        """Return the message with its payload loaded by the schema. Raises the schema's errors."""
        assert self.validation is not None
        return replace(message, payload=self.validation.load(message.payload))

    def load_many(self, messages: Sequence[Message]) -> tuple[list[Message[P]], list[tuple[Message, str]]]:
        """Return the messages as loaded by the schema, and those that do not match it, each with the reason."""
        fitting, misfits = [], []
        for message in messages:
            try:
                fitting.append(self.load(message))
            except Exception as error:
                misfits.append((message, misfit(error)))
        return fitting, misfits
