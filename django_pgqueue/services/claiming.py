"""Claim messages of a queue, and plan the next claim."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_pgqueue import instrumentation
from django_pgqueue.conf import settings
from django_pgqueue.message import Message, decode
from django_pgqueue.services import consumers, dead_letters, session
from django_pgqueue.services.beliefs import beliefs
from django_pgqueue.services.declaring import Declaration

logger = logging.getLogger("django_pgqueue")

# PostgreSQL's times that Python can represent, as seconds since 1970: the years 1 to 9999.
EARLIEST = datetime(1, 1, 2, tzinfo=UTC).timestamp()

LATEST = datetime(9999, 12, 30, tzinfo=UTC).timestamp()


class Claim(NamedTuple):
    """The result of one claim."""

    messages: list[Message]
    #: Whether the claim found a suspect and left it, because the caller did not ask for suspects.
    suspect_met: bool
    #: How many messages were dead-lettered: undecodable, or delivered ``max_deliveries`` times.
    dead_lettered: int
    #: Whether the claim left messages that it found.
    more: bool
    #: Whether the queue is paused or another consumer owns it.
    closed: bool
    #: The lowest and the highest id claimed by the walk in id order. None: this walk found nothing.
    walked: tuple[int, int] | None
    #: Seconds since each message became due, by message id and by the database's clock.
    waits: dict[int, float]


class SleepPlan(NamedTuple):
    """What a consumer needs to know before it sleeps."""

    exists: bool
    #: Seconds until the next delayed message is due. None: there is none.
    due_in: float | None
    orphans: bool


# CLAIM - lease messages of one queue.
# Two walks over the claim index find due messages (delayed, retried, given back) and then messages that were never
# delayed, by id, starting after %(above)s (0: all; see low_water.py). If both walks find messages, the claim takes from
# both, so that neither starves.
# A message whose lease has expired is a suspect: it may have killed its worker, so it is claimed alone.
# %(suspects)s: whether a suspect may be taken. %(skip_suspects)s: whether suspects are passed over.
# Only the owner of an exclusive queue may claim. The claim stops after about %(most_bytes)s bytes (null: no limit). A
# compressed payload counts as sixteen times its stored size: decompressing all candidates to measure them would cost
# more than the claim, and PostgreSQL compresses up to ninety times.
# A CTE returns its rows in their order, so ordered rows are not sorted again. This is the most frequent statement
# apart from publishing, and sorting and comparing took half of its time. A CTE that is used twice or that locks is
# materialized without the keyword, which keeps the text short: psycopg does not cache a query of more than 4,096
# characters, and parses it anew each time.
# Locks: the candidates FOR UPDATE, skipping locked rows, so nobody waits. The row of an exclusive queue FOR SHARE, so
# that a claim and a change of the owner cannot overlap.
# Index: django_pgqueue_item_claim_idx; the update changes none of its columns.
# Times (published, end of the lease, due if it was ever delayed) are seconds since 1970, because reading a timestamp
# with Django takes as long as decoding the payload.
# A message without failures was never given back or dead-lettered: its publish is counted when it is settled.
# Returns rows of kind "claimed", "exhausted" (delivered max_deliveries times: to be dead-lettered), "ready" (the lowest
# and, in place of the count, the highest id claimed by the walk in id order), and rows with only a kind: "suspect"
# (%(suspects)s is false and one was found), "more" (the claim left messages that it found), "paused", "foreign"
# (another consumer owns the queue, or nobody does).
CLAIM = """
WITH shared AS (
    SELECT name, max_deliveries
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s AND paused_at IS NULL AND NOT exclusive
), owned AS (
    SELECT name, max_deliveries
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s AND paused_at IS NULL AND exclusive AND exclusive_consumer_id = %(consumer)s
    FOR SHARE
), queue AS (
    SELECT * FROM shared
    UNION ALL
    SELECT * FROM owned
), due AS MATERIALIZED (
    SELECT id, read_after, delivery_count, lease_expires_at IS NOT NULL AS lapsed,
           pg_column_size(payload) * CASE WHEN pg_column_compression(payload) IS NULL THEN 1 ELSE 16 END AS bytes
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = (SELECT name FROM queue)
      AND read_after <= statement_timestamp()
      AND (lease_expires_at IS NULL
           OR (lease_expires_at <= statement_timestamp() AND NOT %(skip_suspects)s))
      AND (expires_at IS NULL OR expires_at > statement_timestamp())
    ORDER BY read_after, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
), ready AS MATERIALIZED (
    SELECT * FROM (
        SELECT id, delivery_count, lease_expires_at IS NOT NULL AS lapsed,
               pg_column_size(payload) * CASE WHEN pg_column_compression(payload) IS NULL THEN 1 ELSE 16 END AS bytes
        FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
        WHERE queue_id = (SELECT name FROM queue)
          AND read_after IS NULL
          AND id > %(above)s
          AND (lease_expires_at IS NULL
               OR (lease_expires_at <= statement_timestamp() AND NOT %(skip_suspects)s))
          AND (expires_at IS NULL OR expires_at > statement_timestamp())
        ORDER BY read_after, id
        LIMIT %(limit)s
        FOR UPDATE OF item SKIP LOCKED
    ) AS walk
    LIMIT (SELECT greatest(%(limit)s - count(*), (%(limit)s + 1) / 2) FROM due)
), candidate AS (
    SELECT id, delivery_count, lapsed, bytes, true AS is_due, row_number() OVER () AS place, random() AS tie
    FROM due
    UNION ALL
    SELECT id, delivery_count, lapsed, bytes, false, row_number() OVER (), random()
    FROM ready
), fit AS (
    SELECT id, lapsed, is_due,
           sum(candidate.bytes) OVER (ORDER BY candidate.place, candidate.tie) - candidate.bytes AS bytes_before
    FROM candidate, queue
    WHERE candidate.delivery_count < queue.max_deliveries
), chosen AS (
    SELECT id, lapsed, is_due
    FROM fit
    WHERE lapsed = (%(suspects)s AND EXISTS (SELECT FROM fit WHERE lapsed))
      AND ((bytes_before < %(most_bytes)s::bigint) IS NOT FALSE OR lapsed)
    LIMIT CASE WHEN %(suspects)s AND EXISTS (SELECT FROM fit WHERE lapsed) THEN 1 ELSE %(limit)s END
), claimed AS (
    UPDATE django_pgqueue_messagequeueitem
    SET lease_expires_at = statement_timestamp() + %(lease)s * interval '1 second',
        lease_token = %(token)s,
        leased_by = %(consumer)s,
        delivery_count = delivery_count + 1
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING id, payload::text, headers::text, delivery_count,
              date_part('epoch', published_at), date_part('epoch', lease_expires_at), failures IS NULL,
              date_part('epoch', read_after)
)
SELECT 'claimed', claimed.*, (SELECT bool_or(lapsed) FROM chosen)
FROM claimed
UNION ALL
SELECT 'exhausted', id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM candidate, queue
WHERE candidate.delivery_count >= queue.max_deliveries
UNION ALL
SELECT 'ready', min(id), NULL, NULL, max(id), NULL, NULL, NULL, NULL, NULL
FROM chosen
WHERE NOT is_due
HAVING count(*) > 0
UNION ALL
SELECT flag, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM (
    (SELECT 'suspect' AS flag FROM fit WHERE lapsed AND NOT %(suspects)s LIMIT 1)
    UNION ALL
    SELECT 'more' WHERE (SELECT count(*) FROM fit) > (SELECT count(*) FROM chosen)
    UNION ALL
    SELECT CASE WHEN paused_at IS NULL THEN 'foreign' ELSE 'paused' END
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s AND NOT EXISTS (SELECT FROM queue)
) AS flags
"""


def claim(
    declaration: Declaration,
    using: str,
    *,
    limit: int,
    lease: float,
    consumer: UUID,
    suspects: bool = True,
    skip_suspects: bool = False,
    most_bytes: int | None = None,
    above: int = 0,
) -> Claim:
    """
    Lease up to ``limit`` ready messages for ``lease`` seconds.

    A suspect (a message whose last lease expired) is claimed alone. With ``suspects=False`` none is taken, and the
    result says whether one was found; with ``skip_suspects`` the claim walks past them. The claim stops after about
    ``most_bytes`` of payload. Of the messages that were never delayed, only ids greater than ``above`` are examined.
    An exclusive queue without a live owner is taken over.

    Raises ``RuntimeError`` inside a transaction, because a rollback would undo the lease.
    """
    connection = connections[using]
    session.refuse_transaction(connection)
    token = uuid4()
    params = {
        "name": declaration.name,
        "limit": limit,
        "lease": lease,
        "token": token,
        "consumer": consumer,
        "suspects": suspects and not skip_suspects,
        "skip_suspects": skip_suspects,
        "most_bytes": most_bytes,
        "above": above,
    }
    began = time.monotonic()
    rows = session.run(using, CLAIM, **params)
    if [row[0] for row in rows] == ["foreign"] and consumers.take_over(declaration.name, consumer, using):
        rows = session.run(using, CLAIM, **params)
    found = _read(rows, declaration.name, token, lease, _clock(connection))
    aside = _set_aside(declaration, found.undecodable, token, "undecodable payload or headers", using)
    aside += _set_aside(declaration, found.exhausted, None, "worker lost: the lease lapsed on the last delivery", using)
    if found.messages:
        instrumentation.instrument.claimed(
            lambda: instrumentation.Target(declaration.name, using, declaration.auto_deleted), found.messages, began
        )
    flags = found.flags
    is_closed = not flags.isdisjoint({"paused", "foreign"})
    return Claim(found.messages, "suspect" in flags, aside, "more" in flags, is_closed, found.walked, found.waits)


class _Found(NamedTuple):
    """What the rows of a claim say: see ``Claim``."""

    messages: list[Message]
    waits: dict[int, float]
    undecodable: list[int]
    exhausted: list[int]
    walked: tuple[int, int] | None
    flags: set[str]


def _read(
    rows: Sequence[tuple[Any, ...]], name: str, token: UUID, lease: float, time_of: Callable[[float], datetime]
) -> _Found:
    """Read the rows of a claim, by their kind. A message that cannot be decoded harms no other."""
    messages: list[Message] = []
    undecodable: list[int] = []
    exhausted: list[int] = []
    flags: set[str] = set()
    waits: dict[int, float] = {}
    walked = None
    for kind, message_id, payload, headers, count, published_at, lease_expires_at, is_new, read_after, suspect in rows:
        if kind == "claimed":
            try:
                body = decode(payload), {} if headers == "{}" else decode(headers)
            except (ValueError, RecursionError):
                undecodable.append(message_id)
                continue
            times = time_of(published_at), time_of(lease_expires_at)
            minute = int(min(max(published_at, EARLIEST), LATEST) // 60) if is_new else None
            message = Message(message_id, name, *body, count, *times, token, suspect, len(payload), minute)
            messages.append(message)
            waits[message_id] = lease_expires_at - lease - (published_at if read_after is None else read_after)
        elif kind == "exhausted":
            exhausted.append(message_id)
        elif kind == "ready":
            walked = message_id, count
        else:
            flags.add(kind)
    messages.sort(key=attrgetter("id"))
    return _Found(messages, waits, undecodable, exhausted, walked, flags)


def _clock(connection: BaseDatabaseWrapper) -> Callable[[float], datetime]:
    """Return a function that converts seconds since 1970 to a datetime like those in this connection's rows."""
    zone = connection.timezone or ZoneInfo(connection.timezone_name)
    is_naive = connection.timezone is None

    # The messages of a claim usually have two distinct times: one lease, and one publish_many.
    @lru_cache(maxsize=2)
    def time_of(seconds: float) -> datetime:
        # A row that was dated "infinity" by hand must be readable too. A day is left for time zones.
        moment = datetime.fromtimestamp(min(max(seconds, EARLIEST), LATEST), zone)
        return moment.replace(tzinfo=None) if is_naive else moment

    return time_of


def claim_by_hand(declaration: Declaration, using: str, *, limit: int, lease: float) -> Claim:
    """Claim as this process, not as a running consumer. See ``claim``."""
    consumer = beliefs.claimers.setdefault(os.getpid(), uuid4())
    session.refuse_transaction(connections[using])
    has_beaten = time.monotonic() - beliefs.beaten.get((consumer, using), -1e9) <= settings.HEARTBEAT_INTERVAL
    if declaration.exclusive and not has_beaten:
        _beat_by_hand(declaration, consumer, using)
    found = claim(declaration, using, limit=limit, lease=lease, consumer=consumer)
    if declaration.exclusive and has_beaten and found.closed:
        # Another consumer owns the queue, or this process has lost its row, for example by a flush, and cannot own it.
        _beat_by_hand(declaration, consumer, using)
        found = claim(declaration, using, limit=limit, lease=lease, consumer=consumer)
    return found


def _beat_by_hand(declaration: Declaration, consumer: UUID, using: str) -> None:
    """Write this process's heartbeat, which the owner of an exclusive queue needs to count as alive."""
    consumers.beat(consumer, socket.gethostname(), os.getpid(), [declaration.name], using)
    beliefs.beaten[consumer, using] = time.monotonic()


def _set_aside(declaration: Declaration, ids: Sequence[int], token: UUID | None, reason: str, using: str) -> int:
    """Dead-letter messages that a claim found and cannot return. Returns how many."""
    if not ids:
        return 0
    try:
        return len(
            dead_letters.dead_letter(declaration, ids, None if token is None else [token] * len(ids), reason, using)
        )
    except (DatabaseError, InterfaceError):
        # The other messages are already leased: raising would lose their deliveries, at every claim.
        logger.exception("messages not dead-lettered queue=%s ids=%s", declaration.name, list(ids)[:10])
        return 0


# NEXT_LOOK - read what a consumer needs to know before it sleeps. No lock.
# Index: the claim index for the earliest due time, the orphan index for orphans. BETWEEN instead of =, because with =
# the primary key would also have the requested order, and the planner might walk it.
# Goes back one second, so that a message which became due since the last claim is found. Subtracts epochs, because
# subtracting infinite times is an error before PostgreSQL 17.
# Returns one row: exists, seconds until the next delayed message is due (null: none), whether orphans wait.
NEXT_LOOK = """
SELECT EXISTS (SELECT FROM django_pgqueue_messagequeue WHERE name = %(name)s),
       (SELECT (extract(epoch FROM read_after) - extract(epoch FROM statement_timestamp()))::float8
        FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
        WHERE queue_id = %(name)s
          AND read_after > statement_timestamp() - interval '1 second'
          AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
        ORDER BY read_after, id
        LIMIT 1),
       (SELECT id
        FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
        WHERE orphaned_from BETWEEN %(name)s AND %(name)s
        ORDER BY orphaned_from, id
        LIMIT 1) IS NOT NULL
"""


def look(name: str, using: str) -> SleepPlan:
    """Return what a consumer needs to know before it sleeps."""
    (row,) = session.run(using, NEXT_LOOK, name=name)
    return SleepPlan(*row)
