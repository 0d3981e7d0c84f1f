"""A handler, and what becomes of a message that it was called with."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from django_pgqueue.message import Message
from django_pgqueue.services.declaring import Declaration

ACK_MODES = ("late", "early", "atomic")
#: Of a handler that settles its messages by itself: it returns an ``Attempt``, or None where the lease was lost.
OWN_ACK = "own"


class ConsumableQueue(Protocol):
    """What the consumer needs of a queue."""

    @property
    def name(self) -> str: ...
    @property
    def using(self) -> str: ...
    @property
    def lease(self) -> float: ...
    def retry_delay(self, message: Message, /) -> float: ...


def is_never(message: Message) -> bool:
    """Tell that no message is for the event loop."""
    return False


@dataclass(frozen=True)
class Handler:
    """A function, the queue whose messages it handles, and how. Made by ``make_handler()``."""

    queue: ConsumableQueue
    function: Callable[[Any], Any]
    concurrency: int
    ack: str
    timeout: float
    is_async: bool
    #: Returns the queue's attributes as its row stores them. Asked each time: a setting or a binding may have changed.
    read_declaration: Callable[[], Declaration]
    #: How many messages it takes at once, as a list. None: one, as itself.
    batch: int | None = None
    #: Returns a message with the payload that the queue's schema makes of it, or raises. None: as it is.
    load: Callable[[Message], Message] | None = None
    #: Handles, on the event loop, the messages that ``is_for_loop`` picks; ``function`` takes the others.
    async_function: Callable[[Any], Awaitable[Any]] | None = None
    is_for_loop: Callable[[Message], bool] = is_never

    @property
    def declaration(self) -> Declaration:
        """The queue's attributes as its row stores them."""
        return self.read_declaration()

    @property
    def uses_loop(self) -> bool:
        """Whether any of its messages are handled on the event loop."""
        return self.is_async or self.async_function is not None


def check_function(function: Callable[[Any], Any], name: str, ack: str) -> bool:
    """
    Return whether a queue's handler is async.

    Raises ``ValueError`` for what is no function, and for one that cannot be handled that way.
    """
    if ack not in ACK_MODES:
        raise ValueError(f"ack must be one of {', '.join(ACK_MODES)}, not {ack!r}")
    if not callable(function):
        raise ValueError(f"{function!r} is not callable, so it cannot be the handler of queue {name!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{function!r} is a generator, so calling it does not run it; return, don't yield")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if is_async and ack == "atomic":
        raise ValueError(
            f"{function!r}: ack='atomic' needs a transaction around the handler, which Django does not offer to"
            " async functions; use a sync handler, or ack='late'"
        )
    return is_async


class Outcome(Enum):
    """What becomes of a message."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"
    RELEASE = "release"

    #: Nothing is left to do: it was acked already,
    SETTLED = "settled"
    #: its lease was lost,
    LOST = "lost"
    #: it was given back after a failure,
    FAILED = "failed"
    #: it became a dead letter.
    GIVEN_UP = "given up"

    @property
    def is_success(self) -> bool:
        """Whether its handler has done its work."""
        return self is Outcome.ACK or self is Outcome.SETTLED

    @property
    def is_failure(self) -> bool:
        """Whether it counts as failed, unless it became a dead letter."""
        return self is Outcome.NACK or self is Outcome.REJECT or self is Outcome.FAILED

    @property
    def is_retry(self) -> bool:
        """Whether it comes back after a delay."""
        return self is Outcome.NACK or self is Outcome.FAILED


@dataclass(frozen=True, slots=True)
class Settlement:
    """What becomes of a message, why, and for a retry after how many seconds."""

    outcome: Outcome
    reason: str = ""
    delay: float = 0.0
    #: What has to settle it, of a handler that does so by itself.
    attempt: Attempt | None = None

    @property
    def label(self) -> str:
        """The word for instruments: who has settled a message makes no difference to them."""
        return "ack" if self.outcome is Outcome.SETTLED else self.outcome.value


class Attempt(Protocol):
    """What a handler that settles by itself has done with a message."""

    error: BaseException | None

    def settle(self, settlement: Settlement, /) -> Settlement: ...


ACK = Settlement(Outcome.ACK)
RELEASE = Settlement(Outcome.RELEASE)
SETTLED = Settlement(Outcome.SETTLED)
LOST = Settlement(Outcome.LOST)
