"""Run the registered handlers here and now, as ``consume_queues`` runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

from django.db.models.functions import Now

from django_pgqueue import signals
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.handler import OWN_ACK, Attempt, Handler
from django_pgqueue.consumer.outcomes import call, errors_in
from django_pgqueue.exceptions import Nack, Reject
from django_pgqueue.message import Message
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queues import Queue
from django_pgqueue.services import dead_letters, session
from django_pgqueue.task_backend.queues import handlers_of
from django_pgqueue.testing.clock import PARKED, advance
from django_pgqueue.testing.journal import observed
from django_pgqueue.testing.names import alias_of, name_of
from django_pgqueue.validation import check_count

Queues = Queue | str | Sequence[Queue | str] | None

# So many deliveries in one drain are no test: something publishes for ever.
DELIVERY_LIMIT = 10_000
# Seconds beyond a due time, which is rounded.
MOMENT = 0.001


class Failure(NamedTuple):
    """A delivery whose handler raised."""

    message: Message
    error: BaseException


class DeadLetter(NamedTuple):
    """A message that was given up."""

    id: int
    queue: str
    reason: str


@dataclass
class Drained:
    """What became of messages. One that was tried twice is in it twice."""

    #: Deliveries that ended well.
    handled: list[Message] = field(default_factory=list)
    #: Deliveries that raised, also ``Nack`` and ``Reject``.
    failed: list[Failure] = field(default_factory=list)
    #: What went to a dead-letter queue, or was parked.
    dead_lettered: list[DeadLetter] = field(default_factory=list)
    #: Ids of what could not be settled, for the lease was lost.
    lost: list[int] = field(default_factory=list)

    @property
    def deliveries(self) -> int:
        """How many times a handler got a message."""
        return len(self.handled) + len(self.failed)

    def error(self) -> BaseException | None:
        """Return the first error that a handler raised and did not mean as an answer. None: there is none."""
        return next((error for _, error in self.failed if not isinstance(error, (Nack, Reject))), None)


def drain(
    queue: Queues = None,
    *,
    limit: int | None = None,
    include_delayed: bool = False,
    raises: bool = False,
    using: str | None = None,
) -> Drained:
    """
    Run the handlers and tasks of a queue, or of these, or of all (None) until nothing is ready; tell what happened.

    Each message is claimed, handled and settled as ``consume_queues`` does it: acks, retries with their back-off, dead
    letters, ``ack="atomic"`` and ``"early"``, batches, async handlers. Inside a ``TestCase`` in the calling thread and
    in the test's transaction; what a handler does wrong in SQL is undone and ends no more than it would in a worker.
    In a ``TransactionTestCase`` in worker threads, on connections of their own.

    ``limit``: end after so many deliveries; without it ten thousand are a ``RuntimeError``. ``include_delayed``: where
    only delayed messages are left, retries among them, let time pass until the next is due (see ``advance()``) and go
    on. ``raises``: end with the first error of a handler, once that is settled, and raise it; ``Nack`` and ``Reject``
    are answers, no errors.

    Raises ``LookupError`` where a queue has no handler, and ``RuntimeError`` inside the caller's own ``atomic()``: a
    worker would see nothing of it yet.
    """
    names = None if queue is None else [name_of(each) for each in _listed(queue)]
    alias = alias_of(_listed(queue)[0] if names else None, using)
    handlers = [handler for handler in handlers_of(names or ()) if handler.queue.using == alias]
    if not handlers:
        raise LookupError(f"no handler is registered for a queue of database {alias!r}")
    return run(handlers, limit=limit, include_delayed=include_delayed, raises=raises)


def run(handlers: Sequence[Handler], *, limit: int | None, include_delayed: bool, raises: bool) -> Drained:
    """Drain with these handlers. See ``drain()``."""
    most = DELIVERY_LIMIT if limit is None else check_count(limit, "limit")
    alias, names = handlers[0].queue.using, [handler.queue.name for handler in handlers]
    with watching(handlers) as watch:
        done = watch.done
        while done.deliveries < most:
            # One at a time where the first error ends it: what is held beyond that would be handled.
            most_held = 1 if raises else None
            consumer = Consumer(
                watch.handlers,
                concurrency=most_held,
                prefetch=most_held,
                drain=True,
                max_messages=most - done.deliveries,
            )
            if raises:
                watch.on_error.append(consumer.stop)
            consumer.run()
            if raises and (error := done.error()):
                raise error
            wait = _next_delay(names, alias) if include_delayed else None
            if wait is None or done.deliveries >= most:
                break
            advance(wait, using=alias)
        if limit is None and done.deliveries >= most:
            raise RuntimeError(f"{most} deliveries, and no end: does a handler publish to a queue that is drained?")
    return done


@contextmanager
def watching(handlers: Sequence[Handler]) -> Iterator[Watch]:
    """Give what becomes of the messages that these handlers get, and handlers that tell it."""
    watch = Watch(handlers)
    signals.lease_lost.connect(watch.lose)
    signals.message_failed.connect(watch.fail)
    try:
        with mock.patch.object(dead_letters, "dead_letter", observed(dead_letters.dead_letter, watch.set_aside)):
            yield watch
    finally:
        signals.lease_lost.disconnect(watch.lose)
        signals.message_failed.disconnect(watch.fail)


class Watch:
    """What becomes of messages, as it is told from whatever thread."""

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self.done = Drained()
        #: Called when there is a first error.
        self.on_error: list[Callable[[], object]] = []
        self.handlers = [_watched(handler, self.end) for handler in handlers]
        self._names = {handler.queue.name for handler in handlers}
        self._lock = threading.Lock()

    def end(self, messages: Sequence[Message], errors: dict[int, BaseException]) -> None:
        """A handler has ended, with these errors by id."""
        with self._lock:
            self.done.handled += [message for message in messages if message.id not in errors]
            self.done.failed += [Failure(each, errors[each.id]) for each in messages if each.id in errors]
        self._heed()

    def fail(self, sender: str, message: Message, error: str, **kwargs: Any) -> None:
        """A delivery failed: news where its handler had ended well, as when the commit of ack="atomic" fails."""
        with self._lock:
            if message in self.done.handled:
                self.done.handled.remove(message)
                self.done.failed.append(Failure(message, RuntimeError(error)))
        self._heed()

    def set_aside(self, call: dict[str, Any], taken: list[int]) -> None:
        """Messages were dead-lettered, by this call."""
        name, ids, reasons = call["declaration"].name, call["ids"], call["reasons"]
        reason_of = dict(zip(ids, [reasons] * len(ids) if isinstance(reasons, str) else reasons, strict=True))
        if name in self._names:
            self.done.dead_lettered += [DeadLetter(id, name, reason_of[id]) for id in taken]

    def lose(self, sender: str, ids: list[int], **kwargs: Any) -> None:
        """Leases were lost."""
        if sender in self._names:
            self.done.lost += ids

    def _heed(self) -> None:
        if self.done.error():
            for stop in self.on_error:
                stop()


End = Callable[[Sequence[Message], dict[int, BaseException]], None]


def _watched(handler: Handler, end: End) -> Handler:
    if handler.ack == OWN_ACK:
        return _watched_tasks(handler, end)

    def messages_of(argument: Any) -> list[Message]:
        return argument if handler.batch else [argument]

    def handle(argument: Any) -> dict[int, BaseException]:
        messages = messages_of(argument)
        try:
            errors = call(handler, messages)
        except BaseException as error:
            end(messages, {message.id: error for message in messages})
            raise
        end(messages, errors)
        return errors

    async def handle_async(argument: Any) -> dict[int, BaseException]:
        messages = messages_of(argument)
        try:
            errors = errors_in(handler, messages, await handler.function(argument))
        except BaseException as error:
            end(messages, {message.id: error for message in messages})
            raise
        end(messages, errors)
        return errors

    return replace(handler, function=handle_async if handler.is_async else handle)


def _watched_tasks(handler: Handler, end: End) -> Handler:
    def tell(message: Message, attempt: Attempt | None) -> Attempt | None:
        if attempt is not None:
            end([message], {} if attempt.error is None else {message.id: attempt.error})
        return attempt

    async def handle_async(message: Message) -> Attempt | None:
        assert handler.async_function is not None
        return tell(message, await handler.async_function(message))

    return replace(
        handler, function=lambda message: tell(message, handler.function(message)), async_function=handle_async
    )


def _listed(queue: Queues) -> Sequence[Queue | str]:
    if queue is None:
        return []
    return [queue] if isinstance(queue, (Queue, str)) else queue


def _next_delay(names: Sequence[str], alias: str) -> float | None:
    """Return the seconds until the next delayed message of these queues is due. None: there is none."""
    waiting = MessageQueueItem.objects.using(alias).filter(queue__in=names, read_after__gt=Now(), read_after__lt=PARKED)
    first = waiting.order_by("read_after").values_list("read_after", flat=True).first()
    return None if first is None else max((first - session.now(alias)).total_seconds(), 0.0) + MOMENT
