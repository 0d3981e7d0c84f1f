"""
Publishers, for the benchmarks that compare ways of publishing: one statement by pgbench, or ``Queue.publish``.

The ways are the design's, the one before it, and those that were tried and rejected:

* ours: a plain insert, whose foreign-key check takes a lock that publishers share. Never lost, never waits.
* insert without foreign key: the limit. A queue may be deleted under its messages.
* ensure on every publish: an upsert of the queue's row in each publish. The row stays locked until the
  commit, and all publishers to the queue stand in line. Never lost.
* ensure where stale: the same, but its update has a WHERE that is false nearly always. The row is locked
  before the WHERE is looked at, so they stand in line all the same. Never lost.
* upsert, then insert: the same in two statements, so in a transaction. Never lost.
* ensure, do nothing: ``DO NOTHING`` does not lock the row, but returns none either where there is one: the
  insert that selects from it inserts nothing, and no error tells.
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
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from benchmarks.harness import PAYLOAD, Cost, LockWaits, Meter, set_up_django, table_figures, wait_until_gone
from django_pgqueue.devdb import DevCluster, find_pg_bindir
from django_pgqueue.services import publishing

if TYPE_CHECKING:
    from django_pgqueue import Queue

QUEUE = "benchmark"
# The application_name of sessions that publish.
APPLICATION = "publisher"
# Seconds until all processes that publish have started, on a busy machine.
START = 120.0

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
ENSURE_WHERE_STALE = """
WITH ensure_queue AS (
    INSERT INTO django_pgqueue_messagequeue AS queue (name) VALUES (%(name)s)
    ON CONFLICT (name) DO UPDATE SET last_active = now()
    WHERE queue.last_active < now() - interval '5 minutes'
)
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers)
VALUES (%(name)s, %(payload)s::jsonb, %(headers)s::jsonb)
RETURNING id
"""
ENSURE_DO_NOTHING = """
WITH ensure_queue AS (
    INSERT INTO django_pgqueue_messagequeue (name) VALUES (%(name)s)
    ON CONFLICT (name) DO NOTHING
    RETURNING name
)
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers)
SELECT name, %(payload)s::jsonb, %(headers)s::jsonb FROM ensure_queue
RETURNING id
"""
UPSERT = """
INSERT INTO django_pgqueue_messagequeue (name) VALUES (%(name)s)
ON CONFLICT (name) DO UPDATE SET last_active = now()
"""
LIMIT_TABLE = "benchmark_item"

LIMIT, OURS, OLD = "insert without foreign key", "ours", "ensure on every publish"
WHERE_STALE, UPSERT_FIRST, DO_NOTHING = "ensure where stale", "upsert, then insert", "ensure, do nothing"


@dataclass(frozen=True)
class Part:
    """One kind of publishing transaction."""

    title: str
    #: Milliseconds between the publish and its commit. None: autocommit.
    held_open: int | None = None
    #: What a transaction costs, as settings of the publisher's session.
    settings: dict[str, str] = field(default_factory=dict)

    def statements(self, way: str) -> list[str]:
        """Return what one publish of this way runs, in one transaction."""
        ours = publishing.PUBLISH if self.held_open is None else publishing.PUBLISH_IF_QUEUE
        return {
            LIMIT: [publishing.PUBLISH.replace("django_pgqueue_messagequeueitem", LIMIT_TABLE)],
            OURS: [ours],
            OLD: [ENSURE_AND_INSERT],
            WHERE_STALE: [ENSURE_WHERE_STALE],
            UPSERT_FIRST: [UPSERT, publishing.PUBLISH],
            DO_NOTHING: [ENSURE_DO_NOTHING],
        }[way]


AUTOCOMMIT = Part("autocommit")
HELD_OPEN = Part("held open 5 ms", 5)


@dataclass(frozen=True)
class Measured:
    """One way in one round: publishes a second, shares of lock wait (of all kinds, for rows), seconds each took."""

    rate: float
    lock_wait: float
    row_wait: float
    latencies: list[float]


@dataclass(frozen=True)
class Metered(Measured):
    """What it did to the server, too; by publish, but for ``dead``."""

    cost: Cost
    #: Share of the messages that are not there although the publish reported no error.
    lost: float
    #: Versions of the queue's row: written, and dead at the end.
    versions: float
    dead: int


def make_limit_table(url: str) -> None:
    """Make the table without a foreign key."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {LIMIT_TABLE} (LIKE django_pgqueue_messagequeueitem INCLUDING ALL)")


def prepare(url: str) -> None:
    """Empty the tables, so that no way inherits another's rows and dead row versions."""
    with psycopg.connect(url, autocommit=True) as connection:
        tables = ["django_pgqueue_messagequeue", "django_pgqueue_messagequeueitem"]
        if connection.execute("SELECT to_regclass(%s)", [LIMIT_TABLE]).fetchone() != (None,):
            tables.append(LIMIT_TABLE)
        connection.execute(f"TRUNCATE {', '.join(tables)} CASCADE")
        connection.execute("INSERT INTO django_pgqueue_messagequeue (name) VALUES (%s)", [QUEUE])
        # TRUNCATE leaves the statistics of dead row versions as they are.
        connection.execute(f"VACUUM {', '.join(tables)}")
        connection.execute("CHECKPOINT")


def queue_updates(url: str) -> int:
    """Return how often rows of queues were updated so far, once the publishers' sessions have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until_gone(connection, APPLICATION)
        return table_figures(connection, "django_pgqueue_messagequeue").updates


# --- The statements, by pgbench -------------------------------------------------------------------


def by_pgbench(
    cluster: DevCluster, part: Part, statements: list[str], seconds: float, *, publishers: int, **variables: str
) -> Metered:
    """Publish by these statements from so many sessions, prepared. ``variables`` are more parameters of theirs."""
    prepare(cluster.url)
    before = queue_updates(cluster.url)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.sql")
        script.write_text(as_script(statements, part.held_open))
        with Meter(cluster) as meter, LockWaits(cluster.url) as lock_waits:
            done = subprocess.run(
                pgbench(script, seconds, publishers, variables),
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
    versions = queue_updates(cluster.url) - before
    with psycopg.connect(cluster.url) as connection:
        table = LIMIT_TABLE if LIMIT_TABLE in "".join(statements) else "django_pgqueue_messagequeueitem"
        ((stored,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
        dead = table_figures(connection, "django_pgqueue_messagequeue").dead
    count = len(latencies)
    return Metered(
        float(rate[1]),
        lock_waits.share,
        lock_waits.row_share,
        latencies,
        meter.cost.per(count),
        lost=1 - stored / count,
        versions=versions / count,
        dead=dead,
    )


def pgbench(script: Path, seconds: float, publishers: int, variables: dict[str, str]) -> list[str]:
    parameters = {"name": QUEUE, "headers": "{}", "payload": json.dumps(PAYLOAD), **variables}
    return [
        str(find_pg_bindir() / "pgbench"),
        *("--no-vacuum", "--protocol=prepared", f"--client={publishers}", "--jobs=2", f"--file={script}"),
        # It counts in whole seconds.
        *("--log", "--log-prefix=log", f"--time={max(round(seconds), 1)}"),
        *(f"--define={name}={value}" for name, value in parameters.items()),
    ]


def as_script(statements: list[str], held_open: int | None) -> str:
    """Return the statements with pgbench's kind of parameters, which cannot be null."""
    text = "".join(statement.strip() + ";\n" for statement in statements)
    for name in ("delay", "expires_in"):
        text = text.replace(f"%({name})s", "NULL::float8")
    text = text.replace("%(due)s", "NULL")
    text = re.sub(r"%\((\w+)\)s", r":\1", text)
    if held_open is None:
        return text if len(statements) == 1 else f"BEGIN;\n{text}COMMIT;\n"
    return f"BEGIN;\n{text}\\sleep {held_open} ms\nCOMMIT;\n"


def environment(cluster: DevCluster, settings: dict[str, str]) -> dict[str, str]:
    return os.environ | {
        "PGHOST": str(cluster.socket_dir),
        "PGPORT": cluster.options["port"],
        "PGUSER": "postgres",
        "PGDATABASE": "postgres",
        "PGAPPNAME": APPLICATION,
        "PGOPTIONS": " ".join(f"-c {name}={value}" for name, value in settings.items()),
    }


# --- Queue.publish, from processes and threads ----------------------------------------------------

#: In the processes of ``Publishers``: what lets them start together.
together: Barrier

#: Publishes one message.
Publish = Callable[["Queue", Part], None]


def publish_once(queue: Queue, part: Part) -> None:
    """Publish as a project does."""
    from django.db import transaction

    if part.held_open is None:
        queue.publish(PAYLOAD)
    else:
        with transaction.atomic():
            queue.publish(PAYLOAD)
            time.sleep(part.held_open / 1000)


class Publishers:
    """Processes with threads that publish, each on a connection of its own. They live as long as the block."""

    def __init__(self, url: str, *, processes: int, threads: int) -> None:
        self._url = url
        self._processes = processes
        self._threads = threads
        context = get_context("spawn")
        self._pool = context.Pool(processes, initializer=set_up_process, initargs=[context.Barrier(processes)])

    def __enter__(self) -> Publishers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def publish(
        self, part: Part, seconds: float, *, by: Publish = publish_once, pgqueue: dict[str, Any] | None = None
    ) -> Measured:
        """Publish for so long, into an empty table, with these ``PGQUEUE`` settings."""
        prepare(self._url)
        arguments = (part, seconds, self._threads, by, pgqueue or {})
        with LockWaits(self._url) as lock_waits:
            # A pool replaces processes that die at their start, and would wait for ever.
            found = self._pool.starmap_async(publish_in_threads, [arguments] * self._processes, chunksize=1).get(
                START + seconds
            )
        latencies = [latency for latencies in found for latency in latencies]
        return Measured(len(latencies) / seconds, lock_waits.share, lock_waits.row_share, latencies)


def set_up_process(barrier: Barrier) -> None:
    """Be one of the processes: ``barrier`` lets them start together."""
    global together
    together = barrier
    os.environ["PGAPPNAME"] = APPLICATION
    set_up_django()


def publish_in_threads(
    part: Part, seconds: float, count: int, publish: Publish, pgqueue: dict[str, Any]
) -> list[float]:
    """Publish for so long, once all processes are there. Returns the seconds that each publish took."""
    from django.test import override_settings

    from django_pgqueue.services.beliefs import beliefs

    latencies: list[float] = []
    connected = threading.Barrier(count, action=together.wait)
    with override_settings(PGQUEUE=pgqueue):
        # What the round before taught is not this one's.
        beliefs.forget()
        threads = [
            threading.Thread(target=publish_for, args=(part, seconds, publish, connected, latencies))
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return latencies


def publish_for(
    part: Part, seconds: float, publish: Publish, connected: threading.Barrier, latencies: list[float]
) -> None:
    from django.db import connection

    from django_pgqueue import Queue

    queue = Queue(QUEUE)
    with connection.cursor() as cursor:
        for name, value in part.settings.items():
            cursor.execute("SELECT set_config(%s, %s, false)", [name, value])
    connected.wait()
    end = time.monotonic() + seconds
    while (before := time.monotonic()) < end:
        publish(queue, part)
        latencies.append(time.monotonic() - before)
    connection.close()
