"""Read published messages, and the state of their transactions, for the testing helpers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.db import connections


class Row(NamedTuple):
    """A message as it was published, with the transaction and the table file that it was written to."""

    id: int
    queue: str
    #: JSON text, like the headers.
    payload: str
    headers: str
    #: Seconds until it was due.
    delay: float
    #: Seconds from the due time to the expiry. None: it never expires.
    ttl: float | None
    #: The transaction that inserted it, as stored in the row.
    xmin: int
    #: The table's file at that time. TRUNCATE gives the table another one.
    file: int


def _rows(using: str, statement: str, **params: Any) -> list[tuple[Any, ...]]:
    """Run a statement without Django's cursors, whose statements a test may count or log."""
    connection = connections[using]
    connection.ensure_connection()
    with connection.wrap_database_errors:
        rows: list[tuple[Any, ...]] = connection.connection.execute(statement, params or None).fetchall()
    return rows


# PUBLISHED_SINCE - read the messages after an id, or those of %(ids)s among them, as they were published. (A retry and
# a move to a dead-letter queue write their own due time.)
# No lock.
# Returns the columns of Row, in the order of ids.
PUBLISHED_SINCE = """
SELECT id, coalesce(dead_letter_path ->> 0, queue_id, orphaned_from), payload::text, headers::text,
       extract(epoch FROM due - published_at)::float8,
       extract(epoch FROM expires_at - due)::float8,
       xmin::text::bigint, pg_relation_filenode('django_pgqueue_messagequeueitem'::regclass)
FROM (SELECT *, xmin, coalesce(CASE WHEN delivery_count = 0 AND dead_lettered_at IS NULL THEN read_after END,
                               published_at) AS due
      FROM django_pgqueue_messagequeueitem) AS item
WHERE id > %(since)s AND id = ANY (coalesce(%(ids)s::bigint[], ARRAY[id]))
ORDER BY id
"""


def published_since(since: int, using: str) -> list[Row]:
    """Return the existing messages after the id ``since``."""
    return [Row(*row) for row in _rows(using, PUBLISHED_SINCE, since=since, ids=None)]


def published_as(ids: Iterable[int], using: str) -> list[Row]:
    """Return those of the messages that still exist."""
    return [Row(*row) for row in _rows(using, PUBLISHED_SINCE, since=0, ids=_array(ids))]


# FATES - read the status of transactions and subtransactions. A row holds the lower half of their numbers.
# No lock.
# Returns each xmin with "committed", "aborted" or "in progress", or NULL if it is too old.
FATES = """
WITH next AS (
    SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xid
), noted AS (
    SELECT xmin, (next.xid >> 32 << 32) + xmin AS xid, next.xid AS next_xid
    FROM unnest(%(xmins)s::bigint[]) AS noted (xmin), next
)
SELECT xmin, pg_xact_status((CASE WHEN xid - next_xid > 2147483648 THEN xid - 4294967296 ELSE xid END)::text::xid8)
FROM noted
"""


def fates(xmins: Iterable[int], using: str) -> dict[int | None, str | None]:
    """Return the status of each of these transactions: committed, aborted or in progress. None: it is too old."""
    return dict(_rows(using, FATES, xmins=_array(xmins)))


def _array(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


# MAY_READ - check whether this role may read messages; a publisher does not need this privilege. No lock.
MAY_READ = "SELECT has_table_privilege('django_pgqueue_messagequeueitem', 'SELECT')"


def may_read(using: str) -> bool:
    """Return whether this role may read messages."""
    ((may,),) = _rows(using, MAY_READ)
    return bool(may)


# TABLE_FILE - read the number of the message table's file. TRUNCATE gives the table another one. No lock.
TABLE_FILE = "SELECT pg_relation_filenode('django_pgqueue_messagequeueitem'::regclass)"


def table_file(using: str) -> int:
    """Return the number of the message table's file."""
    ((file,),) = _rows(using, TABLE_FILE)
    return int(file)


# LAST_ID - read the highest id that was assigned to a message so far, or 0. No lock.
LAST_ID = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('django_pgqueue_messagequeueitem', 'id')::regclass), 0)
"""


def last_id(using: str) -> int:
    """Return the highest id that was assigned to a message so far, or 0."""
    ((last,),) = _rows(using, LAST_ID)
    return int(last)
