"""Remove expired messages and idle queues, and adopt orphans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.db import connections

from django_pgqueue import signals
from django_pgqueue.services import consumers, dead_letters, notifying, session
from django_pgqueue.services.declaring import Declaration

# ORPHANED_NAMES - find the existing queues that have orphans. No lock.
ORPHANED_NAMES = """
SELECT queue.name
FROM django_pgqueue_messagequeue AS queue
WHERE (SELECT id
       FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
       WHERE orphaned_from BETWEEN queue.name AND queue.name
       ORDER BY orphaned_from, id
       LIMIT 1) IS NOT NULL
ORDER BY queue.name
"""


def orphaned_names(using: str) -> list[str]:
    """Return the names of the existing queues that have orphans."""
    return [name for (name,) in session.run(using, ORPHANED_NAMES)]


# ADOPT - return a batch of orphans to their queue.
# Claims find them in the walk over due messages. Their expiry, and a lease that is still held, stay as they are.
# Locks: KEY SHARE on the queue (if it has been deleted again, nothing is done and there is no error), then the orphans
# in id order, skipping locked rows.
# Returns the ids.
# Index: django_pgqueue_item_orphan_idx.
ADOPT = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s FOR KEY SHARE
), orphan AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE orphaned_from = (SELECT name FROM queue)
    ORDER BY orphaned_from, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
UPDATE django_pgqueue_messagequeueitem
SET queue_id = orphaned_from,
    orphaned_from = NULL,
    read_after = coalesce(read_after, statement_timestamp())
WHERE id = ANY (ARRAY(SELECT id FROM orphan))
RETURNING id
"""


def adopt(name: str, limit: int, using: str) -> int:
    """Return up to ``limit`` orphans to their queue, in a separate transaction. Returns how many."""
    count = len(session.run(using, ADOPT, name=name, limit=limit))
    if count:
        signals.orphans_adopted.send_robust(name, using=using, count=count)
        notifying.notify(name, using)
    return count


# EXPIRE - take a batch of expired messages that nobody holds, orphans included, and delete those whose queue has no
# configured dead-letter queue.
# One walk finds both kinds: a search for one kind would read past all messages of the other kind each time.
# Locks: the batch, skipping locked rows.
# Index: django_pgqueue_item_expiry_idx.
# Returns id, queue, and whether the message was kept for DEAD_LETTER to move.
EXPIRE = """
WITH expired AS MATERIALIZED (
    SELECT id,
           coalesce(queue_id, orphaned_from) AS name,
           coalesce((SELECT dead_letter IS NOT NULL
                     FROM django_pgqueue_messagequeue
                     WHERE name = queue_id), false) AS is_kept
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE expires_at <= statement_timestamp()
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
    ORDER BY expires_at
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
), gone AS (
    DELETE FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (ARRAY(SELECT id FROM expired WHERE NOT is_kept))
)
SELECT id, name, is_kept FROM expired
"""


def expire(limit: int, using: str) -> tuple[int, int]:
    """
    Remove a batch of expired messages.

    Returns how many were deleted and how many were moved to a configured dead-letter queue.
    """
    letters: dict[str, list[int]] = {}
    deleted: dict[str, int] = {}
    for message_id, name, is_kept in session.run(using, EXPIRE, limit=limit):
        if is_kept:
            letters.setdefault(name, []).append(message_id)
        else:
            deleted[name] = deleted.get(name, 0) + 1
    moved = sum(
        len(dead_letters.dead_letter(Declaration(name), ids, None, "expired", using))
        for name, ids in sorted(letters.items())
    )
    for name, count in deleted.items():
        signals.messages_expired.send_robust(name, using=using, count=count)
    return sum(deleted.values()), moved


# EXHAUSTED - find messages that were delivered max_deliveries times and whose lease has expired.
# A claim dead-letters the messages that it finds; this is for queues that nobody claims from. Bounded: it reads the
# head of each queue's two walks. %(heartbeat_timeout)s: seconds after its last heartbeat for which a consumer counts as
# alive.
# No lock. Returns id and queue.
EXHAUSTED = """
SELECT head.id, queue.name
FROM django_pgqueue_messagequeue AS queue
CROSS JOIN LATERAL (
    (SELECT id, lease_expires_at, delivery_count
     FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
     WHERE queue_id = queue.name AND read_after <= statement_timestamp()
     ORDER BY read_after, id
     LIMIT %(limit)s)
    UNION ALL
    (SELECT id, lease_expires_at, delivery_count
     FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
     WHERE queue_id = queue.name AND read_after IS NULL
     ORDER BY read_after, id
     LIMIT %(limit)s)
) AS head
WHERE head.lease_expires_at <= statement_timestamp()
  AND head.delivery_count >= queue.max_deliveries
  AND (queue.paused_at IS NOT NULL
       OR NOT EXISTS (SELECT
                      FROM django_pgqueue_queueconsumer AS consumer
                      WHERE consumer.queues ? queue.name
                        AND consumer.last_heartbeat
                            > statement_timestamp() - %(heartbeat_timeout)s * interval '1 second'))
"""


def dead_letter_exhausted(limit: int, using: str) -> int:
    """
    Dead-letter messages that were delivered ``max_deliveries`` times and whose lease has expired.

    Reads up to ``limit`` messages at the head of each queue's two walks. Returns how many were dead-lettered.
    """
    found: dict[str, list[int]] = {}
    for message_id, name in session.run(using, EXHAUSTED, limit=limit, heartbeat_timeout=consumers.heartbeat_timeout()):
        found.setdefault(name, []).append(message_id)
    reason = "worker lost: the lease lapsed on the last delivery"
    return sum(
        len(dead_letters.dead_letter(Declaration(name), ids, None, reason, using))
        for name, ids in sorted(found.items())
    )


# IDLE_QUEUES - find the auto-deleted queues that may be reaped: idle, empty and not paused (deleting a paused queue's
# row would lose the pause).
# No lock. Returns name and idle seconds.
IDLE_QUEUES = """
SELECT name, (extract(epoch FROM statement_timestamp()) - extract(epoch FROM last_active))::float8
FROM django_pgqueue_messagequeue AS queue
WHERE auto_deleted
  AND paused_at IS NULL
  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
  AND (SELECT id
       FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
       WHERE queue_id = queue.name
       ORDER BY read_after, id
       LIMIT 1) IS NULL
ORDER BY name
"""


def idle_queues(idle_for: float, using: str) -> list[tuple[str, float]]:
    """Return the name and the idle seconds of each queue that may be reaped."""
    return [(name, idle) for name, idle in session.run(using, IDLE_QUEUES, idle_for=idle_for)]


# REAPABLE - count what the reaper would process now. No lock.
# Returns one row: expired messages, those of them with a configured dead-letter queue, orphans to adopt.
REAPABLE = """
SELECT count(*) FILTER (WHERE item.expires_at <= statement_timestamp()),
       count(*) FILTER (WHERE item.expires_at <= statement_timestamp()
                          AND item.queue_id = queue.name AND queue.dead_letter IS NOT NULL),
       count(*) FILTER (WHERE item.orphaned_from = queue.name
                          AND (item.expires_at > statement_timestamp()) IS NOT FALSE)
FROM django_pgqueue_messagequeueitem AS item
LEFT JOIN django_pgqueue_messagequeue AS queue
    ON queue.name = coalesce(item.queue_id, item.orphaned_from)
WHERE (item.lease_expires_at > statement_timestamp()) IS NOT TRUE
  AND (item.expires_at <= statement_timestamp() OR item.orphaned_from IS NOT NULL)
"""


def reapable(using: str) -> tuple[int, int, int]:
    """Return how many messages the reaper would delete as expired, dead-letter as expired, and adopt."""
    ((expired, moved, orphans),) = session.run(using, REAPABLE)
    return expired - moved, moved, orphans


# LOCK_IDLE_QUEUE, LOCK_BINDINGS, DELETE_IDLE_QUEUE - reap one queue, in one short transaction.
# The deletion is a separate statement because its snapshot must be younger than the locks. A message that is committed
# between the snapshot and the lock of a single statement would be orphaned. The deletion leaves a tombstone.
# Locks: the queue's row and its bindings FOR UPDATE, skipping locked rows. An open transaction that publishes to the
# queue or to a topic holds KEY SHARE on one of them, so the queue is skipped. (A publisher to a topic locks bindings
# first and then waits for the queue. The reaper never waits, so the two cannot deadlock.)
# The commit does not wait for the disk: a queue that returns after a crash is idle, and is reaped again.
# Index: the claim index. The server plans the foreign key's own search for messages once per session. A plan from when
# the table was empty would scan the table at every deletion, so sequential scans are disabled in this transaction.
LOCK_IDLE_QUEUE = """
SELECT name, set_config('enable_seqscan', 'off', true), set_config('synchronous_commit', 'off', true)
FROM django_pgqueue_messagequeue
WHERE name = %(name)s
  AND auto_deleted
  AND paused_at IS NULL
  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
FOR UPDATE SKIP LOCKED
"""
LOCK_BINDINGS = """
WITH locked AS MATERIALIZED (
    SELECT id FROM django_pgqueue_topicbinding WHERE queue = %(name)s FOR UPDATE SKIP LOCKED
)
SELECT (SELECT count(*) FROM locked) = (SELECT count(*) FROM django_pgqueue_topicbinding WHERE queue = %(name)s)
"""
DELETE_IDLE_QUEUE = """
WITH gone AS (
    DELETE FROM django_pgqueue_messagequeue AS queue
    WHERE name = %(name)s
      AND auto_deleted
      AND paused_at IS NULL
      AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
      AND (SELECT id
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name
           ORDER BY read_after, id
           LIMIT 1) IS NULL
    RETURNING name,
              (extract(epoch FROM statement_timestamp()) - extract(epoch FROM last_active))::float8 AS idle_seconds
), unbound AS (
    DELETE FROM django_pgqueue_topicbinding WHERE queue IN (SELECT name FROM gone)
), tombstone AS (
    INSERT INTO django_pgqueue_queueevent (queue, kind) SELECT name, 'reaped' FROM gone
)
SELECT idle_seconds FROM gone
"""


def reap_queue(name: str, idle_for: float, using: str) -> bool:
    """
    Delete one queue if it is still idle and empty and nobody holds its row.

    Runs in a short transaction of its own. Returns whether the queue was deleted.
    """
    with session.own_transaction(connections[using]) as cursor:
        cursor.execute(LOCK_IDLE_QUEUE, {"name": name, "idle_for": idle_for})
        if cursor.fetchone() is None:
            return False
        cursor.execute(LOCK_BINDINGS, {"name": name})
        if not cursor.fetchone()[0]:
            return False
        # A separate statement, so that its snapshot is younger than the locks.
        cursor.execute(DELETE_IDLE_QUEUE, {"name": name, "idle_for": idle_for})
        row = cursor.fetchone()
    if row is None:
        return False
    signals.queue_reaped.send_robust(name, using=using, idle_seconds=row[0])
    return True


# FORGET_EVENTS - delete a batch of events that are %(age)s seconds old or older.
# Returns the ids.
FORGET_EVENTS = """
DELETE FROM django_pgqueue_queueevent
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_queueevent
                      WHERE at < statement_timestamp() - %(age)s * interval '1 second'
                      ORDER BY at
                      LIMIT %(limit)s))
RETURNING id
"""


def forget_events(age: float, limit: int, using: str) -> int:
    """Delete a batch of events that are ``age`` seconds old or older. Returns how many."""
    return len(session.run(using, FORGET_EVENTS, age=age, limit=limit))


# FORGET_BODIES - delete a batch of expired topic bodies, which did not fit into a notification.
# Returns the ids.
FORGET_BODIES = """
DELETE FROM django_pgqueue_topicbody
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_topicbody
                      WHERE expires_at <= statement_timestamp()
                      ORDER BY expires_at
                      LIMIT %(limit)s))
RETURNING id
"""


def forget_bodies(limit: int, using: str) -> int:
    """Delete a batch of expired topic bodies. Returns how many."""
    return len(session.run(using, FORGET_BODIES, limit=limit))


# RECORD_RUN - record that a run of the reaper has ended, and what it did.
RECORD_RUN = """
INSERT INTO django_pgqueue_reaperrun (id, seconds, report)
VALUES (1, %(seconds)s, %(report)s::jsonb)
ON CONFLICT (id) DO UPDATE
SET finished_at = statement_timestamp(), seconds = %(seconds)s, report = %(report)s::jsonb
"""


def record_run(seconds: float, report: Mapping[str, Any], using: str) -> None:
    """Record that a run of the reaper has ended after ``seconds``, and what it did."""
    session.run(using, RECORD_RUN, seconds=seconds, report=json.dumps(report))


# LAST_RUN - read the seconds since the reaper's last run ended. No lock.
LAST_RUN = """
SELECT extract(epoch FROM statement_timestamp() - finished_at)::float8 FROM django_pgqueue_reaperrun
"""


def last_run_age(using: str) -> float | None:
    """Return the seconds since the reaper's last run ended. None: it has never run."""
    rows = session.run(using, LAST_RUN)
    return rows[0][0] if rows else None
