"""The messages of one queue that a consumer holds, and their outcomes, shared between its threads."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from django_pgqueue.consumer.handler import RELEASE, ConsumableQueue, Handler, Outcome, Settlement
from django_pgqueue.consumer.low_water import LowWaterMark
from django_pgqueue.message import Message
from django_pgqueue.services.minutes import Tally

# In seconds: how long a finished message may wait to be settled together with others.
SETTLE_DELAY = 0.02
# This many finished messages of a lane are settled without waiting for more.
SETTLE_BATCH = 50
# The number of minutes of publishing that a lane counts, more than twice as many as are stored.
MAX_MINUTES = 3_000


@dataclass(eq=False, slots=True)
class Held:
    """A message that this process holds."""

    message: Message
    #: Monotonic time at which the lease was last known to be extended, before the statement was sent.
    confirmed: float
    #: Monotonic time at which the message was due.
    due: float
    started: float | None = None
    lost: bool = False


@dataclass(eq=False)
class Lane:
    """One queue in this process: the messages that are held, that wait to start, and that wait to be settled."""

    handler: Handler
    prefetch: int
    concurrency: int
    held: dict[int, Held] = field(default_factory=dict)
    waiting: SimpleQueue[Held | None] = field(default_factory=SimpleQueue)
    finished: deque[tuple[Held, Settlement]] = field(default_factory=deque)
    #: Monotonic time at which the first message of ``finished`` was added.
    finished_since: float = 0.0
    #: How many messages were claimed, without those that were given back before they were started.
    claimed: int = 0
    #: Monotonic time of the next claim, and whether one more follows it before the lane sleeps.
    next_look: float = 0.0
    look_again: bool = True
    #: Monotonic time of the last claim, or of the last check whether the queue is paused.
    asked: float = 0.0
    #: Set by other threads: a message was published since the last claim was sent.
    woken: bool = False
    #: The counts of settled messages, the minutes of their publishing, and the counts that were already reported. Each
    #: field is written by one thread.
    tally: Tally = Tally()
    published: dict[int, int] = field(default_factory=dict)
    reported: Tally = Tally()
    #: Whether a claim found a suspect and left it, and how many suspects were claimed in a row.
    suspect_waiting: bool = False
    suspects_in_row: int = 0
    low_water: LowWaterMark = field(default_factory=LowWaterMark)
    #: Monotonic time until which this process is sure to own the queue, if the queue is exclusive. A claim that returns
    #: messages proves the ownership, and each heartbeat in time extends it.
    owned_until: float = field(init=False)
    #: The queue's lease in seconds, cached because it is needed for each message.
    lease: float = field(init=False)
    #: For an async handler: the event loop, and an event on it that is set when messages are waiting.
    loop: asyncio.AbstractEventLoop | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    #: The messages that wait for the event loop. The same object as ``waiting``, unless threads take some of them.
    loop_waiting: SimpleQueue[Held | None] = field(init=False)

    def __post_init__(self) -> None:
        self.loop_waiting = self.waiting if self.handler.async_function is None else SimpleQueue()
        self.owned_until = 0.0 if self.is_exclusive else math.inf
        self.lease = self.queue.lease

    @property
    def queue(self) -> ConsumableQueue:
        return self.handler.queue

    @property
    def is_exclusive(self) -> bool:
        return self.handler.declaration.exclusive

    def wake(self) -> None:
        # In this order, because the claiming thread writes ``next_look`` first and then reads ``woken``.
        self.woken = True
        self.next_look = 0.0

    def look_within(self, delay: float) -> None:
        """Plan the next claim in ``delay`` seconds, unless it is planned sooner."""
        self.next_look = min(self.next_look, time.monotonic() + delay)

    def put(self, held: Held | None) -> None:
        """Pass a message to a worker. None ends one worker of each kind."""
        is_for_loop = held is not None and self.handler.is_for_loop(held.message)
        if not is_for_loop:
            self.waiting.put(held)
        if is_for_loop or (held is None and self.loop_waiting is not self.waiting):
            self.loop_waiting.put(held)
        if self.loop is not None:
            # The loop is closed if its last worker took the None before this line was reached.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.arrived.set)

    def give_back_waiting(self) -> None:
        """Let messages that have not started be released."""
        for waiting in {self.waiting, self.loop_waiting}:
            with contextlib.suppress(Empty):
                while held := waiting.get_nowait():
                    self.finished.append((held, RELEASE))

    def finish(self, held: Held, settlement: Settlement) -> bool:
        """Let a message be settled. Returns whether to wake the claiming thread. May be called from any thread."""
        self.finished.append((held, settlement))
        # Workers may append at the same time, so that none of them sees a length of 1.
        if len(self.finished) <= self.concurrency:
            self.finished_since = time.monotonic()
            return True
        return len(self.finished) >= SETTLE_BATCH or self.waiting.empty()

    def count(self, outcome: Outcome, messages: Sequence[Message], dead_lettered: int) -> None:
        """Count settled messages. ``dead_lettered`` of them were dead-lettered."""
        rest = len(messages) - dead_lettered
        self.tally = Tally(
            self.tally.handled + (0 if outcome.is_failure else rest),
            self.tally.failed + (rest if outcome.is_failure else 0),
            self.tally.dead_lettered + dead_lettered,
        )
        published = self.published
        for message in messages:
            if message.minute is not None:
                published[message.minute] = published.get(message.minute, 0) + 1
        if len(published) > MAX_MINUTES:
            for minute in sorted(published)[: -MAX_MINUTES // 2]:
                del published[minute]

    def count_set_aside(self, dead_lettered: int) -> None:
        """Count messages that a claim dead-lettered."""
        self.tally = self.tally._replace(dead_lettered=self.tally.dead_lettered + dead_lettered)

    @property
    def counted(self) -> Tally:
        """The counts until now. Copying a dict is atomic, so other threads may write to it."""
        return self.tally._replace(published=dict(self.published))

    @property
    def size(self) -> int:
        """How many characters of JSON the held messages have."""
        return sum(held.message.size for held in list(self.held.values()))

    @property
    def is_low(self) -> bool:
        """Whether few messages are waiting, so that a claim keeps the workers busy and is not for one message only."""
        return self.waiting.qsize() <= self.prefetch // 2

    def is_ripe(self, now: float) -> bool:
        """Return whether finished messages have waited long enough for others."""
        return bool(self.finished) and (
            len(self.finished) >= SETTLE_BATCH or self.waiting.empty() or now - self.finished_since >= SETTLE_DELAY
        )

    def has_outlived(self, held: Held, now: float) -> bool:
        """
        Return whether the message's handler has been running for longer than a lease.

        Such a handler may run for hours and is unlikely to kill its worker, so other messages do not wait for its end.
        """
        return held.started is not None and now - held.started >= self.lease

    def is_stuck(self, now: float) -> bool:
        """Return whether all workers run long-running handlers, so that a claimed message would have to wait."""
        return sum(self.has_outlived(held, now) for held in list(self.held.values())) >= self.concurrency

    def may_start(self, held: Held) -> bool:
        """Return whether the lease and the ownership are recent. They are not after the process was suspended."""
        now = time.monotonic()
        return not held.lost and now - held.confirmed <= self.lease / 2 and now < self.owned_until


def take(lane: Lane, *, block: bool = True, waiting: SimpleQueue[Held | None] | None = None) -> list[Held]:
    """
    Return what a worker handles next: one message, or a batch of waiting messages. Empty: the worker ends.

    ``waiting``: the messages that wait for this kind of worker (None: those that wait for threads).
    """
    waiting = lane.waiting if waiting is None else waiting
    batch: list[Held] = []
    while len(batch) < (lane.handler.batch or 1):
        try:
            held = waiting.get(block=block and not batch)
        except Empty:
            if not batch:
                raise
            break
        if held is None:
            if batch:
                # Ends this worker after the batch.
                lane.put(None)
            break
        batch.append(held)
    return batch


def start(lane: Lane, batch: list[Held]) -> list[Held]:
    """Return the messages of a batch that may start, and mark them as started."""
    started = [held for held in batch if lane.may_start(held)]
    now = time.monotonic()
    for held in started:
        held.started = now
    return started
