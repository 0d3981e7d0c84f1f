"""
What does ``Queue.publish`` add to its one statement? One process, one message at a time.

The baseline is the same INSERT of the same dict by raw psycopg, prepared. Both are measured in autocommit and in a
transaction: ``atomic()``, compared with a raw BEGIN, INSERT and COMMIT.

Django's settings are the defaults. With these, Django's own cursor prepares nothing, and planning the statement again
each time costs about as much as running it. The row for Django's cursor is the same statement, run by hand. In a
transaction, one more row uses the baseline's cursor inside ``atomic()``, to show the cost of ``atomic()`` itself.

The round trips are counted in libpq's trace of the protocol: the server ends each answer with ReadyForQuery.
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
from django_pgqueue.devdb import DevCluster
from django_pgqueue.services import publishing

QUEUE = "benchmark"
RAW, CURSOR = "raw psycopg, prepared", "Django's cursor"
RAW_IN_ATOMIC = "raw psycopg, prepared, inside atomic()"
OURS = "Queue.publish"

# So many are published with the protocol traced.
TRACED = 100

Way = Callable[[], object]


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure each way in both kinds of transaction, and count round trips."""
    from django.db import connection

    from django_pgqueue import Queue
    from django_pgqueue.conf import settings

    rounds, count = (2, 50) if quick else (101, 80)
    report = Report("publish_one", "what does Queue.publish add to its one statement?", rounds)
    Queue(QUEUE).declare()
    with psycopg.connect(cluster.url, autocommit=True) as raw:
        for target, part, ways in (
            ("T3", "autocommit", in_autocommit(raw)),
            ("T4", "in a transaction", in_transactions(raw)),
        ):
            for way in ways.values():
                repeat(way, 20)
            rates = interleaved({name: lambda way=way: repeat(way, count) for name, way in ways.items()}, rounds)
            against = {name: ratio(rates[name], rates[RAW]) for name in ways}
            pgconns = {RAW: raw.pgconn, OURS: connection.connection.pgconn}
            trips = {name: round_trips(pgconn, ways[name]) for name, pgconn in pgconns.items()}
            report.rows += [
                {
                    "one publish": part,
                    "way": name,
                    "messages/s": Spread.of(rates[name]),
                    "of raw": against[name],
                    f"round trips of {TRACED}": trips[name].count if name in trips else "",
                }
                for name in ways
            ]
            # A wake-up for each NOTIFY_INTERVAL, one more for the fraction, and one refresh of the queue.
            most = trips[OURS].seconds // settings.NOTIFY_INTERVAL + 2
            beyond = trips[OURS].count - trips[RAW].count
            report.targets += [
                Target(f"{target}: {part}: {OURS} / raw psycopg", against[OURS], ">=", 0.85),
                Target(f"{target}: {part}: round trips of {TRACED} beyond raw", beyond, "<=", most),
            ]
    report.targets.append(Target("T4: in a transaction: round trips until its COMMIT", until_commit(), "<=", 2))
    return report


def in_autocommit(raw: psycopg.Connection[Any]) -> dict[str, Way]:
    from django.db import connection

    from django_pgqueue import Queue

    def by_cursor() -> None:
        with connection.cursor() as cursor:
            cursor.execute(publishing.PUBLISH, params())
            cursor.fetchone()

    queue = Queue(QUEUE)
    return {
        RAW: lambda: raw.execute(publishing.PUBLISH, params(), prepare=True).fetchone(),
        CURSOR: by_cursor,
        OURS: lambda: queue.publish(PAYLOAD),
    }


def in_transactions(raw: psycopg.Connection[Any]) -> dict[str, Way]:
    from django.db import connection, connections, transaction

    from django_pgqueue import Queue

    def by_raw() -> None:
        raw.execute("BEGIN")
        raw.execute(publishing.PUBLISH, params(), prepare=True).fetchone()
        raw.execute("COMMIT")

    def by_cursor() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(publishing.PUBLISH_IF_QUEUE, params())
            cursor.fetchone()

    # Django lets psycopg prepare nothing unless it is told to.
    default = connections.settings["default"]
    connections.settings["prepared"] = {**default, "OPTIONS": {**default["OPTIONS"], "prepare_threshold": 0}}

    def by_raw_in_atomic() -> None:
        with transaction.atomic(using="prepared"):
            psycopg.Cursor(connections["prepared"].connection).execute(
                publishing.PUBLISH, params(), prepare=True
            ).fetchone()

    queue = Queue(QUEUE)

    def by_queue() -> None:
        with transaction.atomic():
            queue.publish(PAYLOAD)

    return {RAW: by_raw, RAW_IN_ATOMIC: by_raw_in_atomic, CURSOR: by_cursor, OURS: by_queue}


def params() -> dict[str, Any]:
    return {
        "name": QUEUE,
        "payload": json.dumps(PAYLOAD),
        "headers": "{}",
        "delay": None,
        "expires_in": None,
        "due": None,
    }


def repeat(way: Way, count: int) -> float:
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
        # libpq wrote by the same file description, so this one stands at the end.
        file.seek(0)
        trace.count = sum("ReadyForQuery" in line for line in file)


def round_trips(pgconn: Any, way: Way) -> Trace:
    with traced(pgconn) as trace:
        for _ in range(TRACED):
            way()
    return trace


def until_commit() -> int:
    """Return the round trips of a transaction before its COMMIT: BEGIN and INSERT."""
    from django.db import connection, transaction

    from django_pgqueue import Queue

    with transaction.atomic(), traced(connection.connection.pgconn) as trace:
        Queue(QUEUE).publish(PAYLOAD)
    return trace.count
