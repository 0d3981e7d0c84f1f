"""
Call sync handlers: take a lane's messages, call the handler, and pass on the outcomes.

Every exception of a handler is an outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from django.db import transaction

from django_pgqueue.consumer.handler import ACK, LOST, OWN_ACK, SETTLED, Outcome, Settlement
from django_pgqueue.consumer.lane import Held, Lane, start, take
from django_pgqueue.consumer.outcomes import (
    attempted,
    call,
    failures,
    finish,
    join,
    left_open,
    load,
    log_after_early_ack,
    settle_attempts,
    settlements,
    watched,
)
from django_pgqueue.message import Message
from django_pgqueue.runtime.guard import ConnectionGuard
from django_pgqueue.runtime.loop import DATABASE_FAULTS
from django_pgqueue.services import session, settling

Handle = Callable[[Lane, list[Message]], list[Settlement]]


class ThreadWorkers:
    """
    The worker threads of one consumer process. ``wake`` is called when finished messages should be settled.

    The consumer increments ``outages`` with each outage of the database, after which connections may be broken.
    """

    def __init__(self, using: str, wake: Callable[[], object]) -> None:
        self.using = using
        self.wake = wake
        self.outages = 0

    def work_inline(self, lane: Lane) -> None:
        """Handle the messages that wait for threads, in the calling thread."""
        work_inline(lane, lane.waiting, self._handle_of(lane), self.wake)

    def work(self, lane: Lane) -> None:
        """Run one worker thread of a lane with a sync handler."""
        handle = self._handle_of(lane)
        guard = ConnectionGuard()
        guard.watch()
        while batch := take(lane):
            guard.before(self.outages)
            started = start(lane, batch)
            ended = self._handle_guarded(lane, started, handle, guard) if started else []
            if lane.handler.ack == OWN_ACK:
                # On clean connections.
                ended = settle_attempts(lane, started, ended)
                guard.after()
            if finish(lane, batch, started, ended):
                self.wake()
        guard.close()

    def _handle_guarded(
        self, lane: Lane, started: list[Held], handle: Handle, guard: ConnectionGuard
    ) -> list[Settlement]:
        with watched(lane, started) as handling:
            ended = handle(lane, [held.message for held in started])
            if guard.after():
                ended = left_open(lane, started, ended)
            handling.ended(ended)
        return ended

    def _handle_of(self, lane: Lane) -> Handle:
        handle = {
            "late": self._handle_late,
            "early": self._handle_early,
            "atomic": self._handle_atomic,
            OWN_ACK: self._handle_own,
        }[lane.handler.ack]
        if lane.handler.load is None:
            return handle

        def handle_fitting(lane: Lane, messages: list[Message]) -> list[Settlement]:
            fitting, refused = load(lane, messages)
            return join(messages, refused, handle(lane, fitting) if fitting else [])

        return handle_fitting

    def _handle_late(self, lane: Lane, messages: list[Message]) -> list[Settlement]:
        try:
            errors = call(lane.handler, messages)
        except BaseException as error:
            return failures(lane, messages, error)
        return settlements(lane, messages, errors, ACK)

    def _handle_early(self, lane: Lane, messages: list[Message]) -> list[Settlement]:
        try:
            lost = settling.ack(messages, self.using)
        except DATABASE_FAULTS as error:
            return failures(lane, messages, error)
        mine = [message for message in messages if message.id not in lost]
        try:
            if mine:
                log_after_early_ack(lane, call(lane.handler, mine))
        except BaseException as error:
            log_after_early_ack(lane, {message.id: error for message in mine})
        return [LOST if message.id in lost else SETTLED for message in messages]

    def _handle_atomic(self, lane: Lane, messages: list[Message]) -> list[Settlement]:
        lost: set[int] = set()
        try:
            # In a stricter transaction, the ack would fail if the lease was extended after the transaction began.
            is_read_committed = session.is_read_committed(self.using)
            with transaction.atomic(using=self.using):
                if not is_read_committed:
                    session.make_read_committed(self.using)
                errors = call(lane.handler, messages)
                done = [message for message in messages if message.id not in errors]
                if done:
                    # The last statement, so that nobody has to wait for the messages' rows until now.
                    lost = settling.ack(done, self.using)
                if lost:
                    transaction.set_rollback(True, using=self.using)
        except BaseException as error:
            return failures(lane, messages, error)
        if lost:
            # Everything was rolled back. The messages that are still held can be handled again immediately.
            again = Settlement(Outcome.NACK, "rolled back: the lease of another message in the batch was lost")
            return [LOST if message.id in lost else again for message in messages]
        return settlements(lane, messages, errors, SETTLED)

    def _handle_own(self, lane: Lane, messages: list[Message]) -> list[Settlement]:
        try:
            return [attempted(lane, message, lane.handler.function(message)) for message in messages]
        except BaseException as error:
            return failures(lane, messages, error)


def work_inline(lane: Lane, waiting: SimpleQueue[Held | None], handle: Handle, wake: Callable[[], object]) -> None:
    """
    Handle waiting messages in the calling thread, on its connections.

    For a TestCase, because other connections cannot see the rows of its open transaction.
    """
    while not waiting.empty():
        batch = take(lane, block=False, waiting=waiting)
        started = start(lane, batch)
        ended: list[Settlement] = []
        if started:
            with watched(lane, started) as handling:
                ended = handle(lane, [held.message for held in started])
                handling.ended(ended)
        if finish(lane, batch, started, settle_attempts(lane, started, ended)):
            wake()
