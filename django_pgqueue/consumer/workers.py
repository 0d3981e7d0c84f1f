"""
Run handlers: take what a lane holds, call the handler, tell how it ended.

What a handler raises is an outcome, whatever it is.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue

from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction

from django_pgqueue import instrumentation, signals
from django_pgqueue.consumer.handler import ACK, LOST, OWN_ACK, RELEASE, SETTLED, Attempt, Handler, Outcome
from django_pgqueue.consumer.lane import SETTLE_BATCH, Held, Lane, start, take
from django_pgqueue.exceptions import Nack, Reject
from django_pgqueue.message import Message
from django_pgqueue.runtime.guard import ConnectionGuard
from django_pgqueue.runtime.loop import DATABASE_FAULTS, describe
from django_pgqueue.schema import misfit
from django_pgqueue.services import session, settling
from django_pgqueue.validation import check_seconds

logger = logging.getLogger("django_pgqueue")

# Seconds after which a message comes back whose back-off could not be computed.
FALLBACK_DELAY = 60.0

Handle = Callable[[Lane, list[Message]], list[Outcome]]


class Workers:
    """
    The workers of one consumer process. ``wake`` is called when finished messages should be settled.

    ``outages`` is raised by the consumer with each outage of the database: connections may be dead.
    """

    def __init__(self, using: str, wake: Callable[[], object]) -> None:
        self.using = using
        self.wake = wake
        self.outages = 0

    def work_inline(self, lane: Lane) -> None:
        """
        Handle what waits in the calling thread, on its connections.

        For a TestCase: the rows of its open transaction are seen on no other connection.
        """
        if lane.handler.uses_loop:
            self._work_inline(lane, lane.loop_waiting, async_to_sync(self._async_handle_of(lane)))
        if not lane.handler.is_async:
            self._work_inline(lane, lane.waiting, self._handle_of(lane))

    def _work_inline(
        self,
        lane: Lane,
        waiting: SimpleQueue[Held | None],
        handle: Callable[[Lane, list[Message]], list[Outcome]],
    ) -> None:
        while not waiting.empty():
            batch = take(lane, block=False, waiting=waiting)
            started = start(lane, batch)
            if instrumentation.instrument is not None and started:
                outcomes = self._handle_traced(lane, started, handle)
            else:
                outcomes = handle(lane, [held.message for held in started]) if started else []
            self._finish(lane, batch, started, self._settle_own(lane, started, outcomes))

    def _handle_of(self, lane: Lane) -> Handle:
        handle = {
            "late": self._handle,
            "early": self._handle_early,
            "atomic": self._handle_atomic,
            OWN_ACK: self._handle_own,
        }[lane.handler.ack]
        if lane.handler.load is None:
            return handle

        def handle_fitting(lane: Lane, messages: list[Message]) -> list[Outcome]:
            fitting, refused = load(lane, messages)
            return join(messages, refused, handle(lane, fitting) if fitting else [])

        return handle_fitting

    def work(self, lane: Lane) -> None:
        """One worker thread of a lane with a sync handler."""
        handle = self._handle_of(lane)
        guard = ConnectionGuard()
        guard.watch()
        while batch := take(lane):
            guard.before(self.outages)
            started = start(lane, batch)
            if instrumentation.instrument is not None and started:
                outcomes = self._handle_traced(lane, started, handle, guard)
            else:
                outcomes = handle(lane, [held.message for held in started]) if started else []
                if guard.after():
                    outcomes = self._left_open(lane, started, outcomes)
            if lane.handler.ack == OWN_ACK:
                outcomes = self._settle_own(lane, started, outcomes)
                guard.after()
            self._finish(lane, batch, started, outcomes)
        guard.close()

    def _handle_traced(
        self, lane: Lane, started: list[Held], handle: Handle, guard: ConnectionGuard | None = None
    ) -> list[Outcome]:
        with traced(lane, started) as handling:
            outcomes = handle(lane, [held.message for held in started])
            if guard is not None and guard.after():
                outcomes = self._left_open(lane, started, outcomes)
            handling.outcomes = verbs_of(outcomes)
        return outcomes

    def _finish(self, lane: Lane, batch: list[Held], started: list[Held], outcomes: list[Outcome]) -> None:
        outcome_of = {id(held): outcome for held, outcome in zip(started, outcomes, strict=True)}
        for held in batch:
            self._finished(lane, held, outcome_of.get(id(held), RELEASE))

    def _finished(self, lane: Lane, held: Held, outcome: Outcome) -> None:
        lane.finished.append((held, outcome))
        # Workers may append at the same time, and then none of them sees a length of 1.
        if len(lane.finished) <= lane.concurrency:
            lane.finished_since = time.monotonic()
            self.wake()
        elif len(lane.finished) >= SETTLE_BATCH or lane.waiting.empty():
            self.wake()

    def _handle(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        try:
            errors = call(lane.handler, messages)
        except BaseException as error:
            return [self._failure(lane, message, error) for message in messages]
        return self._outcomes(lane, messages, errors, ACK)

    def _outcomes(
        self, lane: Lane, messages: list[Message], errors: dict[int, BaseException], done: Outcome
    ) -> list[Outcome]:
        return [
            self._failure(lane, message, errors[message.id]) if message.id in errors else done for message in messages
        ]

    def _handle_early(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        try:
            lost = settling.ack(messages, self.using)
        except DATABASE_FAULTS as error:
            return [self._failure(lane, message, error) for message in messages]
        mine = [message for message in messages if message.id not in lost]
        try:
            if mine:
                self._log_after_early_ack(lane, call(lane.handler, mine))
        except BaseException as error:
            self._log_after_early_ack(lane, {message.id: error for message in mine})
        return [LOST if message.id in lost else SETTLED for message in messages]

    def _log_after_early_ack(self, lane: Lane, errors: dict[int, BaseException]) -> None:
        # By identity: an exception may define what equals it.
        ids_of: dict[int, tuple[BaseException, list[int]]] = {}
        for message_id, error in errors.items():
            instrumentation.failed(message_id, error)
            ids_of.setdefault(id(error), (error, []))[1].append(message_id)
        for error, ids in ids_of.values():
            logger.error("handler failed after an early ack queue=%s ids=%s", lane.queue.name, ids[:10], exc_info=error)

    def _handle_atomic(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        lost: set[int] = set()
        try:
            # In a stricter one the ack would fail whenever the lease was extended after it began.
            is_read_committed = session.is_read_committed(self.using)
            with transaction.atomic(using=self.using):
                if not is_read_committed:
                    session.make_read_committed(self.using)
                errors = call(lane.handler, messages)
                done = [message for message in messages if message.id not in errors]
                if done:
                    # The last statement: until here nobody else waits for the messages' rows.
                    lost = settling.ack(done, self.using)
                if lost:
                    transaction.set_rollback(True, using=self.using)
        except BaseException as error:
            return [self._failure(lane, message, error) for message in messages]
        if lost:
            # All was rolled back; those that are still held can be handled again at once.
            again = Outcome("nack", "rolled back: the lease of another message of its batch was lost")
            return [LOST if message.id in lost else again for message in messages]
        return self._outcomes(lane, messages, errors, SETTLED)

    def _handle_own(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        try:
            return [self._attempted(lane, message, lane.handler.function(message)) for message in messages]
        except BaseException as error:
            return [self._failure(lane, message, error) for message in messages]

    def _attempted(self, lane: Lane, message: Message, attempt: Attempt | None) -> Outcome:
        if attempt is None:
            return LOST
        outcome = ACK if attempt.error is None else self._failure(lane, message, attempt.error)
        return replace(outcome, attempt=attempt)

    def _settle_own(self, lane: Lane, started: list[Held], outcomes: list[Outcome]) -> list[Outcome]:
        """Let attempts settle their messages, on connections that are as at the start."""
        return [self._settle(lane, held, outcome) for held, outcome in zip(started, outcomes, strict=True)]

    def _settle(self, lane: Lane, held: Held, outcome: Outcome) -> Outcome:
        if outcome.attempt is None:
            return outcome
        try:
            return outcome.attempt.settle(replace(outcome, attempt=None))
        except BaseException as error:
            return self._failure(lane, held.message, error)

    def _left_open(self, lane: Lane, started: list[Held], outcomes: list[Outcome]) -> list[Outcome]:
        """Make failures of a handler that returned inside a transaction: its changes were rolled back."""
        error = RuntimeError("the handler left a transaction open; its changes were rolled back")
        if lane.handler.ack == "early":
            logger.error("handler left a transaction open queue=%s", lane.queue.name)
            return outcomes
        return [
            self._failed_open(lane, held.message, outcome, error) if outcome.verb in ("ack", "settled") else outcome
            for held, outcome in zip(started, outcomes, strict=True)
        ]

    def _failed_open(self, lane: Lane, message: Message, outcome: Outcome, error: BaseException) -> Outcome:
        if outcome.attempt is not None:
            outcome.attempt.error = error
        return replace(self._failure(lane, message, error), attempt=outcome.attempt)

    def _failure(self, lane: Lane, message: Message, error: BaseException) -> Outcome:
        instrumentation.failed(message.id, error)
        if isinstance(error, Reject):
            return Outcome("reject", reason_of(error) or "rejected")
        reason = reason_of(error) or "nack" if isinstance(error, Nack) else text_of(error)
        try:
            if isinstance(error, Nack) and error.delay is not None:
                delay = check_seconds(error.delay, "Nack(delay=…)")
            else:
                delay = lane.queue.retry_delay(message)
        except Exception as wrong:
            # The message must come back all the same.
            logger.error("no usable delay queue=%s id=%s error=%s", lane.queue.name, message.id, describe(wrong))
            delay = FALLBACK_DELAY
        outcome = Outcome("nack", reason, delay)
        signals.message_failed.send_robust(
            lane.queue.name,
            using=self.using,
            message=message,
            error=outcome.reason,
            delay=outcome.delay,
        )
        logger.debug("handler failed queue=%s id=%s", lane.queue.name, message.id, exc_info=error)
        return outcome

    # --- Handling, async ---

    async def work_async(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.loop = asyncio.get_running_loop()
        guard = ConnectionGuard()
        await sync_to_async(guard.watch)()
        await asyncio.gather(*(self._work_lane_async(lane, guard) for lane in lanes for _ in range(lane.concurrency)))
        await sync_to_async(guard.close)()

    async def _work_lane_async(self, lane: Lane, guard: ConnectionGuard) -> None:
        while batch := await self._take_async(lane):
            if guard.has_open and guard.is_needed(self.outages):
                await sync_to_async(guard.before)(self.outages)
            started = start(lane, batch)
            if instrumentation.instrument is not None and started:
                outcomes = await self._handle_traced_async(lane, started, guard)
            else:
                outcomes = await self._handle_guarded_async(lane, started, guard)
            if lane.handler.ack == OWN_ACK:
                outcomes = await sync_to_async(self._settle_own)(lane, started, outcomes)
                await sync_to_async(guard.after)()
            self._finish(lane, batch, started, outcomes)

    async def _handle_guarded_async(self, lane: Lane, started: list[Held], guard: ConnectionGuard) -> list[Outcome]:
        outcomes = await self._async_handle_of(lane)(lane, [held.message for held in started]) if started else []
        # To another thread and back takes longer than a short handler.
        if guard.has_open and await sync_to_async(guard.after)():
            outcomes = self._left_open(lane, started, outcomes)
        return outcomes

    async def _handle_traced_async(self, lane: Lane, started: list[Held], guard: ConnectionGuard) -> list[Outcome]:
        with traced(lane, started) as handling:
            outcomes = await self._handle_guarded_async(lane, started, guard)
            handling.outcomes = verbs_of(outcomes)
        return outcomes

    def _async_handle_of(self, lane: Lane) -> Callable[[Lane, list[Message]], Awaitable[list[Outcome]]]:
        if lane.handler.ack == OWN_ACK:
            return self._handle_own_async
        handle = self._handle_early_async if lane.handler.ack == "early" else self._handle_async
        if lane.handler.load is None:
            return handle

        async def handle_fitting(lane: Lane, messages: list[Message]) -> list[Outcome]:
            fitting, refused = load(lane, messages)
            return join(messages, refused, await handle(lane, fitting) if fitting else [])

        return handle_fitting

    async def _take_async(self, lane: Lane) -> list[Held]:
        while True:
            # Cleared before looking, so that what comes after the look is not slept through.
            lane.arrived.clear()
            try:
                return take(lane, block=False, waiting=lane.loop_waiting)
            except Empty:
                await lane.arrived.wait()

    async def _handle_async(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        try:
            result = await lane.handler.function(messages if lane.handler.batch else messages[0])
            errors = errors_in(lane.handler, messages, result)
        except BaseException as error:
            return [self._failure(lane, message, error) for message in messages]
        return self._outcomes(lane, messages, errors, ACK)

    async def _handle_own_async(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        handle = lane.handler.async_function or lane.handler.function
        try:
            return [self._attempted(lane, message, await handle(message)) for message in messages]
        except BaseException as error:
            return [self._failure(lane, message, error) for message in messages]

    async def _handle_early_async(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        try:
            lost = await sync_to_async(settling.ack)(messages, self.using)
        except DATABASE_FAULTS as error:
            return [self._failure(lane, message, error) for message in messages]
        mine = [message for message in messages if message.id not in lost]
        try:
            if mine:
                result = await lane.handler.function(mine if lane.handler.batch else mine[0])
                self._log_after_early_ack(lane, errors_in(lane.handler, mine, result))
        except BaseException as error:
            self._log_after_early_ack(lane, {message.id: error for message in mine})
        return [LOST if message.id in lost else SETTLED for message in messages]


@contextmanager
def traced(lane: Lane, started: list[Held]) -> Iterator[instrumentation.Handling]:
    """Let the instrument be around what handles these messages."""
    declaration = lane.handler.declaration
    waits = [held.started - held.due for held in started if held.started is not None and held.due is not None]
    handling = instrumentation.Handling([held.message for held in started], lane.handler.batch is not None, waits)
    with instrumentation.handling(
        instrumentation.Target(declaration.name, lane.queue.using, declaration.auto_deleted), handling
    ):
        yield handling


def verbs_of(outcomes: list[Outcome]) -> list[str]:
    return ["ack" if outcome.verb == "settled" else outcome.verb for outcome in outcomes]


def load(lane: Lane, messages: list[Message]) -> tuple[list[Message], dict[int, Outcome]]:
    """Return the messages as the queue's schema makes them, and what becomes of those that do not fit it."""
    assert lane.handler.load is not None
    fitting, refused = [], {}
    for message in messages:
        try:
            fitting.append(lane.handler.load(message))
        except BaseException as error:
            instrumentation.failed(message.id, error)
            refused[message.id] = Outcome("reject", misfit(error))
    return fitting, refused


def join(messages: list[Message], refused: dict[int, Outcome], outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcome of each message: of those that were handled, in order, and of the others."""
    handled = iter(outcomes)
    return [refused[message.id] if message.id in refused else next(handled) for message in messages]


def call(handler: Handler, messages: list[Message]) -> dict[int, BaseException]:
    """
    Call a sync handler, and return the errors of single messages that it names.

    One that hands out a coroutine or generator has not done its work: no ack for it.
    """
    result = handler.function(messages if handler.batch else messages[0])
    if result is None:
        return {}
    if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if not inspect.isasyncgen(result):
            result.close()
        raise TypeError(
            f"{handler.function!r} returned a {type(result).__name__}; a handler is a function, or async def itself"
        )
    return errors_in(handler, messages, result)


def errors_in(handler: Handler, messages: list[Message], result: object) -> dict[int, BaseException]:
    """Return what a batch handler returned: a mapping of message id to exception, or anything for "all done"."""
    if not handler.batch or not isinstance(result, Mapping):
        return {}
    ids = {message.id for message in messages}
    for message_id, error in result.items():
        if message_id not in ids or not isinstance(error, BaseException):
            raise TypeError(
                f"{handler.function!r} returned a mapping that is not one of its messages' ids to exceptions:"
                f" {type(message_id).__name__} to {type(error).__name__}"
            )
    return dict(result)


def reason_of(word: Nack | Reject) -> str:
    """Return the reason that a handler gave, as text: people pass the exception itself."""
    return word.reason if isinstance(word.reason, str) else text_of(word.reason)


def text_of(error: object) -> str:
    """Return an object's class and text, mostly an exception's, also when its text cannot be had."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    return f"{type(error).__module__}.{type(error).__qualname__}: {text}"
