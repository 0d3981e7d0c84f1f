"""
What does ``Queue.publish_many`` add to a bulk insert? 1,000 payloads a call, one process, committed each call.

The baseline is COPY by raw psycopg, of the same dicts into the same table. It is the fastest way to insert rows into
PostgreSQL. It returns no ids; ``publish_many`` returns them, in the order of the payloads. Both convert the dicts to
JSON each time. The other variants of raw psycopg are for comparison: the statement of ``publish_many``, rows from an
array of texts, and ``executemany`` (one INSERT for each row, sent in a pipeline), all prepared.

All variants check the foreign key, COPY included. Only ``publish_many`` makes sure beforehand that the queue exists,
refreshes it, and wakes consumers. ``benchmarks/peers`` compares the bulk publishing of other queues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

from benchmarks.harness import PAYLOAD, Report, Spread, Target, interleaved, ratio
from benchmarks.publishing import QUEUE, prepare
from django_pgqueue.devdb import DevCluster
from django_pgqueue.services import publishing

MESSAGES = [{**PAYLOAD, "number": number} for number in range(1_000)]

# Without spaces, as the package does: the same bytes for all.
as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

COPY, OURS = "raw COPY", "Queue.publish_many"

COPY_ROWS = "COPY django_pgqueue_messagequeueitem (queue_id, payload, headers) FROM STDIN"
FROM_TEXTS = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers)
SELECT %(name)s, text::jsonb, '{}' FROM unnest(%(payloads)s::text[]) AS text
RETURNING id
"""

Way = Callable[[], object]


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure each way, round by round, each on an empty table."""
    rounds, calls = (2, 2) if quick else (15, 10)
    report = Report("publish_many", "what does Queue.publish_many add to a bulk insert? (1,000 a call)", rounds)
    with psycopg.connect(cluster.url, autocommit=True) as raw:
        ways = all_ways(raw)
        prepare(cluster.url)
        for way in ways.values():
            # Connected, declared and prepared.
            for _ in range(6):
                way()
        found = interleaved({name: partial(measure, cluster.url, way, calls) for name, way in ways.items()}, rounds)
    report.rows = [
        {
            "1,000 a call": name,
            "messages/s": Spread.of(rates),
            "of raw COPY": ratio(rates, found[COPY]),
            "ids": "no" if name == COPY else "yes",
        }
        for name, rates in found.items()
    ]
    report.targets = [Target("T5: Queue.publish_many / raw COPY", ratio(found[OURS], found[COPY]), ">=", 0.7)]
    return report


def all_ways(raw: psycopg.Connection[Any]) -> dict[str, Way]:
    from django_pgqueue import Queue

    params = {"name": QUEUE, "headers": "{}", "delay": None, "expires_in": None, "due": None}
    queue = Queue(QUEUE)

    def by_copy() -> None:
        # COPY runs in a transaction of its own, as every statement in autocommit.
        with raw.cursor() as cursor, cursor.copy(COPY_ROWS) as copy:
            for message in MESSAGES:
                copy.write_row((QUEUE, as_json(message), "{}"))

    def by_json() -> list[int]:
        payloads = as_json(MESSAGES)
        rows = raw.execute(publishing.PUBLISH_MANY, {**params, "payloads": payloads}, prepare=True).fetchall()
        return [row[0] for row in rows]

    def by_texts() -> list[int]:
        payloads = [as_json(message) for message in MESSAGES]
        rows = raw.execute(FROM_TEXTS, {"name": QUEUE, "payloads": payloads}, prepare=True).fetchall()
        return [row[0] for row in rows]

    def by_executemany() -> list[int]:
        rows = [{**params, "payload": as_json(message)} for message in MESSAGES]
        with raw.transaction(), raw.cursor() as cursor:
            cursor.executemany(publishing.PUBLISH, rows, returning=True)
            return [result.fetchone()[0] for result in cursor.results()]  # type: ignore[index]

    return {
        COPY: by_copy,
        OURS: lambda: queue.publish_many(MESSAGES),
        "raw, one JSON parameter": by_json,
        "raw, array of texts": by_texts,
        "raw, executemany": by_executemany,
    }


def measure(url: str, way: Way, calls: int) -> float:
    """Return the messages a second."""
    prepare(url)
    before = time.perf_counter()
    for _ in range(calls):
        way()
    return calls * len(MESSAGES) / (time.perf_counter() - before)
