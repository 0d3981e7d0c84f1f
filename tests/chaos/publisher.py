"""A publisher process: it publishes in every way there is, whatever happens, and notes what it knows of each."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from django.db import DatabaseError, InterfaceError, connection, transaction

from django_pgqueue import Queue, QueueNotFound
from tests.chaos.notes import Notes
from tests.chaos.plan import BRIEF
from tests.chaos.queues import QUEUES, TOPIC

# Seconds between two publishes, and after one that failed.
PACE = (0.01, 0.08)
PAUSE = 0.1
# The longest delay, in seconds, and the largest batch.
LONGEST_DELAY = 1.5
LARGEST = 20
# Bytes that fit into no notification.
LARGE = 10_000


class Undone(Exception):
    """Ends a transaction, as an error of the caller would."""


class Publisher:
    """Publishes to these queues, one named twice twice as often. ``source`` tells who it is."""

    def __init__(self, source: str, queues: Sequence[Queue], notes: Notes) -> None:
        self.source = source
        self.queues = queues
        self.notes = notes
        self.made = 0
        self.is_stopped = False
        self.ways: dict[Callable[[], None], int] = {
            self.one: 50,
            self.many: 10,
            self.in_transaction: 15,
            self.two_in_transaction: 8,
            self.many_in_transaction: 5,
            self.rolled_back: 5,
            self.delayed: 7,
            self.to_topic: 15,
            self.to_topic_in_transaction: 5,
            self.to_topic_rolled_back: 3,
        }

    def stop(self, *signal: object) -> None:
        # No event: the signal may have interrupted this thread inside that event's lock.
        self.is_stopped = True

    def run(self) -> None:
        """Publish until told to stop."""
        while not self.is_stopped:
            time.sleep(random.uniform(*PACE))
            (way,) = random.choices(list(self.ways), weights=list(self.ways.values()))
            try:
                way()
            except (DatabaseError, InterfaceError) as error:
                # Whether it committed is unknown, and stays so. As a project would, on a new connection.
                sys.stderr.write(f"{way.__name__}: {type(error).__name__}: {error}\n")
                connection.close()
                time.sleep(PAUSE)

    # --- The ways ---

    def one(self) -> None:
        queue, payload = self.queue(), self.payload()
        self.attempt(queue, [payload], lambda: [queue.publish(payload)])

    def many(self) -> None:
        queue, payloads = self.queue(), self.payloads()
        self.attempt(queue, payloads, lambda: queue.publish_many(payloads))

    def in_transaction(self) -> None:
        queue, payload = self.queue(), self.payload()
        self.attempt(queue, [payload], transaction.atomic(lambda: [queue.publish(payload)]))

    def two_in_transaction(self) -> None:
        # In name order: queues that are made again in opposite orders can deadlock.
        first, second = sorted((self.queue(), self.queue()), key=lambda queue: queue.name)
        payloads = [self.payload(), self.payload()]

        @transaction.atomic
        def publish() -> list[int]:
            return [first.publish(payloads[0]), second.publish(payloads[1])]

        self.attempt(first, payloads, publish)

    def many_in_transaction(self) -> None:
        queue, payloads = self.queue(), self.payloads()
        self.attempt(queue, payloads, transaction.atomic(lambda: queue.publish_many(payloads)))

    def rolled_back(self) -> None:
        queue, payloads = self.queue(), self.payloads()

        @transaction.atomic
        def publish() -> list[int]:
            queue.publish(payloads[0])
            queue.publish_many(payloads[1:])
            raise Undone

        self.attempt(queue, payloads, publish)

    def delayed(self) -> None:
        queue = self.queue()
        delay = round(random.uniform(0.1, LONGEST_DELAY), 2)
        payload = self.payload(delay=delay)
        self.attempt(queue, [payload], lambda: [queue.publish(payload, delay=delay)])

    def to_topic(self) -> None:
        payload = self.padded()
        self.attempt(None, [payload], lambda: TOPIC.publish(payload))

    def to_topic_in_transaction(self) -> None:
        payload = self.padded()
        self.attempt(None, [payload], transaction.atomic(lambda: TOPIC.publish(payload)))

    def to_topic_rolled_back(self) -> None:
        payload = self.padded()

        @transaction.atomic
        def publish() -> list[int]:
            TOPIC.publish(payload)
            raise Undone

        self.attempt(None, [payload], publish)

    # --- What they share ---

    def queue(self) -> Queue:
        return random.choice(self.queues)

    def payload(self, *, delay: float = 0.0) -> dict[str, Any]:
        self.made += 1
        fate = random.choices(("handle", "fail", "reject"), weights=(95, 3, 2))[0]
        return {"key": f"{self.source}/{self.made}", "sent": time.monotonic(), "delay": delay, "fate": fate}

    def payloads(self) -> list[dict[str, Any]]:
        return [self.payload() for _ in range(random.randint(2, LARGEST))]

    def padded(self) -> dict[str, Any]:
        """Return a payload that is too large for a notification now and then."""
        return {**self.payload(), "padding": "x" * (LARGE if random.random() < 0.2 else 0)}

    def attempt(
        self, queue: Queue | None, payloads: Sequence[dict[str, Any]], publish: Callable[[], list[int]]
    ) -> None:
        """Publish to a queue or (None) the topic, with a note before and after. All or nothing is stored."""
        keys = [payload["key"] for payload in payloads]
        self.notes.add(
            "trying",
            keys=keys,
            delay=payloads[0]["delay"],
            fates=[payload["fate"] for payload in payloads],
            brief=queue is not None and queue.name == BRIEF,
            topic=queue is None,
        )
        try:
            ids = publish()
        except (Undone, QueueNotFound) as error:
            self.notes.add("undone", keys=keys, refused=isinstance(error, QueueNotFound))
        else:
            self.notes.add("committed", keys=keys, ids=ids)


def main(name: str, folder: str, *queues: str) -> None:
    source = f"{name}.{os.getpid()}"
    # Its choices need not follow from the seed: what is repeatable is the faults.
    publisher = Publisher(source, [QUEUES[queue] for queue in queues], Notes(Path(folder), source))
    signal.signal(signal.SIGTERM, publisher.stop)
    publisher.run()
