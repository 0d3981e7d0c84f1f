"""Read the state of the database and its server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_pgqueue.services import consumers, session

SAMPLE_SIZE = 1_000


# FOREIGN_KEY - read the definition of the foreign key. No lock.
# Returns one row: whether it is SET NULL, not deferrable, validated, enforced. No row: it is missing.
FOREIGN_KEY = """
SELECT confdeltype = 'n', NOT condeferrable, convalidated,
       NOT EXISTS (SELECT
                   FROM pg_trigger
                   WHERE tgconstraint = pg_constraint.oid AND tgenabled NOT IN ('O', 'A'))
FROM pg_constraint
WHERE conname = 'django_pgqueue_item_queue_fk'
  AND contype = 'f'
  AND conrelid = to_regclass('django_pgqueue_messagequeueitem')
  AND confrelid = to_regclass('django_pgqueue_messagequeue')
"""


def foreign_key_state(using: str) -> tuple[bool, ...] | None:
    """Return whether the foreign key is SET NULL, not deferrable, validated and enforced. None: it is missing."""
    rows = session.run(using, FOREIGN_KEY)
    return rows[0] if rows else None


class MigratedSchema(NamedTuple):
    """The state of what migrations created. None: it is missing."""

    claim_index: bool | None
    orphan_trigger: bool | None
    #: Tables for which autovacuum is disabled.
    unvacuumed: list[str]


# SCHEMA - read the state of everything else that migrations created. No lock.
# Returns one row: whether claims can use their index (null: it is missing), whether the trigger that keeps orphans is
# enabled (null: it is missing), and the tables for which autovacuum is disabled.
SCHEMA = """
SELECT (SELECT indisvalid AND indisready AND indoption::text = '0 0 0'
               AND ARRAY(SELECT pg_get_indexdef(indexrelid, number, true)
                         FROM generate_series(1, indnkeyatts) AS number) = ARRAY['queue_id', 'read_after', 'id']
        FROM pg_index
        WHERE indexrelid = to_regclass('django_pgqueue_item_claim_idx')),
       (SELECT tgenabled IN ('O', 'A')
        FROM pg_trigger
        WHERE tgname = 'django_pgqueue_orphan_messages' AND tgrelid = to_regclass('django_pgqueue_messagequeue')),
       ARRAY(SELECT relname::text
             FROM pg_class, pg_options_to_table(reloptions)
             WHERE oid IN (to_regclass('django_pgqueue_messagequeue'), to_regclass('django_pgqueue_messagequeueitem'))
               AND option_name = 'autovacuum_enabled'
               AND NOT option_value::boolean
             ORDER BY 1)
"""


def schema(using: str) -> MigratedSchema:
    """Return the state of what migrations created, apart from the foreign key."""
    return MigratedSchema(*session.run(using, SCHEMA)[0])


class Server(NamedTuple):
    """The server, as the role of this connection sees it."""

    #: As in ``server_version_num``: 180000 is PostgreSQL 18.0.
    version: int
    vacuums: bool
    #: Seconds since 1970.
    clock: float
    #: The fraction of the notification queue that is in use, 0 to 1.
    notification_queue: float
    #: The connections available to roles that are not superusers.
    connections: int
    multixact_age: int
    multixact_freeze_age: int
    #: Whether the role may see the activity of other sessions.
    sees_all: bool


# SERVER - read the state of the server, as this role sees it. No lock.
# Returns one row: version number, whether autovacuum runs, the clock as seconds since 1970, how full the notification
# queue is (0 to 1), the connections available to ordinary roles, the age of the oldest MultiXact of all databases, the
# age at which autovacuum freezes them, and whether this role may see the activity of others.
SERVER = """
SELECT current_setting('server_version_num')::int,
       current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean,
       extract(epoch FROM statement_timestamp())::float8,
       pg_notification_queue_usage(),
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       (SELECT max(mxid_age(datminmxid)) FROM pg_database),
       current_setting('autovacuum_multixact_freeze_max_age')::int,
       pg_has_role('pg_read_all_stats', 'USAGE')
"""


def server(using: str) -> Server:
    """Return the state of the server."""
    return Server(*session.run(using, SERVER)[0])


# DEAD_ROWS - read the number of rows that vacuum has not removed yet, from the server's statistics. No lock.
# Returns table, dead rows, live rows.
DEAD_ROWS = """
SELECT relname::text, n_dead_tup, n_live_tup
FROM pg_stat_all_tables
WHERE relid IN (to_regclass('django_pgqueue_messagequeue'), to_regclass('django_pgqueue_messagequeueitem'))
ORDER BY 1
"""


def dead_rows(using: str) -> list[tuple[str, int, int]]:
    """Return each table with its numbers of dead and live rows, from the server's statistics."""
    return [(table, dead, live) for table, dead, live in session.run(using, DEAD_ROWS)]


class Holder(NamedTuple):
    """What holds back vacuum: "session", "prepared transaction" or "replication slot"."""

    kind: str
    name: str
    #: None: unknown.
    seconds: float | None


# HOLDERS - find what has held back vacuum in this database for %(age)s seconds or more. No lock.
# The age of a standby or a slot is unknown. A slot counts while nobody reads from it.
# Returns kind, name, seconds or null; the longest first.
HOLDERS = """
SELECT 'session',
       format('pid %%s, %%s, %%s', pid, coalesce(nullif(application_name, ''), 'no application name'), state),
       extract(epoch FROM statement_timestamp() - xact_start)::float8 AS seconds
FROM pg_stat_activity
WHERE datname = current_database()
  AND pid <> pg_backend_pid()
  AND backend_type = 'client backend'
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND xact_start <= statement_timestamp() - %(age)s * interval '1 second'
UNION ALL
SELECT 'prepared transaction', gid, extract(epoch FROM statement_timestamp() - prepared)::float8
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared <= statement_timestamp() - %(age)s * interval '1 second'
UNION ALL
SELECT 'replication slot', slot_name::text, NULL
FROM pg_replication_slots
WHERE NOT active AND xmin IS NOT NULL
ORDER BY seconds DESC NULLS LAST
"""


def holders(age: float, using: str) -> list[Holder]:
    """Return what has held back vacuum for ``age`` seconds or more, the longest first."""
    return [Holder(*row) for row in session.run(using, HOLDERS, age=age)]


class Backlog(NamedTuple):
    """The oldest due message of a queue, and whether a consumer can take it."""

    name: str
    paused: bool
    has_consumer: bool
    #: In seconds. None: none of the messages that were read is due.
    oldest_due_age: float | None


# BACKLOGS - measure the oldest due age of the named queues (null: all), at the head of each queue's two walks.
# Bounded: reads at most %(limit)s messages in each walk. %(heartbeat_timeout)s: seconds after its last heartbeat for
# which a consumer counts as alive. No lock.
# Returns name, whether the queue is paused, whether a live consumer names it, seconds or null.
# Index: django_pgqueue_item_claim_idx.
BACKLOGS = """
SELECT queue.name,
       queue.paused_at IS NOT NULL,
       EXISTS (SELECT
               FROM django_pgqueue_queueconsumer AS consumer
               WHERE consumer.queues ? queue.name
                 AND consumer.last_heartbeat > statement_timestamp() - %(heartbeat_timeout)s * interval '1 second'),
       (SELECT extract(epoch FROM statement_timestamp() - min(head.due_at))::float8
        FROM ((SELECT read_after AS due_at, lease_expires_at, expires_at, dead_lettered_at
               FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
               WHERE queue_id = queue.name AND read_after <= statement_timestamp()
               ORDER BY read_after, id
               LIMIT %(limit)s)
              UNION ALL
              (SELECT published_at, lease_expires_at, expires_at, dead_lettered_at
               FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
               WHERE queue_id = queue.name AND read_after IS NULL
               ORDER BY read_after, id
               LIMIT %(limit)s)) AS head
        WHERE isfinite(head.due_at)
          AND head.dead_lettered_at IS NULL
          AND (head.lease_expires_at > statement_timestamp()) IS NOT TRUE
          AND (head.expires_at <= statement_timestamp()) IS NOT TRUE)
FROM django_pgqueue_messagequeue AS queue
WHERE %(names)s::text[] IS NULL OR queue.name = ANY (%(names)s)
ORDER BY queue.name
"""


def backlogs(using: str, names: Sequence[str] | None = None) -> list[Backlog]:
    """Return the ``Backlog`` of each of these queues (None: all)."""
    chosen = None if names is None else list(names)
    rows = session.run(
        using, BACKLOGS, names=chosen, heartbeat_timeout=consumers.heartbeat_timeout(), limit=SAMPLE_SIZE
    )
    return [Backlog(*row) for row in rows]


# RECENT_LETTERS - count how many of the newest %(limit)s dead letters from each queue were dead-lettered within
# %(age)s seconds. Skips from queue to queue. No lock.
# Index: django_pgqueue_item_dead_idx.
RECENT_LETTERS = """
WITH RECURSIVE origin AS (
    (SELECT dead_lettered_from AS name
     FROM django_pgqueue_messagequeueitem
     WHERE dead_lettered_from IS NOT NULL
     ORDER BY dead_lettered_from
     LIMIT 1)
    UNION ALL
    SELECT (SELECT dead_lettered_from
            FROM django_pgqueue_messagequeueitem
            WHERE dead_lettered_from > origin.name
            ORDER BY dead_lettered_from
            LIMIT 1)
    FROM origin
    WHERE origin.name IS NOT NULL
), recent AS (
    SELECT origin.name,
           (SELECT count(*)
            FROM (SELECT dead_lettered_at
                  FROM django_pgqueue_messagequeueitem
                  WHERE dead_lettered_from = origin.name
                  ORDER BY dead_lettered_from DESC, id DESC
                  LIMIT %(limit)s) AS letter
            WHERE dead_lettered_at > statement_timestamp() - %(age)s * interval '1 second') AS letters
    FROM origin
    WHERE origin.name IS NOT NULL
)
SELECT name, letters FROM recent WHERE letters > 0 ORDER BY name
"""


def recent_letters(age: float, using: str) -> dict[str, int]:
    """Count the messages of each queue that were dead-lettered within ``age`` seconds, at most ``SAMPLE_SIZE``."""
    return dict(session.run(using, RECENT_LETTERS, age=age, limit=SAMPLE_SIZE))


# VANISHED - count how often each queue vanished within %(age)s seconds. No lock.
# Index: django_pgqueue_event_at_idx.
VANISHED = """
SELECT queue, count(*)
FROM django_pgqueue_queueevent
WHERE at > statement_timestamp() - %(age)s * interval '1 second' AND kind = 'vanished'
GROUP BY queue
ORDER BY queue
"""


def vanished(age: float, using: str) -> dict[str, int]:
    """Count how often each queue vanished within ``age`` seconds."""
    return dict(session.run(using, VANISHED, age=age))
