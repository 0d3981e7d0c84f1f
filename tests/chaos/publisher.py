"""A publisher process: it publishes in every way there is, to queues and to the topic, whatever happens."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

from django.db import DatabaseError, InterfaceError, connection, transaction

from example_project.demo.publisher import Publisher, Undone
from example_project.demo.run import ROLE_VARIABLE
from tests.chaos.queues import QUEUES, TOPIC

# Seconds between two publishes, and after one that failed.
PACE = (0.01, 0.08)
PAUSE = 0.1
# Bytes that fit into no notification.
LARGE = 10_000


class ChaosPublisher(Publisher):
    def __init__(self, source: str, *queues: str) -> None:
        # Its choices need not follow from the seed: what is repeatable is the faults.
        super().__init__(source, [QUEUES[queue] for queue in queues])
        self.ways |= {self.to_topic: 15, self.to_topic_in_transaction: 5, self.to_topic_rolled_back: 3}

    def run(self) -> None:
        """Publish until told to stop."""
        while not self.is_stopped:
            time.sleep(random.uniform(*PACE))
            way = self.choose_way()
            try:
                way()
            except (DatabaseError, InterfaceError) as error:
                # Whether it committed is unknown, and stays so. As a project would, on a new connection.
                sys.stderr.write(f"{way.__name__}: {type(error).__name__}: {error}\n")
                connection.close()
                time.sleep(PAUSE)

    def to_topic(self) -> None:
        payload = self.padded()
        self.attempt([], [payload], lambda: TOPIC.publish(payload))

    def to_topic_in_transaction(self) -> None:
        payload = self.padded()
        self.attempt([], [payload], transaction.atomic(lambda: TOPIC.publish(payload)))

    def to_topic_rolled_back(self) -> None:
        payload = self.padded()

        @transaction.atomic
        def publish() -> list[int]:
            TOPIC.publish(payload)
            raise Undone

        self.attempt([], [payload], publish)

    def padded(self) -> dict[str, Any]:
        """Return a payload that is too large for a notification now and then."""
        return self.payload(padding="x" * (LARGE if random.random() < 0.2 else 0))


def main(*queues: str) -> None:
    publisher = ChaosPublisher(f"{os.environ[ROLE_VARIABLE]}-{os.getpid()}", *queues)
    signal.signal(signal.SIGTERM, publisher.stop)
    publisher.run()
