"""
Does the space for MultiXact members stay flat under 32 publishers to one queue? And what keeps it flat?

Each publish locks its queue's row, as the check of the foreign key does, and shares the lock with all publishers whose
transactions are open. PostgreSQL records them in a MultiXact, a new one for each publish, with about five bytes for
each member. The space is freed when the oldest MultiXact that any table of any database may still contain moves on,
including ``template0`` and the catalogs. Vacuum moves it on, table by table.

Part one counts members with 1 to 32 publishers. Part two publishes from 32 sessions, with each transaction held open
for 5 ms (pgbench runs the statement of ``Queue.publish``), and watches the files of members:

* no vacuum of the queue table: the baseline.
* the migration's settings: the queue table is vacuumed once it is ``autovacuum_multixact_freeze_max_age``
  behind, through a setting of that table.
* these settings, and VACUUM of the project's database by cron.
* these settings, and VACUUM of all databases by cron, with ``template0`` opened for it. This needs no restart.
* these settings, and a lower ``autovacuum_multixact_freeze_max_age`` of the server, which applies to all tables.
* the same, while the transaction of another session, which has locked a row of another table, stays open: members that
  were created since then are kept because of it. (A transaction that only reads holds nothing back here.)

An hour is shortened by a factor of 400, which also applies to the ages and to cron's interval: 20 million MultiXacts of
the server become 50,000, 10 million of the table become 25,000, and an hour becomes 9 seconds. Autovacuum checks every
second. It is the server's own autovacuum, with its usual cost limits.

Each variant starts without members. For the variants that are not flat, the figures show how many members were created.
The server's emergency starts at 2^31 members (10 GB): it then vacuums all tables, regardless of the settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

from benchmarks.harness import Points, Report, Sampler, Series, Target, multixact_bytes
from benchmarks.harness.metering import Connection
from benchmarks.publishing import AUTOCOMMIT, HELD_OPEN, OURS, Metered, Part, by_pgbench
from django_pgqueue.devdb import DevCluster

PUBLISHERS = 32
COUNTS = (1, 2, 4, 8, 16, PUBLISHERS)

SCALE = 400
SERVER_AGE, TABLE_AGE, CRON = 20_000_000 // SCALE, 10_000_000 // SCALE, 3600 // SCALE
# Where the server begins to vacuum all tables, and what a member takes: four share twenty bytes.
EMERGENCY = 2**31
MEMBER_BYTES = 5
MB, GB = 2**20, 2**30

# Fit for a vacuum that moves the oldest MultiXact: it reads also pages that hold nothing to remove.
AGGRESSIVE = "SET vacuum_multixact_freeze_table_age = 0"

NO_VACUUM, LOWERED = "no vacuum of the queue table", "and the server's age lowered"

USED, AGE, QUEUE_AGE = "member files MB", "oldest MultiXact of all databases, age", "oldest of the queue table, age"
MEASURES: dict[str, Callable[[Connection], float]] = {
    USED: lambda connection: multixact_bytes(connection) / MB,
    AGE: lambda connection: number(connection, "SELECT max(mxid_age(datminmxid)) FROM pg_database"),
    QUEUE_AGE: lambda connection: number(
        connection,
        "SELECT mxid_age(relminmxid) FROM pg_class WHERE oid = 'django_pgqueue_messagequeue'::regclass",
    ),
}


@dataclass(frozen=True)
class Way:
    """What an operator may leave or set."""

    title: str
    #: Storage parameter of the queue table, beside those of the migration.
    storage: str = f"autovacuum_multixact_freeze_max_age = {TABLE_AGE}"
    #: What cron runs.
    cron: Callable[[Connection], object] | None = None
    #: Settings of the server, which need a restart.
    options: dict[str, str] = field(default_factory=dict)
    #: What somebody else does in a transaction that stays open.
    beside: str = ""


@dataclass(frozen=True)
class Watched:
    """One way: its publishes, and what was measured meanwhile."""

    metered: Metered
    points: dict[str, Points]

    def most(self, name: str, third: int) -> float:
        """Return the highest value in a third of the run."""
        points = self.points[name]
        share = max(len(points) // 3, 1)
        return max(value for _, value in points[third * share : (third + 1) * share] or points)


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Count the members, then watch the ways, one after the other."""
    counts, seconds, long = ((1, PUBLISHERS), 1.0, 2.0) if quick else (COUNTS, 5.0, 120.0)
    report = Report("multixacts", "does the space for MultiXact members stay flat? (32 publishers, one queue)", 1)
    for part in (AUTOCOMMIT, HELD_OPEN):
        for count in counts:
            report.rows.append(row(count, part, "members only", publish(cluster, part, seconds, count)))
    watched = {
        way.title: watch(cluster, way, long)
        for way in ways(cluster.url)
        if way.title in (NO_VACUUM, LOWERED) or not quick
    }
    for title, found in watched.items():
        report.rows.append(row(PUBLISHERS, HELD_OPEN, title, found.metered) | usage(found))
        report.series[title] = found.points
    report.targets = targets(watched[NO_VACUUM], watched[LOWERED])
    return report


def targets(baseline: Watched, lowered: Watched) -> list[Target]:
    middle, end = lowered.most(USED, 1), lowered.most(USED, 2)
    return [
        Target("T15: member files at most, last third of the time / second third", end / middle, "<=", 1.2),
        Target("T15: member files at most, last third / no vacuum's", end / baseline.most(USED, 2), "<=", 0.5),
    ]


def ways(url: str) -> list[Way]:
    lowered = {"autovacuum_multixact_freeze_max_age": str(SERVER_AGE)}
    return [
        Way(NO_VACUUM, storage="autovacuum_enabled = off"),
        Way("the migration's settings"),
        Way("and VACUUM of this database by cron", cron=vacuum),
        Way("and VACUUM of all databases by cron", cron=lambda connection: vacuum_all(url)),
        Way(LOWERED, options=lowered),
        Way(
            "the same beside an open transaction",
            options=lowered,
            beside="SELECT id FROM django_migrations LIMIT 1 FOR UPDATE",
        ),
    ]


def publish(cluster: DevCluster, part: Part, seconds: float, count: int) -> Metered:
    return by_pgbench(cluster, part, part.statements(OURS), seconds, publishers=count)


def row(count: int, part: Part, way: str, metered: Metered) -> dict[str, object]:
    members = metered.cost.multixact_members
    return {
        "publishers": count,
        "transaction": part.title,
        "way": way,
        "messages/s": metered.rate,
        "MultiXacts a message": metered.cost.multixacts,
        "members a message": members,
        "bytes a message": members * MEMBER_BYTES,
        "hours to the emergency": EMERGENCY / (members * metered.rate) / 3600 if members else "never",
    }


def usage(found: Watched) -> dict[str, object]:
    return {
        "MB at most, second third": found.most(USED, 1),
        "MB at most, last third": found.most(USED, 2),
        "oldest MultiXact, age": found.most(AGE, 2),
    }


def watch(cluster: DevCluster, way: Way, seconds: float) -> Watched:
    """Publish under these settings, and see what becomes of the members."""
    cluster.options.update({"autovacuum_naptime": "1s", **way.options})
    cluster.restart()
    vacuum_all(cluster.url)
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE django_pgqueue_messagequeue RESET (autovacuum_enabled)")
        connection.execute(f"ALTER TABLE django_pgqueue_messagequeue SET ({way.storage})")
    with contextlib.ExitStack() as stack:
        if way.cron is not None:
            stack.enter_context(Sampler(cluster.url, way.cron, CRON))
        if way.beside:
            stack.enter_context(psycopg.connect(cluster.url)).execute(way.beside)
        series = stack.enter_context(Series(cluster.url, MEASURES, interval=seconds / 120))
        metered = publish(cluster, HELD_OPEN, seconds, PUBLISHERS)
    return Watched(metered, series.points)


def vacuum_all(url: str) -> None:
    """Vacuum each database, also the one that is made to be left alone."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER DATABASE template0 ALLOW_CONNECTIONS true")
        names = [name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()]
    for name in names:
        with psycopg.connect(url, dbname=name, autocommit=True) as connection:
            vacuum(connection)


def vacuum(connection: Connection) -> None:
    connection.execute(AGGRESSIVE)
    connection.execute("VACUUM")


def number(connection: Connection, query: str) -> float:
    ((value,),) = connection.execute(query).fetchall()
    return float(value)
