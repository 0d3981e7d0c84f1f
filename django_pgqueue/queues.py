"""
``Queue``, which projects declare in their ``queues.py`` and publish to.

Declaring a queue runs no SQL and works before Django's apps are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from asgiref.sync import sync_to_async

from django_pgqueue import registry
from django_pgqueue.attributes import Attributes
from django_pgqueue.conf import database_alias, settings
from django_pgqueue.message import Message, check_own, encode, encode_headers, encode_many
from django_pgqueue.queue_internals import HandlerFunction, make_handler, send, send_many
from django_pgqueue.redrive import Redrive, make_filter
from django_pgqueue.schema import P, Schema
from django_pgqueue.services import claiming, counting, declaring, operating, session, settling
from django_pgqueue.services.counting import QueueStats
from django_pgqueue.services.publishing import Outgoing
from django_pgqueue.validation import Seconds, check_count, check_name, check_rate, check_seconds

R = TypeVar("R")

# In seconds: how long extend() tries rows that another session has locked, before it counts them as lost.
LOCK_TIMEOUT = 1.0

PURGE_BATCH = 1_000


class Queue(Generic[P]):
    """
    A queue. Declaring it runs no SQL. Its row is created on first use.

    ``Queue[Order]`` tells type checkers the type of its payloads.

    It has more than twenty methods, one for each verb, so that everything that a project does with a queue is in one
    place.

    ``name``
        1 to 250 printable characters (255 if it ends in ``.dead``), without a space at either end, in Unicode
        normalization form C.
    ``durable``
        If False, a crash of the server may lose messages, because publishes outside a transaction do not wait for the
        disk.
    ``auto_deleted``
        If True, the queue is reaped when it is idle and empty, and created again by the next publish. False: a standing
        queue.
    ``exclusive``
        If True, only one consumer at a time may claim messages.
    ``dead_letter``
        The name of the queue that takes dead letters. None: ``NAME.dead``.
    ``max_deliveries``
        How often a message may be claimed before it is moved to the dead-letter queue. With 1, all messages that a
        worker was handling when it was killed are moved there. None: ``MAX_DELIVERIES``.
    ``ttl``
        Seconds after its due time at which a message expires. ``math.inf``: never. None: ``EPHEMERAL_TTL`` for
        auto-deleted queues, ``DEFAULT_TTL`` for others.
    ``lease``
        Seconds that a claim lasts unless it is extended. None: ``LEASE``.
    ``backoff``
        The delay of a retry: a dict with some of the keys ``base``, ``factor``, ``max`` and ``jitter``, or a function
        that takes the number of deliveries so far and returns seconds. None: ``BACKOFF``.
    ``schema``
        Validates payloads, when they are published and before they are handled: a type that pydantic or msgspec
        supports, a function that takes the JSON value and returns the payload for handlers, or an object with
        ``dump(payload)`` and ``load(value)``. A message that does not match is moved to the dead-letter queue. None:
        any payload.
    ``using``
        The alias of the queue's database. None: ``DATABASE``.

    Seconds are numbers or ``timedelta``, up to a hundred years.

    Raises ``InvalidQueueName`` for an invalid name, ``ImportError`` if the library for ``schema`` is not installed, and
    ``ValueError`` for any other invalid argument, or if the dead-letter queues would form a cycle.
    """

    def __init__(
        self,
        name: str,
        *,
        durable: bool = True,
        auto_deleted: bool = False,
        exclusive: bool = False,
        dead_letter: str | None = None,
        max_deliveries: int | None = None,
        ttl: Seconds | None = None,
        lease: Seconds | None = None,
        backoff: Mapping[str, float] | Callable[[int], float] | None = None,
        schema: Schema[P] | type[P] | Callable[[Any], P] | None = None,
        using: str | None = None,
    ) -> None:
        #: The queue's name.
        self.name = check_name(name)
        self._attributes: Attributes[P] = Attributes(
            name,
            durable=durable,
            auto_deleted=auto_deleted,
            exclusive=exclusive,
            dead_letter=dead_letter,
            max_deliveries=max_deliveries,
            ttl=ttl,
            lease=lease,
            backoff=backoff,
            schema=schema,
            using=using,
        )
        if dead_letter is not None:
            registry.refuse_cycle(self.name, dead_letter)
        registry.register_queue(self)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    @property
    def using(self) -> str:
        """The alias of the queue's database. Raises ``ImproperlyConfigured`` if the alias does not exist."""
        return self._attributes.using

    @property
    def lease(self) -> float:
        """The lease of a claim, in seconds."""
        return self._attributes.lease

    def declare(self) -> None:
        """
        Create the queue and its dead-letter queue, write changed attributes and bindings, and mark the queue as in use.

        May wait for the queue's row. Inside a transaction, the changes are part of that transaction, and other sessions
        that create the same queue wait for its commit. Publishing and consuming declare the queue automatically; call
        this before a long transaction that publishes to a new queue.

        Raises ``ValueError`` if the stored dead-letter queues would form a cycle.
        """
        declaring.declare(self._attributes.declaration, self.using)

    # --- Publishing ---

    def publish(
        self,
        payload: P,
        *,
        headers: Mapping[str, Any] | None = None,
        delay: Seconds = 0,
        ttl: Seconds | None = None,
    ) -> int:
        """
        Publish a message and return its id.

        ``payload``
            A JSON value: None, bool, int, finite float, str, list, tuple (delivered as a list) or dict with str keys,
            nested up to 500 levels, and up to ``MAX_PAYLOAD_BYTES`` of UTF-8 JSON. With a schema: a payload that the
            schema accepts.
        ``headers``
            A mapping of str to JSON values. None: no headers.
        ``delay``
            Seconds until the message is due.
        ``ttl``
            Seconds from the due time until the message expires. ``math.inf``: never. None: the queue's TTL.

        Inside ``atomic()``, the message is part of the transaction and becomes visible to others when it commits.
        Publishers never wait for each other while the queue exists. A reaped auto-deleted queue is created again in the
        same transaction. (The transaction fails with 40001 if it is REPEATABLE READ or stricter and the queue was
        reaped after it began.) A transaction on another database than ``using`` does not include the message; this
        logs a warning, once. Use ``transaction.on_commit(…, using=OTHER)`` to publish after that transaction.

        Raises ``PayloadError`` or ``ValueError`` before any SQL is sent. Raises ``QueueNotFound`` if the row of a
        standing queue is missing although this process saw it within ``DECLARE_TTL``. The transaction stays usable
        after each of these errors.
        """
        delay, expires_in = self._attributes.times(delay, ttl)
        most = settings.MAX_PAYLOAD_BYTES
        validation = self._attributes.validation
        value = payload if validation is None else validation.dump(payload)
        outgoing = Outgoing(encode(value, most), encode_headers(headers, most), delay or None, expires_in)
        return send(self._attributes, outgoing, headers)

    def publish_many(
        self,
        payloads: Iterable[P],
        *,
        headers: Mapping[str, Any] | None = None,
        delay: Seconds = 0,
        ttl: Seconds | None = None,
    ) -> list[int]:
        """
        Publish all messages or none, and return a list of their ids in the order of ``payloads``.

        ``headers``, ``delay`` and ``ttl`` apply to each message. Otherwise like ``publish()``. The path of a
        ``PayloadError`` starts with the position: ``[57].price``. With no payloads, an empty list is returned.
        """
        attributes = self._attributes
        delay, expires_in = attributes.times(delay, ttl)
        most = settings.MAX_PAYLOAD_BYTES
        values = payloads if attributes.validation is None else attributes.validation.dump_many(payloads)
        chunks, text = encode_many(values, most), encode_headers(headers, most)
        return send_many(attributes, chunks, text, headers, delay=delay or None, expires_in=expires_in)

    async def apublish(self, payload: P, **options: Any) -> int:
        """Like ``publish()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish)(payload, **options)

    async def apublish_many(self, payloads: Iterable[P], **options: Any) -> list[int]:
        """Like ``publish_many()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish_many)(payloads, **options)

    # --- Consuming ---

    def claim(self, limit: int = 1) -> list[Message[P]]:
        """
        Lease up to ``limit`` ready messages and return them as a list, which is empty if there are none.

        The caller holds each message until its lease ends, and must ack, nack, reject or extend it before then. A
        message whose last lease expired is delivered on its own. Messages that were delivered ``max_deliveries`` times,
        cannot be decoded or do not match the schema are moved to the dead-letter queue and not returned.

        A paused queue, and an exclusive queue that another consumer owns, return no messages. By claiming, this process
        becomes the owner of an exclusive queue. It remains the owner while it claims at least every two
        ``HEARTBEAT_INTERVAL``.

        Raises ``RuntimeError`` inside ``atomic()``, because a rollback would undo the lease.
        """
        check_count(limit, "limit")
        while True:
            claim = claiming.claim_by_hand(self._attributes.declaration, self.using, limit=limit, lease=self.lease)
            messages = claim.messages if self._attributes.validation is None else self._fitting(claim.messages)
            # Messages that were dead-lettered may have been ahead of others.
            if messages or not (claim.messages or claim.dead_lettered):
                return messages

    def _fitting(self, messages: Sequence[Message]) -> list[Message[P]]:
        """Return the messages as loaded by the schema, and reject those that do not match it."""
        fitting, misfits = self._attributes.load_many(messages)
        if misfits:
            refused, reasons = zip(*misfits, strict=True)
            settling.reject(self._attributes.declaration, refused, reasons, self.using)
        return fitting

    def ack(self, *messages: Message) -> None:
        """
        Delete messages that were handled.

        Inside a transaction, the deletion is part of that transaction. Raises ``LeaseLost`` with the ids of messages
        whose lease the caller no longer has; the other messages are settled. Raises ``ValueError`` for messages of
        another queue, before any SQL is sent. All of this also applies to ``nack()``, ``reject()`` and ``extend()``.
        """
        if check_own(messages, self.name):
            settling.raise_lost(self.name, settling.ack(messages, self.using))

    def nack(self, *messages: Message, delay: Seconds | None = None, reason: str = "") -> None:
        """
        Give messages back, to be delivered again in ``delay`` seconds (None: the queue's back-off).

        A message that was delivered ``max_deliveries`` times is moved to the dead-letter queue. ``reason`` is text for
        the message's history, which keeps ten failures and 2,000 characters of each. Otherwise like ``ack()``.
        """
        if check_own(messages, self.name):
            delays = [
                self.retry_delay(message) if delay is None else check_seconds(delay, "delay") for message in messages
            ]
            declaration, reasons = self._attributes.declaration, [reason] * len(messages)
            settling.raise_lost(self.name, settling.nack(declaration, messages, delays, reasons, self.using).lost)

    def reject(self, *messages: Message, reason: str = "") -> None:
        """
        Move messages to the dead-letter queue, with ``reason`` in their history.

        The dead-letter queue is created if it is missing. Otherwise like ``ack()``.
        """
        if check_own(messages, self.name):
            declaration, reasons = self._attributes.declaration, [reason or "rejected"] * len(messages)
            settling.raise_lost(self.name, settling.reject(declaration, messages, reasons, self.using))

    def extend(self, *messages: Message, seconds: Seconds | None = None) -> None:
        """
        Let leases end ``seconds`` from now (None: the queue's lease).

        A message that another session keeps locked for longer than a second, because it is settling it, counts as lost.
        Otherwise like ``ack()``.
        """
        if check_own(messages, self.name):
            lease = self.lease if seconds is None else check_seconds(seconds, "seconds", zero=False)
            extension = settling.extend(messages, lease, self.using, timeout=LOCK_TIMEOUT)
            settling.raise_lost(self.name, extension.lost | extension.locked)

    def retry_delay(self, message: Message) -> float:
        """Return the delay of a retry of a failed message in seconds, by the queue's back-off."""
        return self._attributes.retry_delay(message.delivery_count)

    @overload
    def handler(self, function: Callable[[Message[P]], R]) -> Callable[[Message[P]], R]: ...

    @overload
    def handler(
        self,
        *,
        concurrency: int = 1,
        ack: Literal["late", "early", "atomic"] = "late",
        timeout: Seconds = 3600,
        batch: None = None,
    ) -> Callable[[Callable[[Message[P]], R]], Callable[[Message[P]], R]]: ...

    @overload
    def handler(
        self,
        *,
        concurrency: int = 1,
        ack: Literal["late", "early", "atomic"] = "late",
        timeout: Seconds = 3600,
        batch: int,
    ) -> Callable[[Callable[[list[Message[P]]], R]], Callable[[list[Message[P]]], R]]: ...

    def handler(
        self,
        function: HandlerFunction | None = None,
        *,
        concurrency: int = 1,
        ack: str = "late",
        timeout: Seconds = 3600,
        batch: int | None = None,
    ) -> Any:
        """
        Register the sync or async function that ``consume_queues`` calls for each message. Use it as a decorator.

        ``concurrency``
            How many messages one process handles at once.
        ``ack``
            When messages are acked. ``"late"``: after the handler, which handles each message at least once.
            ``"early"``: before the handler, at most once. ``"atomic"``: in one transaction with the handler on this
            queue's database, so that the handler's changes there are applied exactly once; not for ``async def``.
        ``timeout``
            Seconds after which the lease is no longer extended, so that another consumer takes over. The handler is
            not stopped.
        ``batch``
            The maximum number of messages that the handler takes at once, as a list. None: it takes a single message.

        The handler is called with a ``Message``. If it returns, the message is acked. If it raises, the message is
        retried with back-off. It may also raise ``Nack`` or ``Reject``.

        With ``batch``, the handler gets a list of one to ``batch`` messages. It is called with the messages that are
        available and does not wait for more; a message whose last lease expired is delivered on its own. Its return or
        its exception applies to all messages of the list. To settle single messages differently, the handler returns a
        mapping of message ids to exceptions: ``{message.id: Reject("no such order")}``. With ``ack="atomic"``, changes
        made for these messages are committed with the rest, unless the handler uses a savepoint for each message. The
        nack or rejection follows the commit.

        Raises ``ValueError`` for an invalid argument or function, and if the queue already has another handler.
        """

        def register(function: HandlerFunction) -> HandlerFunction:
            handler = make_handler(self, function, concurrency=concurrency, ack=ack, timeout=timeout, batch=batch)
            registry.register_handler(handler)
            return function

        return register if function is None else register(function)

    # --- Operating ---

    def redrive(
        self,
        limit: int | None = None,
        *,
        ids: Iterable[int] | None = None,
        reason: str | None = None,
        headers: Mapping[str, Any] | None = None,
        rate: float | None = None,
        canary: int | None = None,
        canary_timeout: Seconds = 300,
        progress: Callable[[int], object] = lambda _: None,
    ) -> int:
        """
        Send this queue's dead letters back to it, with a fresh count, and return how many.

        ``limit``
            At most this many.
        ``ids``
            Only dead letters with these ids.
        ``reason``
            Only dead letters with this text in the reason of their last failure.
        ``headers``
            Only dead letters with these headers.
        ``rate``
            The maximum number per second, 0.001 or more.
        ``canary``
            Send this many first. The others follow if all of these are settled within ``canary_timeout`` seconds and
            none of them is dead-lettered again. Otherwise ``CanaryFailed`` is raised.
        ``progress``
            A function that is called with the number sent so far.

        Filters are combined with AND. Messages that are dead-lettered after the call are not sent.

        A dead letter keeps its history. The queue is created if it is missing. Dead letters that a consumer holds are
        skipped, and concurrent redrives take different ones. Each batch is a separate transaction. Inside ``atomic()``,
        all batches are part of that transaction, and ``rate`` and ``canary`` raise ``RuntimeError``. Raises
        ``ValueError`` for an invalid argument.
        """
        if rate is not None:
            check_rate(rate)
        return Redrive(
            self._attributes.declaration,
            self.using,
            make_filter(ids, reason, headers),
            None if limit is None else check_count(limit, "limit"),
            rate,
            None if canary is None else check_count(canary, "canary"),
            check_seconds(canary_timeout, "canary_timeout", zero=False),
            progress,
        ).run()

    def purge(self, limit: int | None = None, *, progress: Callable[[int], object] = lambda _: None) -> int:
        """
        Delete the messages on this queue, and return how many were deleted.

        Deletes up to ``limit`` messages that nobody holds and that were published before this call: ready, delayed,
        expired and dead. Each batch is a separate transaction; inside ``atomic()``, all batches are part of that
        transaction. ``progress`` is called with the number deleted so far. Raises ``ValueError`` if ``limit`` is not a
        positive whole number.
        """
        most = math.inf if limit is None else check_count(limit, "limit")
        before = session.now(self.using)
        purged = 0
        while purged < most:
            batch = int(min(PURGE_BATCH, most - purged))
            deleted = operating.purge(self.name, batch, before, self.using)
            purged += deleted
            progress(purged)
            if deleted < batch:
                break
        return purged

    def pause(self) -> None:
        """
        Stop claims of this queue by all consumers, until ``resume()`` is called.

        Running handlers end normally. Consumers give back other messages that they hold within ``POLL_INTERVAL``.
        Publishing and expiry continue. ``declare()`` does not change the pause, and a paused queue is not reaped.
        Raises ``QueueNotFound``.
        """
        operating.pause(self.name, self.using)

    def resume(self) -> None:
        """
        Allow claims of this queue again and wake its consumers.

        Inside a transaction, both take effect when it commits. Raises ``QueueNotFound``.
        """
        operating.resume(self.name, self.using)

    # --- Inspecting ---

    def stats(self) -> QueueStats:
        """
        Return a ``QueueStats``: the number of messages by state, and the age of the oldest due message in seconds.

        Reads all messages of the queue. ``exists`` is False if the queue has no row.
        """
        found = counting.stats([self.name], self.using)
        return found[0] if found else QueueStats(self.name, exists=False)


def queue_named(name: str, using: str | None = None, *, auto_deleted: bool = False) -> Queue[Any]:
    """
    Return the queue of this name as declared in this process, or else with the attributes stored in its row.

    With the stored attributes, using the queue does not change its row. A queue without a row is new, and has the given
    ``auto_deleted``. Queries the database only if the queue is not declared, and may then raise its errors. Raises
    ``InvalidQueueName`` before that.
    """
    declared = registry.find_queue(name, using)
    if declared is not None:
        return declared
    stored = declaring.stored(check_name(name), database_alias(using))
    if stored is None:
        return Queue(name, auto_deleted=auto_deleted, using=using)
    return Queue(name, **stored._asdict(), using=using)
