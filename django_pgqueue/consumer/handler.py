"""A handler, and the outcomes of the messages that it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from django_pgqueue.message import Message
from django_pgqueue.services.declaring import Declaration

ACK_MODES = ("late", "early", "atomic")
#: For a handler that settles its messages itself. It returns an ``Attempt``, or None if the lease was lost.
OWN_ACK = "own"


class ConsumableQueue(Protocol):
    """The parts of a queue that the consumer uses."""

    @property
    def name(self) -> str: ...
    @property
    def using(self) -> str: ...
    @property
    def lease(self) -> float: ...
    def retry_delay(self, message: Message, /) -> float: ...


def is_never(message: Message) -> bool:
    """Return False for every message."""
    return False


@dataclass(frozen=True)
class Handler:
    """A function, the queue whose messages it handles, and its options. Created by ``make_handler()``."""

    queue: ConsumableQueue
    function: Callable[[Any], Any]
    concurrency: int
    ack: str
    timeout: float
    is_async: bool
    #: Returns the queue's attributes as stored in its row. Called each time, as settings and bindings may have changed.
    read_declaration: Callable[[], Declaration]
    #: How many messages it takes at once, as a list. None: it takes a single message.
    batch: int | None = None
    #: Returns a message whose payload the queue's schema has loaded, or raises. None: there is no schema.
    load: Callable[[Message], Message] | None = None
    #: Handles the messages selected by ``is_for_loop``, on the event loop. ``function`` handles the others.
    async_function: Callable[[Any], Awaitable[Any]] | None = None
    is_for_loop: Callable[[Message], bool] = is_never

    @property
    def declaration(self) -> Declaration:
        """The queue's attributes as stored in its row."""
        return self.read_declaration()

    @property
    def uses_loop(self) -> bool:
        """Whether any of its messages are handled on the event loop."""
        return self.is_async or self.async_function is not None


def check_function(function: Callable[[Any], Any], name: str, ack: str) -> bool:
    """
    Return whether a queue's handler is async.

    Raises ``ValueError`` if ``ack`` is unknown or ``function`` cannot be a handler with it.
    """
    if ack not in ACK_MODES:
        raise ValueError(f"ack must be one of {', '.join(ACK_MODES)}, not {ack!r}")
    if not callable(function):
        raise ValueError(f"{function!r} is not callable, so it cannot be the handler of queue {name!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{function!r} is a generator, so calling it does not run it; use return instead of yield")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if is_async and ack == "atomic":
        raise ValueError(
            f"{function!r}: ack='atomic' needs a transaction around the handler, which Django does not offer to"
            " async functions; use a sync handler, or ack='late'"
        )
    return is_async


class Outcome(Enum):
    """How a message is settled."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"
    RELEASE = "release"

    # Nothing is left to do for the following.
    #: The message was acked already.
    SETTLED = "settled"
    #: The lease was lost.
    LOST = "lost"
    #: The message was given back after a failure.
    FAILED = "failed"
    #: The message was dead-lettered.
    GIVEN_UP = "given up"

    # Members are singletons. The hash of ``Enum`` is a function in Python, which would be called for each message.
    __hash__ = object.__hash__

    @property
    def is_success(self) -> bool:
        """Whether the handler succeeded."""
        return self is Outcome.ACK or self is Outcome.SETTLED

    @property
    def is_failure(self) -> bool:
        """Whether the message counts as failed, unless it was dead-lettered."""
        return self is Outcome.NACK or self is Outcome.REJECT or self is Outcome.FAILED

    @property
    def is_retry(self) -> bool:
        """Whether the message is delivered again after a delay."""
        return self is Outcome.NACK or self is Outcome.FAILED


@dataclass(frozen=True, slots=True)
class Settlement:
    """The outcome of a message, its reason, and the delay of a retry in seconds."""

    outcome: Outcome
    reason: str = ""
    delay: float = 0.0
    #: The attempt that has to settle the message, for a handler that settles its messages itself.
    attempt: Attempt | None = None

    @property
    def label(self) -> str:
        """The label for instruments, which do not distinguish who settled the message."""
        return "ack" if self.outcome is Outcome.SETTLED else self.outcome.value


class Attempt(Protocol):
    """The result of a handler that settles its messages itself."""

    error: BaseException | None

    def settle(self, settlement: Settlement, /) -> Settlement: ...


ACK = Settlement(Outcome.ACK)
RELEASE = Settlement(Outcome.RELEASE)
SETTLED = Settlement(Outcome.SETTLED)
LOST = Settlement(Outcome.LOST)
