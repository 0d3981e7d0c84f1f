"""
Claim, handle and settle the messages of queues until the consumer is stopped.

A consumer process has these threads. The thread that calls ``Consumer.run`` claims and settles. Each lane (one queue
with its handler) has worker threads, or tasks on one event loop. One thread extends leases, one writes heartbeats, and
the process's listener wakes the claiming thread. The library's threads have their own connections, so a handler cannot
affect them through its connection.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from uuid import uuid4

from django.db import connections, reset_queries

from django_pgqueue import signals
from django_pgqueue.conf import settings
from django_pgqueue.consumer.claimer import Claimer
from django_pgqueue.consumer.handler import Handler
from django_pgqueue.consumer.handler_workers import HandlerWorkers, daemon
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.consumer.lane import SETTLE_DELAY, Held, Lane
from django_pgqueue.consumer.leases import Leases
from django_pgqueue.consumer.minute_report import MinuteReport
from django_pgqueue.consumer.settler import Settler
from django_pgqueue.consumer.testcase import as_in_worker
from django_pgqueue.runtime.connections import own_connection
from django_pgqueue.runtime.listener import ChannelSet, Receive, listener_of
from django_pgqueue.runtime.loop import DATABASE_FAULTS, Outage, is_passing, run_every
from django_pgqueue.services import consumers, declaring, notifying
from django_pgqueue.validation import check_seconds

logger = logging.getLogger("django_pgqueue")

# In seconds: how long threads may take to end after the last message was settled.
JOIN_TIMEOUT = 1.0
# An owner that has missed this many heartbeats starts no handlers, half an interval before others may take over.
TRUSTED_HEARTBEATS = consumers.MISSED_HEARTBEATS - 0.5


@dataclass(frozen=True, slots=True)
class Condition:
    """The state of a consumer. Ages are in seconds; None: it has not happened yet."""

    #: Seconds since the claiming thread began its last turn. It begins one at least every POLL_INTERVAL.
    turn_age: float | None
    #: Seconds since the last claim was sent.
    claim_age: float | None
    listening: bool
    #: Whether the claiming thread has begun to claim and the database is available to it.
    connected: bool
    stopping: bool
    held: int
    handled: int


class Workers(Protocol):
    """Handle the messages that are held, and put each into its lane's ``finished`` when its handler has ended."""

    def threads(self) -> list[threading.Thread]:
        """Return the threads to run, not started yet."""

    def room(self, lane: Lane, /) -> int:
        """Return how many more messages the lane may hold."""

    def hold(self, lane: Lane, held: list[Held], /) -> None:
        """Accept claimed messages."""

    def give_back(self) -> None:
        """Let messages that have not started be released, because the consumer stops."""

    def stop(self) -> None:
        """End the threads, because all messages are settled."""

    def outage(self) -> None:
        """React to an outage of the database, after which connections may be broken."""


class Consumer:
    """
    Consumes the queues of some handlers, in this process.

    ``concurrency``: how many messages of each queue are handled at once (None: each handler's own). ``prefetch``: how
    many messages of each queue are held (None: ``PREFETCH``). ``drain``: stop when nothing is ready and nothing is
    held. ``max_messages``: stop after this many messages. ``grace``: seconds that running handlers get after
    ``stop()``. ``workers``: an object that handles the messages (None: this process calls the handlers).
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
        workers: Workers | None = None,
    ) -> None:
        self.id = uuid4()
        self.using = alias_of(handlers)
        self.drain = drain
        self.grace = check_seconds(grace, "grace")
        self.lanes = tuple(make_lane(handler, concurrency, prefetch) for handler in handlers)
        # Monotonic time of the claiming thread's last turn.
        self._turned: float | None = None
        self._channels = ChannelSet({notifying.channel(lane.queue.name): self._receiver(lane) for lane in self.lanes})
        self._event = threading.Event()
        self._stopping = threading.Event()
        self._stopping_now = threading.Event()
        self._ended = threading.Event()
        self._outage = Outage("consumer")
        self._is_inline = False
        self._heartbeat = Heartbeat(
            self.using, declared=[lane.handler.declaration for lane in self.lanes], consumer=self.id
        )
        self._minutes = MinuteReport(self.using, self.lanes)
        self.workers = workers or HandlerWorkers(self.using, self.lanes, self.wake)
        self.claimer = Claimer(
            self.id,
            self.using,
            self.lanes,
            listening=self._channels.listening,
            stopping=self._stopping,
            hold=self.workers.hold,
            room=self.workers.room,
            drain=drain,
            max_messages=max_messages,
        )
        self.settler = Settler(self.using)
        self.leases = Leases(self.using, self.lanes)

    # --- From outside ---

    def stop(self, *, now: bool = False) -> None:
        """
        Stop claiming, let running handlers end within ``grace`` seconds, and give back the other messages.

        With ``now``, do not wait for handlers; their leases expire. May be called from any thread, but not from a
        signal handler, which may have interrupted the thread that holds the lock needed here.
        """
        self._stopping.set()
        if now:
            self._stopping_now.set()
        self._event.set()

    def wake(self) -> None:
        """Wake the claiming thread. May be called from any thread."""
        # Checked first, because setting the event takes a lock. This is safe: whatever the event reports has already
        # happened, and the claiming thread clears the event before it looks.
        if not self._event.is_set():
            self._event.set()

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop()`` was called."""
        return self._stopping.is_set()

    @property
    def queues(self) -> list[str]:
        """The names of its queues, sorted."""
        return sorted(lane.queue.name for lane in self.lanes)

    @property
    def handled(self) -> int:
        """How many messages were settled, without those that were given back before they were started."""
        return self.settler.handled

    def condition(self) -> Condition:
        """Return the consumer's state. May be called from any thread; does not use the database."""
        now = time.monotonic()
        asked = max(lane.asked for lane in self.lanes)
        return Condition(
            turn_age=None if self._turned is None else now - self._turned,
            claim_age=now - asked if asked else None,
            listening=self._channels.listening.is_set(),
            connected=asked > 0 and not self._outage.attempts,
            stopping=self.is_stopping,
            held=self.claimer.held,
            handled=self.handled,
        )

    @property
    def has_abandoned(self) -> bool:
        """Whether handlers outlived the grace period and still run after ``run()``, in daemon threads."""
        return self._ended.is_set() and bool(self.claimer.held)

    def run(self) -> int:
        """
        Consume until stopped, drained or done. Returns how many messages were handled.

        Inside a ``TestCase``, handlers run one after the other in the calling thread, on the test's connection. Each of
        their statements is isolated from the others, as in autocommit. Inside any other transaction ``RuntimeError`` is
        raised, because a rollback would undo the leases.
        """
        names = self.queues
        self._turned = time.monotonic()
        self._is_inline = connections[self.using].in_atomic_block
        if self._is_inline:
            self._handle_inline()
        with own_connection(self.using, "consumer"):
            self._start()
            signals.consumer_started.send_robust(self.id, using=self.using, queues=names)
            own = [] if self._is_inline else self._own_threads()
            working = self.workers.threads()
            for thread in (*own, *working):
                thread.start()
            listener = listener_of(settings.LISTEN_DATABASE or self.using)
            if not self.drain:
                listener.add(self._channels)
            try:
                self._consume()
                self._finish()
            finally:
                self._ended.set()
                listener.remove(self._channels)
                self.workers.stop()
                with contextlib.suppress(*DATABASE_FAULTS):
                    self._minutes.send()
                    consumers.forget_consumer(self.id, self.using)
                # All threads end immediately, apart from workers whose handler outlived the grace period.
                for thread in own if self.claimer.held else (*own, *working):
                    thread.join(timeout=JOIN_TIMEOUT)
                signals.consumer_stopped.send_robust(self.id, using=self.using, queues=names)
        return self.handled

    # --- Start and end ---

    def _handle_inline(self) -> None:
        if isinstance(self.workers, HandlerWorkers):
            self.workers.is_inline = True
        for lane in self.lanes:
            lane.handler = as_in_worker(lane.handler)

    def _start(self) -> None:
        """Declare the queues and write the first heartbeat. Waits while the database is unavailable."""
        while not self._stopping.is_set():
            try:
                for lane in sorted(self.lanes, key=lambda lane: lane.queue.name):
                    declaring.declare(lane.handler.declaration, self.using)
                self._beat()
            except DATABASE_FAULTS as error:
                if not is_passing(error):
                    raise
                self._pause(error)
            else:
                self._outage.recovered()
                return

    def _own_threads(self) -> list[threading.Thread]:
        return [
            daemon("leases", partial(self._every, self.leases.interval, self.leases.extend, "leases")),
            daemon("heartbeat", partial(self._every, settings.HEARTBEAT_INTERVAL, self._beat, "heartbeat")),
        ]

    def _every(self, interval: float, run_once: Callable[[], object], loop: str) -> None:
        with own_connection(self.using, loop):
            # The first heartbeat was written at the start, and the first lease is new.
            self._ended.wait(interval)
            run_every(lambda: interval, run_once, self._ended, alias=self.using, loop=loop)

    def _finish(self) -> None:
        """Give back messages that have not started, wait for running handlers, and settle all of them."""
        deadline = time.monotonic() + self.grace
        while True:
            self.workers.give_back()
            with self._database():
                for lane in self.lanes:
                    self.settler.settle(lane)
            if not self.claimer.held or self._stopping_now.is_set() or time.monotonic() >= deadline:
                break
            self._event.wait(SETTLE_DELAY)
            self._event.clear()
        for lane in self.lanes:
            if lane.held:
                logger.warning(
                    "handlers outlived the grace, their leases run out queue=%s ids=%s",
                    lane.queue.name,
                    list(lane.held),
                )

    # --- The heartbeat ---

    def _beat(self) -> None:
        sent = time.monotonic()
        # Read again, because a queue may have been bound or unbound since.
        self._heartbeat.declared = {lane.queue.name: lane.handler.declaration for lane in self.lanes}
        self._heartbeat.run_once()
        seen_until = sent + TRUSTED_HEARTBEATS * settings.HEARTBEAT_INTERVAL
        self.claimer.seen_until = seen_until
        now = time.monotonic()
        for lane in self.lanes:
            if lane.is_exclusive and now < lane.owned_until:
                lane.owned_until = seen_until
            elif lane.is_exclusive:
                # Too late: another consumer may own the queue. Only a claim can tell, and there was none meanwhile.
                self._event.set()
        self._minutes.send()

    # --- The claiming thread ---

    def _consume(self) -> None:
        while not self._stopping.is_set():
            self._turned = time.monotonic()
            # Cleared before the work, so that a later event ends the wait below immediately.
            self._event.clear()
            with self._database():
                self._settle_ripe()
                self.claimer.turn()
                self._outage.recovered()
            if self.claimer.is_done():
                return
            if not self._is_inline:
                # With DEBUG=True, Django would keep every query. Not in a test, which may count them.
                reset_queries()
            self._event.wait(self.claimer.nap())

    def _settle_ripe(self) -> None:
        now = time.monotonic()
        for lane in self.lanes:
            if lane.is_ripe(now) and self.settler.settle(lane) and self.drain:
                # The handler may have published to any queue, so a drain must claim from all of them again.
                for each in self.lanes:
                    each.next_look = 0.0

    @contextlib.contextmanager
    def _database(self) -> Iterator[None]:
        """Survive an outage of the database: wait, and connect again."""
        try:
            yield
        except DATABASE_FAULTS as error:
            self._pause(error)

    def _pause(self, error: Exception) -> None:
        if self._is_inline:
            # Closing the connection would end the test's transaction.
            raise error
        self._turned = time.monotonic()
        connections[self.using].close()
        self.workers.outage()
        # Not self._event: finished handlers set it and would shorten the pause.
        stop = self._stopping_now if self._stopping.is_set() else self._stopping
        stop.wait(self._outage.failed(error))

    def _receiver(self, lane: Lane) -> Receive:
        def receive(notification: str | None) -> None:
            lane.wake()
            self._event.set()

        return receive


def alias_of(handlers: Sequence[Handler]) -> str:
    """Return the database alias of the handlers' queues. Raises ``ValueError`` if they cannot be consumed together."""
    aliases = {handler.queue.using for handler in handlers}
    if len(aliases) != 1:
        raise ValueError(f"a consumer takes queues of one database, not of {sorted(aliases) or 'none'}")
    (using,) = aliases
    if not connections[using].settings_dict["AUTOCOMMIT"] and any(each.ack != "late" for each in handlers):
        # These commit on behalf of the handler, but without AUTOCOMMIT the project commits by itself.
        raise ValueError(f"ack='early', ack='atomic' and tasks need AUTOCOMMIT on the database alias {using!r}")
    return using


def make_lane(handler: Handler, concurrency: int | None, prefetch: int | None) -> Lane:
    """Return the lane of a handler. None: the handler's own concurrency, and ``PREFETCH``."""
    concurrency = concurrency or handler.concurrency
    most = held_at_most(handler, concurrency, prefetch or settings.PREFETCH)
    return Lane(handler, concurrency=concurrency, prefetch=most)


def held_at_most(handler: Handler, concurrency: int, prefetch: int) -> int:
    """Return how many messages of a queue may be held at once."""
    startable = concurrency * (handler.batch or 1)
    if handler.declaration.max_deliveries == 1:
        # A claim counts as a delivery. If this process were killed, waiting messages would be dead-lettered unstarted.
        return startable
    # At least enough for all workers, or some would never get a message.
    return max(prefetch, startable)
