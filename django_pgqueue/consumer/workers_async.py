"""Call async handlers, on one event loop for all lanes of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from queue import Empty

from asgiref.sync import async_to_sync, sync_to_async

from django_pgqueue.consumer.handler import ACK, LOST, OWN_ACK, SETTLED, Settlement
from django_pgqueue.consumer.lane import Held, Lane, start, take
from django_pgqueue.consumer.outcomes import (
    attempted,
    errors_in,
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
from django_pgqueue.consumer.workers import work_inline
from django_pgqueue.message import Message
from django_pgqueue.runtime.guard import ConnectionGuard
from django_pgqueue.runtime.loop import DATABASE_FAULTS
from django_pgqueue.services import settling

Handle = Callable[[Lane, list[Message]], Awaitable[list[Settlement]]]


class LoopWorkers:
    """
    The tasks of one event loop. ``wake`` is called when finished messages should be settled.

    The consumer increments ``outages`` with each outage of the database, after which connections may be broken.
    """

    def __init__(self, using: str, wake: Callable[[], object]) -> None:
        self.using = using
        self.wake = wake
        self.outages = 0

    def run(self, lanes: Sequence[Lane]) -> None:
        """Run the event loop in this thread until the workers of all lanes have ended."""
        asyncio.run(self._work(lanes))

    def work_inline(self, lane: Lane) -> None:
        """Handle the messages that wait for the event loop, in the calling thread."""
        work_inline(lane, lane.loop_waiting, async_to_sync(self._handle_of(lane)), self.wake)

    async def _work(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.loop = asyncio.get_running_loop()
        guard = ConnectionGuard()
        await sync_to_async(guard.watch)()
        await asyncio.gather(*(self._work_lane(lane, guard) for lane in lanes for _ in range(lane.concurrency)))
        await sync_to_async(guard.close)()

    async def _work_lane(self, lane: Lane, guard: ConnectionGuard) -> None:
        while batch := await self._take(lane):
            if guard.has_open and guard.is_needed(self.outages):
                await sync_to_async(guard.before)(self.outages)
            started = start(lane, batch)
            ended = await self._handle_guarded(lane, started, guard) if started else []
            if lane.handler.ack == OWN_ACK:
                ended = await sync_to_async(settle_attempts)(lane, started, ended)
                await sync_to_async(guard.after)()
            if finish(lane, batch, started, ended):
                self.wake()

    async def _take(self, lane: Lane) -> list[Held]:
        while True:
            # Cleared before the check, so that a message which arrives after it is not missed.
            lane.arrived.clear()
            try:
                return take(lane, block=False, waiting=lane.loop_waiting)
            except Empty:
                await lane.arrived.wait()

    async def _handle_guarded(self, lane: Lane, started: list[Held], guard: ConnectionGuard) -> list[Settlement]:
        with watched(lane, started) as handling:
            ended = await self._handle_of(lane)(lane, [held.message for held in started])
            # Only if necessary, because switching to another thread and back takes longer than a short handler.
            if guard.has_open and await sync_to_async(guard.after)():
                ended = left_open(lane, started, ended)
            handling.ended(ended)
        return ended

    def _handle_of(self, lane: Lane) -> Handle:
        if lane.handler.ack == OWN_ACK:
            return self._handle_own
        handle = self._handle_early if lane.handler.ack == "early" else self._handle_late
        if lane.handler.load is None:
            return handle

        async def handle_fitting(lane: Lane, messages: list[Message]) -> list[Settlement]:
            fitting, refused = load(lane, messages)
            return join(messages, refused, await handle(lane, fitting) if fitting else [])

        return handle_fitting

    async def _handle_late(self, lane: Lane, messages: list[Message]) -> list[Settlement]:
        try:
            result = await lane.handler.function(messages if lane.handler.batch else messages[0])
            errors = errors_in(lane.handler, messages, result)
        except BaseException as error:
            return failures(lane, messages, error)
        return settlements(lane, messages, errors, ACK)

    async def _handle_own(self, lane: Lane, messages: list[Message]) -> list[Settlement]:
        handle = lane.handler.async_function or lane.handler.function
        try:
            return [attempted(lane, message, await handle(message)) for message in messages]
        except BaseException as error:
            return failures(lane, messages, error)

    async def _handle_early(self, lane: Lane, messages: list[Message]) -> list[Settlement]:
        try:
            lost = await sync_to_async(settling.ack)(messages, self.using)
        except DATABASE_FAULTS as error:
            return failures(lane, messages, error)
        mine = [message for message in messages if message.id not in lost]
        try:
            if mine:
                result = await lane.handler.function(mine if lane.handler.batch else mine[0])
                log_after_early_ack(lane, errors_in(lane.handler, mine, result))
        except BaseException as error:
            log_after_early_ack(lane, {message.id: error for message in mine})
        return [LOST if message.id in lost else SETTLED for message in messages]
