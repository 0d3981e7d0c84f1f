"""Which lane claims, how much, and when to look again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event
from uuid import UUID

from django_pgqueue.conf import settings
from django_pgqueue.consumer.lane import SETTLE_DELAY, Held, Lane
from django_pgqueue.services import claiming, declaring, operating, reaping

# Seconds between two polls while notifications don't arrive.
POLL_INTERVAL_UNHEARD = 1.0
# How many orphans one look adopts.
ADOPT_BATCH = 1_000
# One claim takes no more once it has this many bytes, as CLAIM counts them; nothing is claimed while this many
# characters of JSON are held.
CLAIM_BYTES = 8 * 1024 * 1024
HELD_SIZE = 64 * 1024 * 1024


class Claimer:
    """
    Claims for the lanes of one process. For the claiming thread, on its connection.

    ``listening`` is set while notifications arrive, ``stopping`` once it must claim no more. ``hold`` is called with
    a lane and what was claimed for it. ``room`` says how many more messages a lane may hold.
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
        #: Monotonic time until which others see that this process lives.
        self.seen_until = 0.0
        self._listening = listening
        self._stopping = stopping
        self._hold = hold
        self._room_of = room
        self._turns = 0
        # The suspect that is being handled: nothing else is claimed meanwhile.
        self._solo: tuple[Lane, Held] | None = None

    @property
    def held(self) -> int:
        """How many messages are held."""
        return sum(len(lane.held) for lane in self.lanes)

    @property
    def claimed(self) -> int:
        """How many messages were claimed, but for those that were given back without a start."""
        return sum(lane.claimed for lane in self.lanes)

    def turn(self) -> None:
        """Claim for each lane that has use for messages and is due for a look."""
        self._heed_pause()
        for lane in self._due():
            self._claim(lane)

    def nap(self) -> float:
        """Return the seconds for which the claiming thread may wait, unless an event cuts that short."""
        if any(lane.finished for lane in self.lanes):
            return SETTLE_DELAY
        now = time.monotonic()
        looks = [lane.next_look - now for lane in self.lanes if self._is_open(lane, now)]
        # What is claimed next also waits for handlers that run alone; those end with an event.
        is_quiet = self.held and any(lane.suspect_waiting and not lane.is_stuck(now) for lane in self.lanes)
        waits = self._is_solo(now) or is_quiet
        return settings.POLL_INTERVAL if waits or not looks else min(max(min(looks), 0.0), settings.POLL_INTERVAL)

    def is_done(self) -> bool:
        """Tell whether all was handled that there was to handle: the maximum, or in a drain everything."""
        if self.held:
            return False
        if self.max_messages is not None and self.claimed >= self.max_messages:
            return True
        # Only a look that found nothing plans the next one in the future.
        now = time.monotonic()
        return self.drain and all(lane.next_look > now and not lane.suspect_waiting for lane in self.lanes)

    # --- Which lane ---

    def _heed_pause(self) -> None:
        """Give back what waits on a paused queue, also where there is no room for the claim that would tell."""
        now = time.monotonic()
        for lane in self.lanes:
            has_waiting = not (lane.waiting.empty() and lane.loop_waiting.empty())
            if has_waiting and now - lane.asked >= settings.POLL_INTERVAL:
                lane.asked = now
                if operating.is_paused(lane.queue.name, self.using):
                    lane.give_back_waiting()

    def _due(self) -> list[Lane]:
        """Return the lanes to claim for, another first each time."""
        now = time.monotonic()
        for lane in self.lanes:
            if now >= lane.owned_until:
                # Another may own the queue by now: what has not started is for whoever does.
                lane.give_back_waiting()
        if self._is_solo(now):
            return []
        suspected = [lane for lane in self.lanes if lane.suspect_waiting and not lane.is_stuck(now)]
        if suspected:
            # Nothing is claimed until nothing else is at risk; then one of them comes first.
            return suspected[:1] if self._is_alone(now) else []
        self._turns += 1
        first = self._turns % len(self.lanes)
        return [
            lane
            for lane in [*self.lanes[first:], *self.lanes[:first]]
            if lane.next_look <= now and self._is_open(lane, now)
        ]

    def _is_open(self, lane: Lane, now: float) -> bool:
        """Tell whether the lane has use for more messages."""
        is_full = bool(lane.held) and sum(each.size for each in self.lanes) >= HELD_SIZE
        is_seen = not lane.is_exclusive or now < self.seen_until
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
        # Every so often others get a turn.
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
            # Paused, or another's by now: what has not started is for whoever may have it.
            lane.give_back_waiting()
        elif claim.messages and lane.is_exclusive:
            lane.owned_until = max(lane.owned_until, seen_until)
        is_partial = self._note_suspects(lane, claim) or is_others_turn
        if is_partial:
            # What such a claim walked past, or left, may be below what it brought.
            lane.low_water.drop()
        self._take(lane, claim, before)
        is_more = is_partial or claim.more or len(claim.messages) >= room
        if above and self.drain and not is_more:
            # A drain ends when a look at all of the queue found nothing.
            lane.low_water.drop()
            is_more = True
        self._plan_look(lane, claim, is_more=is_more)

    def _note_suspects(self, lane: Lane, claim: claiming.Claim) -> bool:
        """Note what a claim met of suspects. Returns whether it met any."""
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
        lane.next_look = min(lane.next_look, lane.low_water.look_back_at)
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
        if not self._listening.is_set():
            interval = min(interval, POLL_INTERVAL_UNHEARD)
        if look.due_in is None:
            return interval
        # What is due and was not claimed (just now due, locked, paused) must not make this spin;
        # but a drain ends when nothing is to be looked at soon.
        return min(interval, max(look.due_in, 0.0 if self.drain else SETTLE_DELAY))
