"""
What does ``Queue.publish`` add to its one statement? One process, one message at a time.

The baseline is the same INSERT by raw psycopg, prepared, with the payload as a text that is ready;
``Queue.publish`` gets a dict, and checks and encodes it. In autocommit, and in a transaction:
``atomic()`` beside raw BEGIN, INSERT and COMMIT.

The round trips are counted in libpq's trace of the protocol: the server ends its answer to each
with ReadyForQuery.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.harness import PAYLOAD, Report, Spread, Target, interleaved, ratio
from django_pgqueue import sql
from django_pgqueue.devdb import DevCluster

QUEUE = "benchmark"
PARAMS = {"name": QUEUE, "payload": json.dumps(PAYLOAD), "headers": "{}", "delay": None, "expires_in": None}

RAW, OURS = "raw psycopg", "Queue.publish"


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure both ways in both kinds of transaction, and count round trips."""
    from django.db import connection, transaction

    from django_pgqueue import Queue
    from django_pgqueue.conf import settings

    rounds, count = (2, 50) if quick else (21, 1000)
    report = Report("publish_one", "what does Queue.publish add to its one statement?", rounds)
    queue = Queue(QUEUE)
    queue.declare()
    with psycopg.connect(cluster.url, autocommit=True) as raw:

        def raw_autocommit() -> None:
            raw.execute(sql.PUBLISH, PARAMS, prepare=True).fetchone()

        def raw_transaction() -> None:
            raw.execute("BEGIN")
            raw.execute(sql.PUBLISH, PARAMS, prepare=True).fetchone()
            raw.execute("COMMIT")

        def autocommit() -> None:
            queue.publish(PAYLOAD)

        def in_transaction() -> None:
            with transaction.atomic():
                queue.publish(PAYLOAD)

        for part, baseline, ours in (
            ("autocommit", raw_autocommit, autocommit),
            ("in a transaction", raw_transaction, in_transaction),
        ):
            ways = {RAW: baseline, OURS: ours}
            for way in ways.values():
                repeat(way, 20)
            rates = interleaved({name: lambda way=way: repeat(way, count) for name, way in ways.items()}, rounds)
            against = ratio(rates[OURS], rates[RAW])
            trips = {
                RAW: round_trips(raw.pgconn, baseline, 100),
                OURS: round_trips(connection.connection.pgconn, ours, 100),
            }
            report.rows += [
                {
                    "one publish": part,
                    "way": name,
                    "messages/s": Spread.of(rates[name]),
                    "of raw psycopg": against if name == OURS else 1,
                    "round trips of 100": trips[name].count,
                }
                for name in ways
            ]
            # A wake-up for each NOTIFY_INTERVAL, one more for the fraction, and one refresh of the queue.
            follow_ups = trips[OURS].seconds // settings.NOTIFY_INTERVAL + 2
            report.targets += [
                Target(f"{part}: Queue.publish / raw psycopg", against.median, ">=", 0.85),
                Target(f"{part}: round trips beyond raw", trips[OURS].count - trips[RAW].count, "<=", follow_ups),
            ]
        report.targets.append(
            Target("in a transaction: round trips until its COMMIT", inside(connection, queue), "<=", 2)
        )
    return report


def repeat(way: Callable[[], None], count: int) -> float:
    """Return how often a second ``way`` ran."""
    before = time.perf_counter()
    for _ in range(count):
        way()
    return count / (time.perf_counter() - before)


class Trace:
    """The round trips within a ``traced`` block, and the seconds that it took."""

    count = 0
    seconds = 0.0


@contextmanager
def traced(pgconn: Any) -> Iterator[Trace]:
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "trace").open("w+") as file:
        before = time.perf_counter()
        pgconn.trace(file.fileno())
        yield trace
        pgconn.untrace()
        trace.seconds = time.perf_counter() - before
        file.seek(0)
        trace.count = sum("ReadyForQuery" in line for line in file)


def round_trips(pgconn: Any, way: Callable[[], None], count: int) -> Trace:
    with traced(pgconn) as trace:
        for _ in range(count):
            way()
    return trace


def inside(connection: Any, queue: Any) -> int:
    """Return the round trips of a transaction before its COMMIT: BEGIN and INSERT."""
    from django.db import transaction

    with transaction.atomic(), traced(connection.connection.pgconn) as trace:
        queue.publish(PAYLOAD)
    return trace.count
