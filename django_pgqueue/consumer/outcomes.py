"""
Determine the outcomes of messages from what their handler returned or raised.

Every exception of a handler is an outcome. The functions return a ``Settlement`` for each message, in order.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from django_pgqueue import instrumentation, signals
from django_pgqueue.consumer.handler import ACK, LOST, RELEASE, Attempt, Handler, Outcome, Settlement
from django_pgqueue.consumer.lane import Held, Lane
from django_pgqueue.exceptions import Nack, Reject
from django_pgqueue.message import Message
from django_pgqueue.runtime.loop import describe
from django_pgqueue.schema import misfit
from django_pgqueue.validation import check_seconds

logger = logging.getLogger("django_pgqueue")

# In seconds: the delay of a retry whose back-off could not be computed.
FALLBACK_DELAY = 60.0


def failure(lane: Lane, message: Message, error: BaseException) -> Settlement:
    """Return the settlement of a message whose handler raised, and report the failure."""
    instrumentation.failed(message.id, error)
    if isinstance(error, Reject):
        return Settlement(Outcome.REJECT, reason_of(error) or "rejected")
    reason = reason_of(error) or "nack" if isinstance(error, Nack) else text_of(error)
    try:
        if isinstance(error, Nack) and error.delay is not None:
            delay = check_seconds(error.delay, "Nack(delay=…)")
        else:
            delay = lane.queue.retry_delay(message)
    except Exception as wrong:
        # The message must be retried in any case.
        logger.error("no usable delay queue=%s id=%s error=%s", lane.queue.name, message.id, describe(wrong))
        delay = FALLBACK_DELAY
    signals.message_failed.send_robust(
        lane.queue.name, using=lane.queue.using, message=message, error=reason, delay=delay
    )
    logger.debug("handler failed queue=%s id=%s", lane.queue.name, message.id, exc_info=error)
    return Settlement(Outcome.NACK, reason, delay)


def failures(lane: Lane, messages: Sequence[Message], error: BaseException) -> list[Settlement]:
    """Return the settlements of messages whose handler raised for all of them."""
    return [failure(lane, message, error) for message in messages]


def settlements(
    lane: Lane, messages: Sequence[Message], errors: Mapping[int, BaseException], done: Settlement
) -> list[Settlement]:
    """Return the settlements of messages: ``done``, or a failure for those with an error."""
    if not errors:
        return [done] * len(messages)
    return [failure(lane, message, errors[message.id]) if message.id in errors else done for message in messages]


def log_after_early_ack(lane: Lane, errors: Mapping[int, BaseException]) -> None:
    """Log the errors of a handler whose messages were acked already."""
    # By identity, because an exception may define equality.
    ids_of: dict[int, tuple[BaseException, list[int]]] = {}
    for message_id, error in errors.items():
        instrumentation.failed(message_id, error)
        ids_of.setdefault(id(error), (error, []))[1].append(message_id)
    for error, ids in ids_of.values():
        logger.error("handler failed after an early ack queue=%s ids=%s", lane.queue.name, ids[:10], exc_info=error)


# --- Handlers that settle by themselves ---


def attempted(lane: Lane, message: Message, attempt: Attempt | None) -> Settlement:
    """Return the settlement of a message whose attempt will settle it."""
    if attempt is None:
        return LOST
    settlement = ACK if attempt.error is None else failure(lane, message, attempt.error)
    return replace(settlement, attempt=attempt)


def settle_attempts(lane: Lane, started: Sequence[Held], settlements: Sequence[Settlement]) -> list[Settlement]:
    """Let attempts settle their messages. Returns the settlements that remain."""
    return [
        settlement
        if settlement.attempt is None
        else _settle_attempt(lane, held.message, settlement.attempt, settlement)
        for held, settlement in zip(started, settlements, strict=True)
    ]


def _settle_attempt(lane: Lane, message: Message, attempt: Attempt, settlement: Settlement) -> Settlement:
    try:
        return attempt.settle(replace(settlement, attempt=None))
    except BaseException as error:
        return failure(lane, message, error)


# --- After a handler ---


def left_open(lane: Lane, started: Sequence[Held], settlements: Sequence[Settlement]) -> list[Settlement]:
    """Turn successes into failures, after a handler left a transaction open and its changes were rolled back."""
    error = RuntimeError("the handler left a transaction open; its changes were rolled back")
    if lane.handler.ack == "early":
        logger.error("handler left a transaction open queue=%s", lane.queue.name)
        return list(settlements)
    return [
        _failed_open(lane, held.message, settlement, error) if settlement.outcome.is_success else settlement
        for held, settlement in zip(started, settlements, strict=True)
    ]


def _failed_open(lane: Lane, message: Message, settlement: Settlement, error: BaseException) -> Settlement:
    if settlement.attempt is not None:
        settlement.attempt.error = error
    return replace(failure(lane, message, error), attempt=settlement.attempt)


def finish(lane: Lane, batch: Sequence[Held], started: Sequence[Held], settlements: Sequence[Settlement]) -> bool:
    """
    Pass a batch to the lane to be settled. Messages that did not start are released.

    Returns whether to wake the claiming thread.
    """
    if len(batch) == 1:
        return lane.finish(batch[0], settlements[0] if started else RELEASE)
    by_held = {id(held): settlement for held, settlement in zip(started, settlements, strict=True)}
    wakes = [lane.finish(held, by_held.get(id(held), RELEASE)) for held in batch]
    return any(wakes)


# --- Instruments ---


def watched(
    lane: Lane, started: Sequence[Held]
) -> AbstractContextManager[instrumentation.Handling | instrumentation.Unwatched]:
    """Return the instrument's context manager for handling these messages."""
    return instrumentation.instrument.handling(_describe, lane, started)


def _describe(lane: Lane, started: Sequence[Held]) -> tuple[instrumentation.Target, instrumentation.Handling]:
    declaration = lane.handler.declaration
    waits = [held.started - held.due for held in started if held.started is not None]
    return (
        instrumentation.Target(declaration.name, lane.queue.using, declaration.auto_deleted),
        instrumentation.Handling([held.message for held in started], lane.handler.batch is not None, waits),
    )


# --- Schemas ---


def load(lane: Lane, messages: Sequence[Message]) -> tuple[list[Message], dict[int, Settlement]]:
    """Return the messages as loaded by the queue's schema, and the settlements of those that do not match it."""
    assert lane.handler.load is not None
    fitting, refused = [], {}
    for message in messages:
        try:
            fitting.append(lane.handler.load(message))
        except BaseException as error:
            instrumentation.failed(message.id, error)
            refused[message.id] = Settlement(Outcome.REJECT, misfit(error))
    return fitting, refused


def join(
    messages: Sequence[Message], refused: Mapping[int, Settlement], handled: Sequence[Settlement]
) -> list[Settlement]:
    """Return the settlements of all messages in order, merged from ``refused`` and ``handled``."""
    rest = iter(handled)
    return [refused[message.id] if message.id in refused else next(rest) for message in messages]


# --- Calling ---


def call(handler: Handler, messages: list[Message]) -> dict[int, BaseException]:
    """
    Call a sync handler, and return the errors that it returned for single messages.

    Raises ``TypeError`` if the handler returns a coroutine or generator, because its work is not done.
    """
    result = handler.function(messages if handler.batch else messages[0])
    if result is None:
        return {}
    if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if not inspect.isasyncgen(result):
            result.close()
        raise TypeError(
            f"{handler.function!r} returned a {type(result).__name__}; define the handler with async def itself,"
            " or return a result"
        )
    return errors_in(handler, messages, result)


def errors_in(handler: Handler, messages: Sequence[Message], result: object) -> dict[int, BaseException]:
    """
    Return the errors in the result of a batch handler.

    A mapping has message ids as keys and exceptions as values. Any other result means that all succeeded.
    """
    if not handler.batch or not isinstance(result, Mapping):
        return {}
    ids = {message.id for message in messages}
    for message_id, error in result.items():
        if message_id not in ids or not isinstance(error, BaseException):
            raise TypeError(
                f"{handler.function!r} returned a mapping that does not map its messages' ids to exceptions:"
                f" {type(message_id).__name__} to {type(error).__name__}"
            )
    return dict(result)


def reason_of(word: Nack | Reject) -> str:
    """Return the reason that a handler gave, as text. It may be an exception."""
    return word.reason if isinstance(word.reason, str) else text_of(word.reason)


def text_of(error: object) -> str:
    """Return the class and the text of an object, usually an exception, even if ``str()`` fails."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    return f"{type(error).__module__}.{type(error).__qualname__}: {text}"
