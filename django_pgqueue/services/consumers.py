"""The rows of running consumers: heartbeats, and the owners of exclusive queues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from uuid import UUID

from django_pgqueue import signals
from django_pgqueue.conf import settings
from django_pgqueue.services import notifying, session

# A consumer that has missed this many heartbeats counts as dead.
MISSED_HEARTBEATS = 3


# TAKE_OVER - become the owner of an exclusive queue without a live owner.
# An owner is not alive if it has no row or its last heartbeat is more than %(heartbeat_timeout)s seconds old. The new
# owner must have a row itself.
# Locks: the queue's row, unless another session has locked it. The owner is compared again under the lock, so that two
# consumers which see the same dead owner do not both become the new one.
# Returns the name, or no row.
TAKE_OVER = """
WITH stale AS MATERIALIZED (
    SELECT name, exclusive_consumer_id AS owner
    FROM django_pgqueue_messagequeue AS queue
    WHERE name = %(name)s
      AND exclusive
      AND NOT EXISTS (SELECT
                      FROM django_pgqueue_queueconsumer AS owner
                      WHERE owner.id = queue.exclusive_consumer_id
                        AND owner.last_heartbeat > statement_timestamp() - %(heartbeat_timeout)s * interval '1 second')
      AND EXISTS (SELECT FROM django_pgqueue_queueconsumer WHERE id = %(consumer)s)
), free AS MATERIALIZED (
    SELECT queue.name
    FROM django_pgqueue_messagequeue AS queue JOIN stale ON stale.name = queue.name
    WHERE queue.exclusive_consumer_id IS NOT DISTINCT FROM stale.owner
    FOR NO KEY UPDATE OF queue SKIP LOCKED
)
UPDATE django_pgqueue_messagequeue
SET exclusive_consumer_id = %(consumer)s
WHERE name = ANY (ARRAY(SELECT name FROM free))
RETURNING name
"""


def take_over(name: str, consumer: UUID, using: str) -> bool:
    """
    Make the consumer the owner of an exclusive queue that has no owner, or whose owner has missed three heartbeats.

    Returns whether the consumer became the owner.
    """
    taken = bool(session.run(using, TAKE_OVER, name=name, consumer=consumer, heartbeat_timeout=heartbeat_timeout()))
    if taken:
        signals.queue_taken_over.send_robust(name, using=using, consumer=consumer)
    return taken


def heartbeat_timeout() -> float:
    """Return the seconds after its last heartbeat for which a consumer counts as alive."""
    return MISSED_HEARTBEATS * float(settings.HEARTBEAT_INTERVAL)


# BEAT - write the heartbeat of a consumer process.
BEAT = """
INSERT INTO django_pgqueue_queueconsumer (id, host, pid, queues)
VALUES (%(id)s, %(host)s, %(pid)s, %(queues)s::jsonb)
ON CONFLICT (id) DO UPDATE SET last_heartbeat = statement_timestamp(), queues = excluded.queues
"""


def beat(consumer: UUID, host: str, pid: int, queues: Sequence[str], using: str) -> None:
    """Write the heartbeat of a consumer process."""
    session.run(using, BEAT, id=consumer, host=host, pid=pid, queues=json.dumps(list(queues)))


# FORGET_CONSUMER - delete the row of a consumer process that has stopped, and release the queues that it owned.
# Locks: the rows of its exclusive queues, in name order.
# Returns the names of these queues.
FORGET_CONSUMER = """
WITH gone AS (
    DELETE FROM django_pgqueue_queueconsumer WHERE id = %(id)s
), owned AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE exclusive_consumer_id = %(id)s
    ORDER BY name
    FOR NO KEY UPDATE
)
UPDATE django_pgqueue_messagequeue
SET exclusive_consumer_id = NULL
WHERE name = ANY (ARRAY(SELECT name FROM owned))
RETURNING name
"""


def forget_consumer(consumer: UUID, using: str) -> None:
    """Delete the row of a consumer that stops. Other consumers may own its exclusive queues immediately."""
    for (name,) in session.run(using, FORGET_CONSUMER, id=consumer):
        notifying.notify(name, using)


# FORGET_CONSUMERS - delete the rows of consumer processes whose last heartbeat is %(age)s seconds old or older.
FORGET_CONSUMERS = """
DELETE FROM django_pgqueue_queueconsumer
WHERE last_heartbeat < statement_timestamp() - %(age)s * interval '1 second'
"""


def forget_consumers(age: float, using: str) -> None:
    """Delete the rows of consumers whose last heartbeat is ``age`` seconds old or older."""
    session.run(using, FORGET_CONSUMERS, age=age)


# LIVE_CONSUMERS - count the live consumer processes. %(heartbeat_timeout)s: as in BACKLOGS. No lock.
LIVE_CONSUMERS = """
SELECT count(*)
FROM django_pgqueue_queueconsumer
WHERE last_heartbeat > statement_timestamp() - %(heartbeat_timeout)s * interval '1 second'
"""


def live_consumers(using: str) -> int:
    """Return the number of live consumer processes."""
    count: int = session.run(using, LIVE_CONSUMERS, heartbeat_timeout=heartbeat_timeout())[0][0]
    return count
