"""
What does ``Queue.publish`` add to its one statement? One process, one message at a time.

The baseline is the same INSERT by raw psycopg, prepared, of the same dict. In autocommit, and in a
transaction: ``atomic()`` beside raw BEGIN, INSERT and COMMIT.

Django does not prepare statements unless its ``OPTIONS`` say so (a transaction pooler may not be
able to), and planning the statement anew each time costs about as much as running it. So there are
two rows for ``Queue.publish``: by Django's default, and prepared. The row of Django's cursor is the
same statement by hand, by Django's default: what lies between is the package's own.

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
RAW, CURSOR = "raw psycopg, prepared", "Django's cursor"
OURS, OURS_PREPARED = "Queue.publish", "Queue.publish, prepared"

# Django's options for prepared statements, and the alias that has them.
PREPARED = {"server_side_binding": True, "prepare_threshold": 5}
ALIASES = {OURS: "default", OURS_PREPARED: "prepared"}

# So many are published with the protocol traced.
TRACED = 100

Way = Callable[[], object]


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure each way in both kinds of transaction, and count round trips."""
    from django.db import connections

    from django_pgqueue import Queue
    from django_pgqueue.conf import settings

    rounds, count = (2, 50) if quick else (101, 80)
    report = Report("publish_one", "what does Queue.publish add to its one statement?", rounds)
    default = connections.settings["default"]
    connections.settings["prepared"] = {**default, "OPTIONS": {**default["OPTIONS"], **PREPARED}}
    Queue(QUEUE).declare()
    with psycopg.connect(cluster.url, autocommit=True) as raw:
        pgconns = {RAW: lambda: raw.pgconn} | {
            way: lambda alias=alias: connections[alias].connection.pgconn for way, alias in ALIASES.items()
        }
        for target, part, ways in (
            ("T3", "autocommit", in_autocommit(raw)),
            ("T4", "in a transaction", in_transactions(raw)),
        ):
            for way in ways.values():
                repeat(way, 20)
            rates = interleaved({name: lambda way=way: repeat(way, count) for name, way in ways.items()}, rounds)
            against = {name: ratio(rates[name], rates[RAW]) for name in ways}
            trips = {name: round_trips(pgconn(), ways[name]) for name, pgconn in pgconns.items()}
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
            for name in ALIASES:
                # A wake-up for each NOTIFY_INTERVAL, one more for the fraction, and one refresh of the queue.
                most = trips[name].seconds // settings.NOTIFY_INTERVAL + 2
                beyond = trips[name].count - trips[RAW].count
                report.targets += [
                    Target(f"{target}: {part}: {name} / raw psycopg", against[name], ">=", 0.85),
                    Target(f"{target}: {part}: {name}: round trips of {TRACED} beyond raw", beyond, "<=", most),
                ]
            own = ratio(rates[OURS], rates[CURSOR])
            report.targets.append(Target(f"{target}: {part}: {OURS} / {CURSOR}", own, ">=", 0.85))
    report.targets.append(Target("T4: in a transaction: round trips until its COMMIT", until_commit(), "<=", 2))
    return report


def in_autocommit(raw: psycopg.Connection[Any]) -> dict[str, Way]:
    from django.db import connection

    from django_pgqueue import Queue

    def by_cursor() -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql.PUBLISH, params())
            cursor.fetchone()

    queues = {way: Queue(QUEUE, using=alias) for way, alias in ALIASES.items()}
    return {
        RAW: lambda: raw.execute(sql.PUBLISH, params(), prepare=True).fetchone(),
        CURSOR: by_cursor,
        OURS: lambda: queues[OURS].publish(PAYLOAD),
        OURS_PREPARED: lambda: queues[OURS_PREPARED].publish(PAYLOAD),
    }


def in_transactions(raw: psycopg.Connection[Any]) -> dict[str, Way]:
    from django.db import connection, transaction

    from django_pgqueue import Queue

    def by_raw() -> None:
        raw.execute("BEGIN")
        raw.execute(sql.PUBLISH, params(), prepare=True).fetchone()
        raw.execute("COMMIT")

    def by_cursor() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(sql.PUBLISH_IF_QUEUE, params())
            cursor.fetchone()

    def by_queue(queue: Queue) -> None:
        with transaction.atomic(using=queue.using):
            queue.publish(PAYLOAD)

    queues = {way: Queue(QUEUE, using=alias) for way, alias in ALIASES.items()}
    return {
        RAW: by_raw,
        CURSOR: by_cursor,
        OURS: lambda: by_queue(queues[OURS]),
        OURS_PREPARED: lambda: by_queue(queues[OURS_PREPARED]),
    }


def params() -> dict[str, Any]:
    return {"name": QUEUE, "payload": json.dumps(PAYLOAD), "headers": "{}", "delay": None, "expires_in": None}


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
