"""The rows of running consumers: heartbeats, and who owns an exclusive queue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from uuid import UUID

from django_pgqueue import signals
from django_pgqueue.conf import settings
from django_pgqueue.services import notifying, session

# A consumer that missed so many heartbeats counts as gone.
MISSED_HEARTBEATS = 3


# TAKE_OVER - become the owner of an exclusive queue that has none, or whose owner has not beaten for
# %(heartbeat_timeout)s seconds (its row may be gone too). Only for a consumer that has a row itself.
# Locks: the queue's row, skipping it if somebody holds it. The owner is compared again under the
# lock: two that see the same dead owner do not both become the new one.
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
    """Become the owner of an exclusive queue whose owner missed three heartbeats. Returns whether it worked."""
    taken = bool(session.run(using, TAKE_OVER, name=name, consumer=consumer, heartbeat_timeout=heartbeat_timeout()))
    if taken:
        signals.queue_taken_over.send_robust(name, using=using, consumer=consumer)
    return taken


def heartbeat_timeout() -> float:
    """Return the seconds after its last heartbeat for which a consumer counts as living."""
    return MISSED_HEARTBEATS * float(settings.HEARTBEAT_INTERVAL)


# BEAT - write a consumer process's heartbeat.
BEAT = """
INSERT INTO django_pgqueue_queueconsumer (id, host, pid, queues)
VALUES (%(id)s, %(host)s, %(pid)s, %(queues)s::jsonb)
ON CONFLICT (id) DO UPDATE SET last_heartbeat = statement_timestamp(), queues = excluded.queues
"""


def beat(consumer: UUID, host: str, pid: int, queues: Sequence[str], using: str) -> None:
    """Write a consumer's heartbeat."""
    session.run(using, BEAT, id=consumer, host=host, pid=pid, queues=json.dumps(list(queues)))


# FORGET_CONSUMER - a consumer process ended in good order: it owns nothing any more.
# Locks: the rows of its exclusive queues, in name order.
# Returns the names of the queues that it owned.
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
    """Remove the row of a consumer that ends; others may own its exclusive queues at once."""
    for (name,) in session.run(using, FORGET_CONSUMER, id=consumer):
        notifying.notify(name, using)


# FORGET_CONSUMERS - drop the rows of processes that ended otherwise, a day ago or earlier.
FORGET_CONSUMERS = """
DELETE FROM django_pgqueue_queueconsumer
WHERE last_heartbeat < statement_timestamp() - %(age)s * interval '1 second'
"""


def forget_consumers(age: float, using: str) -> None:
    """Remove the rows of consumers whose last heartbeat is ``age`` seconds old or older."""
    session.run(using, FORGET_CONSUMERS, age=age)


# LIVE_CONSUMERS - how many consumer processes live. %(heartbeat_timeout)s as in BACKLOGS.
LIVE_CONSUMERS = """
SELECT count(*)
FROM django_pgqueue_queueconsumer
WHERE last_heartbeat > statement_timestamp() - %(heartbeat_timeout)s * interval '1 second'
"""


def live_consumers(using: str) -> int:
    """Count the consumer processes that live."""
    count: int = session.run(using, LIVE_CONSUMERS, heartbeat_timeout=heartbeat_timeout())[0][0]
    return count
