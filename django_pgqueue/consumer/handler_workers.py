"""The workers of a consumer: threads, and one event loop for async handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from django_pgqueue.consumer.lane import Held, Lane
from django_pgqueue.consumer.workers import ThreadWorkers
from django_pgqueue.consumer.workers_async import LoopWorkers


class HandlerWorkers:
    """Calls sync handlers in threads, and async handlers on one event loop."""

    def __init__(self, using: str, lanes: Sequence[Lane], wake: Callable[[], object]) -> None:
        self.lanes = lanes
        #: Whether handlers run in the calling thread, inside a TestCase.
        self.is_inline = False
        self._in_threads = ThreadWorkers(using, wake)
        self._on_loop = LoopWorkers(using, wake)

    def threads(self) -> list[threading.Thread]:
        """Return one thread for each message that is handled at the same time, and one for the event loop."""
        if self.is_inline:
            return []
        async_lanes = [lane for lane in self.lanes if lane.handler.uses_loop]
        on_loop = [daemon("async", partial(self._on_loop.run, async_lanes))] if async_lanes else []
        return on_loop + [
            daemon(f"{lane.queue.name}/{number}", partial(self._in_threads.work, lane))
            for lane in self.lanes
            if not lane.handler.is_async
            for number in range(lane.concurrency)
        ]

    def room(self, lane: Lane) -> int:
        """Return how many more messages the lane may hold."""
        return lane.prefetch - len(lane.held)

    def hold(self, lane: Lane, held: list[Held]) -> None:
        """Pass the messages to workers."""
        for one in held:
            lane.put(one)
        if self.is_inline:
            if lane.handler.uses_loop:
                self._on_loop.work_inline(lane)
            if not lane.handler.is_async:
                self._in_threads.work_inline(lane)

    def give_back(self) -> None:
        """Let messages that wait for a worker be released."""
        for lane in self.lanes:
            lane.give_back_waiting()

    def stop(self) -> None:
        """Let each worker end after the messages that it handles."""
        for lane in self.lanes:
            for _ in range(lane.concurrency):
                lane.put(None)

    def outage(self) -> None:
        """Make workers test their connections."""
        self._in_threads.outages += 1
        self._on_loop.outages += 1


def daemon(name: str, target: Callable[[], object]) -> threading.Thread:
    """Return a daemon thread, because a handler that outlives the grace period must not keep the process alive."""
    return threading.Thread(target=target, name=f"pgqueue {name}", daemon=True)
