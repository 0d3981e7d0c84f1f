"""
Does it stay as fast as in its first minute? Ten minutes at 60 % of capacity, autovacuum on, twice.

Messages come and go, and each leaves dead rows and dead index entries behind. In the second run, another session holds
a snapshot (REPEATABLE READ, one SELECT, then nothing) for five of the ten minutes. Vacuum can then remove nothing that
died since, and the head of the queue consists of dead entries.

Two publishing processes offer a fixed rate, evenly spaced: every 10 ms, one ``publish``, and the remaining messages
with ``publish_many``. If they cannot keep up, they fall behind and do not offer less. Two processes of ``manage.py
consume_queues`` handle the messages with a handler that does nothing. They measure the time of ``services.claim``
themselves, from the call to the decoded messages. The capacity is measured beforehand with the same processes: it is
the rate that the consumers handle while the publishers keep a few thousand messages waiting.

The baseline is the first minute of the same run. There is only one round, because minutes are compared.

    python -m benchmarks.growth --seconds 60 --hold 40 --rate 4000

This command runs only the second kind, for the given time (with the snapshot held in the middle), and prints each
window.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psycopg

from benchmarks import harness
from benchmarks.harness import Report, Target, percentile
from benchmarks.load import COUNT, Process, memory_of, processes
from django_pgqueue.devdb import DevCluster

QUEUE = "growth"
PUBLISHERS = CONSUMERS = 2
SHARE = 0.6

# While capacity is measured: messages that wait, seconds between two looks at that, and the share of the time
# that is not counted.
WAITING = 4_000
LOOK = 0.02
WARM_UP = 0.3

SIZES = """
SELECT n_dead_tup, pg_table_size(relid), pg_indexes_size(relid), autovacuum_count
FROM pg_stat_user_tables
WHERE relname = 'django_pgqueue_messagequeueitem'
"""
MB = 2**20


@dataclass(frozen=True)
class Plan:
    """How long a run takes, its windows, and for how long in the middle of it a snapshot is held: seconds."""

    seconds: float
    hold: float
    window: float
    rate: float

    @property
    def held(self) -> tuple[float, float]:
        """Seconds at which the snapshot is taken and given up."""
        start = (self.seconds - self.hold) // 2
        return start, start + self.hold

    @property
    def minute(self) -> float:
        """A tenth of the run, which is what "minute 1" and "minute 10" mean in a shorter one."""
        return self.seconds / 10


@dataclass
class Window:
    """What happened in some seconds of a run; the sizes are those at its end."""

    end: float
    published: float
    handled: float
    waiting: int
    claims_ms: list[float]
    dead: int
    table_mb: float
    index_mb: float
    memory_mb: float
    vacuums: int

    @property
    def p50(self) -> float:
        return percentile(self.claims_ms, 50) if self.claims_ms else 0.0

    @property
    def p95(self) -> float:
        return percentile(self.claims_ms, 95) if self.claims_ms else 0.0

    def line(self) -> str:
        return (
            f"{self.end:6.0f} s  offered {self.published:6,.0f}/s  handled {self.handled:6,.0f}/s  "
            f"waiting {self.waiting:7,}  claims {len(self.claims_ms):4}  "
            f"p50 {self.p50:6.2f} ms  p95 {self.p95:6.2f} ms  dead {self.dead:9,}  "
            f"table {self.table_mb:4.0f} MB  indexes {self.index_mb:4.0f} MB  "
            f"memory {self.memory_mb:3.0f} MB  vacuums {self.vacuums}"
        )


@dataclass
class Course:
    """A run: its windows, one after the other."""

    plan: Plan
    windows: list[Window] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[Window]:
        return [window for window in self.windows if start < window.end <= end]

    @property
    def first(self) -> list[Window]:
        return self.between(0, self.plan.minute)

    @property
    def last(self) -> list[Window]:
        return self.between(self.plan.seconds - self.plan.minute, self.plan.seconds)

    @property
    def recovery(self) -> float:
        """Seconds from the end of the snapshot until claims are fast again and nothing is left over; if never, all."""
        released = self.plan.held[1]
        for window in self.between(released, self.plan.seconds):
            if window.p95 <= 2 * p95(self.first) and window.waiting <= self.plan.rate:
                return window.end - released
        return self.plan.seconds


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure capacity, then the two runs."""
    seconds, window, probe = (4.0, 0.2, 2.0) if quick else (600.0, 5.0, 30.0)
    rate = SHARE * capacity(cluster, probe)
    courses = {
        "vacuum at work": course(cluster, Plan(seconds, 0, window, rate)),
        "snapshot held": course(cluster, Plan(seconds, seconds / 2, window, rate)),
    }
    report = Report("growth", f"does it stay as fast as at first? ({seconds:.0f} s at 60 % of capacity)", 1)
    for name, found in courses.items():
        report.rows += [row(name, phase, windows) for phase, windows in phases(found).items()]
        report.series[name] = series(found)
    report.targets = targets(courses["vacuum at work"], courses["snapshot held"])
    return report


def phases(found: Course) -> dict[str, list[Window]]:
    plan = found.plan
    held = {"while it is held": found.between(*plan.held), "after": found.between(plan.held[1], plan.seconds)}
    return {"minute 1": found.first, **(held if plan.hold else {}), "minute 10": found.last}


def row(name: str, phase: str, windows: list[Window]) -> dict[str, object]:
    claims = all_claims(windows)
    return {
        "run": name,
        "phase": phase,
        "offered/s": mean(windows, lambda window: window.published),
        "handled/s": mean(windows, lambda window: window.handled),
        "claim p50 ms": percentile(claims, 50),
        "claim p95 ms": percentile(claims, 95),
        "most waiting": max(window.waiting for window in windows),
        "dead rows": max(window.dead for window in windows),
        "table MB": windows[-1].table_mb,
        "indexes MB": windows[-1].index_mb,
        "consumer MB": windows[-1].memory_mb,
    }


def series(found: Course) -> dict[str, list[tuple[float, float]]]:
    columns: dict[str, Callable[[Window], float]] = {
        "offered/s": lambda window: window.published,
        "handled/s": lambda window: window.handled,
        "claim p50 ms": lambda window: window.p50,
        "claim p95 ms": lambda window: window.p95,
        "waiting": lambda window: window.waiting,
        "dead rows": lambda window: window.dead,
        "table MB": lambda window: window.table_mb,
        "indexes MB": lambda window: window.index_mb,
        "consumer MB": lambda window: window.memory_mb,
    }
    return {
        name: [(window.end, round(value(window), 3)) for window in found.windows] for name, value in columns.items()
    }


def targets(plain: Course, held: Course) -> list[Target]:
    def handled(windows: list[Window]) -> float:
        return mean(windows, lambda window: window.handled)

    return [
        Target("T11: handled/s, minute 10 / minute 1", handled(plain.last) / handled(plain.first), ">=", 0.9),
        Target("T11: claim p95, minute 10 / minute 1", p95(plain.last) / p95(plain.first), "<=", 2),
        Target(
            "T11: handled/s while a snapshot is held / offered",
            handled(held.between(*held.plan.held)) / held.plan.rate,
            ">=",
            0.8,
        ),
        Target("T11: seconds until recovered from the snapshot", held.recovery, "<=", 120),
        Target("T11: claim p95 after the snapshot, minute 10 / minute 1", p95(held.last) / p95(held.first), "<=", 2),
    ]


def all_claims(windows: list[Window]) -> list[float]:
    return [claim for window in windows for claim in window.claims_ms]


def p95(windows: list[Window]) -> float:
    return percentile(all_claims(windows), 95)


def mean(windows: list[Window], value: Callable[[Window], float]) -> float:
    return sum(map(value, windows)) / len(windows)


# --- One run --------------------------------------------------------------------------------------


def capacity(cluster: DevCluster, seconds: float) -> float:
    """Return how many messages a second are handled while some always wait."""
    prepare(cluster.url)
    with (
        processes(CONSUMERS, "consume", QUEUE, COUNT) as consumers,
        processes(PUBLISHERS, "publish", QUEUE, 0) as publishers,
    ):
        began = time.monotonic()
        counted = 0
        while (now := time.monotonic() - began) < seconds:
            done = handled_by(consumers)
            counted = counted or (done if now >= seconds * WARM_UP else 0)
            for publisher in publishers:
                publisher.tell((done + WAITING) // PUBLISHERS)
            time.sleep(LOOK)
        return (handled_by(consumers) - counted) / (seconds * (1 - WARM_UP))


def handled_by(consumers: list[Process]) -> int:
    return sum(consumer.lines[-1][2] for consumer in consumers)


def course(cluster: DevCluster, plan: Plan, tell: Callable[[str], object] = lambda line: None) -> Course:
    """Offer messages at a rate and watch; ``tell`` gets a line for each window."""
    prepare(cluster.url)
    found = Course(plan)
    start, end = plan.held
    with (
        processes(CONSUMERS, "consume", QUEUE, COUNT) as consumers,
        processes(PUBLISHERS, "publish", QUEUE, plan.rate / PUBLISHERS) as publishers,
        psycopg.connect(cluster.url, autocommit=True) as connection,
        contextlib.ExitStack() as stack,
    ):
        began = time.monotonic()
        for number in range(round(plan.seconds / plan.window)):
            now = number * plan.window
            if plan.hold and start <= now < start + plan.window:
                stack.enter_context(snapshot(cluster.url))
            if plan.hold and end <= now < end + plan.window:
                stack.close()
            time.sleep(max(began + now + plan.window - time.monotonic(), 0))
            found.windows.append(look(connection, publishers, consumers, began, now, now + plan.window))
            tell(found.windows[-1].line())
    return found


def look(
    connection: psycopg.Connection,
    publishers: list[Process],
    consumers: list[Process],
    began: float,
    start: float,
    end: float,
) -> Window:
    """Return what happened between two times since ``began``."""
    dead, table, indexes, vacuums = connection.execute(SIZES).fetchone() or (0, 0, 0, 0)
    for process in (*publishers, *consumers):
        process.check()
    from_ns, to_ns = (int((began + seconds) * 1e9) for seconds in (start, end))
    published = [total(publishers, 1, at) for at in (from_ns, to_ns)]
    handled = [total(consumers, 2, at) for at in (from_ns, to_ns)]
    return Window(
        end=end,
        published=(published[1] - published[0]) / (end - start),
        handled=(handled[1] - handled[0]) / (end - start),
        waiting=max(published[1] - handled[1], 0),
        claims_ms=[
            line[1] / 1000 for consumer in consumers for line in latest(consumer, from_ns) if from_ns < line[0] <= to_ns
        ],
        dead=dead,
        table_mb=table / MB,
        index_mb=indexes / MB,
        memory_mb=max(memory_of(consumer.pid) for consumer in consumers) / MB,
        vacuums=vacuums,
    )


def total(found: list[Process], column: int, at: int) -> int:
    """Return what these processes had done at that time, by their last lines before it."""
    return sum(next((line[column] for line in reversed(process.lines) if line[0] <= at), 0) for process in found)


def latest(process: Process, since: int) -> Iterator[tuple[int, ...]]:
    """Return its lines since that time, the last one first."""
    for line in reversed(process.lines):
        if line[0] <= since:
            return
        yield line


@contextlib.contextmanager
def snapshot(url: str) -> Iterator[None]:
    """Hold a snapshot, as a forgotten session or a long report does."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT id FROM django_pgqueue_messagequeueitem LIMIT 1")
        yield


def prepare(url: str) -> None:
    """Begin with empty files."""
    from django_pgqueue import Queue

    Queue(QUEUE).declare()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE django_pgqueue_messagequeueitem")
        connection.execute("CHECKPOINT")


def main() -> None:
    """Run for as long as asked, and print each window."""
    parser = argparse.ArgumentParser("python -m benchmarks.growth", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--hold", type=float, default=0, help="seconds for which a snapshot is held")
    parser.add_argument("--rate", type=float, help="messages a second (default: 60 %% of capacity)")
    options = parser.parse_args()
    with harness.server() as cluster:
        rate = options.rate
        if rate is None:
            found = capacity(cluster, 10)
            rate = SHARE * found
            print(f"capacity {found:,.0f}/s, offered {rate:,.0f}/s", flush=True)
        plan = Plan(options.seconds, options.hold, 5 if options.seconds >= 30 else 1, rate)
        if plan.hold:
            print("a snapshot is held from {:.0f} to {:.0f} s".format(*plan.held), flush=True)
        done = course(cluster, plan, lambda line: print(line, flush=True))
        print(f"claim p95: {p95(done.first):.2f} ms in the first tenth, {p95(done.last):.2f} ms in the last")
        if plan.hold:
            handled = mean(done.between(*plan.held), lambda window: window.handled)
            print(f"handled/offered while held: {handled / rate:.2f}; recovered after {done.recovery:.0f} s")


if __name__ == "__main__":
    main()
