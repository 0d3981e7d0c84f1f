"""Count the messages of queues by state, and measure ages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from django_pgqueue.conf import settings
from django_pgqueue.services import consumers, session


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The message counts and ages of one queue. Ages are in seconds; None if there is nothing to measure."""

    name: str
    #: Whether the queue has a row.
    exists: bool
    #: Messages that a claim may take.
    ready: int = 0
    #: Messages that are not due yet.
    delayed: int = 0
    #: Messages that consumers hold.
    leased: int = 0
    #: Dead letters on this queue.
    dead: int = 0
    #: Messages whose TTL has passed, until the reaper removes them.
    expired: int = 0
    #: Messages that lost this queue's row.
    orphaned: int = 0
    #: How long the oldest ready message has been due.
    oldest_due_age: float | None = None
    #: Seconds since the queue was last declared, published to or consumed.
    last_active_age: float | None = None
    #: Whether the reaper may delete the queue now. None: the queue has neither a row nor messages.
    reapable: bool | None = field(default=None)
    #: Seconds until the last orphan expires. Infinity: some orphans never expire.
    orphans_expire_in: float | None = None
    #: Whether the queue is paused.
    paused: bool = False
    #: The consumer that owns the queue, if it is exclusive.
    owner: UUID | None = None
    #: How often the queue was created again in the last day after the reaper had deleted it.
    revived_per_day: int = 0
    #: How often the queue was created again in the last day after something else had deleted it.
    vanished_per_day: int = 0


# STATS - count messages by state, and measure the oldest due age, of the named queues (null: all).
# Includes queues that only have orphans, and how often each queue was revived or vanished in the last day. Reads every
# message of these queues. No lock.
STATS = """
WITH item AS (
    SELECT coalesce(queue_id, orphaned_from) AS name,
           CASE WHEN lease_expires_at > statement_timestamp() THEN 'leased'
                WHEN queue_id IS NULL THEN 'orphaned'
                WHEN dead_lettered_at IS NOT NULL THEN 'dead'
                WHEN expires_at <= statement_timestamp() THEN 'expired'
                WHEN read_after > statement_timestamp() THEN 'delayed'
                ELSE 'ready'
           END AS state,
           coalesce(read_after, published_at) AS due_at,
           expires_at
    FROM django_pgqueue_messagequeueitem
    WHERE %(names)s::text[] IS NULL OR queue_id = ANY (%(names)s) OR orphaned_from = ANY (%(names)s)
), depth AS (
    SELECT name,
           count(*) FILTER (WHERE state = 'ready') AS ready,
           count(*) FILTER (WHERE state = 'delayed') AS delayed,
           count(*) FILTER (WHERE state = 'leased') AS leased,
           count(*) FILTER (WHERE state = 'dead') AS dead,
           count(*) FILTER (WHERE state = 'expired') AS expired,
           count(*) FILTER (WHERE state = 'orphaned') AS orphaned,
           CASE WHEN count(*) FILTER (WHERE state = 'orphaned' AND expires_at IS NULL) > 0 THEN 'infinity'
                ELSE extract(epoch FROM max(expires_at) FILTER (WHERE state = 'orphaned' AND isfinite(expires_at))
                    - statement_timestamp())
           END::float8 AS orphans_expire_in,
           extract(epoch FROM statement_timestamp()
                              - min(due_at) FILTER (WHERE state = 'ready' AND isfinite(due_at))
               )::float8 AS oldest_due_age,
           count(*) AS messages
    FROM item
    GROUP BY name
), event AS (
    SELECT queue,
           count(*) FILTER (WHERE kind = 'revived') AS revived,
           count(*) FILTER (WHERE kind = 'vanished') AS vanished
    FROM django_pgqueue_queueevent
    WHERE at > statement_timestamp() - interval '1 day'
    GROUP BY queue
)
SELECT coalesce(queue.name, depth.name), queue.name IS NOT NULL,
       coalesce(ready, 0), coalesce(delayed, 0), coalesce(leased, 0), coalesce(dead, 0),
       coalesce(expired, 0), coalesce(orphaned, 0), oldest_due_age,
       extract(epoch FROM statement_timestamp()
                          - CASE WHEN isfinite(queue.last_active) THEN queue.last_active END)::float8,
       queue.auto_deleted
           AND queue.paused_at IS NULL
           AND queue.last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
           AND coalesce(messages, 0) = 0,
       orphans_expire_in,
       queue.paused_at IS NOT NULL,
       queue.exclusive_consumer_id,
       coalesce(event.revived, 0), coalesce(event.vanished, 0)
FROM depth
FULL JOIN django_pgqueue_messagequeue AS queue ON queue.name = depth.name
LEFT JOIN event ON event.queue = coalesce(queue.name, depth.name)
WHERE %(names)s::text[] IS NULL OR coalesce(queue.name, depth.name) = ANY (%(names)s)
ORDER BY 1
"""


def stats(names: Sequence[str] | None, using: str) -> list[QueueStats]:
    """Return the ``QueueStats`` of these queues (None: all). Reads all of their messages."""
    rows = session.run(using, STATS, names=list(names) if names else None, idle_for=settings.REAP_IDLE_AFTER)
    return [QueueStats(*row) for row in rows]


#: The states of messages that have a queue, which are also the names of fields of ``Depth``.
DEPTH_STATES = ("ready", "delayed", "leased", "dead", "expired")


class Depth(NamedTuple):
    """
    The message counts of one queue, from a bounded query that is cheap however many messages there are.

    With ``more``, each count is a lower bound.
    """

    name: str
    auto_deleted: bool
    paused: bool
    exclusive: bool
    #: The consumer that owns the queue, if it is exclusive.
    owner: UUID | None
    #: The configured dead-letter queue. None: the default.
    dead_letter: str | None
    #: In seconds. Infinite if the row was written so by hand.
    last_active_age: float
    consumers: int
    ready: int
    delayed: int
    leased: int
    dead: int
    expired: int
    #: In seconds. None: none of the messages that were read is due.
    oldest_due_age: float | None
    #: Whether there are messages that were not read.
    more: bool


# DEPTHS - like STATS, but bounded: reads at most %(most)s messages of each queue in each of its three walks (due by a
# time, not due yet, never delayed). %(heartbeat_timeout)s: as in BACKLOGS. No lock.
# Returns name, auto_deleted, whether the queue is paused, exclusive, its owner, dead_letter, seconds since it was last
# active, how many live consumers name it, ready, delayed, leased, dead, expired, the oldest due age in seconds or null,
# and whether a walk was cut short.
# Index: django_pgqueue_item_claim_idx.
DEPTHS = """
SELECT queue.name,
       queue.auto_deleted,
       queue.paused_at IS NOT NULL,
       queue.exclusive,
       queue.exclusive_consumer_id,
       queue.dead_letter,
       date_part('epoch', statement_timestamp()) - date_part('epoch', queue.last_active),
       (SELECT count(*)
        FROM django_pgqueue_queueconsumer AS consumer
        WHERE consumer.queues ? queue.name
          AND consumer.last_heartbeat > statement_timestamp() - %(heartbeat_timeout)s * interval '1 second'),
       count(*) FILTER (WHERE state = 'ready'),
       count(*) FILTER (WHERE state = 'delayed'),
       count(*) FILTER (WHERE state = 'leased'),
       count(*) FILTER (WHERE state = 'dead'),
       count(*) FILTER (WHERE state = 'expired'),
       extract(epoch FROM statement_timestamp()
                          - min(due_at) FILTER (WHERE state = 'ready' AND isfinite(due_at)))::float8,
       greatest(count(*) FILTER (WHERE walk = 1),
                count(*) FILTER (WHERE walk = 2),
                count(*) FILTER (WHERE walk = 3)) >= %(most)s
FROM django_pgqueue_messagequeue AS queue
LEFT JOIN LATERAL (
    SELECT walk,
           due_at,
           CASE WHEN lease_expires_at > statement_timestamp() THEN 'leased'
                WHEN dead_lettered_at IS NOT NULL THEN 'dead'
                WHEN expires_at <= statement_timestamp() THEN 'expired'
                WHEN walk = 2 THEN 'delayed'
                ELSE 'ready'
           END AS state
    FROM ((SELECT 1 AS walk, read_after AS due_at, lease_expires_at, dead_lettered_at, expires_at
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name AND read_after <= statement_timestamp()
           ORDER BY read_after, id
           LIMIT %(most)s)
          UNION ALL
          (SELECT 2, read_after, lease_expires_at, dead_lettered_at, expires_at
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name AND read_after > statement_timestamp()
           ORDER BY read_after, id
           LIMIT %(most)s)
          UNION ALL
          (SELECT 3, published_at, lease_expires_at, dead_lettered_at, expires_at
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name AND read_after IS NULL
           ORDER BY read_after, id
           LIMIT %(most)s)) AS head
) AS item ON true
WHERE %(names)s::text[] IS NULL OR queue.name = ANY (%(names)s)
GROUP BY queue.name
ORDER BY queue.name
"""


def depths(most: int, using: str, names: Sequence[str] | None = None) -> list[Depth]:
    """Count the messages of these queues (None: all) by state, reading at most ``most`` of each in each walk."""
    chosen = None if names is None else list(names)
    return [
        Depth(*row)
        for row in session.run(using, DEPTHS, names=chosen, most=most, heartbeat_timeout=consumers.heartbeat_timeout())
    ]


# ORPHANS - count the orphans of each queue, whether the queue exists or not. Reads at most %(most)s orphans in total.
# No lock.
# Index: django_pgqueue_item_orphan_idx.
ORPHANS = """
SELECT orphaned_from, count(*)
FROM (SELECT orphaned_from
      FROM django_pgqueue_messagequeueitem
      WHERE orphaned_from IS NOT NULL
      ORDER BY orphaned_from, id
      LIMIT %(most)s) AS orphan
GROUP BY orphaned_from
ORDER BY orphaned_from
"""


def orphans(most: int, using: str) -> dict[str, int]:
    """Count the orphans of each queue, reading at most ``most`` orphans in total."""
    return dict(session.run(using, ORPHANS, most=most))


class Orphans(NamedTuple):
    """The orphans of one queue, and the seconds until the last one expires (None: no orphans; infinity: never)."""

    messages: int = 0
    expire_in: float | None = None


# ORPHANS_OF - count the orphans of each of these queues, and the seconds until the last one expires. Reads at most
# %(most)s orphans of each. No lock.
# Index: django_pgqueue_item_orphan_idx.
ORPHANS_OF = """
SELECT name, count(*),
       CASE WHEN count(*) > count(expires_at) THEN 'infinity'
            ELSE nullif(date_part('epoch', max(expires_at)) - date_part('epoch', statement_timestamp()), '-infinity')
       END::float8
FROM unnest(%(names)s::text[]) AS name
CROSS JOIN LATERAL (
    SELECT expires_at
    FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
    WHERE orphaned_from = name
    ORDER BY orphaned_from, id
    LIMIT %(most)s) AS orphan
GROUP BY name
ORDER BY name
"""


def orphans_of(names: Sequence[str], most: int, using: str) -> dict[str, Orphans]:
    """Return the ``Orphans`` of each of these queues that has any, reading at most ``most`` of each."""
    return {name: Orphans(*found) for name, *found in session.run(using, ORPHANS_OF, names=list(names), most=most)}


# DEAD_LETTERS - count the dead letters that came from each of these queues, whatever queue they are on now. Counts at
# most %(most)s of each. No lock.
# Index: django_pgqueue_item_dead_idx.
DEAD_LETTERS = """
SELECT name,
       (SELECT count(*)
        FROM (SELECT id
              FROM django_pgqueue_messagequeueitem
              WHERE dead_lettered_from = name
              ORDER BY dead_lettered_from, id
              LIMIT %(most)s) AS letter)
FROM unnest(%(names)s::text[]) AS name
"""


def dead_letters(names: Sequence[str], most: int, using: str) -> dict[str, int]:
    """Count the existing dead letters that came from each of these queues, at most ``most`` of each."""
    return dict(session.run(using, DEAD_LETTERS, names=list(names), most=most))


# EVENTS_PER_DAY - count how often each queue was reaped, was revived or vanished in the last day. No lock.
# Index: django_pgqueue_event_at_idx.
EVENTS_PER_DAY = """
SELECT queue, kind, count(*)
FROM django_pgqueue_queueevent
WHERE at > statement_timestamp() - interval '1 day'
GROUP BY queue, kind
ORDER BY queue, kind
"""


def events_per_day(using: str) -> dict[tuple[str, str], int]:
    """Count the events of the last day by queue and kind."""
    return {(queue, kind): count for queue, kind, count in session.run(using, EVENTS_PER_DAY)}
