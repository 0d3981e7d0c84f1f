"""
A publisher process. It publishes in every way there is, and notes what it knows of each publish: before it begins,
and after ``publish`` has returned or the transaction has ended.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

from django.db import transaction

from django_pgqueue import Queue, QueueNotFound
from example_project.demo.models import Mark
from example_project.demo.notes import note


class Undone(Exception):
    """Ends a transaction, as an error of the caller would."""


class Publisher:
    """
    Publishes to these queues; one that is named twice gets twice as much.

    ``source`` tells who it is. ``left``: how many messages it has yet to publish.
    """

    # How often a message is handled at once, rejected, given back once, or fails once.
    fates = {"handle": 950, "fail": 25, "reject": 20, "nack": 5}
    batch = (2, 20)
    delay = (0.1, 1.5)

    def __init__(self, source: str, queues: Sequence[Queue]) -> None:
        self.source = source
        self.queues = queues
        self.made = 0
        self.left: float = float("inf")
        self.is_stopped = False
        # The ways to publish, with their weights.
        self.ways: dict[Callable[[], None], int] = {
            self.one: 40,
            self.one_beside_a_write: 15,
            self.two_queues: 7,
            self.many: 12,
            self.many_beside_a_write: 5,
            self.rolled_back: 4,
            self.partly_rolled_back: 4,
            self.delayed: 7,
        }

    def stop(self, *signal: object) -> None:
        # No event: the signal may have interrupted this thread inside that event's lock.
        self.is_stopped = True

    def choose_way(self) -> Callable[[], None]:
        return random.choices(list(self.ways), weights=list(self.ways.values()))[0]

    # --- The ways to publish ---

    def one(self) -> None:
        queue, payload = self.queue(), self.payload()
        self.attempt([queue], [payload], lambda: [queue.publish(payload)])

    def one_beside_a_write(self) -> None:
        queue, payload = self.queue(), self.payload()
        self.attempt([queue], [payload], partial(beside_a_write, lambda: [queue.publish(payload)]), is_marked=True)

    def two_queues(self) -> None:
        # In name order: queues that are made again in opposite orders can deadlock.
        queues = sorted({self.queue(), self.queue()}, key=lambda queue: queue.name)
        pairs = [(queue, self.payload()) for queue in queues]
        publish = partial(beside_a_write, lambda: [queue.publish(payload) for queue, payload in pairs])
        self.attempt(queues, [payload for _, payload in pairs], publish, is_marked=True)

    def many(self) -> None:
        queue, payloads = self.queue(), self.payloads()
        self.attempt([queue], payloads, lambda: queue.publish_many(payloads))

    def many_beside_a_write(self) -> None:
        queue, payloads = self.queue(), self.payloads()
        self.attempt([queue], payloads, partial(beside_a_write, lambda: queue.publish_many(payloads)), is_marked=True)

    def rolled_back(self) -> None:
        queue, payloads = self.queue(), [self.payload() for _ in range(3)]

        @transaction.atomic
        def publish() -> list[int]:
            mark(queue.publish(payloads[0]))
            queue.publish_many(payloads[1:])
            raise Undone

        self.attempt([queue], payloads, publish)

    def partly_rolled_back(self) -> None:
        queue, kept, dropped = self.queue(), self.payload(), self.payload()

        @transaction.atomic
        def publish_dropped() -> list[int]:
            queue.publish(dropped)
            raise Undone

        @transaction.atomic
        def publish() -> list[int]:
            ids = [queue.publish(kept)]
            self.attempt([queue], [dropped], publish_dropped)
            return ids

        self.attempt([queue], [kept], publish)

    def delayed(self) -> None:
        delay = round(random.uniform(*self.delay), 2)
        queue, payload = self.queue(), self.payload()
        self.attempt([queue], [payload], lambda: [queue.publish(payload, delay=delay)], delay=delay)

    # --- What they share ---

    def queue(self) -> Queue:
        return random.choice(self.queues)

    def payload(self, **content: Any) -> dict[str, Any]:
        self.made += 1
        (fate,) = random.choices(list(self.fates), weights=list(self.fates.values()))
        return {"key": f"{self.source}/{self.made}", "sent": time.monotonic(), "fate": fate, **content}

    def payloads(self) -> list[dict[str, Any]]:
        return [self.payload() for _ in range(self.size())]

    def size(self) -> int:
        return random.randint(*self.batch)

    def expiry(self, queue: Queue, delay: float, ttl: float | None) -> float | None:
        """Return when a message that was just published may be deleted, as its time is up. None: never."""
        return None

    def attempt(
        self,
        queues: Sequence[Queue],
        payloads: Sequence[dict[str, Any]],
        publish: Callable[[], list[int]],
        *,
        delay: float = 0.0,
        ttl: float | None = None,
        is_marked: bool = False,
    ) -> None:
        """Publish to one queue, to one for each payload, or (no queues) to the topic. All or nothing is stored."""
        keys = [payload["key"] for payload in payloads]
        fates = [payload["fate"] for payload in payloads]
        note("trying", keys=keys, delay=delay, fates=fates, topic=not queues)
        try:
            ids = publish()
        except (Undone, QueueNotFound) as error:
            note("undone", keys=keys, refused=isinstance(error, QueueNotFound))
        else:
            self.left -= len(ids)
            expires = [self.expiry(queue, delay, ttl) for queue in islice(cycle(queues), len(keys))]
            note("committed", keys=keys, ids=ids, expires=expires, marked=is_marked)


@transaction.atomic
def beside_a_write(publish: Callable[[], list[int]]) -> list[int]:
    """Publish in a transaction that writes a row for each message."""
    ids = publish()
    for message_id in ids:
        mark(message_id)
    return ids


def mark(message_id: int) -> None:
    Mark.objects.create(message_id=message_id, what="published")
