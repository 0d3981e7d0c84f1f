"""Create queues, write their attributes and mark them as in use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_pgqueue import signals
from django_pgqueue.conf import settings
from django_pgqueue.services import session, topics
from django_pgqueue.services.beliefs import Key, beliefs

logger = logging.getLogger("django_pgqueue")


@dataclass(frozen=True)
class Declaration:
    """A queue's declared attributes, as its row stores them."""

    name: str
    durable: bool = True
    auto_deleted: bool = False
    exclusive: bool = False
    dead_letter: str | None = None
    max_deliveries: int = 5
    #: The topics that the queue is bound to: name, and the TTL of copies in seconds (None: the default).
    bindings: tuple[tuple[str, float | None], ...] = ()

    @cached_property
    def params(self) -> dict[str, Any]:
        attributes = asdict(self)
        del attributes["bindings"]
        return attributes

    @property
    def dead_letter_target(self) -> str | None:
        """The name of its dead-letter queue. None: dead letters are parked on the queue itself."""
        if self.dead_letter is not None or self.name.endswith(".dead"):
            return self.dead_letter
        return f"{self.name}.dead"


# DECLARE_QUEUE - create a queue, or write its attributes where they differ, and refresh it.
# Locks: the queue's row, waiting for it if necessary. For an explicit declare(), never for publish.
# Returns one row: created.
DECLARE_QUEUE = """
INSERT INTO django_pgqueue_messagequeue
    (name, durable, auto_deleted, exclusive, dead_letter, max_deliveries)
VALUES
    (%(name)s, %(durable)s, %(auto_deleted)s, %(exclusive)s, %(dead_letter)s, %(max_deliveries)s)
ON CONFLICT (name) DO UPDATE
SET last_active = statement_timestamp(),
    durable = excluded.durable,
    auto_deleted = excluded.auto_deleted,
    exclusive = excluded.exclusive,
    dead_letter = excluded.dead_letter,
    max_deliveries = excluded.max_deliveries
RETURNING xmax = 0
"""


def declare(declaration: Declaration, using: str) -> bool:
    """
    Create the queue and its dead-letter queue, or write the attributes where they differ.

    Refreshes the queue. May wait for its row. Inside a transaction, the changes are part of that transaction.
    Returns whether the queue was created.
    """
    connection = connections[using]
    target = declaration.dead_letter_target
    known = beliefs.is_known(connection, declaration.name)
    created = False
    _refuse_cycle(declaration, using)
    # In name order, like every statement that touches several queues.
    for name in sorted({declaration.name, target or declaration.name}):
        if name == declaration.name:
            ((created,),) = session.run(using, DECLARE_QUEUE, **declaration.params)
        else:
            ensure_dead_letter_queue(declaration.name, name, using)
    if created:
        finish_row(connection, declaration, known=known)
    # Repeated for a new queue: finish_row() only logs an error, but the caller must see it.
    _bind_declared(declaration, using)
    beliefs.remember(connection, declaration.name)
    return created


# DEAD_LETTER_CHAIN - follow the stored dead-letter queues from a queue, until the chain ends or reaches a queue for
# the second time.
# Returns the names, in order.
DEAD_LETTER_CHAIN = """
WITH RECURSIVE chain (name, place) AS (
    SELECT %(target)s::text, 1
    UNION ALL
    SELECT queue.dead_letter, chain.place + 1
    FROM chain JOIN django_pgqueue_messagequeue AS queue ON queue.name = chain.name
    WHERE queue.dead_letter IS NOT NULL
) CYCLE name SET is_cycle USING path
SELECT name FROM chain WHERE NOT is_cycle ORDER BY place
"""


def _refuse_cycle(declaration: Declaration, using: str) -> None:
    """Raise ``ValueError`` if the stored dead-letter queues would lead back to the queue."""
    if declaration.dead_letter is None:
        return
    rows = session.run(using, DEAD_LETTER_CHAIN, target=declaration.dead_letter)
    chain = [name for (name,) in rows]
    if declaration.name in chain:
        there = " -> ".join([declaration.name, *chain[: chain.index(declaration.name) + 1]])
        raise ValueError(f"dead-letter queues must not form a cycle: {there}")


# REFRESH_QUEUE - mark a queue as in use and write its declared attributes, unless it was marked within the last
# %(ttl)s seconds.
# Locks: the queue's row FOR NO KEY UPDATE, if it is stale and nobody else holds it. Never waits, and never makes a
# publisher wait. A fresh row is not locked, because the locking SELECT tests for staleness.
# Returns one row: exists, fresh, refreshed, differs (the stored attributes differ from the declared ones).
REFRESH_QUEUE = """
WITH stale AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s
      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'
    FOR NO KEY UPDATE SKIP LOCKED
), refreshed AS (
    UPDATE django_pgqueue_messagequeue
    SET last_active = statement_timestamp(),
        durable = %(durable)s,
        auto_deleted = %(auto_deleted)s,
        exclusive = %(exclusive)s,
        dead_letter = %(dead_letter)s,
        max_deliveries = %(max_deliveries)s
    WHERE name = ANY (ARRAY(SELECT name FROM stale))
    RETURNING name
), seen AS (
    SELECT last_active >= statement_timestamp() - %(ttl)s * interval '1 second' AS fresh,
           (durable, auto_deleted, exclusive, max_deliveries)
               IS DISTINCT FROM (%(durable)s, %(auto_deleted)s, %(exclusive)s, %(max_deliveries)s)
           OR dead_letter IS DISTINCT FROM %(dead_letter)s AS differs
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s
)
SELECT EXISTS (SELECT FROM seen),
       coalesce((SELECT fresh FROM seen), false),
       EXISTS (SELECT FROM refreshed),
       coalesce((SELECT differs FROM seen), false)
"""


def refresh(connection: BaseDatabaseWrapper, declaration: Declaration, key: Key) -> None:
    """Mark the queue as in use, at most once per DECLARE_TTL and without waiting. Create it if it is missing."""
    if beliefs.is_fresh(key):
        return
    params = {**declaration.params, "ttl": settings.DECLARE_TTL}
    ((exists, fresh, refreshed, differs),) = session.run_often(connection, REFRESH_QUEUE, params)
    if not exists:
        create(connection, declaration)
    elif fresh or refreshed:
        beliefs.remember(connection, declaration.name)
    if differs and beliefs.is_first(declaration):
        logger.warning("queue declared differently queue=%s written=%s", declaration.name, refreshed)


# ENSURE_QUEUE - create a missing queue: the first half of ENSURE_AND_PUBLISH, for publish_many.
# Returns one row: created.
ENSURE_QUEUE = """
INSERT INTO django_pgqueue_messagequeue
    (name, durable, auto_deleted, exclusive, dead_letter, max_deliveries)
VALUES
    (%(name)s, %(durable)s, %(auto_deleted)s, %(exclusive)s, %(dead_letter)s, %(max_deliveries)s)
ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()
RETURNING xmax = 0
"""


def ensure_row(connection: BaseDatabaseWrapper, declaration: Declaration) -> bool:
    """Create the queue's row if it is missing. Returns whether it was created."""
    ((created,),) = session.run(connection.alias, ENSURE_QUEUE, **declaration.params)
    return bool(created)


# ENSURE_DEAD_LETTER_QUEUE - create the queue that takes another queue's dead letters, if it is missing.
# The default one, NAME.dead, is auto-deleted if NAME is; a configured one is standing.
# Locks: no existing row.
ENSURE_DEAD_LETTER_QUEUE = """
INSERT INTO django_pgqueue_messagequeue (name, auto_deleted)
SELECT %(target)s,
       coalesce((SELECT auto_deleted AND dead_letter IS NULL
                 FROM django_pgqueue_messagequeue
                 WHERE name = %(name)s), false)
ON CONFLICT (name) DO NOTHING
"""


def ensure_dead_letter_queue(name: str, target: str, using: str) -> None:
    """Create the queue ``target``, which takes the dead letters of queue ``name``, if it is missing."""
    session.run(using, ENSURE_DEAD_LETTER_QUEUE, name=name, target=target)


def create(connection: BaseDatabaseWrapper, declaration: Declaration) -> None:
    """Create the queue and its dead-letter queue if they are missing."""
    known = beliefs.is_known(connection, declaration.name)
    created = ensure_row(connection, declaration)
    target = declaration.dead_letter_target
    if target is not None:
        ensure_dead_letter_queue(declaration.name, target, connection.alias)
    if created:
        finish_row(connection, declaration, known=known)
    beliefs.remember(connection, declaration.name)


# RECORD_RETURN - record why a queue that is created again was missing: revived (its last event is the reaper's
# tombstone) or vanished (it has no tombstone, and %(known)s: this process had seen the queue).
# Locks: nothing; it only inserts.
# Returns the kind. No row: this is the first use.
RECORD_RETURN = """
INSERT INTO django_pgqueue_queueevent (queue, kind)
SELECT %(name)s, cause.kind
FROM (SELECT CASE WHEN (SELECT kind
                        FROM django_pgqueue_queueevent
                        WHERE queue BETWEEN %(name)s AND %(name)s
                        ORDER BY queue DESC, id DESC
                        LIMIT 1) = 'reaped' THEN 'revived'
                  WHEN %(known)s THEN 'vanished'
             END) AS cause (kind)
WHERE cause.kind IS NOT NULL
RETURNING kind
"""


def finish_row(connection: BaseDatabaseWrapper, declaration: Declaration, *, known: bool) -> None:
    """
    Complete a new row: write its bindings, record why the queue was missing, and send the signal.

    Inside a transaction, this is part of that transaction.
    """
    using = connection.alias
    try:
        _bind_declared(declaration, using)
        rows = session.run(using, RECORD_RETURN, name=declaration.name, known=known)
    except (DatabaseError, InterfaceError):
        if not connection.get_autocommit():
            raise
        # The queue is committed, possibly with a message. An error would make the publisher believe that it failed.
        rows = [("vanished",)] if known else []
        logger.warning("event of a recreated queue not recorded queue=%s", declaration.name, exc_info=True)

    def tell() -> None:
        if rows:
            signals.queue_healed.send_robust(
                declaration.name, using=using, cause=rows[0][0], standing=not declaration.auto_deleted
            )
        else:
            signals.queue_created.send_robust(declaration.name, using=using)

    session.once_committed(tell, using)


def _bind_declared(declaration: Declaration, using: str) -> None:
    for topic, ttl in declaration.bindings:
        topics.bind(topic, declaration.name, ttl, using)


class QueueAttributes(NamedTuple):
    """A queue's attributes, as stored in its row."""

    durable: bool
    auto_deleted: bool
    exclusive: bool
    dead_letter: str | None
    max_deliveries: int


# QUEUE_ATTRIBUTES - read a queue's attributes, by primary key. No lock.
QUEUE_ATTRIBUTES = """
SELECT durable, auto_deleted, exclusive, dead_letter, max_deliveries
  FROM django_pgqueue_messagequeue
 WHERE name = %(name)s
"""


def stored(name: str, using: str) -> QueueAttributes | None:
    """Return a queue's attributes, or None if it has no row."""
    rows = session.run(using, QUEUE_ATTRIBUTES, name=name)
    return QueueAttributes(*rows[0]) if rows else None


# TOUCH_QUEUES - mark these queues as in use, each under the same condition as REFRESH_QUEUE.
# Locks: stale rows that nobody holds, in name order. Never waits.
# Returns the names of the queues that exist.
TOUCH_QUEUES = """
WITH stale AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE name = ANY (%(names)s)
      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'
    ORDER BY name
    FOR NO KEY UPDATE SKIP LOCKED
), touched AS (
    UPDATE django_pgqueue_messagequeue
    SET last_active = statement_timestamp()
    WHERE name = ANY (ARRAY(SELECT name FROM stale))
)
SELECT name FROM django_pgqueue_messagequeue WHERE name = ANY (%(names)s)
"""


def touch(names: Sequence[str], using: str) -> set[str]:
    """Mark queues as in use, without waiting. Returns the names of the queues that exist."""
    rows = session.run(
        using,
        TOUCH_QUEUES,
        names=list(names),
        ttl=min(settings.DECLARE_TTL, settings.HEARTBEAT_INTERVAL),
    )
    return {name for (name,) in rows}


# QUEUE_EXISTS - look up a queue. Returns the name, or no row.
QUEUE_EXISTS = "SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s"


def exists(name: str, using: str) -> bool:
    """Return whether the queue has a row."""
    return bool(session.run(using, QUEUE_EXISTS, name=name))


def ensure(declaration: Declaration, using: str) -> None:
    """Create the queue if it is missing."""
    if not exists(declaration.name, using):
        create(connections[using], declaration)
