"""
How soon does a handler start on an idle queue? From the return of ``publish`` to the handler's start.

Our queue is measured with ``manage.py consume_queues`` and a handler that records the time. The baseline is a loop of
raw psycopg in its own process: it listens, waits, claims and acks with our statements. Both get their messages from the
same publisher, in turns, with pauses that are long enough for them to fall asleep.

The clock is CLOCK_MONOTONIC, which all processes of a machine share. If a handler starts before ``publish`` has
returned, the figure is below zero and counts like any other.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

import psycopg

from benchmarks.claiming import RawConsumer
from benchmarks.harness import PAYLOAD, ROOT, Report, Spread, Target, interleaved, percentile
from django_pgqueue.devdb import DevCluster

RAW, OURS = "raw psycopg", "consume_queues"
QUEUES = {RAW: "wakeup-raw", OURS: "wakeup-ours"}
COMMANDS = {
    RAW: ["-m", "benchmarks.wakeup"],
    OURS: ["manage.py", "consume_queues", QUEUES[OURS], "--handler", "benchmarks.wakeup.note"],
}

# Seconds between two messages: longer than a wake-up can be held back, never the same twice.
PAUSE = (0.1, 0.2)
DEADLINE = 20.0


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Publish to both in turn and compare how long each takes."""
    from django_pgqueue import Queue

    rounds, count = (2, 5) if quick else (5, 100)
    report = Report("wakeup", "how soon does a handler start on an idle queue?", rounds)
    for name in QUEUES.values():
        Queue(name).declare()
    with contextlib.ExitStack() as stack:
        handled = {way: stack.enter_context(consumer(way)) for way in QUEUES}
        # Both are warm once they have handled some.
        measure(handled, 5)
        found = interleaved({"both": lambda: measure(handled, count)}, rounds)["both"]
    for way in QUEUES:
        all_of_way = [delay for one in found for delay in one[way]]
        report.rows.append(
            {
                "idle wake-up": way,
                "p50 ms": Spread.of([percentile(one[way], 50) for one in found]),
                "p99 ms": percentile(all_of_way, 99),
                "lowest ms": min(all_of_way),
                "highest ms": max(all_of_way),
            }
        )
    for percent, bound in ((50, 1.5), (99, 2)):
        raw, ours = ([delay for one in found for delay in one[way]] for way in (RAW, OURS))
        report.targets.append(
            Target(
                f"T7: p{percent}, consume_queues / raw",
                percentile(ours, percent) / percentile(raw, percent),
                "<=",
                bound,
            )
        )
    return report


def measure(handled: dict[str, Handled], count: int) -> dict[str, list[float]]:
    """Publish ``count`` messages to each queue, in turn. Returns milliseconds."""
    from django_pgqueue import Queue

    delays: dict[str, list[float]] = {way: [] for way in QUEUES}
    for _ in range(count):
        for way, name in QUEUES.items():
            time.sleep(random.uniform(*PAUSE))
            message_id = Queue(name).publish(PAYLOAD)
            returned = time.monotonic_ns()
            delays[way].append((handled[way].started_at(message_id) - returned) / 1e6)
    return delays


class Handled:
    """When each message's handler started, as a consumer process writes it to its output."""

    def __init__(self, output: IO[str]) -> None:
        self._started: dict[int, int] = {}
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, args=(output,), daemon=True).start()

    def started_at(self, message_id: int) -> int:
        """Wait until the message's handler has started. Returns nanoseconds."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: message_id in self._started, timeout=DEADLINE):
                raise TimeoutError(f"message {message_id} was not handled within {DEADLINE} s")
            return self._started[message_id]

    def _read(self, output: IO[str]) -> None:
        for line in output:
            message_id, started = map(int, line.split())
            with self._arrived:
                self._started[message_id] = started
                self._arrived.notify()


@contextlib.contextmanager
def consumer(way: str) -> Iterator[Handled]:
    """Run a consumer process."""
    process = subprocess.Popen([sys.executable, *COMMANDS[way]], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Handled(process.stdout)
    finally:
        process.terminate()
        process.wait()


# --- In the consumer processes --------------------------------------------------------------------


def note(message: Any) -> None:
    """Be the handler: tell when it started."""
    tell(message.id, time.monotonic_ns())


def tell(message_id: int, started: int) -> None:
    # Past the buffers, in one piece.
    os.write(1, f"{message_id} {started}\n".encode())


def consume_raw() -> None:
    """Be the baseline: what one would write by hand, with one connection and one thread."""
    from django_pgqueue.services.notifying import channel

    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel(QUEUES[RAW]))))
        consumer = RawConsumer(connection, QUEUES[RAW])
        while True:
            # Also without a notification: what was published before LISTEN is not announced.
            list(connection.notifies(timeout=1, stop_after=1))
            for message in consumer.claim():
                tell(message.id, time.monotonic_ns())
                consumer.ack([message])


if __name__ == "__main__":
    from benchmarks.harness import set_up_django

    set_up_django()
    consume_raw()
