"""
Does one publisher wait for another? 32 publishers to one queue: the old way, ours, and the limit.

The old way makes sure of the queue in every publish, by an upsert of the queue's row; that row then
stays locked until the commit, and all publishers stand in line. Ours is a plain insert, whose
foreign-key check takes a lock that publishers share. The limit is the same insert into a table
without the foreign key.

The statements are run by pgbench, because 32 publishers in Python measure Python. The last row of
each part is ``Queue.publish`` itself, by 32 threads in four processes, on the same cores.

A commit that costs 1 ms, as on a cloud disk, is made by ``commit_delay``: whoever flushes the log
waits so long before it does, alone or not (``commit_siblings`` is 0).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psycopg

from benchmarks.harness import (
    PAYLOAD,
    LockWaits,
    Report,
    Spread,
    Target,
    interleaved,
    percentile,
    ratio,
    set_up_django,
)
from django_pgqueue import sql
from django_pgqueue.devdb import DevCluster, find_pg_bindir

PUBLISHERS = 32
PROCESSES = 4
QUEUE = "benchmark"

# What a transaction costs, as settings of the publisher's session.
SLOW_COMMIT = {"commit_delay": "1000", "commit_siblings": "0"}

ENSURE_AND_INSERT = """
WITH ensure_queue AS (
    INSERT INTO django_pgqueue_messagequeue (name) VALUES (%(name)s)
    ON CONFLICT (name) DO UPDATE SET last_active = now()
    RETURNING name
)
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers)
SELECT name, %(payload)s::jsonb, %(headers)s::jsonb FROM ensure_queue
RETURNING id
"""
PLAIN_INSERT = sql.PUBLISH.replace("django_pgqueue_messagequeueitem", "benchmark_item")

#: In the processes of ``by_python``: what lets them start together.
together: Barrier

OLD, OURS, LIMIT, FROM_PYTHON = "ensure on every publish", "ours", "insert without foreign key", "Queue.publish"


@dataclass(frozen=True)
class Part:
    """One kind of publishing transaction."""

    title: str
    #: Milliseconds between the publish and its commit. None: autocommit.
    held_open: int | None
    settings: dict[str, str]

    @property
    def statements(self) -> dict[str, str]:
        ours = sql.PUBLISH if self.held_open is None else sql.PUBLISH_IF_QUEUE
        return {OLD: ENSURE_AND_INSERT, OURS: ours, LIMIT: PLAIN_INSERT}


HELD_OPEN = Part("held open 5 ms", 5, {})
AUTOCOMMIT = Part("autocommit", None, {})
SLOW = Part("held open 5 ms, a commit costs 1 ms", 5, SLOW_COMMIT)
SLOW_AUTOCOMMIT = Part("autocommit, a commit costs 1 ms", None, SLOW_COMMIT)


@dataclass(frozen=True)
class Measured:
    """One way in one round: messages a second, share of lock wait, seconds a transaction took."""

    rate: float
    lock_wait: float
    latencies: list[float]


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure the three ways and ``Queue.publish`` in each kind of transaction."""
    rounds, seconds = (1, 0.5) if quick else (5, 4.0)
    report = Report("publish", "does one publisher wait for another? (32 to one queue)", rounds)
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE benchmark_item (LIKE django_pgqueue_messagequeueitem INCLUDING ALL)")
    context = get_context("spawn")
    with context.Pool(PROCESSES, initializer=set_up_process, initargs=[context.Barrier(PROCESSES)]) as pool:
        for part in (HELD_OPEN, SLOW, AUTOCOMMIT, SLOW_AUTOCOMMIT):
            ways: dict[str, Callable[[], Measured]] = {
                name: partial(by_pgbench, cluster, part, statement, seconds)
                for name, statement in part.statements.items()
            }
            ways[FROM_PYTHON] = partial(by_python, cluster, part, pool, seconds)
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


def prepare(url: str) -> None:
    """Empty the tables, so that no way inherits another's rows and dead row versions."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "TRUNCATE django_pgqueue_messagequeue, django_pgqueue_messagequeueitem, benchmark_item CASCADE"
        )
        connection.execute("INSERT INTO django_pgqueue_messagequeue (name) VALUES (%s)", [QUEUE])
        connection.execute("CHECKPOINT")


# --- The statements -------------------------------------------------------------------------------


def by_pgbench(cluster: DevCluster, part: Part, statement: str, seconds: float) -> Measured:
    """Run a statement from 32 sessions, prepared."""
    prepare(cluster.url)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.sql")
        script.write_text(as_script(statement, part.held_open))
        with LockWaits(cluster.url) as lock_waits:
            done = subprocess.run(
                pgbench(script, seconds),
                cwd=folder,
                env=environment(cluster, part.settings),
                capture_output=True,
                text=True,
                check=False,
            )
        rate = re.search(r"tps = ([\d.]+)", done.stdout)
        if done.returncode or rate is None:
            sys.exit(f"pgbench failed:\n{done.stdout}{done.stderr}")
        # Of each transaction a line; its third number is microseconds.
        latencies = [
            int(line.split()[2]) / 1e6 for log in Path(folder).glob("log.*") for line in log.read_text().splitlines()
        ]
    return Measured(float(rate[1]), lock_waits.share, latencies)


def pgbench(script: Path, seconds: float) -> list[str]:
    return [
        str(find_pg_bindir() / "pgbench"),
        *("--no-vacuum", "--protocol=prepared", f"--client={PUBLISHERS}", "--jobs=2", f"--file={script}"),
        # It counts in whole seconds.
        *("--log", "--log-prefix=log", f"--time={max(round(seconds), 1)}"),
        *("-D", f"name={QUEUE}", "-D", "headers={}", "-D", f"payload={json.dumps(PAYLOAD)}"),
    ]


def as_script(statement: str, held_open: int | None) -> str:
    """Return the statement with pgbench's kind of parameters, which cannot be null."""
    for name in ("delay", "expires_in"):
        statement = statement.replace(f"%({name})s", "NULL::float8")
    statement = re.sub(r"%\((\w+)\)s", r":\1", statement).strip() + ";\n"
    return statement if held_open is None else f"BEGIN;\n{statement}\\sleep {held_open} ms\nCOMMIT;\n"


def environment(cluster: DevCluster, settings: dict[str, str]) -> dict[str, str]:
    return os.environ | {
        "PGHOST": str(cluster.socket_dir),
        "PGPORT": cluster.options["port"],
        "PGUSER": "postgres",
        "PGDATABASE": "postgres",
        "PGOPTIONS": " ".join(f"-c {name}={value}" for name, value in settings.items()),
    }


# --- Queue.publish --------------------------------------------------------------------------------


def by_python(cluster: DevCluster, part: Part, pool: Pool, seconds: float) -> Measured:
    """Call ``Queue.publish`` in 32 threads of several processes."""
    prepare(cluster.url)
    with LockWaits(cluster.url) as lock_waits:
        found = pool.starmap(publish_in_threads, [(part, seconds)] * PROCESSES, chunksize=1)
    latencies = [latency for latencies in found for latency in latencies]
    return Measured(len(latencies) / seconds, lock_waits.share, latencies)


def set_up_process(barrier: Barrier) -> None:
    """Be one of the processes: ``barrier`` lets them start together."""
    global together
    together = barrier
    set_up_django()


def publish_in_threads(part: Part, seconds: float) -> list[float]:
    """Publish for so long, once all processes are there. Returns the seconds that each transaction took."""
    latencies: list[float] = []
    connected = threading.Barrier(PUBLISHERS // PROCESSES, action=together.wait)
    arguments = (part, seconds, connected, latencies)
    threads = [threading.Thread(target=publish_for, args=arguments) for _ in range(connected.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


def publish_for(part: Part, seconds: float, connected: threading.Barrier, latencies: list[float]) -> None:
    from django.db import connection, transaction

    from django_pgqueue import Queue

    queue = Queue(QUEUE)
    with connection.cursor() as cursor:
        for name, value in part.settings.items():
            cursor.execute("SELECT set_config(%s, %s, false)", [name, value])
    connected.wait()
    end = time.monotonic() + seconds
    while (before := time.monotonic()) < end:
        if part.held_open is None:
            queue.publish(PAYLOAD)
        else:
            with transaction.atomic():
                queue.publish(PAYLOAD)
                time.sleep(part.held_open / 1000)
        latencies.append(time.monotonic() - before)
    connection.close()
