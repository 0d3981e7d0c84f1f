"""
Run handlers over queues: claim, handle, settle, until told to stop.

One process, these threads: the one that calls ``Consumer.run`` claims and settles; each lane (one
queue with its handler) has worker threads, or tasks on one event loop; one thread extends leases,
one beats; the process's listener wakes. The threads that are the library's have connections of their own, so nothing
that a handler does to its connection reaches them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty
from uuid import uuid4

from django.db import ProgrammingError, connections, reset_queries

from django_pgqueue import signals
from django_pgqueue.conf import settings
from django_pgqueue.consumer.handler import RELEASE, Handler, Outcome
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.consumer.lane import SETTLE_DELAY, Held, Lane
from django_pgqueue.consumer.testcase import as_in_worker
from django_pgqueue.consumer.workers import Workers
from django_pgqueue.message import Message
from django_pgqueue.runtime.connections import own_connection
from django_pgqueue.runtime.listener import Ear, Receive, listener_of
from django_pgqueue.runtime.loop import DATABASE_FAULTS, Outage, describe, is_passing, run_every
from django_pgqueue.services import claiming, consumers, declaring, minutes, notifying, operating, reaping, settling
from django_pgqueue.validation import check_seconds

logger = logging.getLogger("django_pgqueue")

# Seconds between two polls while notifications don't arrive.
POLL_INTERVAL_UNHEARD = 1.0
# Leases and heartbeat: the threads that come first, and end within so many seconds.
OWN_THREADS = 2
JOIN_TIMEOUT = 1.0
# Seconds for which an extension tries rows that somebody else has locked; the next one is soon.
EXTEND_PATIENCE = 0.2
# An extension is due after a third of a lease; past this share of it something holds it up.
LATE = 0.75
# How many orphans one look adopts.
ADOPT_BATCH = 1_000
# One claim takes no more once it has so many bytes, as CLAIM counts them; nothing is claimed while so many
# characters of JSON are held.
CLAIM_BYTES = 8 * 1024 * 1024
HELD_SIZE = 64 * 1024 * 1024
# An owner that missed so many heartbeats starts nothing, half an interval before others may take over.
TRUSTED_HEARTBEATS = consumers.MISSED_HEARTBEATS - 0.5


@dataclass(frozen=True, slots=True)
class Condition:
    """How a consumer is. Ages in seconds; None: it has not happened yet."""

    #: Since the claiming thread began its last turn. It begins one at least every POLL_INTERVAL.
    turn_age: float | None
    #: Since the last claim was sent.
    claim_age: float | None
    listening: bool
    #: Whether the claiming thread has begun to claim, and has the database.
    connected: bool
    stopping: bool
    held: int
    handled: int


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
        if not connections[self.using].settings_dict["AUTOCOMMIT"] and any(each.ack != "late" for each in handlers):
            # Both commit for the handler, which is its own business there.
            raise ValueError(
                f"ack='early', ack='atomic' and tasks need AUTOCOMMIT on the database alias {self.using!r}"
            )
        self.drain = drain
        self.max_messages = max_messages
        self.grace = check_seconds(grace, "grace")
        self.handled = 0
        self._claimed = 0
        self._lanes = tuple(
            Lane(
                handler,
                concurrency=concurrency or handler.concurrency,
                prefetch=held_at_most(handler, concurrency or handler.concurrency, prefetch or settings.PREFETCH),
            )
            for handler in handlers
        )
        self._turns = 0
        # Monotonic time of the claiming thread's last turn.
        self._turned: float | None = None
        # Monotonic time until which others see that this process lives.
        self._seen_until = 0.0
        self._heartbeat = Heartbeat(
            self.using, declared=[lane.handler.declaration for lane in self._lanes], consumer=self.id
        )
        self._ear = Ear({notifying.channel(lane.queue.name): self._receiver(lane) for lane in self._lanes})
        self._event = threading.Event()
        self._stopping = threading.Event()
        self._stopping_now = threading.Event()
        self._ended = threading.Event()
        # Held while the minute's counts are written: at the end a last beat may be on its way.
        self._telling = threading.Lock()
        self._outage = Outage("consumer")
        #: Inside a TestCase: no thread but the calling one.
        self._is_inline = False
        self._workers = Workers(self.using, self._wake)
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

    def _wake(self) -> None:
        # Looked at first, since setting it takes a lock. What it tells of has happened before this line, and
        # the claiming thread clears it before it looks.
        if not self._event.is_set():
            self._event.set()

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop()`` was called."""
        return self._stopping.is_set()

    @property
    def queues(self) -> list[str]:
        """The names of its queues."""
        return sorted(lane.queue.name for lane in self._lanes)

    def condition(self) -> Condition:
        """Tell how it is, from any thread and without the database."""
        now = time.monotonic()
        asked = max(lane.asked for lane in self._lanes)
        return Condition(
            turn_age=None if self._turned is None else now - self._turned,
            claim_age=now - asked if asked else None,
            listening=self._ear.listening.is_set(),
            connected=asked > 0 and not self._outage.attempts,
            stopping=self.is_stopping,
            held=self._held(),
            handled=self.handled,
        )

    @property
    def has_abandoned(self) -> bool:
        """Whether handlers outlived the grace: after ``run()`` they still run, in daemon threads."""
        return self._ended.is_set() and bool(self._held())

    def run(self) -> int:
        """
        Consume until stopped, drained or done. Returns how many messages were handled.

        Inside a ``TestCase`` handlers run in the calling thread, one after the other, on the test's
        connection, where each of their statements stands alone as in autocommit. Inside any other
        transaction it raises ``RuntimeError``: its leases could roll back.
        """
        names = self.queues
        self._turned = time.monotonic()
        self._is_inline = connections[self.using].in_atomic_block
        if self._is_inline:
            for lane in self._lanes:
                lane.handler = as_in_worker(lane.handler)
        with own_connection(self.using, "consumer"):
            self._start()
            signals.consumer_started.send_robust(self.id, using=self.using, queues=names)
            threads = [] if self._is_inline else self._threads()
            for thread in threads:
                thread.start()
            listener = listener_of(settings.LISTEN_DATABASE or self.using)
            if not self.drain:
                listener.add(self._ear)
            try:
                self._consume()
                self._finish()
            finally:
                self._ended.set()
                listener.remove(self._ear)
                for lane in self._lanes:
                    for _ in range(lane.concurrency):
                        lane.put(None)
                with contextlib.suppress(*DATABASE_FAULTS):
                    self._tell_minute()
                    consumers.forget_consumer(self.id, self.using)
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
                    declaring.declare(lane.handler.declaration, self.using)
                self._beat()
            except DATABASE_FAULTS as error:
                if not is_passing(error):
                    raise
                self._pause(error)
            else:
                self._outage.recovered()
                return

    def _threads(self) -> list[threading.Thread]:
        lease = min(lane.lease for lane in self._lanes)
        own: list[tuple[str, Callable[[], object]]] = [
            ("leases", lambda: self._every(lease / 3, self._extend, "leases")),
            (
                "heartbeat",
                lambda: self._every(settings.HEARTBEAT_INTERVAL, self._beat, "heartbeat"),
            ),
        ]
        async_lanes = [lane for lane in self._lanes if lane.handler.uses_loop]
        if async_lanes:
            own.append(("async", lambda: asyncio.run(self._workers.work_async(async_lanes))))
        own += [
            (f"{lane.queue.name}/{number}", lambda lane=lane: self._workers.work(lane))  # type: ignore[misc]
            for lane in self._lanes
            if not lane.handler.is_async
            for number in range(lane.concurrency)
        ]
        # Daemons: a handler that outlives its grace must not keep the process.
        return [threading.Thread(target=target, name=f"pgqueue {name}", daemon=True) for name, target in own]

    def _beat(self) -> None:
        sent = time.monotonic()
        # Afresh: a queue may have been bound or unbound since.
        self._heartbeat.declared = {lane.queue.name: lane.handler.declaration for lane in self._lanes}
        self._heartbeat.run_once()
        self._seen_until = sent + TRUSTED_HEARTBEATS * settings.HEARTBEAT_INTERVAL
        now = time.monotonic()
        for lane in self._lanes:
            if lane.is_exclusive and now < lane.owned_until:
                lane.owned_until = self._seen_until
            elif lane.is_exclusive:
                # Too late: another may own the queue. A claim tells, and there was none meanwhile.
                self._event.set()
        self._tell_minute()

    def _tell_minute(self) -> None:
        """Add what was done since the last time to the queues' minutes."""
        with self._telling:
            tallies = {lane: lane.counted for lane in self._lanes}
            tallies = {lane: tally for lane, tally in tallies.items() if tally != lane.told}
            if not tallies:
                return
            news = {lane.queue.name: tally.since(lane.told) for lane, tally in tallies.items()}
            try:
                minutes.count_minute(news, self.using)
            except ProgrammingError as error:
                # Not migrated yet, or without the rights: a chart is no reason to miss heartbeats.
                logger.warning("minute not told error=%s", describe(error))
            for lane, tally in tallies.items():
                lane.told = tally

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
        for waiting in {lane.waiting, lane.loop_waiting}:
            with contextlib.suppress(Empty):
                while held := waiting.get_nowait():
                    lane.finished.append((held, RELEASE))

    # --- The claiming thread ---

    def _consume(self) -> None:
        while not self._stopping.is_set():
            self._turned = time.monotonic()
            # Cleared before looking: what comes after that wakes the wait below at once.
            self._event.clear()
            with self._database():
                now = time.monotonic()
                self._settle([lane for lane in self._lanes if lane.is_ripe(now)])
                self._heed_pause(now)
                for lane in self._turn():
                    self._claim(lane)
                self._outage.recovered()
            if self._is_done():
                return
            if not self._is_inline:
                # With DEBUG on, Django would keep them all. A test may just count them.
                reset_queries()
            self._event.wait(self._nap())

    @contextlib.contextmanager
    def _database(self) -> Iterator[None]:
        """Survive the database's absence: wait, with a fresh connection afterwards."""
        try:
            yield
        except DATABASE_FAULTS as error:
            self._pause(error)

    def _pause(self, error: Exception) -> None:
        if self._is_inline:
            # A connection that is closed takes the test's transaction along.
            raise error
        self._turned = time.monotonic()
        connections[self.using].close()
        self._workers.outages += 1
        # Not the event: finished handlers set that, and would shorten the pause.
        stop = self._stopping_now if self._stopping.is_set() else self._stopping
        stop.wait(self._outage.failed(error))

    def _heed_pause(self, now: float) -> None:
        """Give back what waits on a paused queue, also where there is no room for the claim that would tell."""
        for lane in self._lanes:
            has_waiting = not (lane.waiting.empty() and lane.loop_waiting.empty())
            if has_waiting and now - lane.asked >= settings.POLL_INTERVAL:
                lane.asked = now
                if operating.is_paused(lane.queue.name, self.using):
                    self._give_back_waiting(lane)

    def _turn(self) -> list[Lane]:
        """Return the lanes to claim for, another first each time."""
        now = time.monotonic()
        for lane in self._lanes:
            if now >= lane.owned_until:
                # Another may own the queue by now: what has not started is for whoever does.
                self._give_back_waiting(lane)
        if self._is_solo(now):
            return []
        suspected = [lane for lane in self._lanes if lane.suspect_waiting and not lane.is_stuck(now)]
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
        is_full = bool(lane.held) and sum(each.size for each in self._lanes) >= HELD_SIZE
        is_seen = not lane.is_exclusive or now < self._seen_until
        return lane.is_low and self._room(lane) > 0 and not is_full and is_seen and not lane.is_stuck(now)

    def _is_solo(self, now: float) -> bool:
        """Tell whether a suspect is being handled that others must not be beside."""
        if self._solo is None:
            return False
        lane, held = self._solo
        if lane.held.get(held.message.id) is held and not lane.has_outlived(held, now):
            return True
        self._solo = None
        return False

    def _is_alone(self, now: float) -> bool:
        """Tell whether a suspect may be taken: nothing is held, but for handlers that run very long."""
        return all(lane.has_outlived(held, now) for lane in self._lanes for held in lane.held.values())

    def _room(self, lane: Lane) -> int:
        room = lane.prefetch - len(lane.held)
        return room if self.max_messages is None else min(room, self.max_messages - self._claimed)

    def _held(self) -> int:
        return sum(len(lane.held) for lane in self._lanes)

    def _claim(self, lane: Lane) -> None:
        room = self._room(lane)
        seen_until = self._seen_until
        before = time.monotonic()
        if room <= 0 or self._stopping.is_set() or self._is_solo(before):
            return
        if lane.is_exclusive and before >= seen_until:
            return
        lane.asked = before
        if lane.woken:
            lane.woken = False
            lane.look_again = True
        # Every so often others get a turn.
        is_others_turn = lane.suspects_in_row >= lane.prefetch
        above = lane.mark.start(before)
        claim = claiming.claim(
            lane.handler.declaration,
            self.using,
            limit=room,
            lease=lane.lease,
            consumer=self.id,
            suspects=self._is_alone(before),
            skip_suspects=is_others_turn,
            most_bytes=CLAIM_BYTES,
            above=above,
        )
        lane.mark.claimed(above, before, time.monotonic(), len(claim.messages), claim.walked)
        if claim.closed:
            # Paused, or another's by now: what has not started is for whoever may have it.
            self._give_back_waiting(lane)
        elif claim.messages and lane.is_exclusive:
            lane.owned_until = max(lane.owned_until, seen_until)
        self._claimed += len(claim.messages)
        lane.count_set_aside(claim.dead_lettered)
        is_suspect = bool(claim.messages) and claim.messages[0].suspect
        lane.suspects_in_row = lane.suspects_in_row + 1 if is_suspect else 0
        lane.suspect_waiting = claim.suspect_met
        if is_suspect or claim.suspect_met or is_others_turn:
            # What such a claim walked past, or left, may be below what it brought.
            lane.mark.drop()
        self._hold(lane, claim, before)
        if self._is_inline:
            self._workers.work_inline(lane)
        is_more = is_suspect or claim.suspect_met or is_others_turn or claim.more or len(claim.messages) >= room
        if above and self.drain and not is_more:
            # A drain ends when a look at all of the queue found nothing.
            lane.mark.drop()
            is_more = True
        self._plan_look(lane, claim, is_more=is_more)

    def _hold(self, lane: Lane, claim: claiming.Claim, claimed: float) -> None:
        for message in claim.messages:
            held = Held(message, claimed)
            if claim.waits:
                held.due = claimed - claim.waits[message.id]
            lane.held[message.id] = held
            if message.suspect:
                self._solo = lane, held
            lane.put(held)

    def _plan_look(self, lane: Lane, claim: claiming.Claim, *, is_more: bool) -> None:
        now = time.monotonic()
        if claim.closed:
            # Woken, it looks once more: what opens the queue may have been told together with something else.
            lane.next_look = now + (settings.NOTIFY_INTERVAL if lane.look_again else settings.POLL_INTERVAL)
            lane.look_again = False
        elif is_more or claim.dead_lettered or (claim.messages and self.drain):
            lane.next_look = now
        elif (claim.messages or lane.look_again) and not self.drain:
            # A publisher that had just sent a wake-up did not send another: look once more.
            lane.look_again = bool(claim.messages)
            lane.next_look = now + settings.NOTIFY_INTERVAL
        else:
            lane.next_look = now + self._sleep(lane)
        # What is below the mark tells nobody of itself.
        lane.next_look = min(lane.next_look, lane.mark.look_back_at)
        if lane.woken:
            # Since the claim: what was published may be newer than all that was seen above.
            lane.next_look = now

    def _sleep(self, lane: Lane) -> float:
        """Return how long the lane may sleep; mend its queue on the way."""
        look = claiming.look(lane.queue.name, self.using)
        if not look.exists:
            declaring.declare(lane.handler.declaration, self.using)
        if look.orphans and reaping.adopt(lane.queue.name, ADOPT_BATCH, self.using):
            return 0.0
        interval = settings.POLL_INTERVAL
        if not self._ear.listening.is_set():
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
        is_quiet = self._held() and any(lane.suspect_waiting and not lane.is_stuck(now) for lane in self._lanes)
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

    def _receiver(self, lane: Lane) -> Receive:
        def receive(notification: str | None) -> None:
            lane.wake()
            self._event.set()

        return receive

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
            self._settle_ended(verb, lane, ended)

    def _settle_ended(self, verb: str, lane: Lane, ended: Sequence[tuple[Held, Outcome]]) -> None:
        messages = [held.message for held, _ in ended]
        try:
            lost, dead_lettered = self._settle_as(verb, lane, messages, [outcome for _, outcome in ended])
        except DATABASE_FAULTS as error:
            if not is_of_a_row(error):
                raise
            # One of these rows is refused, by a trigger say. It holds up no other, and nobody for ever.
            if len(ended) > 1:
                for one in ended:
                    self._settle_ended(verb, lane, [one])
                return
            logger.exception("message not settled, its lease runs out queue=%s ids=%s", lane.queue.name, messages[0].id)
            lost, dead_lettered = {messages[0].id}, 0
        for message in messages:
            del lane.held[message.id]
        if verb == "release":
            self._claimed -= len(messages)
        elif done := len(messages) - len(lost):
            self.handled += done
            lane.count(verb, [each for each in messages if each.id not in lost] if lost else messages, dead_lettered)
            if verb in ("nack", "reject", "failed", "given up"):
                return
            signals.messages_handled.send_robust(lane.queue.name, using=self.using, count=done)

    def _settle_as(
        self, verb: str, lane: Lane, messages: list[Message], outcomes: list[Outcome]
    ) -> tuple[set[int], int]:
        """Settle them. Returns the ids whose lease was lost, and how many of the others were given up."""
        reasons = [outcome.reason for outcome in outcomes]
        if verb == "ack":
            return settling.ack(messages, self.using), 0
        if verb == "nack":
            delays = [outcome.delay for outcome in outcomes]
            # Leased until now, they were not seen by the look that planned the next one.
            lane.look_within(min(delays))
            lost, given_up = settling.nack(lane.handler.declaration, messages, delays, reasons, self.using)
            return lost, len(given_up)
        if verb == "reject":
            lost = settling.reject(lane.handler.declaration, messages, reasons, self.using)
            return lost, len(messages) - len(lost)
        if verb == "release":
            lost = settling.release(messages, self.using)
            # Others may be idle, and this process may be about to end.
            notifying.notify(lane.queue.name, self.using)
            return lost, 0
        if verb == "failed":
            lane.look_within(min(outcome.delay for outcome in outcomes))
        if verb == "lost":
            return {message.id for message in messages}, 0
        return set(), len(messages) if verb == "given up" else 0

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
            patience = min(EXTEND_PATIENCE, lane.lease / 10)
            extension = settling.extend(messages, lane.lease, self.using, patience=patience)
            late = [
                one.message.id
                for one in held
                if one.message.id in extension.extended and now - one.confirmed > lane.lease * LATE
            ]
            if late:
                # In time, but a little more and others would have taken them.
                logger.warning("leases extended late queue=%s ids=%s", lane.queue.name, late[:10])
            for one in held:
                if one.message.id in extension.extended:
                    one.confirmed = now
                elif one.message.id in extension.lost and one.message.id in lane.held:
                    # Settled meanwhile, or lost: either way a waiting one must not start.
                    one.lost = True


def held_at_most(handler: Handler, concurrency: int, prefetch: int) -> int:
    """Return how many messages of a queue may be held."""
    startable = concurrency * (handler.batch or 1)
    if handler.declaration.max_deliveries == 1:
        # What is claimed has been delivered: killed here, what waits would be given up without a start.
        return startable
    # At least enough for each worker, or some would never get any.
    return max(prefetch, startable)


def is_of_a_row(error: BaseException) -> bool:
    """Tell an error that a row's content makes, so that it comes again each time, and only for this row."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    # By class of SQLSTATE: 22 data, 23 integrity, 27 to 44 triggers, functions and views, 54 limits, P0 raised
    # by a function, XX corruption.
    return sqlstate is not None and sqlstate[:2] in {"22", "23", "27", "38", "39", "44", "54", "P0", "XX"}
