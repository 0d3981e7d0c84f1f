"""
The findings: an id for each, what it means, and how to mend it.

They are Django's check messages. Of ``FINDINGS``, their texts in general, docs/findings.md is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.core.checks import ERROR, INFO, WARNING, CheckMessage

APP = "django_pgqueue"

# Where each finding is explained.
PAGE = "docs/findings.md"

# The connections of a consumer process, but for its workers: claims, leases, heartbeat, notifications.
OWN_CONNECTIONS = 4

OLDEST_VERSION = 15


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


def finding(number: str, text: str, hint: str | None = None) -> CheckMessage:
    """Return a finding as a check message. ``text`` says what was found; without a ``hint`` it links to the page."""
    kind = FINDINGS[number]
    return CheckMessage(kind.level, text, hint=hint or f"{PAGE}#{number.lower()}", id=f"{APP}.{number}")
