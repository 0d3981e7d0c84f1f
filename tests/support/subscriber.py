"""
Live subscribers: in this process (`hearing`), and each in a process of its own (`subscribers`).

`python -m tests.support.subscriber TOPIC FILE SECONDS` appends a line to FILE for each message, SECONDS after it came.
"""

import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import django


def digest(payload: Any) -> str:
    """Return what tells one payload from another."""
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


@contextmanager
def hearing(topic: Any, **options: Any) -> Iterator[list[Any]]:
    """Subscribe in this process, and collect the payloads."""
    heard: list[Any] = []
    with topic.subscribe(lambda message: heard.append(message.payload), **options):
        yield heard


class Subscriber:
    """A subscriber in a process of its own."""

    def __init__(self, process: Any, file: Path) -> None:
        self.process = process
        self._file = file

    @property
    def is_ready(self) -> bool:
        assert self.process.is_running, self.process.output
        return self._file.exists()

    @property
    def heard(self) -> list[str]:
        """The digests, in the order in which they came."""
        return self._file.read_text().splitlines()


@contextmanager
def subscribers(topic: str, folder: Path, *, delays: list[float], **options: Any) -> Iterator[list[Subscriber]]:
    """Start a subscriber for each of `delays`, the seconds that it takes for a message. Options as `command()`."""
    from tests.support.processes import command
    from tests.support.waiting import wait_until

    with ExitStack() as stack:
        started = []
        for number, delay in enumerate(delays):
            file = folder / f"subscriber {number}"
            arguments = topic, str(file), str(delay)
            process = stack.enter_context(command(*arguments, module="tests.support.subscriber", **options))
            started.append(Subscriber(process, file))
        for subscriber in started:
            wait_until(lambda subscriber=subscriber: subscriber.is_ready, 60)  # type: ignore[misc]
        yield started


def main(topic: str, path: str, delay: str) -> None:
    django.setup()

    from django_pgqueue import Topic

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())

    def note(message: Any) -> None:
        time.sleep(float(delay))
        with Path(path).open("a") as file:
            file.write(f"{digest(message.payload)}\n")

    with Topic(topic).subscribe(note):
        # That it is there tells that this listens.
        Path(path).touch()
        stopped.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
