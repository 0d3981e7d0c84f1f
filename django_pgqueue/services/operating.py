"""Pause, resume and purge a queue."""

from __future__ import annotations

from datetime import datetime

from django_pgqueue import signals
from django_pgqueue.exceptions import QueueNotFound
from django_pgqueue.services import notifying, session

# PAUSE - stop claims of a queue. No declare writes this column: it belongs to operators.
# Locks: the queue's row, as an update of a non-key column does.
# Returns the name, or no row if there is no such queue.
PAUSE = """
UPDATE django_pgqueue_messagequeue
SET paused_at = coalesce(paused_at, statement_timestamp())
WHERE name = %(name)s
RETURNING name
"""


def pause(name: str, using: str) -> None:
    """Stop claims of a queue. Raises ``QueueNotFound``."""
    if not session.run(using, PAUSE, name=name):
        raise QueueNotFound(name)
    session.once_committed(lambda: signals.queue_paused.send_robust(name, using=using), using)


# RESUME - start claims of a queue again.
# Locks: as PAUSE.
# Returns the name, or no row if there is no such queue.
RESUME = """
UPDATE django_pgqueue_messagequeue SET paused_at = NULL WHERE name = %(name)s RETURNING name
"""


def resume(name: str, using: str) -> None:
    """Start claims of a queue again, and wake its consumers. Raises ``QueueNotFound``."""
    if not session.run(using, RESUME, name=name):
        raise QueueNotFound(name)

    def tell() -> None:
        signals.queue_resumed.send_robust(name, using=using)
        notifying.notify(name, using)

    session.once_committed(tell, using)


# IS_PAUSED - check whether a queue is paused. No lock. Returns the name, or no row.
IS_PAUSED = """
SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s AND paused_at IS NOT NULL
"""


def is_paused(name: str, using: str) -> bool:
    """Return whether the queue is paused."""
    return bool(session.run(using, IS_PAUSED, name=name))


# PURGE - delete a batch of a queue's messages that nobody holds and that were published up to %(before)s.
# Locks: the batch, skipping locked rows.
# Index: django_pgqueue_item_claim_idx.
# Returns the ids.
PURGE = """
WITH waiting AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = %(name)s
      AND published_at <= %(before)s
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
    ORDER BY read_after, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
DELETE FROM django_pgqueue_messagequeueitem
WHERE id = ANY (ARRAY(SELECT id FROM waiting))
RETURNING id
"""


def purge(name: str, limit: int, before: datetime, using: str) -> int:
    """Delete a batch of messages that nobody holds and that were published up to ``before``. Returns how many."""
    count = len(session.run(using, PURGE, name=name, limit=limit, before=before))
    if count:
        session.once_committed(lambda: signals.messages_purged.send_robust(name, using=using, count=count), using)
    return count


# PURGEABLE - count the messages that PURGE would delete now. No lock.
PURGEABLE = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem
WHERE queue_id = %(name)s
  AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
"""


def purgeable(name: str, using: str) -> int:
    """Count the messages that ``purge`` would delete now."""
    ((count,),) = session.run(using, PURGEABLE, name=name)
    return int(count)
