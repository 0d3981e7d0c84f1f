"""
A publisher process. It publishes in every way there is, and notes the ids once they are committed: after
``publish`` has returned, or after the transaction has ended.
"""

import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction

from django_pgqueue import Queue
from django_pgqueue.conf import settings
from django_pgqueue.queue_internals import declaration_of
from example_project.demo import generator
from example_project.demo.models import Mark
from example_project.demo.notes import note
from example_project.demo.queues import Queues, queues_of
from example_project.demo.run import SHORTEST, Run

# Visits that each visited queue gets for certain, and messages of one.
VISITS, VISIT_SIZE = 4, 12
# Seconds for which a visited queue is left alone once it is empty. REAP_IDLE_AFTER is 1, so that
# most of these pauses, not all, are long enough to be reaped in.
PAUSE = (0.9, 4.0)
# Seconds between two probes, twice the NOTIFY_INTERVAL and more: each one is to wake a consumer.
PROBE_INTERVAL = (0.1, 0.15)
TICK = 0.02


class RolledBack(Exception):
    """Ends a transaction, as an error of the caller would."""


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
        if holds_messages(self.queue.name):
            self.due = None
        elif self.due is None:
            self.due = now + random.uniform(*PAUSE)
        return self.due is not None and now >= self.due


class Publisher:
    """One publisher: its share of the run's messages, in all ways, on all queues."""

    def __init__(self, run: Run, queues: Queues, number: int) -> None:
        self.run = run
        self.probe = queues.probe if number == 0 else None
        self.steady = [*queues.standing, *queues.live]
        self.visited = [Visited(queue) for queue in queues.visited[number :: run.publishers]]
        self.share = self.left = run.share(number)
        self.payloads = generator.payloads(run.input, number, run.publishers)
        self.stop = threading.Event()
        self.next_probe = 0.0
        # The ways to publish, with their weights.
        self.ways = {
            self.one: 40,
            self.one_beside_a_write: 14,
            self.two_queues: 6,
            self.many: 12,
            self.many_beside_a_write: 5,
            self.rolled_back: 4,
            self.partly_rolled_back: 4,
            self.delayed: 6,
            self.short_lived: 4,
            self.fated: 5,
        }

    def publish(self) -> None:
        """Publish until the share is out, the time is up, or the process is told to stop."""
        start = time.monotonic()
        until = start + (self.run.seconds or float("inf"))
        while self.left > 0 and not self.stop.is_set() and (now := time.monotonic()) < until:
            if visited := next((one for one in self.visited if one.is_due(now)), None):
                self.visit(visited)
            elif self.left <= self.reserved() or self.share - self.left > self.share * (now - start) / SHORTEST:
                self.stop.wait(TICK)
            elif self.probe and now >= self.next_probe:
                send_probe(self.probe, self.payload())
                self.left -= 1
                self.next_probe = now + random.uniform(*PROBE_INTERVAL)
            else:
                (way,) = random.choices(list(self.ways), weights=list(self.ways.values()))
                way(random.choice(self.steady))

    def reserved(self) -> int:
        """Return how many messages are kept for visits that are still owed."""
        return VISIT_SIZE * sum(max(VISITS - one.visits, 0) for one in self.visited)

    # --- The ways to publish ---

    def one(self, queue: Queue) -> None:
        self.committed(queue, [queue.publish(self.payload())])

    def one_beside_a_write(self, queue: Queue) -> None:
        with transaction.atomic():
            message_id = queue.publish(self.payload())
            mark(message_id)
        self.committed(queue, [message_id], marked=True)

    def two_queues(self, queue: Queue) -> None:
        # In name order: queues that are made again in opposite orders can deadlock.
        both = sorted({queue, random.choice(self.steady)}, key=lambda one: one.name)[: self.left]
        with transaction.atomic():
            ids = [(one, one.publish(self.payload())) for one in both]
            for _, message_id in ids:
                mark(message_id)
        for one, message_id in ids:
            self.committed(one, [message_id], marked=True)

    def many(self, queue: Queue) -> None:
        self.committed(queue, queue.publish_many(self.payload() for _ in range(self.batch())))

    def many_beside_a_write(self, queue: Queue) -> None:
        with transaction.atomic():
            ids = queue.publish_many(self.payload() for _ in range(self.batch()))
            for message_id in ids:
                mark(message_id)
        self.committed(queue, ids, marked=True)

    def rolled_back(self, queue: Queue) -> None:
        ids = []
        try:
            with transaction.atomic():
                ids.append(queue.publish(self.payload()))
                ids += queue.publish_many([self.payload(), self.payload()])
                mark(ids[0])
                raise RolledBack
        except RolledBack:
            note("rolled_back", ids=ids)

    def partly_rolled_back(self, queue: Queue) -> None:
        with transaction.atomic():
            kept = queue.publish(self.payload())
            try:
                with transaction.atomic():
                    dropped = queue.publish(self.payload())
                    raise RolledBack
            except RolledBack:
                pass
        self.committed(queue, [kept])
        note("rolled_back", ids=[dropped])

    def delayed(self, queue: Queue) -> None:
        delay = random.uniform(0.1, 1.5)
        self.committed(queue, [queue.publish(self.payload(), delay=delay)], delay=delay)

    def short_lived(self, queue: Queue) -> None:
        # Handled or expired, whichever comes first.
        ttl = random.uniform(0.02, 0.3)
        self.committed(queue, [queue.publish(self.payload(), ttl=ttl)], ttl=ttl)

    def fated(self, queue: Queue) -> None:
        fate = random.choice(("reject", "nack", "fail"))
        self.committed(queue, [queue.publish(self.payload(), headers={"fate": fate})])

    def visit(self, visited: Visited) -> None:
        """Publish to a queue that was left alone: some live longer than it takes a consumer to come, some do not."""
        visited.due = None
        visited.visits += 1
        queue = visited.queue
        for _ in range(min(3, self.left)):
            self.committed(queue, [queue.publish(self.payload(), ttl=0.3)], ttl=0.3)
        if self.left > 0:
            size = min(VISIT_SIZE - 3, self.left)
            self.committed(queue, queue.publish_many(self.payload() for _ in range(size)))

    # --- What they share ---

    def payload(self) -> Any:
        return next(self.payloads)

    def batch(self) -> int:
        return min(random.randint(5, 80), self.left - self.reserved())

    def committed(
        self, queue: Queue, ids: list[int], *, delay: float = 0, ttl: float | None = None, marked: bool = False
    ) -> None:
        """Note messages whose commit has returned, and when they expire by this machine's clock."""
        self.left -= len(ids)
        if ttl is None and declaration_of(queue).auto_deleted:
            ttl = settings.EPHEMERAL_TTL
        note("published", ids=ids, expires_at=None if ttl is None else time.time() + delay + ttl, marked=marked)


def send_probe(probe: Queue, payload: Any) -> None:
    """Publish a message that tells its handler when that began."""
    message_id = probe.publish(payload, headers={"sent": time.time()})
    note("published", ids=[message_id], expires_at=None, marked=False)


def mark(message_id: int) -> None:
    """Write a row in the publisher's transaction."""
    Mark.objects.create(message_id=message_id, what="published")


def holds_messages(name: str) -> bool:
    """Tell whether there are messages of a queue, cut loose or not."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM django_pgqueue_messagequeueitem WHERE queue_id = %(name)s)"
            " OR EXISTS (SELECT FROM django_pgqueue_messagequeueitem WHERE orphaned_from = %(name)s)",
            {"name": name},
        )
        return bool(cursor.fetchone()[0])


def main(number: str) -> None:
    """Publish one share of the run that the environment names."""
    run = Run.current()
    assert run is not None
    publisher = Publisher(run, queues_of(run), int(number))
    signal.signal(signal.SIGTERM, lambda *_: publisher.stop.set())
    publisher.publish()


if __name__ == "__main__":
    main()
