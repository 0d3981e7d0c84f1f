"""
What does each way of publishing cost, from 1 to 64 publishers to one queue? The curve.

``publish`` judges 32 publishers, in five rounds. This benchmark draws the whole curve, in three rounds, and checks what
the publishers leave on the server: versions of the queue's row, WAL and MultiXacts. ``benchmarks/publishing.py``
describes the ways to publish and what each of them guarantees. Ways that were tried and rejected are measured with only
a few numbers of publishers.

A publisher that waits for another waits for a row, or for the transaction that locked it. All other lock waits are for
the next page of the table, with every way of publishing, because many sessions append to one table.

pgbench runs the statements, prepared, with client and server on the same cores. The WAL includes a full page for each
page that changes for the first time, as after any checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.harness import Report, Spread, Target, interleaved, percentile
from benchmarks.publishing import (
    AUTOCOMMIT,
    DO_NOTHING,
    HELD_OPEN,
    LIMIT,
    OLD,
    OURS,
    UPSERT_FIRST,
    WHERE_STALE,
    Metered,
    Part,
    by_pgbench,
    make_limit_table,
)
from django_pgqueue.devdb import DevCluster

PUBLISHERS = (1, 2, 4, 8, 16, 32, 64)
#: At which numbers of publishers the rejected ways are measured.
REJECTED = {WHERE_STALE: (2, 8, 32), UPSERT_FIRST: (2, 8, 32), DO_NOTHING: (32,)}

#: By way and number of publishers.
Found = dict[tuple[str, int], list[Metered]]


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure each way at each number of publishers, in autocommit and held open."""
    rounds, seconds = (1, 1) if quick else (3, 2)
    report = Report("publishers", "what does each way of publishing cost, with 1 to 64 publishers?", rounds)
    make_limit_table(cluster.url)
    for part in (HELD_OPEN, AUTOCOMMIT):
        found: Found = {}
        for publishers in (32,) if quick else PUBLISHERS:
            ways = [LIMIT, OURS, OLD, *(way for way, numbers in REJECTED.items() if publishers in numbers)]
            measures = {
                way: partial(by_pgbench, cluster, part, part.statements(way), seconds, publishers=publishers)
                for way in ways
            }
            for way, measured in interleaved(measures, rounds).items():
                found[way, publishers] = measured
                report.rows.append(row(part, way, publishers, measured))
        report.targets += targets(part, found)
    return report


def row(part: Part, way: str, publishers: int, measured: Sequence[Metered]) -> dict[str, object]:
    latencies = [1000 * latency for one in measured for latency in one.latencies]
    return {
        "to one queue": part.title,
        "publishers": publishers,
        "way": way,
        "publishes/s": Spread.of([one.rate for one in measured]),
        "lock wait %": Spread.of([100 * one.lock_wait for one in measured]),
        "of it for rows": median(100 * one.row_wait for one in measured),
        "p50 ms": percentile(latencies, 50),
        "p99 ms": percentile(latencies, 99),
        "lost %": median(100 * one.lost for one in measured),
        "queue row versions a publish": median(one.versions for one in measured),
        "of these dead at the end": median(one.dead for one in measured),
        "WAL bytes a publish": median(one.cost.wal_bytes for one in measured),
        "MultiXacts a publish": median(one.cost.multixacts for one in measured),
        "members a publish": median(one.cost.multixact_members for one in measured),
        "server CPU us a publish": median(1e6 * one.cost.server_cpu for one in measured),
    }


def targets(part: Part, found: Found) -> list[Target]:
    ours = [measured for (way, _), measured in found.items() if way == OURS]
    lost = max(one.lost for measured in ours for one in measured)
    waits = [Spread.of([100 * one.row_wait for one in measured]) for measured in ours]
    return [
        Target(f"T1: {part.title}: share of messages that ours lost", lost, "<=", 0),
        Target(
            f"T1: {part.title}: % of time that ours waits for rows, where it is highest",
            max(waits, key=lambda spread: spread.median),
            "<=",
            1,
        ),
    ]
