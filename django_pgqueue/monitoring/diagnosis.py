"""
The examinations: they find what is wrong with a project's queues, or will soon be.

``check --database`` reports problems of the schema, ``diagnose_queues`` reports all problems.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
from django.core.checks import CheckMessage
from django.db import OperationalError, connections

from django_pgqueue.conf import settings
from django_pgqueue.durations import duration
from django_pgqueue.monitoring.findings import OLDEST_VERSION, OWN_CONNECTIONS, finding
from django_pgqueue.registry import registered_handlers
from django_pgqueue.runtime.connections import dedicated_connection
from django_pgqueue.runtime.listener import hears
from django_pgqueue.runtime.loop import DATABASE_FAULTS, describe
from django_pgqueue.services import consumers, diagnosing, minutes, reaping, session
from django_pgqueue.services.minutes import LetterHistory

# Seconds for each statement.
STATEMENT_TIMEOUT = 10.0
# Findings of one examination. Further ones are only counted.
MAX_FINDINGS = 20

QUERY_CANCELED = "57014"


@dataclass(frozen=True)
class Limits:
    """The thresholds for findings, in seconds unless stated otherwise."""

    #: Time since the last run of the reaper.
    reaper: float = 600.0
    #: How long due messages may wait in a queue without a consumer.
    backlog: float = 600.0
    #: Dead letters younger than this count as new. They are reported if they outnumber those of the same time before by
    #: more than this ratio.
    letters: float = 3_600.0
    letters_ratio: float = 1.5
    #: Queues that vanished within this time are reported.
    vanished: float = 86_400.0
    #: How long something may hold back vacuum.
    holder: float = 300.0
    #: Dead rows of a table, and their ratio to live rows. Both must be exceeded.
    dead_rows: int = 100_000
    dead_ratio: float = 2.0
    #: Age of the oldest MultiXact, in MultiXacts.
    multixact_age: int = 50_000_000
    #: The used part of the notification queue, from 0 to 1.
    notification_queue: float = 0.05
    #: Difference between the clocks of the application and the server.
    skew: float = 1.0


# --- The schema: check --database ---


def examine_schema(using: str) -> list[CheckMessage]:
    """Return problems of the schema, except for the foreign key: E006, E007, W008, E009."""
    server = diagnosing.server(using)
    if server.version < OLDEST_VERSION * 10_000:
        return [finding("E009", f"The server is PostgreSQL {server.version // 10_000}.")]
    found: list[CheckMessage] = []
    schema = diagnosing.schema(using)
    if not schema.claim_index:
        state = "is missing" if schema.claim_index is None else "is invalid or has other columns"
        found.append(finding("E006", f"The index django_pgqueue_item_claim_idx {state}: claims read the whole table."))
    if not schema.orphan_trigger:
        state = "is missing" if schema.orphan_trigger is None else "is disabled"
        found.append(finding("E007", f"The trigger django_pgqueue_orphan_messages {state}."))
    if not server.vacuums:
        found.append(finding("W008", "Autovacuum is off on the whole server."))
    elif schema.unvacuumed:
        found.append(finding("W008", f"Autovacuum is off for {', '.join(schema.unvacuumed)}."))
    return found


def missing_tables(text: str) -> CheckMessage:
    """Return E010, with the text of the database's error."""
    return finding("E010", text.strip().splitlines()[0])


# --- All the rest: diagnose_queues ---

Examination = Callable[[str, Limits], Iterator[CheckMessage]]


def examine(using: str, limits: Limits | None = None) -> list[CheckMessage]:
    """
    Return problems in the operation of the queues of a database: W020 to W035.

    Takes a few seconds at most, of which two are spent waiting if notifications do not arrive. Changes nothing. Raises
    ``django.db.Error`` if the database does not answer.
    """
    limits = limits or Limits()
    found: list[CheckMessage] = []
    for examination in EXAMINATIONS:
        try:
            with session.bounded(STATEMENT_TIMEOUT, using):
                messages = list(examination(using, limits))
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != QUERY_CANCELED:
                raise
            messages = [finding("W035", f"{_name(examination)} took longer than {STATEMENT_TIMEOUT:g} seconds.")]
        found += messages[:MAX_FINDINGS]
        if len(messages) > MAX_FINDINGS:
            rest = messages[MAX_FINDINGS]
            found.append(CheckMessage(rest.level, f"… and {len(messages) - MAX_FINDINGS} more.", id=rest.id))
    return found


def _name(examination: Examination) -> str:
    return "Looking at the " + getattr(examination, "__name__", "").removeprefix("_examine_")


def _examine_reaper(using: str, limits: Limits) -> Iterator[CheckMessage]:
    age = reaping.last_run_age(using)
    if age is None:
        yield finding("W020", "The reaper has never run.")
    elif age > limits.reaper:
        yield finding("W020", f"The reaper ran {duration(age)} ago.")


def _examine_backlogs(using: str, limits: Limits) -> Iterator[CheckMessage]:
    for backlog in diagnosing.backlogs(using):
        age = backlog.oldest_due_age
        if age is not None and age > limits.backlog and not backlog.has_consumer:
            paused = ", and it is paused" if backlog.paused else ""
            yield finding(
                "W021", f"Messages of queue {backlog.name!r} have been due for {duration(age)}, no consumer{paused}."
            )


def _examine_letters(using: str, limits: Limits) -> Iterator[CheckMessage]:
    found = diagnosing.recent_letters(limits.letters, using)
    history = minutes.letter_history(list(found), limits.letters, using)
    for name, seen in found.items():
        reported = history.get(name, LetterHistory(0, 0, 0.0))
        count = max(seen, reported.recent)
        is_known = reported.seconds >= limits.letters
        before = reported.before / (reported.seconds / limits.letters) if is_known else 0.0
        if count <= limits.letters_ratio * before:
            continue
        number = f"At least {count}" if count == seen >= diagnosing.SAMPLE_SIZE else str(count)
        usual = f", {before:.1f} in the same time before" if is_known else ""
        yield finding(
            "W022", f"{number} messages of queue {name!r} were dead-lettered within {duration(limits.letters)}{usual}."
        )


def _examine_heals(using: str, limits: Limits) -> Iterator[CheckMessage]:
    for name, count in diagnosing.vanished(limits.vanished, using).items():
        yield finding("W023", f"Queue {name!r} vanished {count} times within {duration(limits.vanished)}.")


def _examine_notifications(using: str, limits: Limits) -> Iterator[CheckMessage]:
    listening = settings.LISTEN_DATABASE or using
    listener = dedicated_connection(listening, "diagnosis")
    try:
        listener.connect()
        heard = hears(listener.connection, using)
    except (*DATABASE_FAULTS, psycopg.Error) as error:
        yield finding("E024", f"Listening on {listening!r} fails: {describe(error)}.")
    else:
        if not heard:
            yield finding("E024", f"A notification from {using!r} is not heard on {listening!r}: consumers only poll.")
    finally:
        listener.close()


def _examine_vacuum(using: str, limits: Limits) -> Iterator[CheckMessage]:
    numbers = {"session": "W025", "prepared transaction": "W026", "replication slot": "W027"}
    for holder in diagnosing.holders(limits.holder, using):
        since = "" if holder.seconds is None else f" for {duration(holder.seconds)}"
        yield finding(numbers[holder.kind], f"Vacuum is held back{since} by {holder.kind} {holder.name}.")
    for table, dead, live in diagnosing.dead_rows(using):
        if dead > limits.dead_rows and dead > limits.dead_ratio * live:
            yield finding("W028", f"{table} has {dead:,} dead rows and {live:,} live rows.")


def _examine_server(using: str, limits: Limits) -> Iterator[CheckMessage]:
    before = time.time()
    server = diagnosing.server(using)
    after = time.time()
    if server.multixact_age > limits.multixact_age:
        yield finding(
            "W029",
            f"The age of the oldest MultiXact is {server.multixact_age:,}. Autovacuum freezes it at"
            f" {server.multixact_freeze_age:,}.",
        )
    if server.notification_queue > limits.notification_queue:
        yield finding("W030", f"{server.notification_queue:.0%} of the notification queue is used.")
    # The server read its clock at some moment in between.
    skew = server.clock - (before + after) / 2
    if abs(skew) > limits.skew + (after - before) / 2:
        yield finding("W031", f"The server's clock is {duration(abs(skew))} {'ahead' if skew > 0 else 'behind'}.")
    if not server.sees_all:
        yield finding("I034", "This role cannot see the sessions of other roles.")
    yield from _examine_connections(using, server)


def _examine_connections(using: str, server: diagnosing.Server) -> Iterator[CheckMessage]:
    needed = OWN_CONNECTIONS + sum(
        handler.concurrency for handler in registered_handlers() if handler.queue.using == using
    )
    processes = max(consumers.live_consumers(using), 1)
    if needed * processes > server.connections:
        yield finding(
            "W033",
            f"{processes} consumer processes need up to {needed} connections each. The server allows"
            f" {server.connections} in total.",
        )


def _examine_requests(using: str, limits: Limits) -> Iterator[CheckMessage]:
    if connections[using].settings_dict["ATOMIC_REQUESTS"]:
        yield finding("W032", f"DATABASES[{using!r}] has ATOMIC_REQUESTS: each request is one transaction.")


EXAMINATIONS: tuple[Examination, ...] = (
    _examine_reaper,
    _examine_backlogs,
    _examine_letters,
    _examine_heals,
    _examine_notifications,
    _examine_vacuum,
    _examine_server,
    _examine_requests,
)
