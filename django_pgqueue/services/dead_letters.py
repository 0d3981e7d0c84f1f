"""Move messages to dead-letter queues, and send them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django_pgqueue import signals
from django_pgqueue.services import declaring, notifying, session
from django_pgqueue.services.declaring import Declaration

# In characters. The reason is a summary for people; the traceback is in the log.
MAX_REASON_LENGTH = 2_000


# DEAD_LETTER - move messages to the dead-letter queue of the queue they are on.
# The move clears expiry, lease and count, which are kept in the history. A queue named *.dead without a configured
# dead-letter queue parks its failures: they stay on the queue, due in the year 9000, until they are redriven. A queue
# also parks a message that was already dead-lettered from its dead-letter queue, so that no queue is visited twice.
# Fenced by token. If %(tokens)s is null, moves only messages that nobody holds and that are still expired or exhausted:
# several consumers and reapers may find the same message, and it must move only once.
# Locks: the messages in id order, then KEY SHARE on the target's row, in name order.
# Returns the ids taken, their target (null: parked) and whether each was moved (false: the target
# does not exist yet).
DEAD_LETTER = """
WITH mine AS MATERIALIZED (
    SELECT id, coalesce(queue_id, orphaned_from) AS name,
           coalesce(dead_letter_path,
                    CASE WHEN dead_lettered_from IS NOT NULL THEN jsonb_build_array(dead_lettered_from) END,
                    '[]') AS path
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND CASE WHEN %(tokens)s::uuid[] IS NULL
               THEN (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
                    AND (expires_at <= statement_timestamp()
                         OR delivery_count >= (SELECT max_deliveries
                                               FROM django_pgqueue_messagequeue
                                               WHERE name = queue_id))
               ELSE (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
          END
    ORDER BY id
    FOR UPDATE
), wanted AS MATERIALIZED (
    SELECT mine.id, mine.name, mine.path,
           coalesce(queue.dead_letter,
                    CASE WHEN queue.name IS NULL THEN %(dead_letter)s END,
                    CASE WHEN right(mine.name, 5) <> '.dead' THEN mine.name || '.dead' END) AS target
    FROM mine LEFT JOIN django_pgqueue_messagequeue AS queue ON queue.name = mine.name
), route AS MATERIALIZED (
    SELECT id, name, path,
           target = name OR path ? target AS is_cycle,
           CASE WHEN target <> name AND NOT path ? target THEN target END AS target
    FROM wanted
), target AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE name IN (SELECT target FROM route)
    ORDER BY name
    FOR KEY SHARE
), moved AS (
    UPDATE django_pgqueue_messagequeueitem AS item
    SET queue_id = coalesce(target.name, item.queue_id),
        orphaned_from = CASE WHEN target.name IS NULL THEN item.orphaned_from END,
        read_after = CASE WHEN target.name IS NULL THEN timestamptz '9000-01-01 00:00:00+00'
                          ELSE statement_timestamp() END,
        expires_at = NULL,
        lease_expires_at = NULL,
        lease_token = NULL,
        delivery_count = 0,
        dead_lettered_from = CASE WHEN route.target IS NULL AND route.path <> '[]' THEN route.path ->> -1
                                  ELSE route.name END,
        dead_letter_path = CASE WHEN route.target IS NULL AND route.path <> '[]' THEN route.path
                                ELSE route.path || to_jsonb(route.name) END,
        dead_lettered_at = statement_timestamp(),
        failures = jsonb_path_query_array(
            coalesce(item.failures, '[]') || jsonb_build_object(
                'at', statement_timestamp(),
                'queue', coalesce(item.queue_id, item.orphaned_from),
                'delivery_count', item.delivery_count,
                'consumer', item.leased_by,
                'process', (SELECT host || ':' || pid
                            FROM django_pgqueue_queueconsumer
                            WHERE id = item.leased_by),
                'expires_at', item.expires_at,
                'reason', CASE WHEN route.is_cycle THEN 'cycle: ' ELSE '' END || told.reason),
            '$[last - 9 to last]')
    FROM unnest(%(ids)s::bigint[], %(reasons)s::text[]) AS told (id, reason)
    JOIN route ON route.id = told.id
    LEFT JOIN target ON target.name = route.target
    WHERE item.id = ANY (ARRAY(SELECT id FROM mine))
      AND item.id = told.id
      AND (target.name IS NOT NULL OR route.target IS NULL)
    RETURNING item.id
)
SELECT route.id, route.target, moved.id IS NOT NULL
FROM route LEFT JOIN moved USING (id)
"""


def dead_letter(
    declaration: Declaration,
    ids: Sequence[int],
    tokens: Sequence[UUID] | None,
    reasons: Sequence[str] | str,
    using: str,
) -> list[int]:
    """
    Move messages to the dead-letter queue, and return the ids that were moved or parked.

    Fenced by ``tokens``; with None, only messages that nobody holds are taken. The dead-letter queue is created if it
    is missing.
    """
    if isinstance(reasons, str):
        reasons = [reasons] * len(ids)
    reason_of = dict(zip(ids, map(sanitize, reasons), strict=True))
    # Pairs, because an id may come with several tokens if its claimer claimed it again after the lease expired.
    fence: Sequence[UUID | None] = [None] * len(ids) if tokens is None else tokens
    waiting = list(zip(ids, fence, strict=True))
    taken: list[int] = []
    while waiting:
        rows = session.run(
            using,
            DEAD_LETTER,
            ids=[message_id for message_id, _ in waiting],
            tokens=None if tokens is None else [token for _, token in waiting],
            reasons=[reason_of[message_id] for message_id, _ in waiting],
            dead_letter=declaration.dead_letter,
        )
        moved: dict[str | None, list[int]] = {}
        for message_id, target, done in rows:
            if done:
                moved.setdefault(target, []).append(message_id)
        for target, moved_ids in moved.items():
            taken += moved_ids
            _tell_dead_lettered(declaration.name, moved_ids, target, reason_of[moved_ids[0]], using)
        left = {message_id for message_id, _, done in rows if not done}
        waiting = [pair for pair in waiting if pair[0] in left]
        for target in sorted({target for _, target, done in rows if not done}):
            declaring.ensure_dead_letter_queue(declaration.name, target, using)
    return taken


def _tell_dead_lettered(name: str, ids: list[int], target: str | None, reason: str, using: str) -> None:
    def tell() -> None:
        signals.messages_dead_lettered.send_robust(name, using=using, ids=ids, target=target, reason=reason)

    session.once_committed(tell, using)


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Selects dead letters. A field that is None selects all."""

    ids: list[int] | None = None
    #: Text that the reason of the last failure contains.
    reason: str | None = None
    #: JSON of headers that the dead letters have.
    headers: str | None = None

    @property
    def params(self) -> dict[str, Any]:
        return {"ids": self.ids, "reason": self.reason, "headers": self.headers}


# REDRIVE - send a batch of dead letters back to the queue that gave them up, due now and with a fresh count.
# Their history is kept. A dead letter that passed through several queues goes back one step.
# Takes %(limit)s dead letters after id %(after)s that match and were dead-lettered up to %(before)s, so a message
# that fails again is not taken a second time by the same redrive.
# Locks: KEY SHARE on the queue, then the dead letters in id order, skipping locked rows (concurrent redrives take
# different ones).
# Index: django_pgqueue_item_dead_idx.
# Returns the ids.
REDRIVE = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s FOR KEY SHARE
), letter AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE dead_lettered_from = (SELECT name FROM queue)
      AND id > %(after)s
      AND dead_lettered_at <= %(before)s
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)
      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)
    ORDER BY dead_lettered_from, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
UPDATE django_pgqueue_messagequeueitem
SET queue_id = dead_lettered_from,
    orphaned_from = NULL,
    read_after = statement_timestamp(),
    lease_expires_at = NULL,
    lease_token = NULL,
    delivery_count = 0,
    dead_lettered_from = dead_letter_path ->> -2,
    dead_lettered_at = CASE WHEN dead_letter_path ->> -2 IS NOT NULL THEN dead_lettered_at END,
    dead_letter_path = nullif(dead_letter_path - -1, '[]')
WHERE id = ANY (ARRAY(SELECT id FROM letter))
RETURNING id
"""

# UNPARK - redrive messages that a queue has parked: they stay on the queue and become due now.
# Locks: the messages in id order, skipping locked rows.
# Index: django_pgqueue_item_claim_idx.
# Returns the ids.
UNPARK = """
WITH letter AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = %(name)s
      AND read_after >= timestamptz '9000-01-01 00:00:00+00'
      AND dead_lettered_at <= %(before)s
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)
      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)
    ORDER BY read_after, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
UPDATE django_pgqueue_messagequeueitem
SET read_after = statement_timestamp(),
    lease_expires_at = NULL,
    lease_token = NULL,
    delivery_count = 0
WHERE id = ANY (ARRAY(SELECT id FROM letter))
RETURNING id
"""


def redrive(
    declaration: Declaration, letters: DeadLetterFilter, limit: int, after: int, before: datetime, using: str
) -> list[int]:
    """
    Send a batch of dead letters back to the queue, which is created if it is missing.

    Takes those after id ``after`` that were dead-lettered up to ``before``. Returns their ids. Consumers are woken
    after the commit.
    """
    params = {**letters.params, "name": declaration.name, "limit": limit, "before": before}
    ids = [message_id for (message_id,) in session.run(using, REDRIVE, **params, after=after)]
    if len(ids) < limit:
        ids += [message_id for (message_id,) in session.run(using, UNPARK, **{**params, "limit": limit - len(ids)})]
    if ids:
        _tell_redriven(declaration.name, len(ids), using)
    return ids


def _tell_redriven(name: str, count: int, using: str) -> None:
    def tell() -> None:
        signals.messages_redriven.send_robust(name, using=using, count=count)
        notifying.notify(name, using)

    session.once_committed(tell, using)


# REDRIVABLE - count the messages that REDRIVE and UNPARK would take now. No lock.
REDRIVABLE = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem
WHERE (dead_lettered_from = %(name)s
       OR (queue_id = %(name)s AND read_after >= timestamptz '9000-01-01 00:00:00+00'
           AND dead_lettered_at IS NOT NULL))
  AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
  AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
  AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)
  AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)
"""


def redrivable(name: str, letters: DeadLetterFilter, using: str) -> int:
    """Count the dead letters that ``redrive`` would take now."""
    ((count,),) = session.run(using, REDRIVABLE, name=name, **letters.params)
    return int(count)


# OUTCOMES - look up redriven messages. No lock.
# Returns the ids that still exist, and whether each was dead-lettered again after %(since)s.
OUTCOMES = """
SELECT id, coalesce(dead_lettered_at > %(since)s, false)
FROM django_pgqueue_messagequeueitem
WHERE id = ANY (%(ids)s)
"""


def outcomes(ids: Sequence[int], since: datetime, using: str) -> dict[int, bool]:
    """Return the ids of the messages that still exist, and whether each was dead-lettered again after ``since``."""
    rows: list[Any] = session.run(using, OUTCOMES, ids=list(ids), since=since)
    return dict(rows)


def sanitize(text: object) -> str:
    """Return the object's text as PostgreSQL can store it: without NUL and lone surrogates, and cut to length."""
    text = str(text)
    return storable(text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]}…")


def storable(text: str) -> str:
    """Return text as PostgreSQL can store it: without NUL and lone surrogates."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()
