"""
Do claims get slower with a backlog? 1,000,000 ready; 1,000,000 delayed; beside a huge queue; in 1,000 queues.

The baseline is a queue of 10,000 ready messages with fresh statistics. Each backlog has its own database on the same
server, so that all of them are measured in turns. The benchmark times the functions that consumers run, on a connection
that is set up like theirs: ``services.claim``, ``extend`` and ``ack`` of 10 messages (and of 100), and ``look``.

Statistics: "of the emptied table" are the statistics of a queue's table when a burst arrives. A few hundred messages
came and went, and then ANALYZE ran and found pages without a row. Autovacuum, which would analyse the burst, is off for
this table in this benchmark. "Fresh" means after VACUUM and ANALYZE of the full table. The statistics of the baseline
are always fresh. Its table is left alone, or vacuumed, together with the others.

Consumers: a "long-running" consumer made and cached its plans while the table was empty (after an ANALYZE, the server
makes them again). "Just started" is a new session for every five claims: nothing is prepared, and each statement is
planned.

Identity values start at a million, so that psycopg uses the same type for the ids of the warm-up and of the backlog,
and therefore the same prepared statement.

Each claim looks at the whole queue. None starts after a low-water mark, although the claims of a busy consumer do.

The last rows are for information and are not judged. They show what each claim has to pass at the head of a queue of
10,000. A million leased messages are what 10,000 consumers with a prefetch of 100 hold. Expired messages stay there
until ``reap_queues`` runs. Dead index entries of deleted rows stay there until a scan that is allowed to mark them
finds them (the highest figure is that scan) or, while another session holds an older snapshot, until it ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql as names

from benchmarks.harness import PAYLOAD, Report, Spread, Target, interleaved, percentile
from django_pgqueue.devdb import DevCluster
from django_pgqueue.queue_internals import declaration_of

ITEM = "django_pgqueue_messagequeueitem"
QUEUE, HUGE = "backlog", "backlog-huge"
FIRST_ID = 1_000_000

READY = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)
SELECT %(queue)s, %(payload)s::jsonb FROM generate_series(1, %(count)s)
"""
DELAYED = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, read_after)
SELECT %(queue)s, %(payload)s::jsonb, statement_timestamp() + interval '1 day' + number * interval '1 ms'
FROM generate_series(1, %(count)s) AS number
"""
LEASED = """
INSERT INTO django_pgqueue_messagequeueitem
    (queue_id, payload, lease_expires_at, lease_token, leased_by, delivery_count)
SELECT %(queue)s, %(payload)s::jsonb, statement_timestamp() + interval '1 day', gen_random_uuid(), gen_random_uuid(), 1
FROM generate_series(1, %(count)s)
"""
EXPIRED = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, expires_at)
SELECT %(queue)s, %(payload)s::jsonb, statement_timestamp() - interval '1 hour'
FROM generate_series(1, %(count)s)
"""
IN_MANY_QUEUES = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)
SELECT %(queue)s || '-' || number %% %(queues)s, %(payload)s::jsonb FROM generate_series(1, %(count)s) AS number
"""

#: Makes a backlog of so many messages.
Fill = Callable[["Place", int], None]

EMPTIED, FRESH = "of the emptied table", "fresh"
LONG_RUNNING, JUST_STARTED = "long-running", "just started"
# The column of what is judged.
RATIO = "claim p99, of the baseline's"
LEASE = 60.0
# As a consumer's claims have it.
CLAIM_BYTES = 8 * 1024 * 1024
# So many executions until psycopg has prepared a statement and the server has a plan for all parameters, and some.
WARM_UP = 15
# A session's first executions, before psycopg prepares the statement.
UNPREPARED = 5
# No way is measured for longer in a round, however few its claims are: seconds.
WAIT_TIMEOUT = 4.0
# Messages that came and went before the statistics were taken.
TRAFFIC = 500


@dataclass(frozen=True)
class Scale:
    """How much of each, and how often: claims in a round, by how many messages they take."""

    many: int
    few: int
    at_head: int
    queues: int
    rounds: int
    claims: Mapping[int, int]


FULL = Scale(1_000_000, 10_000, 100_000, 1_000, 5, {10: 150, 100: 60})
QUICK = Scale(10_000, 1_000, 2_000, 20, 1, {10: 10, 100: 5})


@dataclass(frozen=True)
class Backlog:
    """What waits, and in how many queues."""

    title: str
    fill: Fill
    queues: int = 1


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Measure each backlog with the statistics of the emptied table, then with fresh ones."""
    scale = QUICK if quick else FULL
    ways = [(consumer, size) for size in scale.claims for consumer in RUNS]
    report = Report("backlog", "does a claim get slower by what waits?", scale.rounds)
    with ExitStack() as stack:

        def opened(backlogs: list[Backlog]) -> dict[str, Place]:
            return {each.title: stack.enter_context(place(cluster, each, scale)) for each in backlogs}

        baseline, judged = baseline_of(scale), judged_backlogs(scale)
        places = opened([baseline, *judged])
        places[baseline.title].run(f"ANALYZE {ITEM}")
        found = measure(places, scale, ways)
        add(report, baseline.title, EMPTIED, found)
        for each in places.values():
            each.run(f"VACUUM ANALYZE {ITEM}")
        found = measure(places, scale, ways)
        add(report, baseline.title, FRESH, found)
        places = opened(backlogs_at_the_head(scale))
        for each in places.values():
            each.run(f"ANALYZE {ITEM}")
        found = measure(places, scale, ways[:1])
        report.rows += [
            row(title, FRESH, way, timings) for title, by_way in found.items() for way, timings in by_way.items()
        ]
    return report


def baseline_of(scale: Scale) -> Backlog:
    return Backlog(f"{scale.few:,} ready", lambda place, few: place.insert(READY, few))


def judged_backlogs(scale: Scale) -> list[Backlog]:
    """Return those of the target."""

    def delayed(place: Place, few: int) -> None:
        place.insert(DELAYED, scale.many)
        place.insert(READY, few)

    def beside(place: Place, few: int) -> None:
        place.insert(READY, scale.many, queue=HUGE)
        place.insert(READY, few)

    return [
        Backlog(f"{scale.many:,} ready", lambda place, few: place.insert(READY, scale.many)),
        Backlog(f"{scale.many:,} delayed, {scale.few:,} ready", delayed),
        Backlog(f"{scale.few:,} ready beside a queue of {scale.many:,}", beside),
        Backlog(
            f"{scale.many:,} ready in {scale.queues:,} queues",
            lambda place, few: place.insert(IN_MANY_QUEUES, scale.many),
            queues=scale.queues,
        ),
    ]


def backlogs_at_the_head(scale: Scale) -> list[Backlog]:
    """Return what is for information: what each claim has to pass."""

    def leased(place: Place, few: int) -> None:
        place.insert(LEASED, scale.many)
        place.insert(READY, few)

    def expired(place: Place, few: int) -> None:
        place.insert(EXPIRED, scale.at_head)
        place.insert(READY, few)

    def dead(place: Place, few: int) -> None:
        place.insert(READY, scale.at_head)
        place.run(f"DELETE FROM {ITEM}")
        place.insert(READY, few)

    def dead_and_held(place: Place, few: int) -> None:
        place.hold_snapshot()
        dead(place, few)

    return [
        Backlog(f"{scale.many:,} leased at the head", leased),
        Backlog(f"{scale.at_head:,} expired at the head", expired),
        Backlog(f"{scale.at_head:,} dead entries at the head", dead),
        Backlog(f"{scale.at_head:,} dead entries at the head, a snapshot held", dead_and_held),
    ]


# --- A backlog's database -------------------------------------------------------------------------


@dataclass
class Place:
    """A database with a backlog, reached by Django under an alias, and by a connection of the benchmark's own."""

    alias: str
    backlog: Backlog
    admin: psycopg.Connection[Any]
    others: ExitStack
    queues: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self.queues = cycle(self.queue_names)

    @property
    def queue_names(self) -> list[str]:
        count = self.backlog.queues
        return [QUEUE] if count == 1 else [f"{QUEUE}-{number}" for number in range(count)]

    def run(self, statement: str, **params: Any) -> None:
        self.admin.execute(statement, params or None)

    def insert(self, statement: str, count: int, *, queue: str = QUEUE) -> None:
        payload = json.dumps(PAYLOAD)
        self.run(statement, queue=queue, payload=payload, count=count, queues=self.backlog.queues)

    def hold_snapshot(self) -> None:
        """Let a session hold a snapshot until the end."""
        session = self.others.enter_context(psycopg.connect(self.admin.info.dsn))
        session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        session.execute(f"SELECT FROM {ITEM} LIMIT 1")


@contextmanager
def place(cluster: DevCluster, backlog: Backlog, scale: Scale) -> Iterator[Place]:
    """Make a database, let a consumer run on its empty table, and then fill it. The consumer stays."""
    from django.db import connections

    from django_pgqueue.runtime.connections import own_connection

    alias = f"backlog_{len(connections.settings)}"
    make_database(cluster, alias)
    with ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(cluster.url, dbname=alias, autocommit=True))
        # The foreign key's check of each row would take most of the time. None of these rows violates it.
        admin.execute("SET session_replication_role = replica")
        found = Place(alias, backlog, admin, stack)
        make_queues(found)
        found.insert(READY, TRAFFIC, queue=found.queue_names[0])
        found.run(f"DELETE FROM {ITEM}")
        found.run(f"ANALYZE {ITEM}")
        stack.enter_context(own_connection(alias, "consumer"))
        warm_up(found, scale)
        backlog.fill(found, scale.few)
        # Or the server would write it all out in the middle of a round.
        found.run("CHECKPOINT")
        yield found


def make_database(cluster: DevCluster, alias: str) -> None:
    """Copy the migrated database, and let Django know the copy."""
    from django.db import connections

    default = connections.settings["default"]
    with psycopg.connect(cluster.url, dbname="template1", autocommit=True) as connection:
        statement = names.SQL("CREATE DATABASE {} TEMPLATE {}")
        connection.execute(statement.format(names.Identifier(alias), names.Identifier(default["NAME"])))
    connections.settings[alias] = {**default, "NAME": alias}


def make_queues(place: Place) -> None:
    place.run(f"ALTER TABLE {ITEM} SET (autovacuum_enabled = off)")
    place.run(f"ALTER SEQUENCE {ITEM}_id_seq RESTART {FIRST_ID}")
    place.run(
        "INSERT INTO django_pgqueue_messagequeue (name) SELECT unnest(%(names)s::text[])",
        names=[HUGE, *place.queue_names],
    )


def warm_up(place: Place, scale: Scale) -> None:
    """Let the consumer prepare its statements, while the table is never fuller than one claim."""
    name = place.queue_names[0]
    for size in scale.claims:
        for _ in range(WARM_UP):
            place.insert(READY, size, queue=name)
            Timings().step(place.alias, name, size)


# --- Measuring ------------------------------------------------------------------------------------


@dataclass
class Timings:
    """What the statements of a consumer took, in milliseconds."""

    claim: list[float] = field(default_factory=list)
    extend: list[float] = field(default_factory=list)
    ack: list[float] = field(default_factory=list)
    look: list[float] = field(default_factory=list)

    def step(self, alias: str, name: str, size: int) -> None:
        """Claim, extend, settle, and look, as a consumer does."""
        from django_pgqueue import Queue
        from django_pgqueue.services import claiming, settling

        declaration = declaration_of(Queue(name))
        times = [time.perf_counter()]
        claim = claiming.claim(declaration, alias, limit=size, lease=LEASE, consumer=uuid4(), most_bytes=CLAIM_BYTES)
        times.append(time.perf_counter())
        extension = settling.extend(claim.messages, LEASE, alias)
        times.append(time.perf_counter())
        lost = settling.ack(claim.messages, alias)
        times.append(time.perf_counter())
        claiming.look(name, alias)
        times.append(time.perf_counter())
        if len(claim.messages) != size or len(extension.extended) != size or lost:
            raise RuntimeError(f"{size} messages of {name} were not all claimed, extended and settled")
        took = [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)]
        for values, value in zip((self.claim, self.extend, self.ack, self.look), took, strict=True):
            values.append(value)


#: A consumer's kind, and how many messages its claims take.
Way = tuple[str, int]


def measure(places: Mapping[str, Place], scale: Scale, ways: Sequence[Way]) -> dict[str, dict[Way, list[Timings]]]:
    """Measure each backlog in turn. Returns the timings by backlog and way, of each round."""
    rounds = interleaved(
        {title: lambda each=each: measure_once(each, scale, ways) for title, each in places.items()}, scale.rounds
    )
    return {title: {way: [one[way] for one in found] for way in ways} for title, found in rounds.items()}


def measure_once(place: Place, scale: Scale, ways: Sequence[Way]) -> dict[Way, Timings]:
    found: dict[Way, Timings] = {}
    for consumer, size in ways:
        timings = found[consumer, size] = Timings()
        end = time.monotonic() + WAIT_TIMEOUT
        while len(timings.claim) < scale.claims[size] and time.monotonic() < end:
            RUNS[consumer](place, timings, size)
        if place.backlog.queues == 1:
            # The backlog is as large as before.
            place.insert(READY, size * len(timings.claim))
    return found


def long_running(place: Place, timings: Timings, size: int) -> None:
    """Claim by the consumer that was there when the table was empty."""
    timings.step(place.alias, next(place.queues), size)


def just_started(place: Place, timings: Timings, size: int) -> None:
    """Be a consumer that has just started: a new session, for a few claims."""
    from django_pgqueue import Queue
    from django_pgqueue.runtime.connections import own_connection
    from django_pgqueue.services import declaring

    with own_connection(place.alias, "consumer"):
        # As each consumer does first.
        declaring.declare(declaration_of(Queue(place.queue_names[0])), place.alias)
        for _ in range(UNPREPARED):
            timings.step(place.alias, next(place.queues), size)


RUNS = {LONG_RUNNING: long_running, JUST_STARTED: just_started}


# --- Telling --------------------------------------------------------------------------------------


def add(report: Report, baseline: str, statistics: str, found: dict[str, dict[Way, list[Timings]]]) -> None:
    """Add rows and targets of one kind of statistics."""
    for title, ways in found.items():
        for way, timings in ways.items():
            is_baseline = title == baseline
            shown = row(*((f"{title} (baseline)", FRESH) if is_baseline else (title, statistics)), way, timings)
            times = p99_of_all(timings) / p99_of_all(found[baseline][way])
            if not is_baseline:
                consumer, size = way
                shown[RATIO] = times
                what = f"T10: {title}, statistics {statistics}, {consumer}, claims of {size}: p99 / baseline"
                report.targets.append(Target(what, times, "<=", 2))
            report.rows.append(shown)


def row(title: str, statistics: str, way: Way, timings: list[Timings]) -> dict[str, Any]:
    consumer, size = way
    return {
        "backlog": title,
        "statistics": statistics,
        "consumer": consumer,
        "of": size,
        "claim p50 ms": Spread.of([percentile(one.claim, 50) for one in timings]),
        "claim p99 ms": Spread.of([percentile(one.claim, 99) for one in timings]),
        RATIO: "",
        "highest ms": max(max(one.claim) for one in timings),
        "ack p99 ms": Spread.of([percentile(one.ack, 99) for one in timings]),
        "extend p99 ms": Spread.of([percentile(one.extend, 99) for one in timings]),
        "look p99 ms": Spread.of([percentile(one.look, 99) for one in timings]),
    }


def p99_of_all(timings: list[Timings]) -> float:
    """Return the 99th percentile over all rounds: of one round's claims of 100 it is the slowest."""
    return percentile([value for one in timings for value in one.claim], 99)
