"""A live subscriber process."""

import signal
import time

from django_pgqueue import TopicMessage
from example_project.demo.notes import note
from tests.chaos import plan
from tests.chaos.queues import TOPIC


def hear(message: TopicMessage) -> None:
    note("heard", key=message.payload["key"], sent=message.payload["sent"], queue=plan.LIVE)


def main() -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    with TOPIC.subscribe(hear):
        while not stopped:
            time.sleep(0.05)
