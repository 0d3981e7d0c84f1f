"""
Do publishers feel the reaper? While it deletes 10,000 idle queues, and while it expires 1,000,000 messages.

``manage.py reap_queues`` runs as fast as it can, while another queue keeps 1,000,000 messages. It runs for a few
seconds, is then stopped for the same time before its next transaction, and so on. The benchmark compares the publishers
in both states, in turns. Four threads of another process call ``Queue.publish`` at a fixed rate, to an auto-deleted
queue in use, which the reaper checks too.

One more publisher follows the reaper and publishes to queues that are just about to be deleted. Each of these publishes
either keeps its queue, or comes after the deletion and creates the queue again; no message may be lost. Only the waits
of this publisher are counted.

The server logs each wait of a millisecond or more for a lock on a row or a transaction (``log_lock_waits``): these are
the times that publishers waited for the reaper. The reaper's own times are measured around ``services.reap_queue`` and
``services.expire``, each of which is one transaction. The tombstones show that a transaction deletes only one queue,
because each has a different transaction id.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

from benchmarks.harness import PAYLOAD, Points, Report, Spread, Target, percentile, ratio, set_up_django
from benchmarks.load import Process, listen, memory_of, tell, told
from django_pgqueue.devdb import DevCluster

SERVER_OPTIONS = {"log_lock_waits": "on", "deadlock_timeout": "1ms"}

LIVE, STANDING, EXPIRED = "reaping-live", "reaping-standing", "reaping-expired"
IDLE = "reaping-idle-{:06}"

# The steady publishers: threads, and publishes a second of each.
THREADS, RATE = 4, 50
# Seconds between two publishes to queues that are about to go, and how many of them are ahead of the reaper at most.
REVIVE_EVERY = 0.02
AHEAD = 3
# Seconds between two looks at the reaper, and of the held reaper at what it is told.
LOOK, HELD_LOOK = 0.1, 0.002
# What does not count at the beginning of each turn: seconds.
SETTLING = 0.1
# The share of the reaper's work after which its memory may grow no more, but for a little.
GROWN, GROWTH = 0.1, 1.05
# Seconds until the reaper has done what it does after that which is measured.
END = 60.0
MB = 2**20

# No course over time has more points in the JSON.
MAX_POINTS = 400

# A reaper's line that tells that the command has ended.
ENDED = -1

WAITED = re.compile(r"acquired \w+ on (?:transaction|tuple) .* after ([\d.]+) ms")

IDLE_QUEUES = """
INSERT INTO django_pgqueue_messagequeue (name, auto_deleted, last_active)
SELECT 'reaping-idle-' || lpad(number::text, 6, '0'), true, statement_timestamp() - interval '1 day'
FROM generate_series(0, %(count)s - 1) AS number
"""
MESSAGES = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, expires_at)
SELECT %(queue)s, %(payload)s::jsonb, statement_timestamp() + %(expires_in)s * interval '1 second'
FROM generate_series(1, %(count)s)
"""
TOMBSTONES = """
SELECT count(*), count(DISTINCT xmin::text) FROM django_pgqueue_queueevent WHERE kind = 'reaped'
"""
THERE = """
SELECT count(*) FROM django_pgqueue_messagequeueitem WHERE queue_id LIKE 'reaping-idle-%'

"""


@dataclass(frozen=True)
class Scale:
    """How many of each; seconds of a turn."""

    queues: int
    expired: int
    standing: int
    turn: float


FULL = Scale(10_000, 1_000_000, 1_000_000, 2.0)
QUICK = Scale(500, 50_000, 5_000, 1.0)


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Let the reaper delete idle queues, then expire messages."""
    scale = QUICK if quick else FULL
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        set_up(connection, scale)
        publishers = Process("publish", module="benchmarks.reaping")
        try:
            publishers.begun()
            beside_queues = Course(f"{scale.queues:,} idle queues deleted", scale.queues)
            with reviver(beside_queues) as published:
                reap(cluster, beside_queues, publishers, scale.turn)
            queues_a_transaction = check_queues(connection, len(published))
            insert(connection, EXPIRED, scale.expired, expires_in=-1)
            beside_expiry = Course(f"{scale.expired:,} messages expired", scale.expired)
            reap(cluster, beside_expiry, publishers, scale.turn)
        finally:
            publishers.end()
    report = Report("reaping", "do publishers feel the reaper?", min(rounds(beside_queues), rounds(beside_expiry)))
    for found in (beside_queues, beside_expiry):
        report.rows += rows(found)
        report.targets += targets(found)
        report.series[found.title] = series(found)
    what = f"T12: {beside_queues.title}: queues a transaction"
    report.targets.append(Target(what, queues_a_transaction, "<=", 1))
    return report


def set_up(connection: psycopg.Connection[Any], scale: Scale) -> None:
    # The foreign key's check of each row would take most of the time. None of these rows violates it.
    connection.execute("SET session_replication_role = replica")
    connection.execute("INSERT INTO django_pgqueue_messagequeue (name) VALUES (%s), (%s)", [STANDING, EXPIRED])
    connection.execute(IDLE_QUEUES, {"count": scale.queues})
    insert(connection, STANDING, scale.standing, expires_in=None)


def insert(connection: psycopg.Connection[Any], queue: str, count: int, *, expires_in: float | None) -> None:
    payload = json.dumps(PAYLOAD)
    connection.execute(MESSAGES, {"queue": queue, "payload": payload, "count": count, "expires_in": expires_in})
    connection.execute("ANALYZE")
    # Or the server would write it all out in the middle of a turn.
    connection.execute("CHECKPOINT")


def check_queues(connection: psycopg.Connection[Any], published: int) -> float:
    """Return how many queues a transaction deleted. Raise if a message was lost that was published to one of them."""
    (there,) = connection.execute(THERE).fetchone() or (0,)
    if there != published:
        raise RuntimeError(f"{published} messages were published to queues that were about to go, {there} are there")
    reaped, transactions = connection.execute(TOMBSTONES).fetchone() or (0, 0)
    return float(reaped / transactions)


# --- The course of a run --------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Some seconds with the reaper at work, or held, and what each publish took: milliseconds."""

    at_work: bool
    start: float
    end: float
    publishes: list[float]


@dataclass
class Course:
    """What the reaper has to do (queues to look at, messages to expire), and what was seen meanwhile."""

    title: str
    work: int
    began: float = field(default_factory=time.monotonic)
    turns: list[Turn] = field(default_factory=list)
    #: Of each transaction of the reaper: when it ended, how much was done then, what it took in microseconds.
    lines: list[tuple[int, ...]] = field(default_factory=list)
    #: When, and how much the reaper's process had resident: bytes.
    memory: list[tuple[float, int]] = field(default_factory=list)
    #: What the waits for a lock took that the server logged: milliseconds.
    waits: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        done = self.lines[-1][1] if self.lines else 0
        return self.work if done == ENDED else done

    @property
    def transactions(self) -> list[float]:
        """Return what each transaction of the reaper took: milliseconds."""
        return [took / 1000 for _, done, took in self.lines if done > 0]

    def of_kind(self, *, at_work: bool) -> list[Turn]:
        return [turn for turn in self.turns if turn.at_work == at_work]

    def p99(self, *, at_work: bool) -> list[float]:
        return [percentile(turn.publishes, 99) for turn in self.of_kind(at_work=at_work)]

    @property
    def memory_growth(self) -> float:
        """The highest memory of the process, beside what it had after the first part of the work."""
        early = next(ended / 1e9 for ended, done, _ in self.lines if done >= GROWN * self.work)
        later = [value for moment, value in self.memory if moment >= early]
        return max(later) / later[0]


def reap(cluster: DevCluster, course: Course, publishers: Process, seconds: float) -> None:
    """Run the command, in turns of so many seconds, until it has ended."""
    log = ServerLog(cluster)
    course.began = time.monotonic()
    reaper = Process("reap", module="benchmarks.reaping")
    course.lines = reaper.lines
    try:
        reaper.begun()
        while course.done < course.work:
            for at_work in (False, True):
                take_turn(course, reaper, publishers, seconds, at_work=at_work)
        wait_for_end(reaper)
    finally:
        reaper.end()
    course.waits = log.waits()


def take_turn(course: Course, reaper: Process, publishers: Process, seconds: float, *, at_work: bool) -> None:
    """Let the reaper work, or hold it. But for the first, a turn counts if the work lasted for half of it."""
    reaper.tell(int(at_work))
    start = now = time.monotonic()
    while now < start + seconds and course.done < course.work:
        time.sleep(LOOK)
        now = time.monotonic()
        reaper.check()
        publishers.check()
        course.memory.append((now, memory_of(reaper.pid)))
    is_first = len(course.turns) < 2
    if is_first or now - start >= seconds / 2:
        course.turns.append(Turn(at_work, start, now, publish_times(publishers, start + SETTLING, now)))
    elif at_work and not course.turns[-1].at_work:
        # Without this one, that in which it was held has no other to be compared with.
        course.turns.pop()


def wait_for_end(reaper: Process) -> None:
    """Wait for what the command does after all that is measured."""
    deadline = time.monotonic() + END
    while reaper.lines[-1][1] != ENDED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"reap_queues has not ended within {END} s of its last queue or message")
        time.sleep(LOOK)


def publish_times(publishers: Process, start: float, end: float) -> list[float]:
    """Return what publishes took that began and ended between these times: milliseconds."""
    return [
        took / 1000
        for ended, took in list(publishers.lines)
        if start <= ended / 1e9 - took / 1e6 and ended / 1e9 <= end
    ]


class ServerLog:
    """The server's log from now on."""

    def __init__(self, cluster: DevCluster) -> None:
        self._path = cluster.pgdata / "server.log"
        self._start = self._path.stat().st_size

    def waits(self) -> list[float]:
        """Return what the waits for a lock have taken: milliseconds."""
        with self._path.open() as file:
            file.seek(self._start)
            return [float(found[1]) for found in WAITED.finditer(file.read())]


@contextlib.contextmanager
def reviver(course: Course) -> Iterator[list[int]]:
    """Publish to queues that are about to go, until the end of the block. Yields the ids."""
    published: list[int] = []
    stop = threading.Event()

    def publish() -> None:
        from django.db import connection

        from django_pgqueue import Queue

        while not stop.wait(REVIVE_EVERY):
            number = course.done + random.randint(0, AHEAD)
            if course.done > 0 and number < course.work:
                published.append(Queue(IDLE.format(number), auto_deleted=True).publish(PAYLOAD))
        connection.close()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield published
    finally:
        stop.set()
        thread.join()


# --- Telling --------------------------------------------------------------------------------------


def rounds(course: Course) -> int:
    return len(course.turns) // 2


def rows(course: Course) -> list[dict[str, Any]]:
    return [row(course, at_work=at_work) for at_work in (False, True)]


def row(course: Course, *, at_work: bool) -> dict[str, Any]:
    turns = course.of_kind(at_work=at_work)
    shown: dict[str, Any] = {
        "beside": course.title,
        "reaper": "at work" if at_work else "held",
        "publishes/s": Spread.of([len(turn.publishes) / (turn.end - turn.start - SETTLING) for turn in turns]),
        "p50 ms": Spread.of([percentile(turn.publishes, 50) for turn in turns]),
        "p99 ms": Spread.of(course.p99(at_work=at_work)),
        "highest ms": max(max(turn.publishes) for turn in turns),
    }
    if at_work:
        took = course.transactions
        shown |= {
            "done/s": course.work / sum(took) * 1000,
            "a transaction, p50 ms": percentile(took, 50),
            "longest ms": max(took),
            "waits for a lock": len(course.waits),
            "longest wait ms": max(course.waits, default=0.0),
            "memory MB": max(value for _, value in course.memory) / MB,
        }
    return shown


def targets(course: Course) -> list[Target]:
    publishes = ratio(course.p99(at_work=True), course.p99(at_work=False))
    longest_wait = max(course.waits, default=0.0) / max(course.transactions)
    return [
        Target(f"T12: {course.title}: publishers' p99 / with the reaper held", publishes, "<=", 1.5),
        Target(f"T12: {course.title}: longest wait for a lock / longest transaction", longest_wait, "<=", 1),
        Target(f"T12: {course.title}: the reaper's highest memory / early on", course.memory_growth, "<=", GROWTH),
    ]


def series(course: Course) -> dict[str, Points]:
    ends = [(turn.end, turn) for turn in course.turns]
    courses: dict[str, Points] = {
        "publish p99 ms, reaper at work": [(end, percentile(turn.publishes, 99)) for end, turn in ends if turn.at_work],
        "publish p99 ms, reaper held": [
            (end, percentile(turn.publishes, 99)) for end, turn in ends if not turn.at_work
        ],
        "reaper's memory MB": [(moment, value / MB) for moment, value in course.memory],
        "done": [(ended / 1e9, done) for ended, done, _ in course.lines if done > 0],
    }
    return {name: thinned(points, course.began) for name, points in courses.items()}


def thinned(points: Points, began: float) -> Points:
    """Return a course as seconds since the start, of at most so many points."""
    step = -(-len(points) // MAX_POINTS) or 1
    return [(round(moment - began, 2), round(value, 3)) for moment, value in points[::step]]


# --- In the processes -----------------------------------------------------------------------------


def publish() -> None:
    """Be the steady publishers, and tell what each publish took in microseconds."""
    from django_pgqueue import Queue

    queue = Queue(LIVE, auto_deleted=True)

    def at_a_rate() -> None:
        due = time.monotonic()
        while True:
            before = time.perf_counter_ns()
            queue.publish(PAYLOAD)
            tell((time.perf_counter_ns() - before) // 1000)
            due = max(due + 1 / RATE, time.monotonic() - 1)
            time.sleep(max(due - time.monotonic(), 0))

    for _ in range(THREADS):
        threading.Thread(target=at_a_rate, daemon=True).start()
    threading.Event().wait()


def reap_queues() -> None:
    """
    Be ``manage.py reap_queues``, which is held before a transaction while the last number that came in is 0.

    Of each transaction tells how much is done, and microseconds.
    """
    from django.core.management import call_command

    from django_pgqueue.services import reaping

    done = 0

    def held_and_timed(verb: Callable[..., Any], count: Callable[[Any], int]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal done
            while not told():
                time.sleep(HELD_LOOK)
            before = time.perf_counter_ns()
            result = verb(*args)
            done += count(result)
            tell(done, (time.perf_counter_ns() - before) // 1000)
            return result

        return run

    reaping.reap_queue = held_and_timed(reaping.reap_queue, lambda reaped: 1)
    reaping.expire = held_and_timed(reaping.expire, sum)
    # A line of the log for each queue, which nobody wants to read here.
    logging.getLogger("django_pgqueue").addHandler(logging.NullHandler())
    tell(0, 0)
    call_command("reap_queues", stdout=io.StringIO())
    tell(ENDED, 0)
    threading.Event().wait()


if __name__ == "__main__":
    threading.Thread(target=listen, daemon=True).start()
    set_up_django()
    {"publish": publish, "reap": reap_queues}[sys.argv[1]]()
