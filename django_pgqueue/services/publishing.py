"""Insert messages, recreate missing queues, and schedule the work that follows a commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_pgqueue import signals
from django_pgqueue.exceptions import FOREIGN_KEY_VIOLATION, QueueNotFound
from django_pgqueue.runtime.prepared import fetch_ids
from django_pgqueue.services import declaring, notifying, session
from django_pgqueue.services.beliefs import Key, beliefs
from django_pgqueue.services.declaring import Declaration

logger = logging.getLogger("django_pgqueue")

FOREIGN_KEY_NAME = "django_pgqueue_item_queue_fk"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish: JSON texts, and seconds from now (None: no delay, no expiry)."""

    payload: str
    headers: str = "{}"
    delay: float | None = None
    expires_in: float | None = None


# PUBLISH - insert a message in autocommit: the hot path, one plain INSERT.
# A missing queue is a foreign-key violation, raised here and not at COMMIT because the constraint is not deferrable.
# Locks: KEY SHARE on the queue's row (by the foreign key's check), which publishers share.
# Returns the id.
PUBLISH = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
VALUES (%(name)s, %(payload)s::jsonb, %(headers)s::jsonb,
        statement_timestamp() + %(delay)s * interval '1 second',
        statement_timestamp() + %(expires_in)s * interval '1 second')
RETURNING id
"""

# PUBLISH_RELAXED - PUBLISH to a queue that is not durable: the commit of this one statement does not wait for the disk.
# Used only in autocommit, where the setting ends with the statement.
# Locks: as PUBLISH. Returns the id.
PUBLISH_RELAXED = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
SELECT %(name)s, %(payload)s::jsonb, %(headers)s::jsonb,
       statement_timestamp() + %(delay)s * interval '1 second',
       statement_timestamp() + %(expires_in)s * interval '1 second'
FROM set_config('synchronous_commit', 'off', true)
RETURNING id
"""

# PUBLISH_IF_QUEUE - insert a message inside a transaction: the hot path.
# If the queue is missing, no row is inserted and no error is raised, so the caller's transaction stays usable without a
# savepoint.
# Locks: KEY SHARE on the queue's row. Without this lock, a concurrent deletion would raise a foreign-key violation.
# Returns the id. No row: there is no such queue.
PUBLISH_IF_QUEUE = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
SELECT queue.name, %(payload)s::jsonb, %(headers)s::jsonb,
       statement_timestamp() + %(delay)s * interval '1 second',
       statement_timestamp() + %(expires_in)s * interval '1 second'
FROM django_pgqueue_messagequeue AS queue
WHERE queue.name = %(name)s
FOR KEY SHARE OF queue
RETURNING id
"""


def publish(declaration: Declaration, outgoing: Outgoing, using: str) -> int:
    """
    Insert a message and return its id.

    In autocommit this is one INSERT, committed on return. Inside a transaction the message is part of that
    transaction, and the refresh of the queue and the wake-up of its consumers run when it commits. A missing queue is
    created again, or ``QueueNotFound`` is raised; ``_may_heal`` decides.
    """
    connection = connections[using]
    key = beliefs.key_of(connection, declaration.name)
    params = {
        "name": declaration.name,
        "payload": outgoing.payload,
        "headers": outgoing.headers,
        "delay": outgoing.delay,
        "expires_in": outgoing.expires_in,
    }
    if not connection.get_autocommit():
        believed = beliefs.is_fresh(key)
        ids = fetch_ids(connection, PUBLISH_IF_QUEUE, params)
        message_id = ids[0] if ids else _heal_and_publish(connection, declaration, params, believed=believed)
        _follow_commit(connection, declaration, key, 1)
        return message_id

    session.warn_of_other_transaction(connection)
    declaring.refresh(connection, declaration, key)
    believed = beliefs.is_fresh(key)
    try:
        (message_id,) = fetch_ids(connection, PUBLISH if declaration.durable else PUBLISH_RELAXED, params)
    except IntegrityError as error:
        if not _is_missing_queue(error):
            raise
        message_id = _heal_and_publish(connection, declaration, params, believed=believed, error=error)
    signals.messages_published.send_robust(declaration.name, using=using, count=1)
    notifying.wake(connection, declaration.name, key)
    return message_id


# RELAX - let the commit of the library's own transaction around PUBLISH_MANY not wait for the disk.
RELAX = "SET LOCAL synchronous_commit = off"


def publish_many(
    declaration: Declaration,
    chunks: Sequence[str],
    using: str,
    *,
    headers: str = "{}",
    delay: float | None = None,
    expires_in: float | None = None,
) -> list[int]:
    """Insert all messages or none, and return their ids in order. ``chunks`` are JSON arrays of payloads."""
    if not chunks:
        return []
    connection = connections[using]
    params = {
        "name": declaration.name,
        "headers": headers,
        "delay": delay,
        "expires_in": expires_in,
    }
    in_autocommit = connection.get_autocommit()
    if in_autocommit:
        session.warn_of_other_transaction(connection)
        declaring.refresh(connection, declaration, beliefs.key_of(connection, declaration.name))
    if in_autocommit and len(chunks) == 1 and declaration.durable:
        believed = beliefs.is_fresh(beliefs.key_of(connection, declaration.name))
        ids = _publish_chunk(connection, params, chunks[0])
        if not ids:
            with transaction.atomic(using=using):
                _heal(connection, declaration, believed=believed)
                ids = _publish_chunk(connection, params, chunks[0])
        signals.messages_published.send_robust(declaration.name, using=using, count=len(ids))
        notifying.notify(declaration.name, using)
        return ids
    if in_autocommit:
        with transaction.atomic(using=using):
            if not declaration.durable:
                with connection.cursor() as cursor:
                    cursor.execute(RELAX)
            return _publish_chunks(connection, declaration, params, chunks)
    return _publish_chunks(connection, declaration, params, chunks)


def _publish_chunks(
    connection: BaseDatabaseWrapper,
    declaration: Declaration,
    params: dict[str, Any],
    chunks: Sequence[str],
) -> list[int]:
    key = beliefs.key_of(connection, declaration.name)
    believed = beliefs.is_fresh(key)
    ids = _publish_chunk(connection, params, chunks[0])
    if not ids:
        _heal(connection, declaration, believed=believed)
        ids = _publish_chunk(connection, params, chunks[0])
    # From here on this transaction holds KEY SHARE on the queue's row, so the queue cannot be deleted.
    for chunk in chunks[1:]:
        ids += _publish_chunk(connection, params, chunk)
    _follow_commit(connection, declaration, key, len(ids))
    return ids


# PUBLISH_MANY - insert many payloads from one JSON array, which the server unpacks in order.
# Locks: KEY SHARE on the queue's row, taken first.
# Returns the ids, ascending in the order of the payloads, because identity values are assigned as the sorted rows are
# inserted. No rows: there is no such queue.
PUBLISH_MANY = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s FOR KEY SHARE
)
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
SELECT queue.name, element.payload, %(headers)s::jsonb,
       statement_timestamp() + %(delay)s * interval '1 second',
       statement_timestamp() + %(expires_in)s * interval '1 second'
FROM queue,
     jsonb_array_elements(%(payloads)s::jsonb) WITH ORDINALITY AS element (payload, position)
ORDER BY element.position
RETURNING id
"""


def _publish_chunk(connection: BaseDatabaseWrapper, params: dict[str, Any], payloads: str) -> list[int]:
    return fetch_ids(connection, PUBLISH_MANY, {**params, "payloads": payloads})


def _is_missing_queue(error: IntegrityError) -> bool:
    """Return whether the app's own foreign key raised the error, and not another constraint or a trigger."""
    cause = error.__cause__
    return (
        getattr(cause, "sqlstate", None) == FOREIGN_KEY_VIOLATION
        and getattr(getattr(cause, "diag", None), "constraint_name", None) == FOREIGN_KEY_NAME
    )


def _may_heal(
    connection: BaseDatabaseWrapper,
    declaration: Declaration,
    *,
    believed: bool,
    error: Exception | None = None,
) -> None:
    """
    Raise ``QueueNotFound`` if a missing queue must not be created again, and stop believing that it exists.

    An auto-deleted queue may always be created again. A standing queue may be created only if this process has not seen
    it within DECLARE_TTL; a standing queue that vanished since then is an error. ``believed`` is the belief at the time
    of the insert, because another thread may have created the queue since then.
    """
    beliefs.doubt(connection, declaration.name)
    if believed and not declaration.auto_deleted:
        raise QueueNotFound(declaration.name) from error


# ENSURE_AND_PUBLISH - create a missing queue and insert a message, in one statement.
# Locks: the queue's row, like an update of a non-key column. DO NOTHING would leave an existing row unlocked, and it
# could be deleted before the foreign key is checked. Setting the key column would lock the row like a deletion, and one
# open publisher would block all others that create the queue.
# Returns one row: id, created (false: another session created the queue first).
ENSURE_AND_PUBLISH = """
WITH ensured AS (
    INSERT INTO django_pgqueue_messagequeue
        (name, durable, auto_deleted, exclusive, dead_letter, max_deliveries)
    VALUES
        (%(name)s, %(durable)s, %(auto_deleted)s, %(exclusive)s, %(dead_letter)s, %(max_deliveries)s)
    ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()
    RETURNING name, xmax = 0 AS created
), published AS (
    INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
    SELECT name, %(payload)s::jsonb, %(headers)s::jsonb,
           statement_timestamp() + %(delay)s * interval '1 second',
           statement_timestamp() + %(expires_in)s * interval '1 second'
    FROM ensured
    RETURNING id
)
SELECT published.id, ensured.created FROM published, ensured
"""


def _heal_and_publish(
    connection: BaseDatabaseWrapper,
    declaration: Declaration,
    params: dict[str, Any],
    *,
    believed: bool,
    error: IntegrityError | None = None,
) -> int:
    _may_heal(connection, declaration, believed=believed, error=error)
    known = beliefs.is_known(connection, declaration.name)
    with connection.cursor() as cursor:
        cursor.execute(ENSURE_AND_PUBLISH, {**declaration.params, **params})
        message_id: int
        message_id, created = cursor.fetchone()
    if created:
        declaring.finish_row(connection, declaration, known=known)
    beliefs.remember(connection, declaration.name)
    return message_id


def _heal(connection: BaseDatabaseWrapper, declaration: Declaration, *, believed: bool) -> None:
    _may_heal(connection, declaration, believed=believed)
    known = beliefs.is_known(connection, declaration.name)
    if declaring.ensure_row(connection, declaration):
        declaring.finish_row(connection, declaration, known=known)
    beliefs.remember(connection, declaration.name)


def _follow_commit(connection: BaseDatabaseWrapper, declaration: Declaration, key: Key, count: int) -> None:
    """Refresh the queue and wake its consumers after the commit, once per transaction and queue."""
    if not connection.in_atomic_block:
        return  # Django runs no commit hooks in manual transaction mode; consumers find the message by polling.
    name = declaration.name
    listed, hooks, counts = beliefs.hooks.get(connection, (None, {}, {}))
    if listed is not connection.run_on_commit:
        present = {id(entry[1]) for entry in connection.run_on_commit}
        hooks = {name: hook for name, hook in hooks.items() if id(hook) in present}
        if hooks:
            for gone in counts.keys() - hooks.keys():
                del counts[gone]
        else:
            # A new transaction. Hooks of the previous one may still be running, and keep their own counts.
            counts = {}
        beliefs.hooks[connection] = connection.run_on_commit, hooks, counts
    if name in hooks:
        counts[name] += count
        return
    counts[name] = count

    # Not the connection itself: its own entry would keep it from being garbage-collected.
    using = connection.alias

    # A plain function, because a partial breaks robust hooks on Django 5.2.
    def refresh_and_notify() -> None:
        connection = connections[using]
        signals.messages_published.send_robust(name, using=using, count=counts[name])
        try:
            declaring.refresh(connection, declaration, key)
        except (DatabaseError, InterfaceError):
            logger.warning("queue not refreshed queue=%s", name, exc_info=True)
        notifying.wake(connection, name, key)

    hooks[name] = refresh_and_notify
    connection.on_commit(refresh_and_notify, robust=True)
