"""Settle finished messages in batches, with one statement for each outcome."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from django_pgqueue import signals
from django_pgqueue.consumer.handler import Outcome, Settlement
from django_pgqueue.consumer.lane import Held, Lane
from django_pgqueue.message import Message
from django_pgqueue.runtime.loop import DATABASE_FAULTS
from django_pgqueue.services import notifying, settling

logger = logging.getLogger("django_pgqueue")

Ended = tuple[Held, Settlement]


class Settler:
    """Settles the messages that the lanes' workers have finished, in the claiming thread and on its connection."""

    def __init__(self, using: str) -> None:
        self.using = using
        #: How many messages were settled, without those that were given back before they were started.
        self.handled = 0

    def settle(self, lane: Lane) -> bool:
        """
        Settle the finished messages, and return whether there were any.

        After a database error, the messages stay for the next call. This is safe, because settling is fenced.
        """
        # A copy, because workers may append meanwhile.
        batch = [lane.finished[index] for index in range(len(lane.finished))]
        by_outcome: dict[Outcome, list[Ended]] = {}
        for held, settlement in batch:
            # Another object has this id if the lease expired and this process claimed the message again.
            if lane.held.get(held.message.id) is held:
                by_outcome.setdefault(settlement.outcome, []).append((held, settlement))
        for outcome, ended in by_outcome.items():
            self._settle(outcome, lane, ended)
        for _ in batch:
            lane.finished.popleft()
        return bool(batch)

    def _settle(self, outcome: Outcome, lane: Lane, ended: Sequence[Ended]) -> None:
        messages = [held.message for held, _ in ended]
        try:
            lost, dead_lettered = self._run(outcome, lane, messages, [settlement for _, settlement in ended])
        except DATABASE_FAULTS as error:
            if not is_of_a_row(error):
                raise
            # The database refuses one of these rows, for example by a trigger. The others are settled one by one.
            if len(ended) > 1:
                for one in ended:
                    self._settle(outcome, lane, [one])
                return
            logger.exception("message not settled, its lease runs out queue=%s ids=%s", lane.queue.name, messages[0].id)
            lost, dead_lettered = {messages[0].id}, 0
        for message in messages:
            del lane.held[message.id]
        if outcome is Outcome.RELEASE:
            lane.claimed -= len(messages)
        elif done := len(messages) - len(lost):
            self.handled += done
            kept = [each for each in messages if each.id not in lost] if lost else messages
            lane.count(outcome, kept, dead_lettered)
            if outcome.is_success:
                signals.messages_handled.send_robust(lane.queue.name, using=self.using, count=done)

    def _run(
        self, outcome: Outcome, lane: Lane, messages: list[Message], settlements: list[Settlement]
    ) -> tuple[set[int], int]:
        """Run the statement. Returns the ids whose lease was lost, and how many of the others were dead-lettered."""
        if outcome.is_retry:
            # The messages were leased when the next claim was planned, so it does not account for them.
            lane.look_within(min(settlement.delay for settlement in settlements))
        reasons = [settlement.reason for settlement in settlements]
        match outcome:
            case Outcome.ACK:
                return settling.ack(messages, self.using), 0
            case Outcome.NACK:
                delays = [settlement.delay for settlement in settlements]
                lost, given_up = settling.nack(lane.handler.declaration, messages, delays, reasons, self.using)
                return lost, len(given_up)
            case Outcome.REJECT:
                lost = settling.reject(lane.handler.declaration, messages, reasons, self.using)
                return lost, len(messages) - len(lost)
            case Outcome.RELEASE:
                lost = settling.release(messages, self.using)
                # Other consumers may be idle, and this process may be about to stop.
                notifying.notify(lane.queue.name, self.using)
                return lost, 0
            case Outcome.LOST:
                return {message.id for message in messages}, 0
            case Outcome.GIVEN_UP:
                return set(), len(messages)
        return set(), 0


def is_of_a_row(error: BaseException) -> bool:
    """Return whether the content of a row caused the error, which then occurs each time, for this row only."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    # By class of SQLSTATE: 22 data, 23 integrity, 27 to 44 triggers, functions and views, 54 limits, P0 raised
    # by a function, XX corruption.
    return sqlstate is not None and sqlstate[:2] in {"22", "23", "27", "38", "39", "44", "54", "P0", "XX"}
