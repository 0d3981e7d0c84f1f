"""
What is wrong with a project's queues, or soon will be: findings with an id, what each means, how to mend it.

``check --database`` reports what is wrong with the schema, ``diagnose_queues`` all of it. The findings are
Django's check messages; their texts in general are in ``FINDINGS``, of which docs/findings.md is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
from django.core.checks import ERROR, INFO, WARNING, CheckMessage
from django.db import OperationalError, connections

from django_pgqueue.conf import settings
from django_pgqueue.durations import duration
from django_pgqueue.registry import registered_handlers
from django_pgqueue.runtime.connections import dedicated_connection
from django_pgqueue.runtime.listener import hears
from django_pgqueue.runtime.loop import DATABASE_FAULTS, describe
from django_pgqueue.services import consumers, diagnosing, minutes, reaping, session
from django_pgqueue.services.minutes import LetterHistory

APP = "django_pgqueue"

# Where each finding is explained.
PAGE = "docs/findings.md"

# The connections of a consumer process, but for its workers: claims, leases, heartbeat, notifications.
OWN_CONNECTIONS = 4

OLDEST_VERSION = 15

# Seconds that a statement gets, and findings of one kind that are told one by one.
PATIENCE = 10.0
MOST = 20

QUERY_CANCELED = "57014"


@dataclass(frozen=True)
class Limits:
    """From where on something is found. Seconds, unless said otherwise."""

    #: Since the reaper ran.
    reaper: float = 600.0
    #: For which due messages may wait where nobody consumes.
    backlog: float = 600.0
    #: Of the dead letters that count as new, and how many times as many as in the same time before they must be.
    letters: float = 3_600.0
    letters_ratio: float = 1.5
    #: Of the queues that vanished.
    vanished: float = 86_400.0
    #: For which something may hold back vacuum.
    holder: float = 300.0
    #: Dead rows: so many, and more than so many for each live one.
    dead_rows: int = 100_000
    dead_ratio: float = 2.0
    #: Age of the oldest MultiXact, in MultiXacts.
    multixact_age: int = 50_000_000
    #: How full the queue of notifications is: 0 to 1.
    notification_queue: float = 0.05
    #: Between the clocks of application and server.
    skew: float = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A kind of finding. ``meaning`` and ``remedy`` are Markdown."""

    level: int
    title: str
    meaning: str
    remedy: str


FINDINGS = {
    "E001": Finding(
        ERROR,
        "The database is not PostgreSQL, or there is no such alias",
        "`PGQUEUE['DATABASE']` and `PGQUEUE['LISTEN_DATABASE']` name aliases of `DATABASES`, whose engine is"
        " PostgreSQL's or made of it. Nothing works without.",
        "Name the right alias.",
    ),
    "E002": Finding(
        ERROR,
        "A setting that there is not",
        "A key of `PGQUEUE` is misspelt: what it was to change stays as it is by default.",
        "Take the name that is suggested, or one of those listed.",
    ),
    "E003": Finding(
        ERROR,
        "A setting's value is of the wrong kind or range",
        "Seconds are numbers, texts are texts, and some have a range.",
        "Correct the value.",
    ),
    "W004": Finding(
        WARNING,
        "Queues in use may be reaped",
        "A queue counts as used only when that is written to its row, which happens every `DECLARE_TTL` (publishers)"
        " or `HEARTBEAT_INTERVAL` (consumers). `REAP_IDLE_AFTER` must leave room for several of these.",
        "Raise `REAP_IDLE_AFTER` to at least three times the longer of the two.",
    ),
    "E005": Finding(
        ERROR,
        "The messages' foreign key is missing or different",
        "It must be `ON DELETE SET NULL`, not deferrable and validated. Without it messages to a queue that is gone lie"
        " there unseen; deferrable, a publish fails at COMMIT, after it has returned; with another action a deleted"
        " queue takes its messages along.",
        "Run the statement that the finding gives.",
    ),
    "E006": Finding(
        ERROR,
        "The claim index is missing, invalid or different",
        "Every claim reads the whole table of messages. A `CREATE INDEX CONCURRENTLY` that failed leaves an invalid"
        " index behind.",
        "`DROP INDEX CONCURRENTLY IF EXISTS django_pgqueue_item_claim_idx;` then `CREATE INDEX CONCURRENTLY"
        " django_pgqueue_item_claim_idx ON django_pgqueue_messagequeueitem (queue_id, read_after, id) WHERE queue_id IS"
        " NOT NULL;`",
    ),
    "E007": Finding(
        ERROR,
        "The trigger that keeps orphans is missing or disabled",
        "When a queue's row is deleted its messages would not know any more where they belong, and the deletion fails"
        " for that reason.",
        "`ALTER TABLE django_pgqueue_messagequeue ENABLE TRIGGER django_pgqueue_orphan_messages;` or, where it is"
        " missing, make it again as `migrate` does: `python manage.py sqlmigrate django_pgqueue 0001` shows it.",
    ),
    "W008": Finding(
        WARNING,
        "Autovacuum is off",
        "Messages come and go: without autovacuum the tables grow without end, and claims become slow.",
        "`ALTER TABLE … RESET (autovacuum_enabled);`, or `autovacuum = on` and `track_counts = on` in the server's"
        " configuration.",
    ),
    "E009": Finding(
        ERROR,
        "The server is too old",
        f"The statements need PostgreSQL {OLDEST_VERSION} or later.",
        "Upgrade the server.",
    ),
    "E010": Finding(
        ERROR,
        "The tables are missing",
        "This database has not been migrated, or not to the end.",
        "`python manage.py migrate`, with `--database` where it is not the default one.",
    ),
    "E011": Finding(
        ERROR,
        "An option of the Tasks backend is wrong",
        "A key of `OPTIONS` in `TASKS` is misspelt, or its value is of the wrong kind.",
        "Take the key that is suggested, or correct the value.",
    ),
    "E012": Finding(
        ERROR,
        "A queue of tasks has a name that no queue can have",
        "`QUEUES` in `TASKS` names a queue with characters that are not allowed, or too many.",
        "Give it another name, there and in the tasks' `queue_name`.",
    ),
    "E013": Finding(
        ERROR,
        "A queue of tasks has a handler of its own",
        "One queue has one handler. `consume_queues` refuses to guess whether its messages are tasks.",
        "Give the tasks or the handler another queue.",
    ),
    "W020": Finding(
        WARNING,
        "The reaper has not run for ten minutes",
        "Expired messages stay, idle auto-deleted queues stay, orphans are not given back to their queues, and what"
        " kills its workers on queues without a consumer is not set aside.",
        "Run `manage.py reap_queues` every minute by cron or a timer, or `manage.py reap_queues --interval 60` under"
        " a supervisor.",
    ),
    "W021": Finding(
        WARNING,
        "Messages are due and nobody consumes",
        "The oldest message of the queue, among its first 1,000, has been due for more than ten minutes, and no running"
        " `consume_queues` names the queue. Consumers that are not this library's are not known.",
        "Start a consumer for it, or see why it ended; publish with a `ttl` what nobody needs later.",
    ),
    "W022": Finding(
        WARNING,
        "More messages are dead-lettered than before",
        "Handlers gave them up, or they killed their workers. Where the minutes that consumers tell of (kept for a day)"
        " reach back for two hours, those of the last hour are more than one and a half times as many as in an hour"
        " before; where they do not, there are some. More than 1,000 of a queue are only counted by these minutes.",
        "Read their failures in the admin, mend the handler, then `manage.py redrive_queue`.",
    ),
    "W023": Finding(
        WARNING,
        "Queues vanished",
        "Their rows were deleted by something that is not the reaper: by hand, by a restored backup, by a test run"
        " against the wrong database. Publishing made them again, no message was lost, but attributes that only the row"
        " had (a pause, an owner) are.",
        "Find who deletes rows of `django_pgqueue_messagequeue`.",
    ),
    "E024": Finding(
        ERROR,
        "Notifications do not arrive",
        "Something was sent from `DATABASE` and not heard on `LISTEN_DATABASE` within two seconds: a pooler that lends"
        " a session for each transaction is between, or the two are different databases. Consumers only poll then.",
        "Let `PGQUEUE['LISTEN_DATABASE']` name an alias that goes to the server itself.",
    ),
    "W025": Finding(
        WARNING,
        "A session holds back vacuum",
        "A transaction has been open for more than five minutes. What was handled since stays in the tables as dead"
        " rows. Claims stay quick, but the tables grow.",
        "End what is forgotten: `SELECT pg_terminate_backend(PID)`. `idle_in_transaction_session_timeout` does so by"
        " itself; reports that run for hours belong on a replica.",
    ),
    "W026": Finding(
        WARNING,
        "A prepared transaction holds back vacuum",
        "It was prepared for a two-phase commit more than five minutes ago, and whoever should end it has not. It"
        " survives restarts.",
        "`COMMIT PREPARED 'NAME'` or `ROLLBACK PREPARED 'NAME'`.",
    ),
    "W027": Finding(
        WARNING,
        "A replication slot that nobody reads holds back vacuum",
        "It keeps dead rows for a standby that is not connected, for ever.",
        "Reconnect the standby, or `SELECT pg_drop_replication_slot('NAME')`.",
    ),
    "W028": Finding(
        WARNING,
        "Many dead rows",
        "There are more than 100,000, and more than twice as many as live ones: vacuum is off, held back, or does not"
        " keep up.",
        "Look for W008 and W025 to W027 first. Otherwise give autovacuum more workers, or `VACUUM` the table.",
    ),
    "W029": Finding(
        WARNING,
        "MultiXacts are old",
        "Publishers that overlap make MultiXacts, and the space of their members is freed only up to the oldest of all"
        " tables of all databases: more than 50 million are kept.",
        "`autovacuum_multixact_freeze_max_age = 20000000` in the server's configuration; docs/autovacuum.md says more.",
    ),
    "W030": Finding(
        WARNING,
        "The queue of notifications fills up",
        "More than a twentieth is used: some session LISTENs inside a transaction that stays open. When it is full,"
        " publishers' wake-ups fail; publishing itself does not.",
        "End that session: `SELECT pid, query FROM pg_stat_activity WHERE state = 'idle in transaction'`.",
    ),
    "W031": Finding(
        WARNING,
        "The clocks of application and server differ",
        "Delays, leases and TTLs go by the server's clock alone. What the application computes by its own is off by as"
        " much: deadlines in payloads, ages in its metrics.",
        "Let both keep time by NTP.",
    ),
    "W032": Finding(
        WARNING,
        "Each request is one transaction",
        "With `ATOMIC_REQUESTS` what a view publishes is committed when the view has ended, which is right. But a view"
        " that takes long keeps its transaction open as long: it holds back vacuum, and others wait for rows that it"
        " changed.",
        "Exempt slow views with `@transaction.non_atomic_requests`, or let them publish what takes long.",
    ),
    "W033": Finding(
        WARNING,
        "There are not enough connections for the consumers",
        f"A consumer process keeps {OWN_CONNECTIONS} connections and one for each message that it handles at a time."
        " All of them together, as the handlers are declared, need more than `max_connections` leaves.",
        "Lower the handlers' `concurrency`, run fewer processes, raise `max_connections`, or use a pooler.",
    ),
    "I034": Finding(
        INFO,
        "Not all can be seen",
        "This role does not see what sessions of others do: W025 is not complete.",
        "`GRANT pg_read_all_stats TO` the role.",
    ),
    "W035": Finding(
        WARNING,
        "The database does not answer in time",
        "A look at the tables, which takes milliseconds, took longer than ten seconds: somebody holds a lock on them (a"
        " migration, `VACUUM FULL`, a forgotten `LOCK TABLE`), or the server is overloaded. What else it would have"
        " found is not known.",
        "`SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE wait_event_type = 'Lock'`.",
    ),
}


def _found(number: str, text: str, hint: str | None = None) -> CheckMessage:
    kind = FINDINGS[number]
    return CheckMessage(kind.level, text, hint=hint or f"{PAGE}#{number.lower()}", id=f"{APP}.{number}")


# --- The schema: check --database ---


def examine_schema(using: str) -> list[CheckMessage]:
    """Return what is wrong with what migrations made, but for the foreign key: E006, E007, W008, E009."""
    server = diagnosing.server(using)
    if server.version < OLDEST_VERSION * 10_000:
        return [_found("E009", f"The server is PostgreSQL {server.version // 10_000}.")]
    found: list[CheckMessage] = []
    schema = diagnosing.schema(using)
    if not schema.claim_index:
        state = "is missing" if schema.claim_index is None else "is invalid, or of other columns"
        found.append(_found("E006", f"The index django_pgqueue_item_claim_idx {state}: claims read the whole table."))
    if not schema.orphan_trigger:
        state = "is missing" if schema.orphan_trigger is None else "is disabled"
        found.append(_found("E007", f"The trigger django_pgqueue_orphan_messages {state}."))
    if not server.vacuums:
        found.append(_found("W008", "Autovacuum is off on the whole server."))
    elif schema.unvacuumed:
        found.append(_found("W008", f"Autovacuum is off for {', '.join(schema.unvacuumed)}."))
    return found


def missing_tables(text: str) -> CheckMessage:
    """Return E010, with what the database says."""
    return _found("E010", text.strip().splitlines()[0])


# --- All the rest: diagnose_queues ---

Examination = Callable[[str, Limits], Iterator[CheckMessage]]


def examine(using: str, limits: Limits | None = None) -> list[CheckMessage]:
    """
    Return what is wrong with how the queues of a database are run: W020 to I034.

    Takes some seconds at most, and as many where notifications don't arrive. Changes nothing.
    Raises ``django.db.Error`` where the database does not answer.
    """
    limits = limits or Limits()
    found: list[CheckMessage] = []
    for examination in EXAMINATIONS:
        try:
            with session.bounded(PATIENCE, using):
                messages = list(examination(using, limits))
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != QUERY_CANCELED:
                raise
            messages = [_found("W035", f"{_name(examination)} took longer than {PATIENCE:g} seconds.")]
        found += messages[:MOST]
        if len(messages) > MOST:
            rest = messages[MOST]
            found.append(CheckMessage(rest.level, f"… and {len(messages) - MOST} more.", id=rest.id))
    return found


def _name(examination: Examination) -> str:
    return "Looking at the " + getattr(examination, "__name__", "").removeprefix("_examine_")


def _examine_reaper(using: str, limits: Limits) -> Iterator[CheckMessage]:
    age = reaping.last_run_age(using)
    if age is None:
        yield _found("W020", "The reaper has never run.")
    elif age > limits.reaper:
        yield _found("W020", f"The reaper ran {duration(age)} ago.")


def _examine_backlogs(using: str, limits: Limits) -> Iterator[CheckMessage]:
    for backlog in diagnosing.backlogs(using):
        age = backlog.oldest_due_age
        if age is not None and age > limits.backlog and not backlog.has_consumer:
            paused = ", and it is paused" if backlog.paused else ""
            yield _found(
                "W021", f"Messages of queue {backlog.name!r} have been due for {duration(age)}, no consumer{paused}."
            )


def _examine_letters(using: str, limits: Limits) -> Iterator[CheckMessage]:
    found = diagnosing.recent_letters(limits.letters, using)
    history = minutes.letter_history(list(found), limits.letters, using)
    for name, seen in found.items():
        told = history.get(name, LetterHistory(0, 0, 0.0))
        count = max(seen, told.recent)
        is_known = told.seconds >= limits.letters
        before = told.before / (told.seconds / limits.letters) if is_known else 0.0
        if count <= limits.letters_ratio * before:
            continue
        number = f"At least {count}" if count == seen >= diagnosing.SAMPLE_SIZE else str(count)
        usual = f", {before:.1f} in the same time before" if is_known else ""
        yield _found(
            "W022", f"{number} messages of queue {name!r} were dead-lettered within {duration(limits.letters)}{usual}."
        )


def _examine_heals(using: str, limits: Limits) -> Iterator[CheckMessage]:
    for name, count in diagnosing.vanished(limits.vanished, using).items():
        yield _found("W023", f"Queue {name!r} vanished {count} times within {duration(limits.vanished)}.")


def _examine_notifications(using: str, limits: Limits) -> Iterator[CheckMessage]:
    listening = settings.LISTEN_DATABASE or using
    ear = dedicated_connection(listening, "diagnosis")
    try:
        ear.connect()
        heard = hears(ear.connection, using)
    except (*DATABASE_FAULTS, psycopg.Error) as error:
        yield _found("E024", f"Listening on {listening!r} fails: {describe(error)}.")
    else:
        if not heard:
            yield _found("E024", f"What is sent from {using!r} is not heard on {listening!r}: consumers only poll.")
    finally:
        ear.close()


def _examine_vacuum(using: str, limits: Limits) -> Iterator[CheckMessage]:
    numbers = {"session": "W025", "prepared transaction": "W026", "replication slot": "W027"}
    for holder in diagnosing.holders(limits.holder, using):
        since = "" if holder.seconds is None else f" for {duration(holder.seconds)}"
        yield _found(numbers[holder.kind], f"Vacuum is held back{since} by {holder.kind} {holder.name}.")
    for table, dead, live in diagnosing.dead_rows(using):
        if dead > limits.dead_rows and dead > limits.dead_ratio * live:
            yield _found("W028", f"{table} has {dead:,} dead rows beside {live:,} live ones.")


def _examine_server(using: str, limits: Limits) -> Iterator[CheckMessage]:
    before = time.time()
    server = diagnosing.server(using)
    after = time.time()
    if server.multixact_age > limits.multixact_age:
        yield _found(
            "W029",
            f"The oldest MultiXact is {server.multixact_age:,} old; autovacuum deals with it at"
            f" {server.multixact_freeze_age:,}.",
        )
    if server.notification_queue > limits.notification_queue:
        yield _found("W030", f"{server.notification_queue:.0%} of the queue of notifications are used.")
    # The answer was made somewhere between.
    skew = server.clock - (before + after) / 2
    if abs(skew) > limits.skew + (after - before) / 2:
        yield _found("W031", f"The server's clock is {duration(abs(skew))} {'ahead' if skew > 0 else 'behind'}.")
    if not server.sees_all:
        yield _found("I034", "This role sees no sessions of other roles.")
    yield from _examine_connections(using, server)


def _examine_connections(using: str, server: diagnosing.Server) -> Iterator[CheckMessage]:
    needed = OWN_CONNECTIONS + sum(
        handler.concurrency for handler in registered_handlers() if handler.queue.using == using
    )
    processes = max(consumers.live_consumers(using), 1)
    if needed * processes > server.connections:
        yield _found(
            "W033",
            f"{processes} consumer processes need up to {needed} connections each; the server has"
            f" {server.connections} for all.",
        )


def _examine_requests(using: str, limits: Limits) -> Iterator[CheckMessage]:
    if connections[using].settings_dict["ATOMIC_REQUESTS"]:
        yield _found("W032", f"DATABASES[{using!r}] has ATOMIC_REQUESTS: each request is one transaction.")


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
