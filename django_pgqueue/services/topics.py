"""Publish to topics, bind queues to them, and read the notifications of live subscribers."""

from __future__ import annotations

import logging
from uuid import uuid4

from django.db import DatabaseError, InterfaceError, connections, transaction

from django_pgqueue import signals
from django_pgqueue.conf import settings
from django_pgqueue.exceptions import QueueNotFound
from django_pgqueue.services import notifying, session

logger = logging.getLogger("django_pgqueue")

# https://www.postgresql.org/docs/current/sql-notify.html: the payload must be shorter than 8000 bytes.
MAX_NOTIFICATION_BYTES = 7_999

# In seconds. How long a body that does not fit is kept: longer than any subscriber should need to read it.
BODY_TTL = 300.0

# The first character of a notification: it carries a message, or the id of the message's body.
INLINE, BY_ID = "=", "#"


# PUBLISH_TO_TOPIC - insert a message into every queue that is bound to a topic, and store a body that does not fit into
# a notification.
# A bound auto-deleted queue that has been idle for %(idle_for)s seconds is skipped without a lock: its subscriber has
# left, and a new message must not keep the queue from being reaped. A bound queue without a row was deleted by hand
# (the reaper deletes bindings together with the queue). Its message becomes an orphan, which is adopted once the queue
# exists again.
# Locks: KEY SHARE on the bindings and on the queues' rows, each in name order. Locked rows cannot be deleted.
# Returns rows: the id of the body (null: none), and the id and the queue of each inserted message (null in the only row
# if there is none).
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
    Insert a copy of a message into every bound queue, and notify the live subscribers after the commit.

    ``payload`` and ``headers`` are JSON texts. ``ttl`` is the TTL of each copy in seconds (None: the binding's TTL, or
    else the default for the queue). Returns the ids, in the order of the queues' names.
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

    # A plain function, because a partial breaks robust hooks on Django 5.2.
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
        # Django runs no commit hooks in manual transaction mode. A notification that is part of the transaction is sent
        # at its commit, although PostgreSQL serializes these commits.
        _send(topic, notification, using)
    return [message_id for message_id, _ in copies]


# NOTIFY_TOPIC - notify the live subscribers of a topic. It runs as a separate statement after the commit, like NOTIFY.
NOTIFY_TOPIC = "SELECT pg_notify(%(channel)s, %(content)s)"


def _send(topic: str, notification: str, using: str) -> None:
    session.run(using, NOTIFY_TOPIC, channel=notifying.topic_channel(topic), content=notification)


def _notify_topic(topic: str, notification: str, using: str) -> None:
    try:
        _send(topic, notification, using)
    except (DatabaseError, InterfaceError):
        # The copies on queues are committed. Live subscribers get a message at most once.
        logger.warning("live subscribers not notified topic=%s", topic, exc_info=True)


# TOPIC_BODY - read a body that did not fit into a notification. Only the reaper deletes it. No lock.
TOPIC_BODY = "SELECT content FROM django_pgqueue_topicbody WHERE id = %(id)s"


def read_notification(notification: str, using: str) -> str | None:
    """
    Return the content of a topic's notification. None: its body no longer exists.

    Raises ``ValueError`` for any other notification.
    """
    kind, rest = notification[:1], notification[1:]
    if kind == INLINE:
        return rest
    if kind != BY_ID or not rest.isdecimal():
        raise ValueError("not a notification of a topic")
    rows = session.run(using, TOPIC_BODY, id=int(rest))
    return rows[0][0] if rows else None


# BIND - bind a queue to a topic, so that it gets a copy of each message.
# Locks: KEY SHARE on the queue's row, because the reaper locks the queue first and must then find every binding; and
# the binding's row, if it exists.
# Returns the queue's name. No row: there is no such queue.
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
    Bind a queue to a topic. It gets a copy of each message, which expires after ``ttl`` seconds (None: the default).

    Raises ``QueueNotFound``.
    """
    if not session.run(using, BIND, topic=topic, queue=queue, ttl=ttl):
        raise QueueNotFound(queue)


# UNBIND - remove the binding of a queue to a topic.
# Locks: the binding's row, waiting for open transactions that publish to the topic.
# Returns the id. No row: the queue was not bound.
UNBIND = """
DELETE FROM django_pgqueue_topicbinding WHERE topic = %(topic)s AND queue = %(queue)s RETURNING id
"""


def unbind(topic: str, queue: str, using: str) -> bool:
    """Remove the binding. Returns whether the queue was bound. May wait for open transactions of publishers."""
    return bool(session.run(using, UNBIND, topic=topic, queue=queue))
