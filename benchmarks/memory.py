"""
Does a consumer's memory usage stay the same after the first five minutes? An hour of an idle and of a busy consumer.

Two processes of ``manage.py consume_queues`` run side by side for an hour. The idle one only sends heartbeats and
polls. The busy one gets 200 messages a second of 10 bytes to 10 kB, and occasionally one of 500 kB. Of every hundred
messages, five fail once and are retried, one is returned with a delay, one is rejected, and one fails until it becomes
a dead letter.

The baseline is minute 5 of the same process. The benchmark compares medians of minutes: of the resident memory (RSS),
and also of the process's unique memory (USS) and of Python's allocated blocks. It takes an hour and a few per cent of a
core, so it can run beside other work. A shorter run has shorter minutes, each a sixtieth of it:

    python -m benchmarks.memory --seconds 600
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness, load
from benchmarks.harness import PAYLOAD, Points, Report, Target, cpu_seconds, print_result
from benchmarks.load import COUNT, Process, processes
from django_pgqueue.devdb import DevCluster

IDLE, BUSY = "idle", "busy"
RATE = 200
# Seconds between two calls of the publisher.
TICK = 0.25
# What becomes of a message, by hundredths; all others are handled.
FATES = ["fails once"] * 5 + ["given back", "rejected", "fails"]
LARGE, LARGE_EVERY = 500_000, 1_000
MINUTES = 60
BASELINE = 5
MB = 2**20

RSS, USS, BLOCKS = "resident MB", "own MB", "allocated blocks"


@dataclass
class Watched:
    """A consumer process and what was seen of it."""

    process: Process
    seconds: float
    points: dict[str, Points] = field(default_factory=lambda: {RSS: [], USS: [], BLOCKS: []})

    def look(self, at: float) -> None:
        self.process.check()
        resident, own = memory_of(self.process.pid)
        for name, value in ((RSS, resident / MB), (USS, own / MB), (BLOCKS, self.process.lines[-1][3])):
            self.points[name].append((round(at, 1), round(value, 3)))

    def minutes(self, name: str) -> list[float]:
        """Return the median of each minute from the baseline on."""
        by_minute: dict[int, list[float]] = {}
        for at, value in self.points[name]:
            by_minute.setdefault(int(at / self.seconds * MINUTES), []).append(value)
        return [median(values) for minute, values in sorted(by_minute.items()) if minute >= BASELINE]

    def span(self, name: str) -> tuple[float, float, float]:
        """Return the baseline, and the lowest and the highest minute since, as shares of it."""
        baseline, *later = self.minutes(name)
        return baseline, min(later) / baseline, max(later) / baseline


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Watch both for an hour."""
    return measure(10.0 if quick else 3600.0)


def measure(seconds: float) -> Report:
    report = Report("memory", f"does a consumer's memory stay what it was? ({seconds:.0f} s, minutes of it)", 1)
    with (
        processes(1, "consume", IDLE, COUNT) as (idle,),
        processes(1, "consume", BUSY, "benchmarks.memory.handle") as (busy,),
    ):
        watched = {IDLE: Watched(idle, seconds), BUSY: Watched(busy, seconds)}
        used = {name: cpu_seconds(each.process.pid) for name, each in watched.items()}
        publish_and_look(watched, seconds)
        for name, each in watched.items():
            report.rows.append(row(name, each, (cpu_seconds(each.process.pid) - used[name]) / seconds))
            report.series[name] = each.points
            report.targets += targets(name, each)
    return report


def row(name: str, watched: Watched, cpu: float) -> dict[str, object]:
    found: dict[str, object] = {
        "consumer": name,
        "messages": watched.process.lines[-1][2],
        "% of a core": 100 * cpu,
    }
    for measure in (RSS, USS):
        baseline, lowest, highest = watched.span(measure)
        found |= {
            f"{measure}, minute 5": baseline,
            f"{measure}, lowest since": baseline * lowest,
            f"{measure}, highest since": baseline * highest,
        }
    return found


def targets(name: str, watched: Watched) -> list[Target]:
    _, lowest, highest = watched.span(RSS)
    return [
        Target(f"T13: {name}, resident memory, highest minute / minute 5", highest, "<=", 1.05),
        Target(f"T13: {name}, resident memory, lowest minute / minute 5", lowest, ">=", 0.95),
    ]


def publish_and_look(watched: dict[str, Watched], seconds: float) -> None:
    """Publish to the busy one, and look at both, some times a minute."""
    from django_pgqueue import Queue

    queue, messages = Queue(BUSY), payloads()
    interval = seconds / MINUTES / 6
    began = time.monotonic()
    looked = published = 0
    while (now := time.monotonic() - began) < seconds:
        due = int(now * RATE) - published
        queue.publish_many([next(messages) for _ in range(due)])
        published += due
        if now >= looked * interval:
            for each in watched.values():
                each.look(now)
            looked += 1
        time.sleep(min(TICK, interval))


def payloads() -> Iterator[dict[str, Any]]:
    """Return what is published: the same in each run."""
    chance = random.Random(4)
    text = "".join(chance.choices(string.ascii_letters, k=LARGE))
    number = 0
    while True:
        number += 1
        size = LARGE if number % LARGE_EVERY == 0 else int(10 ** chance.uniform(1, 4))
        hundredth = chance.randrange(100)
        fate = FATES[hundredth] if hundredth < len(FATES) else "handled"
        yield {**PAYLOAD, "fate": fate, "attachment": text[:size]}


def memory_of(pid: int) -> tuple[int, int]:
    """Return the bytes of memory that a process has resident, and those of them that it shares with nobody."""
    kilobytes = {"Rss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kilobytes:
            kilobytes[name] = int(value.split()[0])
    resident, *own = kilobytes.values()
    return resident * 1024, sum(own) * 1024


def handle(message: Any) -> None:
    """Be the handler of the busy one, in its process."""
    from django_pgqueue import Nack, Reject

    load.count(message)
    fate, is_first = message.payload["fate"], message.delivery_count == 1
    if fate == "fails" or (fate == "fails once" and is_first):
        raise ValueError(f"cannot handle {message.id}")
    if fate == "given back" and is_first:
        raise Nack(delay=2)
    if fate == "rejected":
        raise Reject(reason="not for us")


def main() -> None:
    """Watch both for as long as asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    options = parser.parse_args()
    with harness.server() as cluster:
        print_result(measure(options.seconds).as_dict(harness.machine(cluster), quick=False))


if __name__ == "__main__":
    main()
