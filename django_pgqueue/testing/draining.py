"""Running the registered handlers in the test, as ``consume_queues`` runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple
from unittest import mock

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

# For one drain. A drain that reaches it probably never ends, because a handler publishes again and again.
DELIVERY_LIMIT = 10_000
# Seconds. Due times are rounded.
ROUNDING_MARGIN = 0.001


class Failure(NamedTuple):
    """A delivery whose handler raised."""

    message: Message
    error: BaseException


class DeadLetter(NamedTuple):
    """A message that was dead-lettered."""

    id: int
    queue: str
    reason: str


@dataclass
class Drained:
    """The outcomes of deliveries. A message that was delivered twice is listed twice."""

    #: Deliveries whose handler succeeded.
    handled: list[Message] = field(default_factory=list)
    #: Deliveries whose handler raised, including ``Nack`` and ``Reject``.
    failed: list[Failure] = field(default_factory=list)
    #: Messages that were moved to a dead-letter queue or parked.
    dead_lettered: list[DeadLetter] = field(default_factory=list)
    #: Ids of messages that could not be settled because their lease was lost.
    lost: list[int] = field(default_factory=list)

    @property
    def deliveries(self) -> int:
        """The number of times that a handler received a message."""
        return len(self.handled) + len(self.failed)

    def error(self) -> BaseException | None:
        """Return the first exception of a handler other than ``Nack`` and ``Reject``. None: there is none."""
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
    Run the handlers and tasks of a queue, of several queues, or of all queues (None) until no message is ready.

    Each message is claimed, handled and settled as in ``consume_queues``: with acks, retries and their back-off, dead
    letters, ``ack="atomic"`` and ``"early"``, batches, and async handlers. Inside a ``TestCase``, handlers run in the
    calling thread and in the test's transaction. SQL errors in a handler are rolled back, and affect no more than they
    would in a worker. In a ``TransactionTestCase``, handlers run in worker threads with their own connections. Returns
    the outcomes as ``Drained``.

    ``limit`` ends the drain after this number of deliveries. Without a limit, ten thousand deliveries raise
    ``RuntimeError``. With ``include_delayed``, whenever only delayed messages remain, retries included, time passes
    until the next one is due (see ``advance()``) and the drain continues. With ``raises``, the drain ends at the first
    exception of a handler: its message is settled, and the exception is raised. ``Nack`` and ``Reject`` do not count as
    exceptions here.

    Raises ``LookupError`` if a queue has no handler, and ``RuntimeError`` inside your own ``atomic()`` block, because a
    worker could not see its changes yet.
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
            # One message at a time if the first error ends the drain. Otherwise other held messages would be handled.
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
            began = session.now(alias)
            consumer.run()
            if raises and (error := done.error()):
                raise error
            wait = _next_delay(names, alias, began) if include_delayed else None
            if wait is None or done.deliveries >= most:
                break
            advance(wait, using=alias)
        if limit is None and done.deliveries >= most:
            raise RuntimeError(f"{most} deliveries without an end: does a handler publish to a queue that is drained?")
    return done


@contextmanager
def watching(handlers: Sequence[Handler]) -> Iterator[Watch]:
    """Yield a ``Watch`` of these handlers. Its own ``handlers`` report their outcomes to it."""
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
    """Collects the outcomes of deliveries, which any thread may report."""

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self.done = Drained()
        #: Called after the first error.
        self.on_error: list[Callable[[], object]] = []
        self.handlers = [_watched(handler, self.end) for handler in handlers]
        self._names = {handler.queue.name for handler in handlers}
        self._lock = threading.Lock()

    def end(self, messages: Sequence[Message], errors: dict[int, BaseException]) -> None:
        """Record that a handler has ended, with the errors by message id."""
        with self._lock:
            self.done.handled += [message for message in messages if message.id not in errors]
            self.done.failed += [Failure(each, errors[each.id]) for each in messages if each.id in errors]
        self._heed()

    def fail(self, sender: str, message: Message, error: str, **kwargs: Any) -> None:
        """Record a failed delivery whose handler succeeded, for example if the commit of ack="atomic" fails."""
        with self._lock:
            if message in self.done.handled:
                self.done.handled.remove(message)
                self.done.failed.append(Failure(message, RuntimeError(error)))
        self._heed()

    def set_aside(self, call: dict[str, Any], taken: list[int]) -> None:
        """Record that a call of ``dead_letter()`` dead-lettered messages."""
        name, ids, reasons = call["declaration"].name, call["ids"], call["reasons"]
        reason_of = dict(zip(ids, [reasons] * len(ids) if isinstance(reasons, str) else reasons, strict=True))
        if name in self._names:
            self.done.dead_lettered += [DeadLetter(id, name, reason_of[id]) for id in taken]

    def lose(self, sender: str, ids: list[int], **kwargs: Any) -> None:
        """Record lost leases."""
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
    def report(message: Message, attempt: Attempt | None) -> Attempt | None:
        if attempt is not None:
            end([message], {} if attempt.error is None else {message.id: attempt.error})
        return attempt

    async def handle_async(message: Message) -> Attempt | None:
        assert handler.async_function is not None
        return report(message, await handler.async_function(message))

    return replace(
        handler, function=lambda message: report(message, handler.function(message)), async_function=handle_async
    )


def _listed(queue: Queues) -> Sequence[Queue | str]:
    if queue is None:
        return []
    return [queue] if isinstance(queue, (Queue, str)) else queue


def _next_delay(names: Sequence[str], alias: str, began: datetime) -> float | None:
    """
    Return the seconds until the next delayed message of these queues is due. None: there is no delayed message.

    A message that was delayed when the consumer ``began``, and is due by now, was missed by its last look: 0 seconds.
    """
    waiting = MessageQueueItem.objects.using(alias).filter(queue__in=names, read_after__gt=began, read_after__lt=PARKED)
    first = waiting.order_by("read_after").values_list("read_after", flat=True).first()
    return None if first is None else max((first - session.now(alias)).total_seconds(), 0.0) + ROUNDING_MARGIN
