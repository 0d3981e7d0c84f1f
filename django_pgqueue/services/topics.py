"""Publish to topics, bind queues to them, read what live subscribers are told."""

from __future__ import annotations

import logging
from uuid import uuid4

from django.db import DatabaseError, InterfaceError, connections, transaction

from django_pgqueue import signals
from django_pgqueue.conf import settings
from django_pgqueue.exceptions import QueueNotFound
from django_pgqueue.services import notifying, session

logger = logging.getLogger("django_pgqueue")

# A notification carries up to 7,999 bytes
# (https://www.postgresql.org/docs/current/sql-notify.html: it must be shorter than 8000 bytes).
MAX_NOTIFICATION_BYTES = 7_999

# Seconds for which a body that does not fit stays: longer than a subscriber's buffer should be behind.
BODY_TTL = 300.0

# The first character of a notification tells whether it carries a message or the id of its body.
INLINE, BY_ID = "=", "#"


# PUBLISH_TO_TOPIC - put a message on every queue that is bound to a topic, and store what does not
# fit into a notification.
# A bound auto-deleted queue that nobody has used for %(idle_for)s seconds is left out, and not even
# locked: its subscriber went away, and what is put there must not keep it. A bound queue without a row
# (deleted by hand; the reaper removes the bindings along) gets its message as an orphan, which comes in
# when it is back.
# Locks: KEY SHARE on the bindings and on the queues' rows, each in name order. Once locked they stay.
# Returns rows: the id of the body (null: none), and id and queue of each message put on a queue (null
# in the only row if there is none).
PUBLISH_TO_TOPIC = """
WITH binding AS MATERIALIZED (
    SELECT queue, ttl
    FROM django_pgqueue_topicbinding AS binding
    WHERE topic = %(topic)s
      AND NOT EXISTS (SELECT
                      FROM django_pgqueue_messagequeue
                      WHERE name = binding.queue
                        AND auto_deleted
                        AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second')
    ORDER BY queue
    FOR KEY SHARE OF binding
), bound AS MATERIALIZED (
    SELECT name, auto_deleted
    FROM django_pgqueue_messagequeue
    WHERE name = ANY (ARRAY(SELECT queue FROM binding))
    ORDER BY name
    FOR KEY SHARE
), target AS MATERIALIZED (
    SELECT binding.queue, bound.name,
           coalesce(%(ttl)s::float8, binding.ttl,
                    CASE WHEN bound.auto_deleted THEN %(ephemeral_ttl)s::float8
                         ELSE %(default_ttl)s::float8 END) AS ttl
    FROM binding LEFT JOIN bound ON bound.name = binding.queue
), published AS (
    INSERT INTO django_pgqueue_messagequeueitem
        (queue_id, orphaned_from, payload, headers, expires_at)
    SELECT target.name, CASE WHEN target.name IS NULL THEN target.queue END,
           %(payload)s::jsonb, %(headers)s::jsonb,
           CASE WHEN target.ttl < 'infinity' THEN statement_timestamp() + target.ttl * interval '1 second' END
    FROM target
    ORDER BY target.queue
    RETURNING id, coalesce(queue_id, orphaned_from) AS queue
), body AS (
    INSERT INTO django_pgqueue_topicbody (content, expires_at)
    SELECT %(body)s::text, statement_timestamp() + %(body_ttl)s * interval '1 second'
    WHERE %(body)s::text IS NOT NULL
    RETURNING id
)
SELECT body.id, published.id, published.queue
FROM (SELECT 1) AS always LEFT JOIN body ON true LEFT JOIN published ON true
ORDER BY published.id
"""


def publish_to_topic(topic: str, payload: str, headers: str, ttl: float | None, using: str) -> list[int]:
    """
    Put a message on every bound queue, and tell the live subscribers once that is committed.

    ``payload`` and ``headers`` are JSON texts; ``ttl`` is that of each copy in seconds (None: the
    binding's, else the default of its queue's kind). Returns the ids, in the order of the queues' names.
    """
    connection = connections[using]
    content = f'{{"id":"{uuid4()}","payload":{payload},"headers":{headers}}}'
    fits = len(content.encode()) + 1 <= MAX_NOTIFICATION_BYTES
    if connection.get_autocommit():
        session.warn_of_other_transaction(connection)
    with connection.cursor() as cursor:
        cursor.execute(
            PUBLISH_TO_TOPIC,
            {
                "topic": topic,
                "payload": payload,
                "headers": headers,
                "ttl": ttl,
                "ephemeral_ttl": settings.EPHEMERAL_TTL,
                "default_ttl": settings.DEFAULT_TTL,
                "idle_for": settings.REAP_IDLE_AFTER,
                "body": None if fits else content,
                "body_ttl": BODY_TTL,
            },
        )
        rows = cursor.fetchall()
    copies = [(message_id, queue) for _, message_id, queue in rows if message_id is not None]
    notification = f"{INLINE}{content}" if fits else f"{BY_ID}{rows[0][0]}"

    # A plain function: a partial breaks robust hooks on Django 5.2.
    def tell() -> None:
        _notify_topic(topic, notification, using)
        for _, queue in copies:
            signals.messages_published.send_robust(queue, using=using, count=1)
            notifying.notify(queue, using)

    if connection.in_atomic_block:
        transaction.on_commit(tell, using=using, robust=True)
    elif connection.get_autocommit():
        tell()
    else:
        # Manual transaction mode has no hooks; a notification of the transaction itself is sent when it
        # commits, though such commits stand in line.
        _send(topic, notification, using)
    return [message_id for message_id, _ in copies]


# NOTIFY_TOPIC - tell the live subscribers of a topic. Its own statement after commit, as NOTIFY.
NOTIFY_TOPIC = "SELECT pg_notify(%(channel)s, %(content)s)"


def _send(topic: str, notification: str, using: str) -> None:
    session.run(using, NOTIFY_TOPIC, channel=notifying.topic_channel(topic), content=notification)


def _notify_topic(topic: str, notification: str, using: str) -> None:
    try:
        _send(topic, notification, using)
    except (DatabaseError, InterfaceError):
        # What is durable is committed; live subscribers get a message at most once.
        logger.warning("live subscribers not notified topic=%s", topic, exc_info=True)


# TOPIC_BODY - read what did not fit into a notification. Nobody takes it away: the reaper does.
TOPIC_BODY = "SELECT content FROM django_pgqueue_topicbody WHERE id = %(id)s"


def read_notification(notification: str, using: str) -> str | None:
    """Return the content of a topic's notification. None: its body is gone. Raises ``ValueError`` for others."""
    kind, rest = notification[:1], notification[1:]
    if kind == INLINE:
        return rest
    if kind != BY_ID or not rest.isdecimal():
        raise ValueError("not a notification of a topic")
    rows = session.run(using, TOPIC_BODY, id=int(rest))
    return rows[0][0] if rows else None


# BIND - let a queue get a copy of each message of a topic.
# Locks: KEY SHARE on the queue's row, so that the reaper, which locks it first, never meets a binding that
# it has not locked; and the binding's row, if it is there.
# Returns the queue's name, or no row: there is no such queue.
BIND = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(queue)s FOR KEY SHARE
), bound AS (
    INSERT INTO django_pgqueue_topicbinding AS binding (topic, queue, ttl)
    SELECT %(topic)s::text, name, %(ttl)s::float8 FROM queue
    ON CONFLICT (topic, queue) DO UPDATE
    SET ttl = excluded.ttl
    WHERE binding.ttl IS DISTINCT FROM excluded.ttl
)
SELECT name FROM queue
"""


def bind(topic: str, queue: str, ttl: float | None, using: str) -> None:
    """
    Let a queue get a copy of each message of a topic, expiring after ``ttl`` seconds (None: the default).

    Raises ``QueueNotFound``.
    """
    if not session.run(using, BIND, topic=topic, queue=queue, ttl=ttl):
        raise QueueNotFound(queue)


# UNBIND - end that. Locks: the binding's row; waits for publishers that put messages there.
# Returns the id, or no row: it was not bound.
UNBIND = """
DELETE FROM django_pgqueue_topicbinding WHERE topic = %(topic)s AND queue = %(queue)s RETURNING id
"""


def unbind(topic: str, queue: str, using: str) -> bool:
    """End that. Returns whether it was bound. May wait for publishers to the topic."""
    return bool(session.run(using, UNBIND, topic=topic, queue=queue))
