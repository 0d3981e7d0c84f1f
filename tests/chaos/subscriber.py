"""A live subscriber process."""

import signal
import time

from tests.chaos.handlers import hear
from tests.chaos.queues import TOPIC


def main() -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    with TOPIC.subscribe(hear):
        while not stopped:
            time.sleep(0.05)
