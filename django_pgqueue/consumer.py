"""
Run handlers over queues: claim, handle, settle, until told to stop.

One process, these threads: the one that calls ``Consumer.run`` claims and settles; each lane (one
queue with its handler) has worker threads, or tasks on one event loop; one thread extends leases,
one beats, one listens. The threads that are the library's have connections of their own, so nothing
that a handler does to its connection reaches them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from uuid import uuid4

from asgiref.sync import sync_to_async
from django.db import connections, reset_queries, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_pgqueue import services, signals
from django_pgqueue.conf import settings
from django_pgqueue.exceptions import Nack, Reject
from django_pgqueue.heartbeat import Heartbeat
from django_pgqueue.listener import Listener
from django_pgqueue.loop import DATABASE_FAULTS, Outage, describe, own_connection, run_every
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
# Seconds between two polls while notifications don't arrive.
POLL_INTERVAL_UNHEARD = 1.0
# Leases, heartbeat, listener: the threads that come first, and end within so many seconds.
OWN_THREADS = 3
JOIN_TIMEOUT = 1.0
# Seconds for which an extension tries rows that somebody else has locked; the next one is soon.
EXTEND_PATIENCE = 0.2
# Seconds after which a message comes back whose back-off could not be computed.
FALLBACK_DELAY = 60.0
# How many orphans one look adopts.
ADOPT_BATCH = 1_000


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
    function: Callable[[Message], Any]
    concurrency: int
    ack: str
    timeout: float
    is_async: bool


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
    #: Set by other threads: somebody published since the last claim was sent.
    woken: bool = False
    #: A claim met a suspect and left it; how many were taken in a row.
    suspect_waiting: bool = False
    suspects_in_row: int = 0
    #: Of an async handler: the event loop, and its event that something is waiting.
    loop: asyncio.AbstractEventLoop | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def queue(self) -> ConsumableQueue:
        return self.handler.queue

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
    def is_low(self) -> bool:
        """Few are waiting: a claim now keeps the workers busy, and is not for one message only."""
        return self.waiting.qsize() <= self.prefetch // 2

    def is_ripe(self, now: float) -> bool:
        """Finished messages have waited for others long enough."""
        return bool(self.finished) and (
            len(self.finished) >= SETTLE_BATCH or self.waiting.empty() or now - self.finished_since >= SETTLE_DELAY
        )


class Consumer:
    """
    ``concurrency``: how many messages of each queue are handled at once (None: as each handler
    says). ``prefetch``: how many of each queue are held. ``drain``: end when nothing is ready and
    nothing is held. ``max_messages``: end after so many. ``grace``: seconds that running handlers
    get after ``stop()``.
    """

    def __init__(
        self,
        handlers: Sequence[Handler],
        *,
        concurrency: int | None = None,
        prefetch: int | None = None,
        drain: bool = False,
        max_messages: int | None = None,
        grace: float = 30.0,
    ) -> None:
        aliases = {handler.queue.using for handler in handlers}
        if len(aliases) != 1:
            raise ValueError(f"a consumer takes queues of one database, not of {sorted(aliases) or 'none'}")
        self.id = uuid4()
        (self.using,) = aliases
        self.drain = drain
        self.max_messages = max_messages
        self.grace = check_seconds(grace, "grace")
        self.handled = 0
        self._claimed = 0
        self._lanes = tuple(
            Lane(
                handler,
                concurrency=concurrency or handler.concurrency,
                # At least one for each worker, or some would never get any.
                prefetch=max(prefetch or settings.PREFETCH, concurrency or handler.concurrency),
            )
            for handler in handlers
        )
        self._turns = 0
        self._by_name = {lane.queue.name: lane for lane in self._lanes}
        self._heartbeat = Heartbeat(
            self.using, declared=[lane.queue.declaration for lane in self._lanes], consumer=self.id
        )
        self._listener = Listener(
            settings.LISTEN_DATABASE or self.using,
            {services.channel(name): name for name in self._by_name},
            self._wake,
        )
        self._event = threading.Event()
        self._stopping = threading.Event()
        self._stopping_now = threading.Event()
        self._ended = threading.Event()
        self._outage = Outage("consumer")
        # Raised with each outage: workers then drop connections that may be dead.
        self._outages = 0
        # The suspect that is being handled: nothing else is claimed meanwhile.
        self._solo: tuple[Lane, Held] | None = None

    # --- From outside ---

    def stop(self, *, now: bool = False) -> None:
        """
        Stop claiming, let running handlers end within ``grace`` seconds, give back the rest.

        With ``now`` don't wait for handlers; their leases run out. May be called from any thread, but
        not from a signal handler: that may have interrupted a thread which holds the lock needed here.
        """
        self._stopping.set()
        if now:
            self._stopping_now.set()
        self._event.set()

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop()`` was called."""
        return self._stopping.is_set()

    @property
    def has_abandoned(self) -> bool:
        """Whether handlers outlived the grace: after ``run()`` they still run, in daemon threads."""
        return self._ended.is_set() and bool(self._held())

    def run(self) -> int:
        """Consume until stopped, drained or done. Returns how many messages were handled."""
        names = sorted(self._by_name)
        with own_connection(self.using, "consumer"):
            self._start()
            signals.consumer_started.send_robust(self.id, using=self.using, queues=names)
            threads = self._threads()
            for thread in threads:
                thread.start()
            try:
                self._consume()
                self._finish()
            finally:
                self._ended.set()
                for lane in self._lanes:
                    for _ in range(lane.concurrency):
                        lane.put(None)
                with contextlib.suppress(*DATABASE_FAULTS):
                    services.forget_consumer(self.id, self.using)
                # All end at once, but for workers in a handler that outlived its grace.
                for thread in threads[:OWN_THREADS] if self._held() else threads:
                    thread.join(timeout=JOIN_TIMEOUT)
                signals.consumer_stopped.send_robust(self.id, using=self.using, queues=names)
        return self.handled

    # --- Start and end ---

    def _start(self) -> None:
        """Declare the queues and write the first heartbeat, however long the database is away."""
        while not self._stopping.is_set():
            try:
                for lane in sorted(self._lanes, key=lambda lane: lane.queue.name):
                    services.declare(lane.queue.declaration, self.using)
                self._heartbeat.run_once()
            except DATABASE_FAULTS as error:
                if not is_passing(error):
                    raise
                self._pause(error)
            else:
                self._outage.recovered()
                return

    def _threads(self) -> list[threading.Thread]:
        lease = min(lane.queue.lease for lane in self._lanes)
        own: list[tuple[str, Callable[[], object]]] = [
            ("leases", lambda: self._every(lease / 3, self._extend, "leases")),
            (
                "heartbeat",
                lambda: self._every(settings.HEARTBEAT_INTERVAL, self._heartbeat.run_once, "heartbeat"),
            ),
            ("listener", self._listen),
        ]
        async_lanes = [lane for lane in self._lanes if lane.handler.is_async]
        if async_lanes:
            own.append(("async", lambda: asyncio.run(self._work_async(async_lanes))))
        own += [
            (f"{lane.queue.name}/{number}", lambda lane=lane: self._work(lane))  # type: ignore[misc]
            for lane in self._lanes
            if not lane.handler.is_async
            for number in range(lane.concurrency)
        ]
        # Daemons: a handler that outlives its grace must not keep the process.
        return [threading.Thread(target=target, name=f"pgqueue {name}", daemon=True) for name, target in own]

    def _listen(self) -> None:
        if not self.drain:
            self._listener.run(self._ended)

    def _every(self, interval: float, run_once: Callable[[], object], loop: str) -> None:
        with own_connection(self.using, loop):
            # The first beat was at the start, the first lease is young.
            self._ended.wait(interval)
            run_every(lambda: interval, run_once, self._ended, alias=self.using, loop=loop)

    def _finish(self) -> None:
        """Give back what did not start, wait for what runs, settle it all."""
        deadline = time.monotonic() + self.grace
        while True:
            for lane in self._lanes:
                self._give_back_waiting(lane)
            with self._database():
                self._settle(self._lanes)
            running = any(lane.held for lane in self._lanes)
            if not running or self._stopping_now.is_set() or time.monotonic() >= deadline:
                break
            self._event.wait(SETTLE_DELAY)
            self._event.clear()
        for lane in self._lanes:
            if lane.held:
                logger.warning(
                    "handlers outlived the grace, their leases run out queue=%s ids=%s",
                    lane.queue.name,
                    list(lane.held),
                )

    def _give_back_waiting(self, lane: Lane) -> None:
        with contextlib.suppress(Empty):
            while held := lane.waiting.get_nowait():
                lane.finished.append((held, RELEASE))

    # --- The claiming thread ---

    def _consume(self) -> None:
        while not self._stopping.is_set():
            # Cleared before looking: what comes after that wakes the wait below at once.
            self._event.clear()
            with self._database():
                now = time.monotonic()
                self._settle([lane for lane in self._lanes if lane.is_ripe(now)])
                for lane in self._turn():
                    self._claim(lane)
                self._outage.recovered()
            if self._is_done():
                return
            self._event.wait(self._nap())

    @contextlib.contextmanager
    def _database(self) -> Iterator[None]:
        """Survive the database's absence: wait, with a fresh connection afterwards."""
        try:
            yield
        except DATABASE_FAULTS as error:
            self._pause(error)

    def _pause(self, error: Exception) -> None:
        connections[self.using].close()
        self._outages += 1
        # Not the event: finished handlers set that, and would shorten the pause.
        stop = self._stopping_now if self._stopping.is_set() else self._stopping
        stop.wait(self._outage.failed(error))

    def _turn(self) -> list[Lane]:
        """Return the lanes to claim for, another first each time."""
        now = time.monotonic()
        if self._is_solo(now):
            return []
        suspected = [lane for lane in self._lanes if lane.suspect_waiting and not is_stuck(lane, now)]
        if suspected:
            # Nothing is claimed until nothing else is at risk; then one of them comes first.
            return suspected[:1] if self._is_alone(now) else []
        self._turns += 1
        first = self._turns % len(self._lanes)
        return [
            lane
            for lane in self._lanes[first:] + self._lanes[:first]
            if lane.next_look <= now and self._is_open(lane, now)
        ]

    def _is_open(self, lane: Lane, now: float) -> bool:
        """Tell whether the lane has use for more messages."""
        return lane.is_low and self._room(lane) > 0 and not is_stuck(lane, now)

    def _is_solo(self, now: float) -> bool:
        """Tell whether a suspect is being handled that others must not be beside."""
        if self._solo is None:
            return False
        lane, held = self._solo
        if lane.held.get(held.message.id) is held and not has_outlived(lane, held, now):
            return True
        self._solo = None
        return False

    def _is_alone(self, now: float) -> bool:
        """Tell whether a suspect may be taken: nothing is held, but for handlers that run very long."""
        return all(has_outlived(lane, held, now) for lane in self._lanes for held in lane.held.values())

    def _room(self, lane: Lane) -> int:
        room = lane.prefetch - len(lane.held)
        return room if self.max_messages is None else min(room, self.max_messages - self._claimed)

    def _held(self) -> int:
        return sum(len(lane.held) for lane in self._lanes)

    def _claim(self, lane: Lane) -> None:
        room = self._room(lane)
        before = time.monotonic()
        if room <= 0 or self._stopping.is_set() or self._is_solo(before):
            return
        if lane.woken:
            lane.woken = False
            lane.look_again = True
        # Every so often others get a turn.
        is_others_turn = lane.suspects_in_row >= lane.prefetch
        claim = services.claim(
            lane.queue.declaration,
            self.using,
            limit=room,
            lease=lane.queue.lease,
            consumer=self.id,
            suspects=self._is_alone(before),
            skip_suspects=is_others_turn,
        )
        self._claimed += len(claim.messages)
        is_suspect = bool(claim.messages) and claim.messages[0].suspect
        lane.suspects_in_row = lane.suspects_in_row + 1 if is_suspect else 0
        lane.suspect_waiting = claim.suspect_met
        for message in claim.messages:
            held = Held(message, before)
            lane.held[message.id] = held
            if is_suspect:
                self._solo = lane, held
            lane.put(held)
        is_more = is_suspect or claim.suspect_met or is_others_turn or len(claim.messages) >= room
        self._plan_look(lane, claim, is_more=is_more)

    def _plan_look(self, lane: Lane, claim: services.Claim, *, is_more: bool) -> None:
        now = time.monotonic()
        if is_more or claim.dead_lettered or (claim.messages and self.drain):
            lane.next_look = now
        elif (claim.messages or lane.look_again) and not self.drain:
            # A publisher that had just sent a wake-up did not send another: look once more.
            lane.look_again = bool(claim.messages)
            lane.next_look = now + settings.NOTIFY_INTERVAL
        else:
            lane.next_look = now + self._sleep(lane)
        if lane.woken:
            # Since the claim: what was published may be newer than all that was seen above.
            lane.next_look = now

    def _sleep(self, lane: Lane) -> float:
        """Return how long the lane may sleep; mend its queue on the way."""
        look = services.look(lane.queue.name, self.using)
        if not look.exists:
            services.declare(lane.queue.declaration, self.using)
        if look.orphans and services.adopt(lane.queue.name, ADOPT_BATCH, self.using):
            return 0.0
        interval = settings.POLL_INTERVAL
        if not self._listener.listening:
            interval = min(interval, POLL_INTERVAL_UNHEARD)
        if look.due_in is None:
            return interval
        # What is due and was not claimed (just now due, locked, paused) must not make this spin;
        # but a drain ends when nothing is to be looked at soon.
        return min(interval, max(look.due_in, 0.0 if self.drain else SETTLE_DELAY))

    def _nap(self) -> float:
        """Return how long this thread may wait, unless an event cuts it short."""
        if any(lane.finished for lane in self._lanes):
            return SETTLE_DELAY
        now = time.monotonic()
        looks = [lane.next_look - now for lane in self._lanes if self._is_open(lane, now)]
        # What is claimed next also waits for handlers that run alone; those end with an event.
        is_quiet = self._held() and any(lane.suspect_waiting and not is_stuck(lane, now) for lane in self._lanes)
        waits = self._is_solo(now) or is_quiet
        return settings.POLL_INTERVAL if waits or not looks else min(max(min(looks), 0.0), settings.POLL_INTERVAL)

    def _is_done(self) -> bool:
        if self._held():
            return False
        if self.max_messages is not None and self._claimed >= self.max_messages:
            return True
        # Only a look that found nothing plans the next one in the future.
        now = time.monotonic()
        return self.drain and all(lane.next_look > now and not lane.suspect_waiting for lane in self._lanes)

    def _wake(self, name: str | None) -> None:
        for lane in self._lanes if name is None else [self._by_name[name]]:
            lane.wake()
        self._event.set()

    # --- Settling ---

    def _settle(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            # As many as there are now: workers may append meanwhile.
            batch = [lane.finished[index] for index in range(len(lane.finished))]
            self._settle_batch(lane, batch)
            for _ in batch:
                lane.finished.popleft()
            if batch and self.drain:
                # Its handler may have published, to any queue: a drain ends with a look after that.
                for each in self._lanes:
                    each.next_look = 0.0

    def _settle_batch(self, lane: Lane, batch: list[tuple[Held, Outcome]]) -> None:
        """Settle finished messages. A fault leaves the whole batch for the next time: settling is fenced."""
        by_verb: dict[str, list[tuple[Held, Outcome]]] = {}
        for held, outcome in batch:
            # Another object under this id: its lease lapsed here, and it was claimed again.
            if lane.held.get(held.message.id) is held:
                by_verb.setdefault(outcome.verb, []).append((held, outcome))
        for verb, ended in by_verb.items():
            messages = [held.message for held, _ in ended]
            lost = self._settle_as(verb, lane, messages, [outcome for _, outcome in ended])
            for message in messages:
                del lane.held[message.id]
            if verb == "release":
                self._claimed -= len(messages)
            else:
                self.handled += len(messages) - len(lost)

    def _settle_as(self, verb: str, lane: Lane, messages: list[Message], outcomes: list[Outcome]) -> set[int]:
        reasons = [outcome.reason for outcome in outcomes]
        if verb == "ack":
            return services.ack(messages, self.using)
        if verb == "nack":
            delays = [outcome.delay for outcome in outcomes]
            # Leased until now, they were not seen by the look that planned the next one.
            lane.look_within(min(delays))
            return services.nack(lane.queue.declaration, messages, delays, reasons, self.using)
        if verb == "reject":
            return services.reject(lane.queue.declaration, messages, reasons, self.using)
        if verb == "release":
            lost = services.release(messages, self.using)
            # Others may be idle, and this process may be about to end.
            services.notify(lane.queue.name, self.using)
            return lost
        return set()

    # --- Leases ---

    def _extend(self) -> None:
        for lane in self._lanes:
            now = time.monotonic()
            held = [
                held
                for held in list(lane.held.values())
                if not held.lost and (held.started is None or now - held.started < lane.handler.timeout)
            ]
            if not held:
                continue
            # A claim beside this locks what it looks at, for a moment.
            messages = [one.message for one in held]
            patience = min(EXTEND_PATIENCE, lane.queue.lease / 10)
            extension = services.extend(messages, lane.queue.lease, self.using, patience=patience)
            for one in held:
                if one.message.id in extension.extended:
                    one.confirmed = now
                elif one.message.id in extension.lost and one.message.id in lane.held:
                    # Settled meanwhile, or lost: either way a waiting one must not start.
                    one.lost = True

    def _may_start(self, lane: Lane, held: Held) -> bool:
        # A process that was stopped and goes on finds its leases old: it may not trust them.
        return not held.lost and time.monotonic() - held.confirmed <= lane.queue.lease / 2

    # --- Handling ---

    def _work(self, lane: Lane) -> None:
        """One worker thread of a lane with a sync handler."""
        handle = {"late": self._handle, "early": self._handle_early, "atomic": self._handle_atomic}[lane.handler.ack]
        guard = ConnectionGuard()
        while held := lane.waiting.get():
            guard.before(self._outages)
            if self._may_start(lane, held):
                held.started = time.monotonic()
                outcome = handle(lane, held.message)
            else:
                outcome = RELEASE
            guard.after()
            self._finished(lane, held, outcome)
        guard.close()

    def _finished(self, lane: Lane, held: Held, outcome: Outcome) -> None:
        lane.finished.append((held, outcome))
        # Workers may append at the same time, and then none of them sees a length of 1.
        if len(lane.finished) <= lane.concurrency:
            lane.finished_since = time.monotonic()
            self._event.set()
        elif len(lane.finished) >= SETTLE_BATCH or lane.waiting.empty():
            self._event.set()

    def _handle(self, lane: Lane, message: Message) -> Outcome:
        try:
            call(lane.handler, message)
        except BaseException as error:
            return self._failure(lane, message, error)
        return ACK

    def _handle_early(self, lane: Lane, message: Message) -> Outcome:
        try:
            if services.ack([message], self.using):
                return SETTLED
        except DATABASE_FAULTS as error:
            return self._failure(lane, message, error)
        try:
            call(lane.handler, message)
        except BaseException:
            logger.exception("handler failed after an early ack queue=%s id=%s", lane.queue.name, message.id)
        return SETTLED

    def _handle_atomic(self, lane: Lane, message: Message) -> Outcome:
        lost: set[int] = set()
        try:
            # In a stricter one the ack would fail whenever the lease was extended after it began.
            is_read_committed = services.is_read_committed(self.using)
            with transaction.atomic(using=self.using):
                if not is_read_committed:
                    services.make_read_committed(self.using)
                call(lane.handler, message)
                # The last statement: until here nobody else waits for the message's row.
                lost = services.ack([message], self.using)
                if lost:
                    transaction.set_rollback(True, using=self.using)
        except BaseException as error:
            return self._failure(lane, message, error)
        return SETTLED

    def _failure(self, lane: Lane, message: Message, error: BaseException) -> Outcome:
        if isinstance(error, Reject):
            return Outcome("reject", error.reason or "rejected")
        reason = error.reason or "nack" if isinstance(error, Nack) else text_of(error)
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

    async def _work_async(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.loop = asyncio.get_running_loop()
        guard = ConnectionGuard()
        await asyncio.gather(*(self._work_lane_async(lane, guard) for lane in lanes for _ in range(lane.concurrency)))
        await sync_to_async(guard.close)()

    async def _work_lane_async(self, lane: Lane, guard: ConnectionGuard) -> None:
        while held := await self._take_async(lane):
            if guard.is_needed(self._outages):
                await sync_to_async(guard.before)(self._outages)
            if self._may_start(lane, held):
                held.started = time.monotonic()
                outcome = await self._handle_async(lane, held.message)
            else:
                outcome = RELEASE
            if outcome.verb != "ack":
                await sync_to_async(guard.after)()
            self._finished(lane, held, outcome)

    async def _take_async(self, lane: Lane) -> Held | None:
        while True:
            # Cleared before looking, so that what comes after the look is not slept through.
            lane.arrived.clear()
            try:
                return lane.waiting.get_nowait()
            except Empty:
                await lane.arrived.wait()

    async def _handle_async(self, lane: Lane, message: Message) -> Outcome:
        is_early = lane.handler.ack == "early"
        try:
            if is_early and await sync_to_async(services.ack)([message], self.using):
                return SETTLED
        except DATABASE_FAULTS as error:
            return self._failure(lane, message, error)
        try:
            await lane.handler.function(message)
        except BaseException as error:
            if is_early:
                logger.exception("handler failed after an early ack queue=%s id=%s", lane.queue.name, message.id)
                return SETTLED
            return self._failure(lane, message, error)
        return SETTLED if is_early else ACK


class ConnectionGuard:
    """Give each message usable connections, whatever the one before did to them."""

    def __init__(self) -> None:
        self._used = time.monotonic()
        self._outages = 0

    def is_needed(self, outages: int) -> bool:
        """Connections may have died: the database was away, or they were idle for a while."""
        return outages != self._outages or time.monotonic() - self._used > CONNECTION_IDLE

    def before(self, outages: int) -> None:
        """Drop connections that died."""
        if self.is_needed(outages):
            self._outages = outages
            self._used = time.monotonic()
            for connection in connections.all(initialized_only=True):
                if connection.connection is not None and not connection.in_atomic_block and not connection.is_usable():
                    self._drop(connection)

    def after(self) -> None:
        """Drop connections that the handler broke or left in a transaction."""
        self._used = time.monotonic()
        reset_queries()
        for connection in connections.all(initialized_only=True):
            if connection.connection is None:
                continue
            if connection.in_atomic_block or not connection.autocommit:
                self._drop(connection)
            elif connection.errors_occurred:
                if connection.is_usable():
                    connection.errors_occurred = False
                else:
                    self._drop(connection)

    def _drop(self, connection: BaseDatabaseWrapper) -> None:
        # A fresh wrapper too: the old one may believe that it is inside a transaction.
        with contextlib.suppress(*DATABASE_FAULTS):
            connection.close()
        del connections[connection.alias]

    def close(self) -> None:
        """Close this thread's connections."""
        connections.close_all()


def has_outlived(lane: Lane, held: Held, now: float) -> bool:
    """
    Tell whether a handler has been running for longer than a lease.

    It is unlikely to kill its worker then, and what it is beside need not wait for its end: it may run for hours.
    """
    return held.started is not None and now - held.started >= lane.queue.lease


def is_stuck(lane: Lane, now: float) -> bool:
    """Tell whether all workers of a lane run very long: what it claimed would wait behind them."""
    return sum(has_outlived(lane, held, now) for held in list(lane.held.values())) >= lane.concurrency


def call(handler: Handler, message: Message) -> None:
    """Call a sync handler. One that hands out a coroutine has not done its work, and must not be acked."""
    result = handler.function(message)
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(f"{handler.function!r} returned a coroutine; a handler is async def itself, or not async")


def text_of(error: BaseException) -> str:
    """Return an exception's class and text, also when its text cannot be had."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    return f"{type(error).__module__}.{type(error).__qualname__}: {text}"


def is_passing(error: BaseException) -> bool:
    """Tell a fault that passes (server away, restarting, read-only) from one that needs a person."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    # No SQLSTATE: the connection broke or was refused. Else by class of SQLSTATE: 08 connection, 25
    # transaction state (read-only), 40 rollback, 53 resources, 55 object in use, 57 operator, 58 system.
    return sqlstate is None or sqlstate[:2] in {"08", "25", "40", "53", "55", "57", "58"}
