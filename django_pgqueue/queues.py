"""
``Queue``: what projects import, declare in their ``queues.py`` and publish to.

Declaring one runs no SQL and works before Django's apps are loaded.
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

# Seconds for which extend() tries rows that somebody else has locked, before it counts them as lost.
LOCK_TIMEOUT = 1.0

# How many messages one statement of a purge deletes.
PURGE_BATCH = 1_000


class Queue(Generic[P]):
    """
    A queue, declared. Runs no SQL: the first use makes its row, if it is not there.

    ``Queue[Order]`` has payloads of that type, for type checkers.

    It has more than twenty methods, one for each verb, so that all that a project does with a queue is in one place.

    ``name``
        1 to 250 printable characters (255 where it ends in ``.dead``), no space at its ends, in Unicode normal
        form C.
    ``durable``
        False allows a crash of the server to take messages: publishes outside a transaction do not wait for the
        disk.
    ``auto_deleted``
        Reaped when it is idle and empty, and made again by the next publish. False: a standing queue.
    ``exclusive``
        One consumer at a time claims.
    ``dead_letter``
        Name of the queue for what is given up. None: ``NAME.dead``.
    ``max_deliveries``
        How often a message may be claimed before it goes there. With 1, a worker that is killed takes all that it
        was handling to the dead-letter queue. None: ``MAX_DELIVERIES``.
    ``ttl``
        Seconds after which a message that is due expires. ``math.inf``: never. None: ``EPHEMERAL_TTL`` for
        auto-deleted queues, else ``DEFAULT_TTL``.
    ``lease``
        Seconds that a claim lasts unless it is extended. None: ``LEASE``.
    ``backoff``
        The delay of a retry: a dict with some of ``base``, ``factor``, ``max`` and ``jitter``, or a function that
        takes the number of deliveries so far and returns seconds. None: ``BACKOFF``.
    ``schema``
        What a payload must look like, checked by publish and before a message is handled: a type that pydantic or
        msgspec knows, a function that takes the JSON value and returns what handlers get, or an object with
        ``dump(payload)`` and ``load(value)``. A message that does not fit goes to the dead-letter queue. None: any.
    ``using``
        Alias of the database that holds it. None: ``DATABASE``.

    Seconds are numbers or ``timedelta``, up to a hundred years. Raises ``InvalidQueueName``, or ``ValueError`` for
    any other argument, and where dead-letter queues would lead back to this one; ``ImportError`` for a ``schema``
    whose library is not installed.
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
        """The alias of its database. Raises ``ImproperlyConfigured`` if there is no such one."""
        return self._attributes.using

    @property
    def lease(self) -> float:
        """Seconds for which a claim lasts."""
        return self._attributes.lease

    def declare(self) -> None:
        """
        Make the queue and its dead-letter queue, write changed attributes and bindings, mark it as in use.

        May wait for the queue's row. Inside a transaction it is part of it, and others who make
        the same queue wait for its commit. Publishing and consuming declare by themselves; call
        this ahead of a long transaction that publishes to a new queue.

        Raises ``ValueError`` where stored dead-letter queues would lead back to this one.
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
            A JSON value: None, bool, int, finite float, str, list, tuple (arrives as a list), dict with str keys;
            nested up to 500 levels, and up to ``MAX_PAYLOAD_BYTES`` of UTF-8 JSON. With a schema: what that makes
            JSON of.
        ``headers``
            A mapping of str to JSON values. None: no headers.
        ``delay``
            Seconds until the message is due.
        ``ttl``
            Seconds after that until it expires. ``math.inf``: never. None: the queue's.

        Inside ``atomic()`` the message is part of the transaction: others see it when that
        commits. Publishers never wait for each other while the queue exists. A reaped auto-deleted
        queue is made again, in the same transaction (which fails with 40001 if it is REPEATABLE READ or stricter
        and the queue was reaped after it began). A transaction of another database than
        ``using`` has no part in it, which is warned of once; ``transaction.on_commit(…,
        using=OTHER)`` publishes after that one.

        Raises ``PayloadError`` or ``ValueError`` before any SQL is sent, and ``QueueNotFound``
        when a standing queue is gone that this process had seen within ``DECLARE_TTL``; the
        transaction stays usable after each of them.
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
        Publish messages, all or none, and return a list of their ids in the order of ``payloads``.

        ``headers``, ``delay`` and ``ttl`` are those of each message. Otherwise as ``publish``; the
        path of a ``PayloadError`` starts with the position: ``[57].price``. Nothing to publish is no error.
        """
        attributes = self._attributes
        delay, expires_in = attributes.times(delay, ttl)
        most = settings.MAX_PAYLOAD_BYTES
        values = payloads if attributes.validation is None else attributes.validation.dump_many(payloads)
        chunks, text = encode_many(values, most), encode_headers(headers, most)
        return send_many(attributes, chunks, text, headers, delay=delay or None, expires_in=expires_in)

    async def apublish(self, payload: P, **options: Any) -> int:
        """As ``publish()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish)(payload, **options)

    async def apublish_many(self, payloads: Iterable[P], **options: Any) -> list[int]:
        """As ``publish_many()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish_many)(payloads, **options)

    # --- Consuming ---

    def claim(self, limit: int = 1) -> list[Message[P]]:
        """
        Lease up to ``limit`` ready messages and return a list of them, empty where there are none.

        Each is the caller's until its lease ends: ack, nack, reject or extend it before. A message
        whose last lease lapsed comes alone. Messages delivered ``max_deliveries`` times, and
        those that cannot be decoded or do not fit the schema, go to the dead-letter queue and are not
        returned.

        None come from a paused queue, nor from an exclusive one that another consumer owns. This
        process becomes the owner of an exclusive queue by claiming; it stays so while it claims at
        least every two ``HEARTBEAT_INTERVAL``.

        Raises ``RuntimeError`` inside ``atomic()``: a lease that can roll back counts nothing.
        """
        check_count(limit, "limit")
        while True:
            claim = claiming.claim_by_hand(self._attributes.declaration, self.using, limit=limit, lease=self.lease)
            messages = claim.messages if self._attributes.validation is None else self._fitting(claim.messages)
            # What was taken aside may have hidden messages behind it.
            if messages or not (claim.messages or claim.dead_lettered):
                return messages

    def _fitting(self, messages: Sequence[Message]) -> list[Message[P]]:
        """Return the messages as the schema makes them, and reject those that do not fit."""
        fitting, misfits = self._attributes.load_many(messages)
        if misfits:
            refused, reasons = zip(*misfits, strict=True)
            settling.reject(self._attributes.declaration, refused, reasons, self.using)
        return fitting

    def ack(self, *messages: Message) -> None:
        """
        Delete messages that are done.

        Inside a transaction it is part of it. Raises ``LeaseLost`` naming those that are no longer
        the caller's; the others are settled. So do ``nack``, ``reject`` and ``extend``. All four raise
        ``ValueError`` for messages of another queue, before any SQL is sent.
        """
        if check_own(messages, self.name):
            settling.raise_lost(self.name, settling.ack(messages, self.using))

    def nack(self, *messages: Message, delay: Seconds | None = None, reason: str = "") -> None:
        """
        Give messages back, to be delivered again in ``delay`` seconds (None: the queue's back-off).

        One that was delivered ``max_deliveries`` times goes to the dead-letter queue. ``reason`` is text for the
        message's history, which keeps ten failures and 2,000 characters of each. Otherwise as ``ack()``.
        """
        if check_own(messages, self.name):
            delays = [
                self.retry_delay(message) if delay is None else check_seconds(delay, "delay") for message in messages
            ]
            declaration, reasons = self._attributes.declaration, [reason] * len(messages)
            settling.raise_lost(self.name, settling.nack(declaration, messages, delays, reasons, self.using).lost)

    def reject(self, *messages: Message, reason: str = "") -> None:
        """
        Give messages up: they go to the dead-letter queue, with ``reason`` in their history.

        The dead-letter queue is made if it is not there. Otherwise as ``ack()``.
        """
        if check_own(messages, self.name):
            declaration, reasons = self._attributes.declaration, [reason or "rejected"] * len(messages)
            settling.raise_lost(self.name, settling.reject(declaration, messages, reasons, self.using))

    def extend(self, *messages: Message, seconds: Seconds | None = None) -> None:
        """
        Let leases end ``seconds`` from now (None: the queue's lease).

        A message that another session has locked for longer than a second (it is being settled)
        counts as lost. Otherwise as ``ack()``.
        """
        if check_own(messages, self.name):
            lease = self.lease if seconds is None else check_seconds(seconds, "seconds", zero=False)
            extension = settling.extend(messages, lease, self.using, timeout=LOCK_TIMEOUT)
            settling.raise_lost(self.name, extension.lost | extension.locked)

    def retry_delay(self, message: Message) -> float:
        """Return the seconds after which a failed message is delivered again, by the queue's back-off."""
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
        Register the function, sync or async, that ``consume_queues`` runs for each message. A decorator.

        ``concurrency``
            How many messages one process handles at once.
        ``ack``
            ``"late"``: after the handler, at least once. ``"early"``: before it, at most once. ``"atomic"``: in the
            handler's own transaction on this queue's database, whose effects there are exactly once; not for
            ``async def``.
        ``timeout``
            Seconds after which the lease is no longer extended, so that another consumer takes over. The handler
            is not stopped.
        ``batch``
            How many messages it takes at once, as a list. None: one, as itself.

        The handler is called with a ``Message``. It returns (ack), raises (nack with back-off), or raises ``Nack`` or
        ``Reject``.

        With ``batch`` it gets a list of one to so many messages, those that are there. What it
        returns or raises is for all of them, but for those that it names in a returned mapping of
        message id to exception: ``{message.id: Reject("no such order")}``. A batch is not waited
        for; a message whose last lease lapsed comes alone. With ``ack="atomic"`` what was written for
        a message that is named is committed with the rest, unless the handler gives each a savepoint;
        the nack or rejection of that message follows the commit.

        Raises ``ValueError`` for a wrong argument, for what is no function, and where the queue has another
        handler already.
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
            So many at the most.
        ``ids``
            Only those with these ids.
        ``reason``
            Only those with this text in the reason of their last failure.
        ``headers``
            Only those that have these headers.
        ``rate``
            How many a second, from 0.001.
        ``canary``
            So many go first. The others follow when these were settled within ``canary_timeout`` seconds and none
            of them died again; otherwise ``CanaryFailed`` is raised.
        ``progress``
            Is called with the number so far.

        Only letters that are dead now are sent; choices add up.

        A dead letter keeps its history. The queue is made if it is gone. DeadLetterFilter that somebody
        handles are left; two redrives at once take different ones. Each batch is a transaction of
        its own; inside ``atomic()`` all is part of that, and ``rate`` and ``canary`` are refused with
        ``RuntimeError``. A wrong argument raises ``ValueError``.
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
        Delete what waits on this queue, and return how many messages that were.

        Ready, delayed, expired, dead: all that nobody holds and that was published before this call;
        ``limit`` at the most. In batches, each a transaction of its own; inside ``atomic()`` all is
        part of that. ``progress`` is called with the number so far. Raises ``ValueError`` for a ``limit`` that is no
        whole number from 1.
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
        Stop claims of this queue, by all consumers, until ``resume()``.

        What is being handled ends normally; what consumers hold beyond that they give back within
        ``POLL_INTERVAL``. Publishing goes on, and so does expiry. No declare changes it, and a paused
        queue is not reaped. Raises ``QueueNotFound``.
        """
        operating.pause(self.name, self.using)

    def resume(self) -> None:
        """
        Start claims again and wake the consumers.

        Inside a transaction both happen when that commits. Raises ``QueueNotFound``.
        """
        operating.resume(self.name, self.using)

    # --- Seeing ---

    def stats(self) -> QueueStats:
        """
        Return a ``QueueStats``: the number of messages by state, the age of the oldest due one, in seconds.

        Reads all messages of the queue. One that has no row has ``exists`` False.
        """
        found = counting.stats([self.name], self.using)
        return found[0] if found else QueueStats(self.name, exists=False)


def queue_named(name: str, using: str | None = None, *, auto_deleted: bool = False) -> Queue[Any]:
    """
    Return the queue that is declared in this process, else as its row says: using it then changes nothing of it.

    One that has no row either is new, and ``auto_deleted`` or not. Asks the database, and raises what that does,
    only for a queue that is not declared; ``InvalidQueueName`` before.
    """
    declared = registry.find_queue(name, using)
    if declared is not None:
        return declared
    stored = declaring.stored(check_name(name), database_alias(using))
    if stored is None:
        return Queue(name, auto_deleted=auto_deleted, using=using)
    return Queue(name, **stored._asdict(), using=using)
