"""
Does one publisher wait for another? 32 publishers to one queue: the old way, ours, and the limit.

With the old way, every publish makes sure that the queue exists, by an upsert of the queue's row. That row then stays
locked until the commit, and all publishers wait in line. Our publish is a plain insert, whose foreign-key check takes a
lock that publishers share. The limit is the same insert into a table without the foreign key.

pgbench runs the statements, because a benchmark of 32 publishers in Python would measure Python. The last row of each
part is ``Queue.publish`` itself, by 32 threads in four processes, on the same cores.

``commit_delay`` simulates commits that cost 1 ms, as on a cloud disk: the session that flushes the log waits that long
before each flush, even if no other session commits (``commit_siblings`` is 0).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.harness import Report, Spread, Target, interleaved, percentile, ratio
from benchmarks.publishing import (
    AUTOCOMMIT,
    HELD_OPEN,
    LIMIT,
    OLD,
    OURS,
    Measured,
    Part,
    Publishers,
    by_pgbench,
    make_limit_table,
)
from django_pgqueue.devdb import DevCluster

PUBLISHERS = 32
PROCESSES = 4
FROM_PYTHON = "Queue.publish"

SLOW_COMMIT = {"commit_delay": "1000", "commit_siblings": "0"}
SLOW = Part("held open 5 ms, a commit costs 1 ms", 5, SLOW_COMMIT)
SLOW_AUTOCOMMIT = Part("autocommit, a commit costs 1 ms", None, SLOW_COMMIT)


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure the three ways and ``Queue.publish`` in each kind of transaction."""
    rounds, seconds = (1, 0.5) if quick else (5, 4.0)
    report = Report("publish", "does one publisher wait for another? (32 to one queue)", rounds)
    make_limit_table(cluster.url)
    with Publishers(cluster.url, processes=PROCESSES, threads=PUBLISHERS // PROCESSES) as publishers:
        for part in (HELD_OPEN, SLOW, AUTOCOMMIT, SLOW_AUTOCOMMIT):
            ways: dict[str, Callable[[], Measured]] = {
                way: partial(by_pgbench, cluster, part, part.statements(way), seconds, publishers=PUBLISHERS)
                for way in (OLD, OURS, LIMIT)
            }
            ways[FROM_PYTHON] = partial(publishers.publish, part, seconds)
            found = interleaved(ways, rounds)
            report.rows += [row(part, name, measured) for name, measured in found.items()]
            report.targets += targets(part, found)
    return report


def row(part: Part, name: str, measured: list[Measured]) -> dict[str, object]:
    latencies = [1000 * latency for one in measured for latency in one.latencies]
    return {
        "32 publishers, one queue": part.title,
        "way": name,
        "messages/s": Spread.of([one.rate for one in measured]),
        "lock wait %": Spread.of([100 * one.lock_wait for one in measured]),
        "p50 ms": percentile(latencies, 50),
        "p99 ms": percentile(latencies, 99),
    }


def targets(part: Part, found: dict[str, list[Measured]]) -> list[Target]:
    rates = {name: [one.rate for one in measured] for name, measured in found.items()}
    waits = {name: Spread.of([100 * one.lock_wait for one in measured]) for name, measured in found.items()}
    judged = [
        Target(f"T1: {part.title}: lock wait % of ours", waits[OURS], "<=", 1),
        Target(f"T1: {part.title}: lock wait % of Queue.publish", waits[FROM_PYTHON], "<=", 1),
    ]
    if part.held_open is not None:
        # In autocommit, client and server on the same cores, the ratios are those of processor time.
        judged += [
            Target(f"T1: {part.title}: ours / without foreign key", ratio(rates[OURS], rates[LIMIT]), ">=", 0.85),
            Target(f"T1: {part.title}: ours / the old way", ratio(rates[OURS], rates[OLD]), ">=", 25),
            Target(f"T1: {part.title}: lock wait % of the old way", waits[OLD], ">=", 85),
        ]
    return judged
