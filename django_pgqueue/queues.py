"""
``Queue``: what projects import, declare in their ``queues.py`` and publish to.

Declaring one runs no SQL and works before Django's apps are loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypeVar, overload

from asgiref.sync import sync_to_async

from django_pgqueue import instrumentation, registry
from django_pgqueue.backoff import backoff_delay, check_backoff
from django_pgqueue.conf import database_alias, settings
from django_pgqueue.consumer.handler import ACK_MODES, Handler
from django_pgqueue.message import Message, add_headers, encode, encode_headers, encode_many
from django_pgqueue.redrive import Redrive
from django_pgqueue.schema import P, Schema, Validation, misfit, validation_of
from django_pgqueue.services import claiming, counting, declaring, operating, publishing, session, settling
from django_pgqueue.services.counting import QueueStats
from django_pgqueue.services.dead_letters import Letters
from django_pgqueue.services.declaring import Declaration
from django_pgqueue.services.publishing import Outgoing
from django_pgqueue.validation import check_count, check_name, check_rate, check_seconds, check_ttl

Seconds = float | timedelta
#: Takes a message, or a list of them where ``batch`` is given.
HandlerFunction = Callable[[Any], Any]
R = TypeVar("R")

# Seconds for which extend() tries rows that somebody else has locked, before it counts them as lost.
LOCK_PATIENCE = 1.0

# How many messages one statement of a purge deletes.
PURGE_BATCH = 1_000


class Queue(Generic[P]):
    """
    A queue, declared. Runs no SQL: the first use makes its row, if it is not there.

    ``Queue[Order]`` has payloads of that type, for type checkers.

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
        if dead_letter is not None and check_name(dead_letter) == name:
            raise ValueError(f"queue {name!r} cannot be its own dead-letter queue")
        for what, value in (("durable", durable), ("auto_deleted", auto_deleted), ("exclusive", exclusive)):
            if not isinstance(value, bool):
                raise ValueError(f"{what} must be True or False, not {value!r:.40}")
        self._durable = durable
        self._auto_deleted = auto_deleted
        self._exclusive = exclusive
        self._dead_letter = dead_letter
        self._max_deliveries = None if max_deliveries is None else check_count(max_deliveries, "max_deliveries")
        self._ttl = check_ttl(ttl)
        self._lease = None if lease is None else check_seconds(lease, "lease", zero=False)
        self._backoff = backoff if backoff is None or callable(backoff) else check_backoff(backoff)
        self._validation: Validation[P] | None = None if schema is None else validation_of(schema)
        self._using = using
        self._topics: set[str] = set()
        self._declaration: Declaration | None = None
        if dead_letter is not None:
            self._refuse_cycle()
        registry.register_queue(self)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    @property
    def using(self) -> str:
        """The alias of its database. Raises ``ImproperlyConfigured`` if there is no such one."""
        return database_alias(self._using)

    @property
    def declaration(self) -> Declaration:
        """The attributes as they are stored in the queue's row."""
        max_deliveries = self._max_deliveries or settings.MAX_DELIVERIES
        bindings = tuple((topic, self.copy_ttl) for topic in sorted(self._topics)) if self._topics else ()
        kept = self._declaration
        if kept is None or (kept.max_deliveries, kept.bindings) != (max_deliveries, bindings):
            self._declaration = kept = Declaration(
                self.name,
                self._durable,
                self._auto_deleted,
                self._exclusive,
                self._dead_letter,
                max_deliveries,
                bindings,
            )
        return kept

    @property
    def copy_ttl(self) -> float | None:
        """
        Seconds after which copies of a topic's messages expire, as a binding stores them. None: the default.

        That of an auto-deleted queue is written down: when its row is deleted by hand nothing else tells
        that the copies, orphans then, expire.
        """
        return settings.EPHEMERAL_TTL if self._ttl is None and self._auto_deleted else self._ttl

    def add_binding(self, topic: str) -> None:
        """Let the declaration say that the queue is bound to a topic. For ``Topic.bind``."""
        self._topics.add(topic)

    def remove_binding(self, topic: str) -> None:
        """Let it say so no more. For ``Topic.unbind``."""
        self._topics.discard(topic)

    def _refuse_cycle(self) -> None:
        """Raise ``ValueError`` where the dead-letter queues declared in this process lead back."""
        declared = {queue.name: queue._dead_letter for queue in (*registry.living_queues(), self)}
        chain = [self.name]
        while (target := declared.get(chain[-1])) is not None:
            chain.append(target)
            if target in chain[:-1]:
                raise ValueError(f"dead-letter queues must not lead back: {' -> '.join(chain)}")

    @property
    def lease(self) -> float:
        """Seconds for which a claim lasts."""
        return self._lease or settings.LEASE

    def declare(self) -> None:
        """
        Make the queue and its dead-letter queue, write changed attributes and bindings, mark it as in use.

        May wait for the queue's row. Inside a transaction it is part of it, and others who make
        the same queue wait for its commit. Publishing and consuming declare by themselves; call
        this ahead of a long transaction that publishes to a new queue.

        Raises ``ValueError`` where stored dead-letter queues would lead back to this one.
        """
        declaring.declare(self.declaration, self.using)

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
        delay, expires_in = self._times(delay, ttl)
        most = settings.MAX_PAYLOAD_BYTES
        value = payload if self._validation is None else self._validation.dump(payload)
        outgoing = Outgoing(encode(value, most), encode_headers(headers, most), delay or None, expires_in)
        if instrumentation.instrument is not None:
            return self._publish_traced(outgoing, headers)
        return publishing.publish(self.declaration, outgoing, self.using)

    def publish_at(self, due: datetime | None, payload: str, headers: Mapping[str, Any]) -> int:
        """
        Publish a payload that is JSON text, due at a moment; past or None, at once. For the backend of Tasks.

        By the database's clock, however far this machine's is from it: that takes a statement ahead. Otherwise
        as ``publish``.
        """
        delay, expires_in = self._times(0 if due is None else session.seconds_until(due, self.using), None)
        text = encode_headers(headers, settings.MAX_PAYLOAD_BYTES)
        outgoing = Outgoing(payload, text, delay or None, expires_in)
        if instrumentation.instrument is not None:
            return self._publish_traced(outgoing, headers)
        return publishing.publish(self.declaration, outgoing, self.using)

    def _publish_traced(self, outgoing: Outgoing, headers: Mapping[str, Any] | None) -> int:
        with instrumentation.publishing(self._target, headers) as publication:
            text = add_headers(outgoing.headers, publication.context)
            message_id = publishing.publish(self.declaration, replace(outgoing, headers=text), self.using)
            publication.ids = [message_id]
        return message_id

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
        delay, expires_in = self._times(delay, ttl)
        most = settings.MAX_PAYLOAD_BYTES
        values = payloads if self._validation is None else self._dump_many(payloads)
        chunks, text = encode_many(values, most), encode_headers(headers, most)
        times = {"delay": delay or None, "expires_in": expires_in}
        if instrumentation.instrument is None or not chunks:
            return publishing.publish_many(self.declaration, chunks, self.using, headers=text, **times)
        with instrumentation.publishing(self._target, headers, is_batch=True) as publication:
            text = add_headers(text, publication.context)
            publication.ids = ids = publishing.publish_many(self.declaration, chunks, self.using, headers=text, **times)
        return ids

    def _dump_many(self, payloads: Iterable[P]) -> list[Any]:
        assert self._validation is not None
        return [self._validation.dump(payload, f"[{position}]") for position, payload in enumerate(payloads)]

    async def apublish(self, payload: P, **options: Any) -> int:
        """As ``publish()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish)(payload, **options)

    async def apublish_many(self, payloads: Iterable[P], **options: Any) -> list[int]:
        """As ``publish_many()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish_many)(payloads, **options)

    @property
    def _target(self) -> instrumentation.Target:
        return instrumentation.Target(self.name, self.using, self._auto_deleted)

    def _times(self, delay: Seconds, ttl: Seconds | None) -> tuple[float, float | None]:
        """Return the delay, and the seconds from now to the expiry."""
        delay = check_seconds(delay, "delay")
        if ttl is None:
            ttl = self._ttl
        if ttl is None:
            ttl = settings.EPHEMERAL_TTL if self._auto_deleted else settings.DEFAULT_TTL
        ttl = check_ttl(ttl)
        # The TTL counts from the due time.
        return delay, None if ttl is None or ttl == math.inf else delay + ttl

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
            claim = claiming.claim_by_hand(self.declaration, self.using, limit=limit, lease=self.lease)
            messages = claim.messages if self._validation is None else self._fitting(claim.messages)
            # What was taken aside may have hidden messages behind it.
            if messages or not (claim.messages or claim.dead_lettered):
                return messages

    def _fitting(self, messages: Sequence[Message]) -> list[Message[P]]:
        """Return the messages as the schema makes them, and reject those that do not fit."""
        fitting, misfits, reasons = [], [], []
        for message in messages:
            try:
                fitting.append(self._load(message))
            except Exception as error:
                misfits.append(message)
                reasons.append(misfit(error))
        if misfits:
            settling.reject(self.declaration, misfits, reasons, self.using)
        return fitting

    def _load(self, message: Message) -> Message[P]:
        """Return the message with what the schema makes of its payload. Raises what the schema does."""
        assert self._validation is not None
        return replace(message, payload=self._validation.load(message.payload))

    def ack(self, *messages: Message) -> None:
        """
        Delete messages that are done.

        Inside a transaction it is part of it. Raises ``LeaseLost`` naming those that are no longer
        the caller's; the others are settled. So do ``nack``, ``reject`` and ``extend``. All four raise
        ``ValueError`` for messages of another queue, before any SQL is sent.
        """
        if self._own(messages):
            settling.raise_lost(self.name, settling.ack(messages, self.using))

    def nack(self, *messages: Message, delay: Seconds | None = None, reason: str = "") -> None:
        """
        Give messages back, to be delivered again in ``delay`` seconds (None: the queue's back-off).

        One that was delivered ``max_deliveries`` times goes to the dead-letter queue. ``reason`` is text for the
        message's history, which keeps ten failures and 2,000 characters of each. Otherwise as ``ack()``.
        """
        if self._own(messages):
            delays = [
                self.retry_delay(message) if delay is None else check_seconds(delay, "delay") for message in messages
            ]
            lost = settling.nack(self.declaration, messages, delays, [reason] * len(messages), self.using).lost
            settling.raise_lost(self.name, lost)

    def reject(self, *messages: Message, reason: str = "") -> None:
        """
        Give messages up: they go to the dead-letter queue, with ``reason`` in their history.

        The dead-letter queue is made if it is not there. Otherwise as ``ack()``.
        """
        if self._own(messages):
            lost = settling.reject(self.declaration, messages, [reason or "rejected"] * len(messages), self.using)
            settling.raise_lost(self.name, lost)

    def extend(self, *messages: Message, seconds: Seconds | None = None) -> None:
        """
        Let leases end ``seconds`` from now (None: the queue's lease).

        A message that another session has locked for longer than a second (it is being settled)
        counts as lost. Otherwise as ``ack()``.
        """
        if self._own(messages):
            lease = self.lease if seconds is None else check_seconds(seconds, "seconds", zero=False)
            extension = settling.extend(messages, lease, self.using, patience=LOCK_PATIENCE)
            settling.raise_lost(self.name, extension.lost | extension.locked)

    def _own(self, messages: Sequence[Message[Any]]) -> bool:
        """Tell whether there are any, and refuse those of other queues."""
        for message in messages:
            if not isinstance(message, Message):
                raise ValueError(f"not a message: {message!r:.80}")
            if message.queue != self.name:
                raise ValueError(f"message {message.id} was claimed from queue {message.queue!r}, not {self.name!r}")
        return bool(messages)

    def retry_delay(self, message: Message) -> float:
        """Return the seconds after which a failed message is delivered again, by the queue's back-off."""
        return backoff_delay(self._backoff or settings.BACKOFF, message.delivery_count)

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
        options = {"concurrency": concurrency, "ack": ack, "timeout": timeout, "batch": batch}
        if function is None:
            return lambda function: self._register(function, options)
        return self._register(function, options)

    def _register(self, function: HandlerFunction, options: dict[str, Any]) -> HandlerFunction:
        registry.register_handler(self.make_handler(function, **options))
        return function

    def make_handler(
        self,
        function: HandlerFunction,
        *,
        concurrency: int = 1,
        ack: str = "late",
        timeout: Seconds = 3600,
        batch: int | None = None,
    ) -> Handler:
        """Return what a ``Consumer`` takes, without registering it. Arguments as ``handler()``."""
        if ack not in ACK_MODES:
            raise ValueError(f"ack must be one of {', '.join(ACK_MODES)}, not {ack!r}")
        if not callable(function):
            raise ValueError(f"{function!r} is not callable, so it cannot be the handler of queue {self.name!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ValueError(f"{function!r} is a generator, so calling it does not run it; return, don't yield")
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        if is_async and ack == "atomic":
            raise ValueError(
                f"{function!r}: ack='atomic' needs a transaction around the handler, which Django does not offer to"
                " async functions; use a sync handler, or ack='late'"
            )
        return Handler(
            queue=self,
            function=function,
            concurrency=check_count(concurrency, "concurrency"),
            ack=ack,
            timeout=check_seconds(timeout, "timeout", zero=False),
            is_async=is_async,
            batch=None if batch is None else check_count(batch, "batch"),
            load=None if self._validation is None else self._load,
        )

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

        A dead letter keeps its history. The queue is made if it is gone. Letters that somebody
        handles are left; two redrives at once take different ones. Each batch is a transaction of
        its own; inside ``atomic()`` all is part of that, and ``rate`` and ``canary`` are refused with
        ``RuntimeError``. A wrong argument raises ``ValueError``.
        """
        if rate is not None:
            check_rate(rate)
        return Redrive(
            self.declaration,
            self.using,
            make_letters(ids, reason, headers),
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


def make_letters(ids: Iterable[int] | None, reason: str | None, headers: Mapping[str, Any] | None) -> Letters:
    """Return which dead letters are meant. Raises ``ValueError`` or ``PayloadError``."""
    most = settings.MAX_PAYLOAD_BYTES
    if reason is not None:
        if not isinstance(reason, str):
            raise ValueError(f"reason must be a str, not {type(reason).__name__}")
        # For its checks: what PostgreSQL cannot store cannot stand in a reason.
        encode(reason, most, "reason")
    if ids is not None and not isinstance(ids, Iterable):
        raise ValueError(f"ids must be iterable, not {type(ids).__name__}")
    numbers = None if ids is None else [check_count(message_id, "an id", most=2**63 - 1) for message_id in ids]
    return Letters(numbers, reason, None if headers is None else encode_headers(headers, most))


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
