"""
What does it cost to keep a queue marked as in use? 64 publishing processes whose caches go stale all the time.

For ``DECLARE_TTL`` a process assumes that a queue exists and is marked as in use. Then it checks, and the first process
that finds the mark stale renews it. Here ``DECLARE_TTL`` is two seconds (the default is 15): in that time, each process
checks once, and only one of all the processes writes. The baseline never checks again, because its ``DECLARE_TTL`` is
an hour. The third variant shows why there is a limit for all processes together: each process with a stale cache
writes.

Each of 64 real processes calls ``Queue.publish`` in autocommit on its own connection, as often as the machine allows.
The processor time of a check therefore counts in full: on a few cores these processes publish a few dozen messages a
second each, so one check is a few per cent of their work.

The server counts the writes as updates of the queues' table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import Report, Spread, Target, interleaved, percentile, ratio
from benchmarks.publishing import AUTOCOMMIT, Measured, Part, Publish, Publishers, publish_once, queue_updates
from django_pgqueue import Queue
from django_pgqueue.devdb import DevCluster

PROCESSES = 64
TTL = 2.0
NEVER = 3600.0

NO_REFRESH, OURS, EACH = "no refresh at all", "ours", "each process writes"

MARK = "UPDATE django_pgqueue_messagequeue SET last_active = statement_timestamp() WHERE name = %s"

#: In a process that writes by itself: monotonic time at which its cache is stale.
stale_at = 0.0


@dataclass(frozen=True)
class Kept:
    """One way in one round: what was published, and how often the queue's row was written in a ``TTL``."""

    published: Measured
    writes: float


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Publish with caches that go stale, that never do, and without the bound for the fleet."""
    rounds, seconds, processes = (1, 2.5, 8) if quick else (9, 5.0, PROCESSES)
    question = f"what does it cost to keep a queue marked as in use? ({processes} processes)"
    report = Report("stale", question, rounds)
    with Publishers(cluster.url, processes=processes, threads=1) as publishers:
        # Their start is not what is measured.
        publishers.publish(AUTOCOMMIT, 0.1)
        measure = partial(keep, cluster.url, publishers, seconds)
        found = interleaved(
            {
                NO_REFRESH: partial(measure, publish_once, NEVER),
                OURS: partial(measure, publish_once, TTL),
                EACH: partial(measure, publish_and_write, NEVER),
            },
            rounds,
        )
    rates = {way: [one.published.rate for one in kept] for way, kept in found.items()}
    report.rows = [
        {
            "declare caches": way,
            "messages/s": Spread.of(rates[way]),
            "of no refresh": ratio(rates[way], rates[NO_REFRESH]),
            "p99 ms": percentile([1000 * each for one in kept for each in one.published.latencies], 99),
            "lock wait %": Spread.of([100 * one.published.lock_wait for one in kept]),
            "writes to the row a second": Spread.of([one.writes / TTL for one in kept]),
        }
        for way, kept in found.items()
    ]
    report.targets = [
        Target("T2: ours / no refresh at all", ratio(rates[OURS], rates[NO_REFRESH]), ">=", 0.97),
        Target("T2: writes to the queue's row per DECLARE_TTL", max(one.writes for one in found[OURS]), "<=", 1),
    ]
    return report


def keep(url: str, publishers: Publishers, seconds: float, by: Publish, declare_ttl: float) -> Kept:
    """Publish for so long, with caches that live so long."""
    before = queue_updates(url)
    began = time.monotonic()
    published = publishers.publish(AUTOCOMMIT, seconds, by=by, pgqueue={"DECLARE_TTL": declare_ttl})
    # The first may be due at once. A busy machine takes longer than it was told.
    possible = (time.monotonic() - began) / TTL + 1
    return Kept(published, (queue_updates(url) - before) / possible)


def publish_and_write(queue: Queue, part: Part) -> None:
    """Publish, and mark the queue first where this process has not done so for a ``TTL``."""
    from django.db import connection

    global stale_at
    if time.monotonic() >= stale_at:
        with connection.cursor() as cursor:
            cursor.execute(MARK, [queue.name])
        stale_at = time.monotonic() + TTL
    publish_once(queue, part)
