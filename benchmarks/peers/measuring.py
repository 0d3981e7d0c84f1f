"""What is measured of each peer, one function for each question."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from benchmarks.peers.catalog import Settings
from benchmarks.peers.running import Contender, Course, Program
from benchmarks.peers.wire import BULK

# Seconds between two messages to an idle worker: never the same twice. To a worker that polls, and so looked
# just when it got the one before, up to so much more that all moments between two looks are as likely.
PAUSE = (0.05, 0.15)

# Seconds within which an idle worker has to have started a message.
WAKE_UP = 20.0

# Into how many parts of equal time a drain with a held snapshot is divided.
PARTS = 3

# Seconds in which a worker settles down after its start, or takes what was published.
SETTLING = 1.0

# How many messages are published to the worker that is killed, and after how many seconds nobody waits any longer.
KILLED_WITH = 20
WAIT_TIMEOUT = 90.0


@dataclass(frozen=True)
class Rate:
    count: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.count / self.seconds

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.count + other.count, self.seconds + other.seconds)


# --- Publishing -----------------------------------------------------------------------------------


def publish_one_by_one(contender: Contender, way: str, seconds: float) -> float:
    """Return messages a second."""
    return rate(contender.publisher(way).ask("one", seconds)).per_second


def publish_many(contender: Contender, count: int) -> Rate:
    return rate(contender.publisher().ask("many", -(-count // BULK) * BULK))


def rate(answer: Sequence[int]) -> Rate:
    count, start, end = answer
    return Rate(count, (end - start) / 1e9)


def left(contender: Contender) -> int:
    return contender.publisher().ask("left")[0]


# --- Draining -------------------------------------------------------------------------------------


def drain(contender: Contender, settings: Settings, processes: int, cap: float) -> Course:
    """Let workers handle all that is there, or as much as they can in ``cap`` seconds."""
    contender.vacuum()
    expected = left(contender)
    with contender.workers("count", settings, processes) as programs:
        return course(programs, expected, cap)


def course(programs: Sequence[Program], expected: int, cap: float) -> Course:
    """Wait until all have been handled together, or for ``cap`` seconds after all have begun."""
    deadline = time.monotonic() + WAKE_UP + cap
    begun = None
    while sum(program.lines[-1][1] for program in programs if program.lines) < expected:
        now = time.monotonic()
        if begun is None and all(program.lines for program in programs):
            begun = now
        if now > (deadline if begun is None else begun + cap):
            break
        for program in programs:
            program.check()
        time.sleep(0.01)
    return Course([list(program.lines) for program in programs], cap)


def drain_beside_snapshot(contender: Contender, settings: Settings, cap: float) -> list[float]:
    """Drain while another session of the same database keeps a snapshot; messages a second in each part."""
    with psycopg.connect(contender.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        return drain(contender, settings, 1, cap).rates(PARTS)


# --- Waking up ------------------------------------------------------------------------------------


def wake_up(contender: Contender, settings: Settings, count: int, poll: float) -> list[float]:
    """Return, for messages to an idle worker, the milliseconds from the publish's return to the handler's start."""
    shortest, longest = PAUSE
    publisher = contender.publisher()
    delays = []
    with contender.workers("note", settings) as (worker,):
        time.sleep(SETTLING)
        # The first ones warm up both ends.
        for number in range(-3, count):
            time.sleep(random.uniform(shortest, max(longest, shortest + poll)))
            _count, _start, returned = publisher.ask("tag", number)
            worker.wait(lambda number=number: any(tag == number for tag, _ in worker.lines), WAKE_UP)
            started = next(ns for tag, ns in worker.lines if tag == number)
            if number >= 0:
                delays.append((started - returned) / 1e6)
    return delays


# --- A killed worker ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """
    ``seconds``: from the SIGKILL until all that the worker had in flight was running again; None: not within
    ``WAIT_TIMEOUT``. ``stuck``: still stored, but not run again. ``lost``: neither.
    """

    seconds: float | None
    stuck: int
    lost: int


def recover(contender: Contender, settings: Settings, patience: float) -> Recovery:
    """Kill a worker that holds messages, with another one beside it."""
    publisher = contender.publisher()
    publisher.ask("clear")
    tags = set(range(KILLED_WITH))
    with contender.workers("hold", settings) as (victim,):
        for tag in tags:
            publisher.ask("tag", tag)
        victim.wait(lambda: bool(victim.lines), WAKE_UP)
        time.sleep(SETTLING)
        with contender.workers("note", settings) as (survivor,):
            # It takes what the other one does not hold.
            time.sleep(3 * SETTLING)
            victim.kill()
            killed = time.monotonic_ns()
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and tags - tags_of(survivor):
                time.sleep(0.05)
            missing = tags - tags_of(survivor)
            last = max((ns for _, ns in survivor.lines), default=killed)
            time.sleep(SETTLING)
            stored = left(contender)
    stuck = min(len(missing), stored)
    return Recovery(None if missing else max((last - killed) / 1e9, 0.0), stuck, len(missing) - stuck)


def tags_of(program: Program) -> set[int]:
    return {tag for tag, _ in program.lines}
