"""The publishers of the demo: their share of the messages while everything runs, and the probes after that."""

import random
import signal
import time
from dataclasses import dataclass
from typing import Any

from django_pgqueue import Queue
from django_pgqueue.conf import settings
from django_pgqueue.queue_internals import declaration_of
from example_project.demo import generator
from example_project.demo.publisher import Publisher
from example_project.demo.queues import Queues, queues_of
from example_project.demo.run import SHORTEST, Run
from example_project.demo.tables import fetch

# Visits that each visited queue gets for certain, and messages of one.
VISITS, VISIT_SIZE = 4, 12
# Seconds for which a visited queue is left alone once it is empty. REAP_IDLE_AFTER is 1, so that
# most of these pauses, not all, are long enough to be reaped in.
PAUSE = (0.9, 4.0)
# Seconds between two probes: more than NOTIFY_INTERVAL, so that each of them wakes a consumer.
BUSY_INTERVAL, QUIET_INTERVAL = (0.1, 0.15), (0.06, 0.08)
TICK = 0.02

HOLDS_MESSAGES = """
SELECT EXISTS (SELECT FROM django_pgqueue_messagequeueitem WHERE queue_id = %s)
    OR EXISTS (SELECT FROM django_pgqueue_messagequeueitem WHERE orphaned_from = %s)
"""


@dataclass
class Visited:
    """A visited queue, as its publisher sees it."""

    queue: Queue
    due: float | None = None
    next_look: float = 0.0
    visits: int = 0

    def is_due(self, now: float) -> bool:
        """Tell whether it has been empty for long enough. Looks at the table a few times a second."""
        if now < self.next_look:
            return False
        self.next_look = now + 0.1
        if fetch(HOLDS_MESSAGES, self.queue.name, self.queue.name)[0][0]:
            self.due = None
        elif self.due is None:
            self.due = now + random.uniform(*PAUSE)
        return self.due is not None and now >= self.due


class Load(Publisher):
    """One publisher: its share of the run's messages, in all ways, on all queues."""

    fates = {"handle": 994, "fail": 2, "reject": 2, "nack": 2}
    batch = (5, 80)

    def __init__(self, run: Run, queues: Queues, number: int) -> None:
        super().__init__(f"publisher{number}", [*queues.standing, *queues.live])
        self.run = run
        self.probe = queues.probe if number == 0 else None
        self.visited = [Visited(queue) for queue in queues.visited[number :: run.publishers]]
        self.share = self.left = run.share(number)
        self.contents = generator.payloads(run.input, number, run.publishers)
        self.next_probe = 0.0
        self.ways[self.short_lived] = 4

    def publish(self) -> None:
        """Publish until the share is out, the time is up, or the process is told to stop."""
        start = time.monotonic()
        until = start + (self.run.seconds or float("inf"))
        while self.left > 0 and not self.is_stopped and (now := time.monotonic()) < until:
            if visited := next((one for one in self.visited if one.is_due(now)), None):
                self.visit(visited)
            elif self.left <= self.reserved() or self.share - self.left > self.share * (now - start) / SHORTEST:
                time.sleep(TICK)
            elif self.probe and now >= self.next_probe:
                self.send_probe(self.probe)
                self.next_probe = now + random.uniform(*BUSY_INTERVAL)
            else:
                self.choose_way()()

    def reserved(self) -> int:
        """Return how many messages are kept for visits that are still owed."""
        return VISIT_SIZE * sum(max(VISITS - one.visits, 0) for one in self.visited)

    def two_queues(self) -> None:
        if self.left > 1:
            super().two_queues()

    def short_lived(self) -> None:
        # Handled or expired, whichever comes first.
        self.with_ttl(self.queue(), random.uniform(0.02, 0.3))

    def with_ttl(self, queue: Queue, ttl: float) -> None:
        payload = self.payload()
        self.attempt([queue], [payload], lambda: [queue.publish(payload, ttl=ttl)], ttl=ttl)

    def visit(self, visited: Visited) -> None:
        """Publish to a queue that was left alone: some live longer than it takes a consumer to come, some do not."""
        visited.due = None
        visited.visits += 1
        for _ in range(min(3, self.left)):
            self.with_ttl(visited.queue, 0.3)
        if self.left > 0:
            payloads = [self.payload() for _ in range(min(VISIT_SIZE - 3, self.left))]
            self.attempt([visited.queue], payloads, lambda: visited.queue.publish_many(payloads))

    def send_probe(self, probe: Queue) -> None:
        """Publish a message that tells its handler when that began."""
        payload = {**self.payload(), "fate": "handle"}
        payload["sent"] = time.monotonic()
        self.attempt([probe], [payload], lambda: [probe.publish(payload)])

    def payload(self, **content: Any) -> dict[str, Any]:
        return super().payload(content=next(self.contents))

    def size(self) -> int:
        return min(super().size(), self.left - self.reserved())

    def expiry(self, queue: Queue, delay: float, ttl: float | None) -> float | None:
        if ttl is None and declaration_of(queue).auto_deleted:
            ttl = settings.EPHEMERAL_TTL
        return None if ttl is None else time.monotonic() + delay + ttl


def main(number: str) -> None:
    """Publish one share of the run that the environment names, or ("probes") its probes."""
    run = Run.current()
    assert run is not None
    queues = queues_of(run)
    load = Load(run, queues, 0 if number == "probes" else int(number))
    signal.signal(signal.SIGTERM, load.stop)
    if number != "probes":
        load.publish()
        return
    load.source = "prober"
    # Everything else has come to rest: each probe finds its queue empty and the consumers asleep.
    for _ in range(run.probes):
        if not load.is_stopped:
            time.sleep(random.uniform(*QUIET_INTERVAL))
            load.send_probe(queues.probe)
