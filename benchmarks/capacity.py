"""
What does a message cost the server, and therefore: what can a server of a given size carry?

Each way of publishing and of handling runs alone. The resources that the server used are divided by the number of
messages: the processor time of all its processes, write-ahead log, flushes of the log, transactions and MultiXacts.
Handling ends with a VACUUM, because removing the dead rows is part of the cost. The client's processor time is not
counted, because clients scale with the number of their machines and not with the server.

Sessions that publish prepare their statement after a few publishes (unless they use a pooler), and so do the sessions
of this benchmark.

There is no baseline. ``sizing.py`` calculates ``docs/capacity.md`` from these figures, with the assumptions stated
there.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import psycopg

from benchmarks.harness import PAYLOAD, ROOT, Cost, Meter, Report, Spread, interleaved, table_figures
from django_pgqueue.devdb import DevCluster

TABLE = "django_pgqueue_messagequeueitem"
PUBLISHERS = 8
BULK = 1_000
QUEUES = [f"capacity-{number}" for number in range(PUBLISHERS)]
# What holds the messages that are handled.
QUEUE = QUEUES[0]

ONE = "publish, one publisher"
TOGETHER = f"publish, {PUBLISHERS} publishers to one queue"
APART = f"publish, {PUBLISHERS} publishers to {PUBLISHERS} queues"
MANY = f"publish_many, {BULK:,} a call"
CONSUMER = "handled by consume_queues"
BY_HAND = "claim and ack, one by one"

DEADLINE = 30.0
SESSIONS = """
SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""

# From PostgreSQL 18 on they are in pg_stat_io.
FLUSHES = {
    False: "SELECT wal_sync FROM pg_stat_wal",
    True: "SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal'",
}


@dataclass(frozen=True)
class Way:
    """``make`` is called before the meter runs, ``work`` is what is metered; both get the number of messages."""

    count: int
    work: Callable[[int], object]
    make: Callable[[int], object] = lambda count: None


@dataclass(frozen=True)
class Measured:
    """What one message took, and the bytes of table and indexes that it holds while it waits."""

    cost: Cost
    flushes: float
    stored: float


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure what each way costs."""
    from django.db import connection

    from django_pgqueue import Queue

    rounds, share = (1, 0.05) if quick else (5, 1.0)
    report = Report("capacity", "what does a message cost the server?", rounds)
    for name in QUEUES:
        Queue(name).declare()
    connection.close()
    ways = {
        ONE: Way(4_000, partial(publish, [QUEUE])),
        TOGETHER: Way(8_000, partial(publish, [QUEUE] * PUBLISHERS)),
        APART: Way(8_000, partial(publish, QUEUES)),
        MANY: Way(60_000, publish_many),
        CONSUMER: Way(20_000, consume, publish_many),
        BY_HAND: Way(2_000, handle_by_hand, publish_many),
    }
    found = interleaved(
        {name: partial(measure, cluster, way, max(round(way.count * share), BULK)) for name, way in ways.items()},
        rounds,
    )
    report.rows = [row(name, measured) for name, measured in found.items()]
    return report


def row(name: str, found: Sequence[Measured]) -> dict[str, object]:
    def spread(values: Iterable[float]) -> Spread:
        return Spread.of(list(values))

    return {
        "a message": name,
        "server CPU µs": spread(1e6 * one.cost.server_cpu for one in found),
        "WAL bytes": spread(one.cost.wal_bytes for one in found),
        "flushes": spread(one.flushes for one in found),
        "transactions": spread(one.cost.transactions for one in found),
        "MultiXacts": spread(one.cost.multixacts for one in found),
        "MultiXact members": spread(one.cost.multixact_members for one in found),
        "bytes while it waits": spread(one.stored for one in found) if found[0].stored else "",
    }


def measure(cluster: DevCluster, way: Way, count: int) -> Measured:
    """Run a way from an empty table and return what each message took."""
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {TABLE}")  # type: ignore[arg-type]
        way.make(count)
        connection.execute(f"VACUUM ANALYZE {TABLE}")  # type: ignore[arg-type]
        wait_until_ended(connection, others=0)
        before = flushes(connection)
        with Meter(cluster) as meter:
            way.work(count)
            # The meter has a session too.
            wait_until_ended(connection, others=1)
        flushed = flushes(connection) - before
        sizes = table_figures(connection, TABLE)
        waiting = connection.execute(f"SELECT count(*) FROM {TABLE}").fetchone()  # type: ignore[arg-type]
    assert waiting in ((0,), (count,))
    stored = (sizes.table_bytes + sizes.index_bytes) / count if waiting == (count,) else 0
    return Measured(meter.cost.per(count), flushed / count, stored)


def wait_until_ended(connection: psycopg.Connection, *, others: int) -> None:
    """
    Wait until no sessions but so many others are left.

    What a session used is known once it has ended, and its processor time for certain once the server's main
    process has taken note of it, which no statistics tell.
    """
    deadline = time.monotonic() + DEADLINE
    while connection.execute(SESSIONS).fetchone() != (others,):
        if time.monotonic() > deadline:
            raise TimeoutError(f"sessions have not ended within {DEADLINE} s")
        time.sleep(0.01)
    time.sleep(0.1)


def flushes(connection: psycopg.Connection) -> float:
    """Return how often the log was flushed, by all sessions that have ended or been idle since."""
    row = connection.execute(FLUSHES[connection.info.server_version >= 180_000]).fetchone()  # type: ignore[arg-type]
    return float(row[0]) if row else 0.0


# --- Ways -----------------------------------------------------------------------------------------


def publish(queues: Sequence[str], count: int) -> None:
    """Publish from a thread and session for each name, one by one, in autocommit."""

    def work(name: str) -> None:
        from django.db import connection

        from django_pgqueue import Queue

        queue = Queue(name)
        for _ in range(count // len(queues)):
            queue.publish(PAYLOAD)
        # Its end is when the session tells of what it did.
        connection.close()

    threads = [threading.Thread(target=work, args=[name]) for name in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def publish_many(count: int) -> None:
    from django.db import connection

    from django_pgqueue import Queue

    for _ in range(count // BULK):
        Queue(QUEUE).publish_many([PAYLOAD] * BULK)
    connection.close()


def consume(count: int) -> None:
    """Handle all with one consumer process, as in production."""
    arguments = ["consume_queues", QUEUE, "--handler", "benchmarks.capacity.nothing", "--drain"]
    subprocess.run([sys.executable, "manage.py", *arguments], cwd=ROOT, check=True, capture_output=True)
    vacuum()


def nothing(message: object) -> None:
    """Be the handler."""


def handle_by_hand(count: int) -> None:
    """Claim one and ack it, as a consumer does whose queue is nearly empty."""
    from django_pgqueue import Queue

    queue = Queue(QUEUE)
    for _ in range(count):
        queue.ack(*queue.claim())
    vacuum()


def vacuum() -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM {TABLE}")
    connection.close()
