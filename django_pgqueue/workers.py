"""
Run handlers: take what a lane holds, call the handler, tell how it ended.

What a handler raises is an outcome, whatever it is, and what it does to its connections ends with its
message.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import re
import select
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, reset_queries, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus
from psycopg.sql import Composable

from django_pgqueue import services, signals
from django_pgqueue.exceptions import Nack, Reject
from django_pgqueue.loop import DATABASE_FAULTS, describe
from django_pgqueue.message import Message
from django_pgqueue.services import Declaration
from django_pgqueue.validation import check_seconds

logger = logging.getLogger("django_pgqueue")

ACK_MODES = ("late", "early", "atomic")

# Seconds for which a finished message may wait for others to be settled with it.
SETTLE_DELAY = 0.02
# How many finished messages of a lane are settled at once without waiting for that.
SETTLE_BATCH = 50
# Seconds after which a handler's idle connection is tested before it is used again.
CONNECTION_IDLE = 1.0
# Seconds after which a message comes back whose back-off could not be computed.
FALLBACK_DELAY = 60.0

# Statements whose effect on the session outlives their transaction: settings, role, locks, temporary
# tables; a DO or CALL may do any of that. What ends with the transaction is not among them.
LEAVES_TRACES = re.compile(
    r"""(?:^|;)\s*(?:(?:--[^\n]*\n|/\*.*?\*/)\s*)*(?:
        set\s(?!\s*(?:local|transaction|constraints)\b) | reset\b | discard\b | listen\b | load\b | do\b | call\b
        | declare\b | prepare\s(?!\s*transaction\b) | create\s+(?:global\s+|local\s+)?temp(?:orary)?\b
    )
    | \bset_config\s*\((?![^()]*\btrue\s*\)) | \bpg_(?:try_)?advisory_lock""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)


class ConsumableQueue(Protocol):
    """What the consumer needs of a queue."""

    @property
    def name(self) -> str: ...
    @property
    def using(self) -> str: ...
    @property
    def declaration(self) -> Declaration: ...
    @property
    def lease(self) -> float: ...
    def retry_delay(self, message: Message, /) -> float: ...


@dataclass(frozen=True)
class Handler:
    """A function, the queue whose messages it handles, and how. Made by ``Queue.make_handler``."""

    queue: ConsumableQueue
    function: Callable[[Any], Any]
    concurrency: int
    ack: str
    timeout: float
    is_async: bool
    #: How many messages it takes at once, as a list. None: one, as itself.
    batch: int | None = None


@dataclass(eq=False, slots=True)
class Held:
    """A message that this process holds."""

    message: Message
    #: Monotonic time at which the lease was last known to be extended, before the statement was sent.
    confirmed: float
    started: float | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a message ended: "ack", "nack", "reject", "release" or "settled" (nothing left to do)."""

    verb: str
    reason: str = ""
    delay: float = 0.0


ACK = Outcome("ack")
RELEASE = Outcome("release")
SETTLED = Outcome("settled")


@dataclass(eq=False)
class Lane:
    """One queue in this process: what is held, what waits to start, what waits to be settled."""

    handler: Handler
    prefetch: int
    concurrency: int
    held: dict[int, Held] = field(default_factory=dict)
    waiting: SimpleQueue[Held | None] = field(default_factory=SimpleQueue)
    finished: deque[tuple[Held, Outcome]] = field(default_factory=deque)
    #: Monotonic time at which the first of ``finished`` came in.
    finished_since: float = 0.0
    #: Monotonic time of the next claim, and whether one more follows it before the lane sleeps.
    next_look: float = 0.0
    look_again: bool = True
    #: Monotonic time of the last claim, or look at whether the queue is paused.
    asked: float = 0.0
    #: Set by other threads: somebody published since the last claim was sent.
    woken: bool = False
    #: A claim met a suspect and left it; how many were taken in a row.
    suspect_waiting: bool = False
    suspects_in_row: int = 0
    #: Monotonic time until which this process may be sure to own the queue, if that is exclusive: a claim
    #: that brings messages proves it, and each heartbeat in time prolongs it.
    owned_until: float = field(init=False)
    #: Of an async handler: the event loop, and its event that something is waiting.
    loop: asyncio.AbstractEventLoop | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.owned_until = 0.0 if self.is_exclusive else math.inf

    @property
    def queue(self) -> ConsumableQueue:
        return self.handler.queue

    @property
    def is_exclusive(self) -> bool:
        return self.queue.declaration.exclusive

    def wake(self) -> None:
        # In this order: who plans the next look reads ``woken`` after writing ``next_look``.
        self.woken = True
        self.next_look = 0.0

    def look_within(self, delay: float) -> None:
        """Let the next look come in ``delay`` seconds, or when it was planned if that is sooner."""
        self.next_look = min(self.next_look, time.monotonic() + delay)

    def put(self, held: Held | None) -> None:
        """Let a worker start it. None ends one worker."""
        self.waiting.put(held)
        if self.loop is not None:
            # Closed: at the end, when its last worker took the None before this line was reached.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.arrived.set)

    @property
    def size(self) -> int:
        """How many characters of JSON are held."""
        return sum(held.message.size for held in list(self.held.values()))

    @property
    def is_low(self) -> bool:
        """Few are waiting: a claim now keeps the workers busy, and is not for one message only."""
        return self.waiting.qsize() <= self.prefetch // 2

    def is_ripe(self, now: float) -> bool:
        """Finished messages have waited for others long enough."""
        return bool(self.finished) and (
            len(self.finished) >= SETTLE_BATCH or self.waiting.empty() or now - self.finished_since >= SETTLE_DELAY
        )

    def has_outlived(self, held: Held, now: float) -> bool:
        """
        Tell whether a handler has been running for longer than a lease.

        It is unlikely to kill its worker then, and others need not wait for its end: it may run for hours.
        """
        return held.started is not None and now - held.started >= self.queue.lease

    def is_stuck(self, now: float) -> bool:
        """Tell whether all workers run very long: what is claimed now would wait behind them."""
        return sum(self.has_outlived(held, now) for held in list(self.held.values())) >= self.concurrency

    def may_start(self, held: Held) -> bool:
        """Tell whether lease and ownership may be trusted: a process that was stopped and goes on finds them old."""
        now = time.monotonic()
        return not held.lost and now - held.confirmed <= self.queue.lease / 2 and now < self.owned_until


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
        handle = async_to_sync(self._async_handle_of(lane)) if lane.handler.is_async else self._handle_of(lane)
        while not lane.waiting.empty():
            batch = take(lane, block=False)
            started = start(lane, batch)
            outcomes = handle(lane, [held.message for held in started]) if started else []
            self._finish(lane, batch, started, outcomes)

    def _handle_of(self, lane: Lane) -> Callable[[Lane, list[Message]], list[Outcome]]:
        return {"late": self._handle, "early": self._handle_early, "atomic": self._handle_atomic}[lane.handler.ack]

    def work(self, lane: Lane) -> None:
        """One worker thread of a lane with a sync handler."""
        handle = self._handle_of(lane)
        guard = ConnectionGuard()
        guard.watch()
        while batch := take(lane):
            guard.before(self.outages)
            started = start(lane, batch)
            outcomes = handle(lane, [held.message for held in started]) if started else []
            if guard.after():
                outcomes = self._left_open(lane, started, outcomes)
            self._finish(lane, batch, started, outcomes)
        guard.close()

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
            lost = services.ack(messages, self.using)
        except DATABASE_FAULTS as error:
            return [self._failure(lane, message, error) for message in messages]
        mine = [message for message in messages if message.id not in lost]
        try:
            if mine:
                self._log_after_early_ack(lane, call(lane.handler, mine))
        except BaseException as error:
            self._log_after_early_ack(lane, {message.id: error for message in mine})
        return [SETTLED] * len(messages)

    def _log_after_early_ack(self, lane: Lane, errors: dict[int, BaseException]) -> None:
        # By identity: an exception may define what equals it.
        ids_of: dict[int, tuple[BaseException, list[int]]] = {}
        for message_id, error in errors.items():
            ids_of.setdefault(id(error), (error, []))[1].append(message_id)
        for error, ids in ids_of.values():
            logger.error("handler failed after an early ack queue=%s ids=%s", lane.queue.name, ids[:10], exc_info=error)

    def _handle_atomic(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        lost: set[int] = set()
        try:
            # In a stricter one the ack would fail whenever the lease was extended after it began.
            is_read_committed = services.is_read_committed(self.using)
            with transaction.atomic(using=self.using):
                if not is_read_committed:
                    services.make_read_committed(self.using)
                errors = call(lane.handler, messages)
                done = [message for message in messages if message.id not in errors]
                if done:
                    # The last statement: until here nobody else waits for the messages' rows.
                    lost = services.ack(done, self.using)
                if lost:
                    transaction.set_rollback(True, using=self.using)
        except BaseException as error:
            return [self._failure(lane, message, error) for message in messages]
        if lost:
            # All was rolled back; those that are still held can be handled again at once.
            again = Outcome("nack", "rolled back: the lease of another message of its batch was lost")
            return [SETTLED if message.id in lost else again for message in messages]
        return self._outcomes(lane, messages, errors, SETTLED)

    def _left_open(self, lane: Lane, started: list[Held], outcomes: list[Outcome]) -> list[Outcome]:
        """Make failures of a handler that returned inside a transaction: its changes were rolled back."""
        error = RuntimeError("the handler left a transaction open; its changes were rolled back")
        if lane.handler.ack == "early":
            logger.error("handler left a transaction open queue=%s", lane.queue.name)
            return outcomes
        return [
            self._failure(lane, held.message, error) if outcome.verb in ("ack", "settled") else outcome
            for held, outcome in zip(started, outcomes, strict=True)
        ]

    def _failure(self, lane: Lane, message: Message, error: BaseException) -> Outcome:
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
            if guard.is_needed(self.outages):
                await sync_to_async(guard.before)(self.outages)
            started = start(lane, batch)
            outcomes = await self._async_handle_of(lane)(lane, [held.message for held in started]) if started else []
            if await sync_to_async(guard.after)():
                outcomes = self._left_open(lane, started, outcomes)
            self._finish(lane, batch, started, outcomes)

    def _async_handle_of(self, lane: Lane) -> Callable[[Lane, list[Message]], Awaitable[list[Outcome]]]:
        return self._handle_early_async if lane.handler.ack == "early" else self._handle_async

    async def _take_async(self, lane: Lane) -> list[Held]:
        while True:
            # Cleared before looking, so that what comes after the look is not slept through.
            lane.arrived.clear()
            try:
                return take(lane, block=False)
            except Empty:
                await lane.arrived.wait()

    async def _handle_async(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        try:
            result = await lane.handler.function(messages if lane.handler.batch else messages[0])
            errors = errors_in(lane.handler, messages, result)
        except BaseException as error:
            return [self._failure(lane, message, error) for message in messages]
        return self._outcomes(lane, messages, errors, ACK)

    async def _handle_early_async(self, lane: Lane, messages: list[Message]) -> list[Outcome]:
        try:
            lost = await sync_to_async(services.ack)(messages, self.using)
        except DATABASE_FAULTS as error:
            return [self._failure(lane, message, error) for message in messages]
        mine = [message for message in messages if message.id not in lost]
        try:
            if mine:
                result = await lane.handler.function(mine if lane.handler.batch else mine[0])
                self._log_after_early_ack(lane, errors_in(lane.handler, mine, result))
        except BaseException as error:
            self._log_after_early_ack(lane, {message.id: error for message in mine})
        return [SETTLED] * len(messages)


class ConnectionGuard:
    """
    Give each message usable connections with the session as it is at the start, whatever the one before did.

    For the connections of one thread. That a session was changed is told by the statements that went
    through Django: asking the server would cost every message a round trip.
    """

    def __init__(self) -> None:
        self._used = time.monotonic()
        self._outages = 0
        self._traced: set[str] = set()

    def watch(self) -> None:
        """Watch this thread's connections. Opens none."""
        for connection in connections.all():
            self._watch(connection)

    def _watch(self, connection: BaseDatabaseWrapper) -> None:
        connect = connection.connect

        def connect_afresh() -> None:
            connect()
            # What receivers of connection_created did to the session, they do to each.
            self._traced.discard(connection.alias)

        connection.connect = connect_afresh  # type: ignore[method-assign]
        connection.execute_wrappers.append(self._trace)

    def _trace(self, execute: Callable[..., Any], statement: Any, params: Any, many: Any, context: Any) -> Any:
        text = statement if isinstance(statement, str) else as_text(statement)
        if LEAVES_TRACES.search(text):
            self._traced.add(context["connection"].alias)
        return execute(statement, params, many, context)

    def is_needed(self, outages: int) -> bool:
        """Connections may have died: the database was away, or they were idle for a while."""
        return outages != self._outages or time.monotonic() - self._used > CONNECTION_IDLE

    def before(self, outages: int) -> None:
        """Drop connections that died."""
        is_needed = self.is_needed(outages)
        if is_needed:
            self._outages = outages
            self._used = time.monotonic()
        for connection in connections.all(initialized_only=True):
            if connection.connection is None or connection.in_atomic_block:
                continue
            if (is_needed or has_unread(connection)) and not is_usable(connection):
                self._drop(connection)

    def after(self) -> bool:
        """
        Drop connections that the handler broke, changed or left in a transaction; give those of a pool back.

        Returns whether it left a transaction open.
        """
        self._used = time.monotonic()
        reset_queries()
        left_open = False
        for connection in connections.all(initialized_only=True):
            if connection.connection is None:
                continue
            # Autocommit is off by the handler, or by the settings: then it is the handler who has to commit.
            is_switched = connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
            if connection.in_atomic_block or is_switched or is_in_transaction(connection):
                left_open = True
                self._drop(connection)
            elif connection.alias in self._traced or (connection.errors_occurred and not is_usable(connection)):
                self._drop(connection)
            elif is_pooled(connection):
                # Kept, it would be missing to the other workers of a pool that is smaller than they are many.
                connection.close()
            else:
                connection.errors_occurred = False
        self._traced.clear()
        return left_open

    def _drop(self, connection: BaseDatabaseWrapper) -> None:
        with contextlib.suppress(*DATABASE_FAULTS):
            if is_pooled(connection):
                # First, or the pool would hand it on as it is.
                connection.connection.close()
            connection.close()
        # A fresh wrapper too: the old one may believe that it is inside a transaction.
        del connections[connection.alias]
        self._watch(connections[connection.alias])

    def close(self) -> None:
        """Close this thread's connections."""
        connections.close_all()


def take(lane: Lane, *, block: bool = True) -> list[Held]:
    """Take what a worker handles next: one message, or a batch of those that wait. Empty: the worker ends."""
    batch: list[Held] = []
    while len(batch) < (lane.handler.batch or 1):
        try:
            held = lane.waiting.get(block=block and not batch)
        except Empty:
            if not batch:
                raise
            break
        if held is None:
            if batch:
                # For this worker, when it comes back.
                lane.put(None)
            break
        batch.append(held)
    return batch


def start(lane: Lane, batch: list[Held]) -> list[Held]:
    """Return those of a batch that may start, marked as started."""
    started = [held for held in batch if lane.may_start(held)]
    now = time.monotonic()
    for held in started:
        held.started = now
    return started


def call(handler: Handler, messages: list[Message]) -> dict[int, BaseException]:
    """
    Call a sync handler, and return the errors of single messages that it names.

    One that hands out a coroutine or generator has not done its work: no ack for it.
    """
    result = handler.function(messages if handler.batch else messages[0])
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


def is_usable(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether a connection works, and leave it outside a transaction."""
    usable: bool = connection.is_usable()
    if usable and not connection.autocommit:
        connection.rollback()
    return usable


def has_unread(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the server sent something that nobody asked for: mostly that it ended the session."""
    if connection.vendor != "postgresql":
        return False
    raw = connection.connection
    if raw.closed:
        return True
    # Not select(): that takes no file descriptor above 1023.
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the session is in a transaction that Django knows nothing of: a BEGIN by hand."""
    if connection.vendor != "postgresql":
        return False
    status = connection.connection.info.transaction_status
    return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR, TransactionStatus.ACTIVE)


def is_pooled(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether Django's connection comes from psycopg's pool."""
    return bool(connection.settings_dict.get("OPTIONS", {}).get("pool"))


def as_text(statement: Any) -> str:
    """Return the text of a statement that is composed of ``psycopg.sql`` objects."""
    return str(statement.as_string(None)) if isinstance(statement, Composable) else str(statement)


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
