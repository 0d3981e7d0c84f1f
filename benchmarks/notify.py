"""
What do wake-ups cost the publishers? 32 of them, and consumers that listen and are idle.

Our queue is measured with ``Queue.publish`` in autocommit, by 32 threads in four processes. Each process sends a NOTIFY
after a commit, in a separate statement, at most once per ``NOTIFY_INTERVAL`` and queue. The baseline is the same with
an interval that never ends: there are no wake-ups, so consumers would have to poll. The third variant sends a NOTIFY
after each publish.

The cost of a NOTIFY on the server is easier to see without Python. The second part runs only the insert, by pgbench:
without a NOTIFY, with one after each commit, and with one inside the publishing transaction, where the commits of the
whole database wait in line for it.

The consumers are sessions that LISTEN and read the notifications. They do not claim, so all variants publish under the
same conditions. All variants except the first two wake consumers for each message; our wake-up may be late by one
interval.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import psycopg

from benchmarks.harness import Report, Spread, Target, interleaved, percentile, ratio
from benchmarks.publishing import AUTOCOMMIT, QUEUE, Measured, Publishers, by_pgbench
from django_pgqueue.devdb import DevCluster
from django_pgqueue.services import notifying, publishing

PUBLISHERS = 32
PROCESSES = 4
LISTENERS = 4

NONE, OURS, EACH, INSIDE = "none", "ours", "after each commit", "inside the transaction"

# A day, in seconds: longer than a process of this benchmark lives.
NEVER = 86_400.0

# Each is the whole of a transaction, or of two: pgbench runs what it gets in autocommit.
STATEMENTS = {
    NONE: publishing.PUBLISH,
    EACH: f"{publishing.PUBLISH.strip()};\n{notifying.NOTIFY}",
    INSIDE: publishing.PUBLISH.replace("RETURNING id", "RETURNING id, pg_notify(%(channel)s, '')"),
}


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure the ways, from Python and as statements."""
    from django_pgqueue.services.notifying import channel

    rounds, seconds = (1, 1.0) if quick else (5, 4.0)
    report = Report("notify", f"what do wake-ups cost the publishers? ({PUBLISHERS} to one queue)", rounds)
    with listeners(cluster.url, channel(QUEUE)):
        with Publishers(cluster.url, processes=PROCESSES, threads=PUBLISHERS // PROCESSES) as publishers:
            publish = partial(publishers.publish, AUTOCOMMIT, seconds)
            # Their start is not what is measured.
            publish()
            found = interleaved(
                {
                    NONE: partial(publish, pgqueue={"NOTIFY_INTERVAL": NEVER}),
                    OURS: publish,
                    EACH: partial(publish, pgqueue={"NOTIFY_INTERVAL": 0}),
                },
                rounds,
            )
        report.rows += rows("Queue.publish", found)
        report.targets = [Target("T6: ours / none", ratio(rates(found[OURS]), rates(found[NONE])), ">=", 0.95)]
        statements: dict[str, Callable[[], Measured]] = {
            way: partial(
                by_pgbench,
                cluster,
                AUTOCOMMIT,
                [statement],
                seconds,
                publishers=PUBLISHERS,
                channel=channel(QUEUE),
            )
            for way, statement in STATEMENTS.items()
        }
        report.rows += rows("the insert, by pgbench", interleaved(statements, rounds))
    return report


def rows(publish: str, found: Mapping[str, list[Measured]]) -> list[dict[str, object]]:
    return [
        {
            "publish": publish,
            "NOTIFY": way,
            "messages/s": Spread.of(rates(measured)),
            "of none": ratio(rates(measured), rates(found[NONE])),
            "lock wait %": Spread.of([100 * one.lock_wait for one in measured]),
            "p99 ms": percentile([1000 * latency for one in measured for latency in one.latencies], 99),
        }
        for way, measured in found.items()
    ]


def rates(measured: list[Measured]) -> list[float]:
    return [one.rate for one in measured]


@contextlib.contextmanager
def listeners(url: str, channel: str) -> Iterator[None]:
    """Within the block, listen as idle consumers do."""
    done = threading.Event()
    threads = [threading.Thread(target=listen, args=(url, channel, done)) for _ in range(LISTENERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def listen(url: str, channel: str, done: threading.Event) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel)))
        while not done.is_set():
            for _ in connection.notifies(timeout=0.5):
                pass
