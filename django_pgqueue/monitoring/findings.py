"""
The findings: each has an id, a meaning and a remedy.

They are reported as Django's check messages. docs/findings.md is generated from ``FINDINGS``.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.core.checks import ERROR, INFO, WARNING, CheckMessage

APP = "django_pgqueue"

# The page that explains each finding.
PAGE = "docs/findings.md"

# Connections of a consumer process besides those of its workers: for claims, leases, heartbeat and notifications.
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
        "`PGQUEUE['DATABASE']` and `PGQUEUE['LISTEN_DATABASE']` must name aliases of `DATABASES` whose engine is"
        " PostgreSQL's or derived from it. Otherwise, nothing works.",
        "Use the right alias.",
    ),
    "E002": Finding(
        ERROR,
        "Unknown setting",
        "A key of `PGQUEUE` is misspelt, so the setting keeps its default.",
        "Use the name that is suggested, or one of those listed.",
    ),
    "E003": Finding(
        ERROR,
        "A setting has a value of the wrong type or range",
        "Seconds must be numbers, text must be strings, and some settings have a range.",
        "Correct the value.",
    ),
    "W004": Finding(
        WARNING,
        "Queues in use may be reaped",
        "A queue counts as used only when its row is updated, which happens every `DECLARE_TTL` (publishers) or"
        " `HEARTBEAT_INTERVAL` (consumers). `REAP_IDLE_AFTER` must leave time for several of these updates.",
        "Raise `REAP_IDLE_AFTER` to at least three times the longer of the two.",
    ),
    "E005": Finding(
        ERROR,
        "The messages' foreign key is missing or different",
        "It must be `ON DELETE SET NULL`, not deferrable, and validated. Without it, messages to a deleted queue remain"
        " unnoticed. If it is deferrable, a publish fails at COMMIT, after `publish()` has returned. With another"
        " action, deleting a queue deletes its messages.",
        "Run the statement that the finding shows.",
    ),
    "E006": Finding(
        ERROR,
        "The claim index is missing, invalid or different",
        "Without it, every claim reads the whole table of messages. A failed `CREATE INDEX CONCURRENTLY` leaves an"
        " invalid index behind.",
        "`DROP INDEX CONCURRENTLY IF EXISTS django_pgqueue_item_claim_idx;` then `CREATE INDEX CONCURRENTLY"
        " django_pgqueue_item_claim_idx ON django_pgqueue_messagequeueitem (queue_id, read_after, id) WHERE queue_id IS"
        " NOT NULL;`",
    ),
    "E007": Finding(
        ERROR,
        "The trigger that keeps orphans is missing or disabled",
        "The trigger stores the name of a deleted queue in its messages. Without it, a queue's row with messages cannot"
        " be deleted, because the messages would lose the name of their queue.",
        "`ALTER TABLE django_pgqueue_messagequeue ENABLE TRIGGER django_pgqueue_orphan_messages;` or, if it is missing,"
        " create it again as `migrate` does: `python manage.py sqlmigrate django_pgqueue 0001` shows the statement.",
    ),
    "W008": Finding(
        WARNING,
        "Autovacuum is off",
        "Messages are added and deleted all the time. Without autovacuum, the tables grow without limit, and claims"
        " become slow.",
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
        "This database has not been migrated, or not completely.",
        "Run `python manage.py migrate`, with `--database` if it is not the default database.",
    ),
    "E011": Finding(
        ERROR,
        "An option of the Tasks backend is wrong",
        "A key of `OPTIONS` in `TASKS` is misspelt, or its value has the wrong type.",
        "Use the key that is suggested, or correct the value.",
    ),
    "E012": Finding(
        ERROR,
        "A queue of tasks has an invalid name",
        "`QUEUES` in `TASKS` contains a queue name that is too long or has characters that are not allowed.",
        "Use another name, there and in the tasks' `queue_name`.",
    ),
    "E013": Finding(
        ERROR,
        "A queue of tasks has a handler of its own",
        "A queue has one handler. `consume_queues` does not guess whether the queue's messages are tasks.",
        "Use another queue for the tasks or for the handler.",
    ),
    "W020": Finding(
        WARNING,
        "The reaper has not run for ten minutes",
        "Expired messages and idle auto-deleted queues are not deleted. Orphans do not return to their queues. In"
        " queues without a consumer, messages that killed their workers are not dead-lettered.",
        "Run `manage.py reap_queues` every minute from cron or a timer, or `manage.py reap_queues --interval 60` under"
        " a supervisor.",
    ),
    "W021": Finding(
        WARNING,
        "Messages are due and nobody consumes",
        "The oldest of the queue's first 1,000 messages has been due for more than ten minutes, and no running"
        " `consume_queues` consumes the queue. Consumers other than this library's are not detected.",
        "Start a consumer for the queue, or find out why it ended. Publish messages that are not needed later with a"
        " `ttl`.",
    ),
    "W022": Finding(
        WARNING,
        "More messages are dead-lettered than before",
        "Their handlers failed too often or rejected them, or they killed their workers. Consumers report dead letters"
        " per minute, and these reports are kept for a day. If the reports cover two hours, the finding means that more"
        " than one and a half times as many messages were dead-lettered in the last hour as in an hour before. If they"
        " do not, it means that messages were dead-lettered in the last hour. More than 1,000 dead letters of a queue"
        " are counted only by these reports.",
        "Read their failures in the admin, fix the handler, then run `manage.py redrive_queue`.",
    ),
    "W023": Finding(
        WARNING,
        "Queues vanished",
        "Their rows were deleted by something other than the reaper: by hand, by a restored backup, or by a test run"
        " against the wrong database. Publishing recreated them, and no message was lost. Attributes that were stored"
        " only in the row (a pause, an owner) were lost.",
        "Find out what deletes rows of `django_pgqueue_messagequeue`.",
    ),
    "E024": Finding(
        ERROR,
        "Notifications do not arrive",
        "A notification was sent from `DATABASE` and not received on `LISTEN_DATABASE` within two seconds. Either the"
        " connection goes through a pooler in transaction mode, or the two are different databases. Consumers then only"
        " poll.",
        "Set `PGQUEUE['LISTEN_DATABASE']` to an alias that connects directly to the server.",
    ),
    "W025": Finding(
        WARNING,
        "A session holds back vacuum",
        "A transaction has been open for more than five minutes. Messages handled since then remain in the tables as"
        " dead rows. Claims stay fast, but the tables grow.",
        "End forgotten sessions: `SELECT pg_terminate_backend(PID)`. `idle_in_transaction_session_timeout` ends them"
        " automatically. Run reports that take hours on a replica.",
    ),
    "W026": Finding(
        WARNING,
        "A prepared transaction holds back vacuum",
        "It was prepared for a two-phase commit more than five minutes ago, and has been neither committed nor rolled"
        " back. It survives restarts.",
        "Run `COMMIT PREPARED 'NAME'` or `ROLLBACK PREPARED 'NAME'`.",
    ),
    "W027": Finding(
        WARNING,
        "An unused replication slot holds back vacuum",
        "It keeps dead rows for a standby that is not connected, for as long as the slot exists.",
        "Reconnect the standby, or run `SELECT pg_drop_replication_slot('NAME')`.",
    ),
    "W028": Finding(
        WARNING,
        "Many dead rows",
        "A table has more than 100,000 dead rows, and more than twice as many dead rows as live rows. Vacuum is off, is"
        " held back, or cannot keep up.",
        "Look for W008 and W025 to W027 first. Otherwise, give autovacuum more workers, or `VACUUM` the table.",
    ),
    "W029": Finding(
        WARNING,
        "MultiXacts are old",
        "Concurrent publishers create MultiXacts. The storage of their members is freed only up to the oldest MultiXact"
        " of all tables in all databases. Here, more than 50 million are kept.",
        "Set `autovacuum_multixact_freeze_max_age = 20000000` in the server's configuration. See docs/autovacuum.md.",
    ),
    "W030": Finding(
        WARNING,
        "The notification queue is filling up",
        "More than 5% is used, because a session that LISTENs keeps a transaction open. When it is full, publishers'"
        " wake-ups fail. Publishing itself does not fail.",
        "End that session: `SELECT pid, query FROM pg_stat_activity WHERE state = 'idle in transaction'`.",
    ),
    "W031": Finding(
        WARNING,
        "The clocks of the application and the server differ",
        "Delays, leases and TTLs use only the server's clock. Values that the application computes with its own clock,"
        " such as deadlines in payloads and ages in metrics, are wrong by the difference.",
        "Synchronize both clocks with NTP.",
    ),
    "W032": Finding(
        WARNING,
        "Each request is one transaction",
        "With `ATOMIC_REQUESTS`, messages that a view publishes are committed when the view ends, which is correct. But"
        " a slow view keeps its transaction open: it holds back vacuum, and others wait for the rows that it changed.",
        "Exempt slow views with `@transaction.non_atomic_requests`, or move the slow work into a handler.",
    ),
    "W033": Finding(
        WARNING,
        "There are not enough connections for the consumers",
        f"A consumer process keeps {OWN_CONNECTIONS} connections, and one more for each message that it handles at the"
        " same time. With the handlers as declared, all consumer processes together need more connections than"
        " `max_connections` allows.",
        "Lower the handlers' `concurrency`, run fewer processes, raise `max_connections`, or use a pooler.",
    ),
    "I034": Finding(
        INFO,
        "Some sessions cannot be seen",
        "This role cannot see the sessions of other roles, so W025 may be incomplete.",
        "Run `GRANT pg_read_all_stats TO` the role.",
    ),
    "W035": Finding(
        WARNING,
        "The database does not answer in time",
        "An examination that normally takes milliseconds took longer than ten seconds. Another session holds a lock on"
        " the tables (a migration, `VACUUM FULL`, a forgotten `LOCK TABLE`), or the server is overloaded. The results"
        " of this examination are missing.",
        "`SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE wait_event_type = 'Lock'`.",
    ),
}


def finding(number: str, text: str, hint: str | None = None) -> CheckMessage:
    """Return a finding as a check message with this text. The default ``hint`` is a link to its page."""
    kind = FINDINGS[number]
    return CheckMessage(kind.level, text, hint=hint or f"{PAGE}#{number.lower()}", id=f"{APP}.{number}")
