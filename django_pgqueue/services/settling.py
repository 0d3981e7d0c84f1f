"""Extend, ack, nack, reject and release claimed messages. Every statement is fenced by the lease's token."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django_pgqueue import signals
from django_pgqueue.exceptions import LeaseLost
from django_pgqueue.message import Message
from django_pgqueue.services import dead_letters, notifying, session
from django_pgqueue.services.declaring import Declaration

# Seconds between two attempts to lock rows that another session has locked.
LOCK_RETRY = 0.01


class Nacked(NamedTuple):
    """The ids of the messages that a nack did not give back."""

    lost: set[int]
    #: Delivered ``max_deliveries`` times.
    dead_lettered: set[int]


class Extension(NamedTuple):
    """The result of extending leases, as message ids."""

    extended: set[int]
    #: The caller still has the lease, but another transaction has locked the row.
    locked: set[int]
    lost: set[int]


# EXTEND - extend the leases that the caller still has.
# Locks: the rows in id order, skipping locked rows. A skipped row is not lost: it is returned with extended = false.
# Returns id, extended.
EXTEND = """
WITH held AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
), mine AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE SKIP LOCKED
), extended AS (
    UPDATE django_pgqueue_messagequeueitem
    SET lease_expires_at = statement_timestamp() + %(lease)s * interval '1 second'
    WHERE id = ANY (ARRAY(SELECT id FROM mine))
    RETURNING id
)
SELECT held.id, extended.id IS NOT NULL
FROM held LEFT JOIN extended USING (id)
"""


def extend(messages: Sequence[Message], lease: float, using: str, *, timeout: float = 0.0) -> Extension:
    """
    Let leases end ``lease`` seconds from now.

    Rows that another session has locked are tried again for ``timeout`` seconds. A claim locks every row that it
    examines, including rows that it then does not take, but only while it runs.
    """
    deadline = time.monotonic() + timeout
    extension = Extension(set(), {message.id for message in messages}, set())
    while True:
        waiting = [message for message in messages if message.id in extension.locked]
        held = dict(session.run(using, EXTEND, **_fence(waiting), lease=lease))
        extended = {message_id for message_id, done in held.items() if done}
        lost = extension.locked - held.keys()
        extension = Extension(extension.extended | extended, held.keys() - extended, extension.lost | lost)
        if not extension.locked or time.monotonic() >= deadline:
            return extension
        time.sleep(LOCK_RETRY)


# ACK - delete messages that were handled.
# Locks: the rows in id order, like every statement that settles.
# Returns the ids whose lease the caller still had.
ACK = """
WITH mine AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE
)
DELETE FROM django_pgqueue_messagequeueitem
WHERE id = ANY (ARRAY(SELECT id FROM mine))
RETURNING id
"""


def ack(messages: Sequence[Message], using: str) -> set[int]:
    """
    Delete messages that were handled. Returns the ids whose lease was lost.

    Inside a transaction, the deletion is part of that transaction.
    """
    return lost_of(messages, using, session.run(using, ACK, **_fence(messages)))


# NACK - give messages back, each due after its own delay, and add the failure to their history.
# Messages delivered max_deliveries times are left unchanged, for DEAD_LETTER. %(told)s is a JSON object of delay and
# reason by id. With a join of arrays, the planner may compare every message with every element.
# Locks: the rows in id order.
# Returns the ids whose lease the caller still had, and whether each was given back.
NACK = """
WITH mine AS MATERIALIZED (
    SELECT id, queue_id, delivery_count
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE
), fit AS MATERIALIZED (
    SELECT mine.id
    FROM mine LEFT JOIN django_pgqueue_messagequeue AS queue ON queue.name = mine.queue_id
    WHERE mine.delivery_count < coalesce(queue.max_deliveries, %(max_deliveries)s)
), given_back AS (
    UPDATE django_pgqueue_messagequeueitem AS item
    SET read_after = statement_timestamp() + (told.by_id -> item.id::text ->> 0)::float8 * interval '1 second',
        lease_expires_at = NULL,
        lease_token = NULL,
        failures = jsonb_path_query_array(
            coalesce(item.failures, '[]') || jsonb_build_object(
                'at', statement_timestamp(),
                'queue', coalesce(item.queue_id, item.orphaned_from),
                'delivery_count', item.delivery_count,
                'consumer', item.leased_by,
                'process', (SELECT host || ':' || pid
                            FROM django_pgqueue_queueconsumer
                            WHERE id = item.leased_by),
                'reason', told.by_id -> item.id::text ->> 1),
            '$[last - 9 to last]')
    FROM (SELECT %(told)s::jsonb) AS told (by_id)
    WHERE item.id = ANY (ARRAY(SELECT id FROM fit))
    RETURNING item.id
)
SELECT mine.id, given_back.id IS NOT NULL
FROM mine LEFT JOIN given_back USING (id)
"""


def nack(
    declaration: Declaration,
    messages: Sequence[Message],
    delays: Sequence[float],
    reasons: Sequence[str],
    using: str,
) -> Nacked:
    """
    Give messages back, each due after its delay in seconds.

    A message that was delivered ``max_deliveries`` times is moved to the dead-letter queue instead.
    """
    reasons = [dead_letters.sanitize(reason) for reason in reasons]
    rows = session.run(
        using,
        NACK,
        **_fence(messages),
        told=json.dumps({message.id: told for message, *told in zip(messages, delays, reasons, strict=True)}),
        max_deliveries=declaration.max_deliveries,
    )
    spent = {message_id for message_id, given_back in rows if not given_back}
    taken: list[int] = []
    if spent:
        letters = [letter for letter in zip(messages, reasons, strict=True) if letter[0].id in spent]
        taken = _give_up(declaration, [message for message, _ in letters], [reason for _, reason in letters], using)
    return Nacked(lost_of(messages, using, rows), set(taken))


def reject(declaration: Declaration, messages: Sequence[Message], reasons: Sequence[str], using: str) -> set[int]:
    """Move messages to the dead-letter queue. Returns the ids whose lease was lost."""
    taken = _give_up(declaration, messages, reasons, using)
    return lost_of(messages, using, [(message_id,) for message_id in taken])


def _give_up(declaration: Declaration, messages: Sequence[Message], reasons: Sequence[str], using: str) -> list[int]:
    ids, tokens = [message.id for message in messages], [message.token for message in messages]
    return dead_letters.dead_letter(declaration, ids, tokens, reasons, using)


def release(messages: Sequence[Message], using: str) -> set[int]:
    """Give back messages that were never started. The delivery does not count. Returns the ids whose lease was lost."""
    return lost_of(messages, using, _release(using, **_fence(messages)))


# RELEASE - give back messages that were claimed but never started, without counting the delivery.
# Locks: the rows in id order.
# Returns the ids whose lease the caller still had.
RELEASE = """
WITH mine AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE
)
UPDATE django_pgqueue_messagequeueitem
SET read_after = coalesce(read_after, statement_timestamp()),
    lease_expires_at = NULL,
    lease_token = NULL,
    delivery_count = delivery_count - 1
WHERE id = ANY (ARRAY(SELECT id FROM mine))
RETURNING id
"""


def _release(using: str, **fence: str) -> list[tuple[Any, ...]]:
    return session.run(using, RELEASE, **fence)


# QUEUE_OF - look up the queue of a message. No lock.
QUEUE_OF = "SELECT queue_id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s AND queue_id IS NOT NULL"


def release_lease(message_id: int, token: UUID, using: str) -> bool:
    """
    Give back one message on behalf of an operator. The delivery does not count. Wakes the consumers.

    The consumer that holds the message loses its lease and can no longer settle it. Returns whether the message still
    had this lease.
    """
    if not _release(using, ids=f"{{{message_id}}}", tokens=f"{{{token}}}"):
        return False
    rows = session.run(using, QUEUE_OF, id=message_id)
    if rows:
        notifying.notify(rows[0][0], using)
    return True


def _fence(messages: Sequence[Message]) -> dict[str, str]:
    # Array literals, because psycopg inspects each element. Adjacent messages usually share a token.
    tokens: list[str] = []
    last = None
    for message in messages:
        if message.token is not last:
            last = message.token
            text = str(last)
        tokens.append(text)
    return {
        "ids": f"{{{','.join([str(message.id) for message in messages])}}}",
        "tokens": f"{{{','.join(tokens)}}}",
    }


def lost_of(messages: Sequence[Message], using: str, rows: Sequence[tuple[Any, ...]]) -> set[int]:
    lost = {message.id for message in messages} - {row[0] for row in rows}
    if lost:
        signals.lease_lost.send_robust(messages[0].queue, using=using, ids=sorted(lost))
    return lost


def raise_lost(queue: str, lost: set[int]) -> None:
    """Raise ``LeaseLost`` if any leases were lost."""
    if lost:
        raise LeaseLost(queue, lost)
