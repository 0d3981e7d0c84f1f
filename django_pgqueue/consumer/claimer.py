"""Decides which lane claims, how many messages, and when to claim again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event
from uuid import UUID

from django_pgqueue.conf import settings
from django_pgqueue.consumer.lane import SETTLE_DELAY, Held, Lane
from django_pgqueue.services import claiming, declaring, operating, reaping

# In seconds, between two polls while no notifications arrive.
POLL_INTERVAL_UNHEARD = 1.0
ADOPT_BATCH = 1_000
# A claim stops after this many bytes, as CLAIM counts them. Nothing is claimed while the process holds this many
# characters of JSON.
CLAIM_BYTES = 8 * 1024 * 1024
HELD_SIZE = 64 * 1024 * 1024


class Claimer:
    """
    Claims messages for the lanes of one process, in the claiming thread and on its connection.

    ``listening`` is set while notifications arrive, and ``stopping`` once nothing more may be claimed. ``hold`` is
    called with a lane and the messages claimed for it. ``room`` returns how many more messages a lane may hold.
    """

    def __init__(
        self,
        consumer: UUID,
        using: str,
        lanes: Sequence[Lane],
        *,
        listening: Event,
        stopping: Event,
        hold: Callable[[Lane, list[Held]], object],
        room: Callable[[Lane], int] = lambda lane: lane.prefetch - len(lane.held),
        drain: bool = False,
        max_messages: int | None = None,
    ) -> None:
        self.consumer = consumer
        self.using = using
        self.lanes = lanes
        self.drain = drain
        self.max_messages = max_messages
        #: Monotonic time until which other processes are sure to count this one as alive.
        self.seen_until = 0.0
        self._listening = listening
        self._stopping = stopping
        self._hold = hold
        self._room_of = room
        self._turns = 0
        # The suspect that is being handled. Nothing else is claimed meanwhile.
        self._solo: tuple[Lane, Held] | None = None

    @property
    def held(self) -> int:
        """How many messages are held."""
        return sum(len(lane.held) for lane in self.lanes)

    @property
    def claimed(self) -> int:
        """How many messages were claimed, without those that were given back before they were started."""
        return sum(lane.claimed for lane in self.lanes)

    def turn(self) -> None:
        """Claim for each lane that is due and can take messages."""
        self._heed_pause()
        for lane in self._due():
            self._claim(lane)

    def nap(self) -> float:
        """Return the seconds for which the claiming thread may wait, unless an event wakes it."""
        if any(lane.finished for lane in self.lanes):
            return SETTLE_DELAY
        now = time.monotonic()
        looks = [lane.next_look - now for lane in self.lanes if self._is_open(lane, now)]
        # The next claim also waits for a suspect to be handled alone. The end of its handler is an event.
        is_quiet = self.held and any(lane.suspect_waiting and not lane.is_stuck(now) for lane in self.lanes)
        waits = self._is_solo(now) or is_quiet
        return settings.POLL_INTERVAL if waits or not looks else min(max(min(looks), 0.0), settings.POLL_INTERVAL)

    def is_done(self) -> bool:
        """Return whether the work is done: ``max_messages`` were handled or, in a drain, nothing is left."""
        if self.held:
            return False
        if self.max_messages is not None and self.claimed >= self.max_messages:
            return True
        # The next claim is in the future only if the last one found nothing.
        now = time.monotonic()
        return self.drain and all(lane.next_look > now and not lane.suspect_waiting for lane in self.lanes)

    # --- Which lane ---

    def _heed_pause(self) -> None:
        """Give back waiting messages of paused queues, also of full lanes, which do not claim and notice a pause."""
        now = time.monotonic()
        for lane in self.lanes:
            has_waiting = not (lane.waiting.empty() and lane.loop_waiting.empty())
            if has_waiting and now - lane.asked >= settings.POLL_INTERVAL:
                lane.asked = now
                if operating.is_paused(lane.queue.name, self.using):
                    lane.give_back_waiting()

    def _due(self) -> list[Lane]:
        """Return the lanes to claim for, starting with a different one each time."""
        now = time.monotonic()
        for lane in self.lanes:
            if now >= lane.owned_until:
                # Another process may own the queue by now, so messages that have not started are given back.
                lane.give_back_waiting()
        if self._is_solo(now):
            return []
        suspected = [lane for lane in self.lanes if lane.suspect_waiting and not lane.is_stuck(now)]
        if suspected:
            # Nothing is claimed until no other message is at risk. Then a suspect is claimed first.
            return suspected[:1] if self._is_alone(now) else []
        self._turns += 1
        first = self._turns % len(self.lanes)
        return [
            lane
            for lane in [*self.lanes[first:], *self.lanes[:first]]
            if lane.next_look <= now and self._is_open(lane, now)
        ]

    def _is_open(self, lane: Lane, now: float) -> bool:
        """Return whether the lane can take more messages."""
        is_full = bool(lane.held) and sum(each.size for each in self.lanes) >= HELD_SIZE
        is_seen = not lane.is_exclusive or now < self.seen_until
        return lane.is_low and self._room(lane) > 0 and not is_full and is_seen and not lane.is_stuck(now)

    def _is_solo(self, now: float) -> bool:
        """Return whether a suspect is being handled, which must be alone."""
        if self._solo is None:
            return False
        lane, held = self._solo
        if lane.held.get(held.message.id) is held and not lane.has_outlived(held, now):
            return True
        self._solo = None
        return False

    def _is_alone(self, now: float) -> bool:
        """Return whether a suspect may be claimed: nothing is held, apart from messages of long-running handlers."""
        return all(lane.has_outlived(held, now) for lane in self.lanes for held in lane.held.values())

    def _room(self, lane: Lane) -> int:
        room = self._room_of(lane)
        return room if self.max_messages is None else min(room, self.max_messages - self.claimed)

    # --- Claiming ---

    def _claim(self, lane: Lane) -> None:
        room = self._room(lane)
        seen_until = self.seen_until
        before = time.monotonic()
        if room <= 0 or self._stopping.is_set() or self._is_solo(before):
            return
        if lane.is_exclusive and before >= seen_until:
            return
        lane.asked = before
        if lane.woken:
            lane.woken = False
            lane.look_again = True
        # After a row of suspects, other messages get a turn.
        is_others_turn = lane.suspects_in_row >= lane.prefetch
        above = lane.low_water.start(before)
        claim = claiming.claim(
            lane.handler.declaration,
            self.using,
            limit=room,
            lease=lane.lease,
            consumer=self.consumer,
            suspects=self._is_alone(before),
            skip_suspects=is_others_turn,
            most_bytes=CLAIM_BYTES,
            above=above,
        )
        lane.low_water.claimed(above, before, time.monotonic(), len(claim.messages), claim.walked)
        if claim.closed:
            # The queue is paused or another consumer owns it, so messages that have not started are given back.
            lane.give_back_waiting()
        elif claim.messages and lane.is_exclusive:
            lane.owned_until = max(lane.owned_until, seen_until)
        is_partial = self._note_suspects(lane, claim) or is_others_turn
        if is_partial:
            # Messages that this claim walked past or left may have lower ids than those that it returned.
            lane.low_water.drop()
        self._take(lane, claim, before)
        is_more = is_partial or claim.more or len(claim.messages) >= room
        if above and self.drain and not is_more:
            # A drain ends only when a claim over the whole queue has found nothing.
            lane.low_water.drop()
            is_more = True
        self._plan_look(lane, claim, is_more=is_more)

    def _note_suspects(self, lane: Lane, claim: claiming.Claim) -> bool:
        """Record the suspects that a claim found. Returns whether it found any."""
        is_suspect = bool(claim.messages) and claim.messages[0].suspect
        lane.suspects_in_row = lane.suspects_in_row + 1 if is_suspect else 0
        lane.suspect_waiting = claim.suspect_met
        return is_suspect or claim.suspect_met

    def _take(self, lane: Lane, claim: claiming.Claim, claimed: float) -> None:
        lane.claimed += len(claim.messages)
        lane.count_set_aside(claim.dead_lettered)
        taken = []
        for message in claim.messages:
            held = Held(message, claimed, due=claimed - claim.waits[message.id])
            lane.held[message.id] = held
            if message.suspect:
                self._solo = lane, held
            taken.append(held)
        self._hold(lane, taken)

    # --- When to look again ---

    def _plan_look(self, lane: Lane, claim: claiming.Claim, *, is_more: bool) -> None:
        now = time.monotonic()
        if claim.closed:
            # After a wake-up, claim once more: NOTIFY_INTERVAL may have suppressed the one that reports the opening.
            lane.next_look = now + (settings.NOTIFY_INTERVAL if lane.look_again else settings.POLL_INTERVAL)
            lane.look_again = False
        elif is_more or claim.dead_lettered or (claim.messages and self.drain):
            lane.next_look = now
        elif (claim.messages or lane.look_again) and not self.drain:
            # Claim once more: a publisher that had just sent a wake-up does not send another one.
            lane.look_again = bool(claim.messages)
            lane.next_look = now + settings.NOTIFY_INTERVAL
        else:
            lane.next_look = now + self._sleep(lane)
        # No wake-up reports messages below the low-water mark.
        lane.next_look = min(lane.next_look, lane.low_water.look_back_at)
        if lane.woken:
            # A message may have been published since the claim was sent.
            lane.next_look = now

    def _sleep(self, lane: Lane) -> float:
        """Return how long the lane may sleep. Recreates a missing queue and adopts its orphans first."""
        look = claiming.look(lane.queue.name, self.using)
        if not look.exists:
            declaring.declare(lane.handler.declaration, self.using)
        if look.orphans and reaping.adopt(lane.queue.name, ADOPT_BATCH, self.using):
            return 0.0
        interval = settings.POLL_INTERVAL
        if not self._listening.is_set():
            interval = min(interval, POLL_INTERVAL_UNHEARD)
        if look.due_in is None:
            return interval
        # A due message that was not claimed (just now due, or locked) must not make this loop spin. A drain does not
        # end while a message is due.
        return min(interval, max(look.due_in, 0.0 if self.drain else SETTLE_DELAY))
