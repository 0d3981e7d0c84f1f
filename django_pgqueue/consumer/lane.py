"""What a consumer holds of one queue, and how each message ended: passed between its threads."""

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

# Seconds for which a finished message may wait for others to be settled with it.
SETTLE_DELAY = 0.02
# How many finished messages of a lane are settled at once without waiting for that.
SETTLE_BATCH = 50
# Minutes of publishing for which messages are counted apart: more than are kept, twice.
MAX_MINUTES = 3_000


@dataclass(eq=False, slots=True)
class Held:
    """A message that this process holds."""

    message: Message
    #: Monotonic time at which the lease was last known to be extended, before the statement was sent.
    confirmed: float
    #: Monotonic time at which it was due.
    due: float
    started: float | None = None
    lost: bool = False


@dataclass(eq=False)
class Lane:
    """One queue in this process: what is held, what waits to start, what waits to be settled."""

    handler: Handler
    prefetch: int
    concurrency: int
    held: dict[int, Held] = field(default_factory=dict)
    waiting: SimpleQueue[Held | None] = field(default_factory=SimpleQueue)
    finished: deque[tuple[Held, Settlement]] = field(default_factory=deque)
    #: Monotonic time at which the first of ``finished`` came in.
    finished_since: float = 0.0
    #: How many messages were claimed, but for those that were given back without a start.
    claimed: int = 0
    #: Monotonic time of the next claim, and whether one more follows it before the lane sleeps.
    next_look: float = 0.0
    look_again: bool = True
    #: Monotonic time of the last claim, or look at whether the queue is paused.
    asked: float = 0.0
    #: Set by other threads: somebody published since the last claim was sent.
    woken: bool = False
    #: What became of messages, when they were published, and how much of it is reported: each is written by one thread.
    tally: Tally = Tally()
    published: dict[int, int] = field(default_factory=dict)
    reported: Tally = Tally()
    #: A claim met a suspect and left it; how many were taken in a row.
    suspect_waiting: bool = False
    suspects_in_row: int = 0
    low_water: LowWaterMark = field(default_factory=LowWaterMark)
    #: Monotonic time until which this process may be sure to own the queue, if that is exclusive: a claim
    #: that brings messages proves it, and each heartbeat in time prolongs it.
    owned_until: float = field(init=False)
    #: Seconds for which a claim lasts: asked for each message, it is kept.
    lease: float = field(init=False)
    #: Of an async handler: the event loop, and its event that something is waiting.
    loop: asyncio.AbstractEventLoop | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    #: What waits for the loop: ``waiting`` itself, unless some of it is for threads.
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
        # In this order: who plans the next look reads ``woken`` after writing ``next_look``.
        self.woken = True
        self.next_look = 0.0

    def look_within(self, delay: float) -> None:
        """Let the next look come in ``delay`` seconds, or when it was planned if that is sooner."""
        self.next_look = min(self.next_look, time.monotonic() + delay)

    def put(self, held: Held | None) -> None:
        """Let a worker start it. None ends one worker, of each kind."""
        is_for_loop = held is not None and self.handler.is_for_loop(held.message)
        if not is_for_loop:
            self.waiting.put(held)
        if is_for_loop or (held is None and self.loop_waiting is not self.waiting):
            self.loop_waiting.put(held)
        if self.loop is not None:
            # Closed: at the end, when its last worker took the None before this line was reached.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.arrived.set)

    def give_back_waiting(self) -> None:
        """Let what has not started be released."""
        for waiting in {self.waiting, self.loop_waiting}:
            with contextlib.suppress(Empty):
                while held := waiting.get_nowait():
                    self.finished.append((held, RELEASE))

    def finish(self, held: Held, settlement: Settlement) -> bool:
        """Let a message be settled. Returns whether the claiming thread is to be woken. From any thread."""
        self.finished.append((held, settlement))
        # Workers may append at the same time, and then none of them sees a length of 1.
        if len(self.finished) <= self.concurrency:
            self.finished_since = time.monotonic()
            return True
        return len(self.finished) >= SETTLE_BATCH or self.waiting.empty()

    def count(self, outcome: Outcome, messages: Sequence[Message], dead_lettered: int) -> None:
        """Note how messages were settled, and that so many of them were given up."""
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
        """Note that a claim gave up messages."""
        self.tally = self.tally._replace(dead_lettered=self.tally.dead_lettered + dead_lettered)

    @property
    def counted(self) -> Tally:
        """What became of messages until now. Copying a dict is one step, whatever another thread does to it."""
        return self.tally._replace(published=dict(self.published))

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
        return held.started is not None and now - held.started >= self.lease

    def is_stuck(self, now: float) -> bool:
        """Tell whether all workers run very long: what is claimed now would wait behind them."""
        return sum(self.has_outlived(held, now) for held in list(self.held.values())) >= self.concurrency

    def may_start(self, held: Held) -> bool:
        """Tell whether lease and ownership may be trusted: a process that was stopped and goes on finds them old."""
        now = time.monotonic()
        return not held.lost and now - held.confirmed <= self.lease / 2 and now < self.owned_until


def take(lane: Lane, *, block: bool = True, waiting: SimpleQueue[Held | None] | None = None) -> list[Held]:
    """
    Take what a worker handles next: one message, or a batch of those that wait. Empty: the worker ends.

    ``waiting``: what waits for this kind of worker (None: for threads).
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
