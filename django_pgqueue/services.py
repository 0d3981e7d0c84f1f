"""
The functions that run ``sql.py``'s statements, in the order in which a message lives. No other
module runs them.

Publishing inherits the caller's transaction. What is the library's own (claims, settling,
refreshes, reaping) is READ COMMITTED whatever the database's default is.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from hashlib import blake2s
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary
from zoneinfo import ZoneInfo

from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import IsolationLevel

from django_pgqueue import signals, sql, tracing
from django_pgqueue.conf import settings
from django_pgqueue.exceptions import FOREIGN_KEY_VIOLATION, LeaseLost, QueueNotFound
from django_pgqueue.message import Message, decode
from django_pgqueue.prepared import fetch_ids, fetch_rows

logger = logging.getLogger("django_pgqueue")

FOREIGN_KEY_NAME = "django_pgqueue_item_queue_fk"

# Seconds between two attempts at rows that somebody else has locked.
LOCK_RETRY = 0.01

# A process that uses ever new queues forgets them all after so many, and looks again.
MOST_REMEMBERED = 10_000

# A consumer that missed so many heartbeats counts as gone.
MISSED_HEARTBEATS = 3

# What Python can hold of PostgreSQL's times, as seconds since 1970: from the year 1 to 9999.
EARLIEST = datetime(1, 1, 2, tzinfo=UTC).timestamp()
LATEST = datetime(9999, 12, 30, tzinfo=UTC).timestamp()

# So many messages of each queue are looked at where a bounded look has to do.
LOOKED_AT = 1_000

# Seconds for which minutes are kept, for charts: a day.
MINUTE_AGE = 86_400.0

# Failure texts are capped: the reason is for a person's eye, the traceback is in the log.
MAX_REASON_LENGTH = 2_000


@dataclass(frozen=True)
class Declaration:
    """A queue's declared attributes, as its row stores them."""

    name: str
    durable: bool = True
    auto_deleted: bool = False
    exclusive: bool = False
    dead_letter: str | None = None
    max_deliveries: int = 5
    #: The topics that it is bound to: name, and the TTL of copies in seconds (None: the default).
    bindings: tuple[tuple[str, float | None], ...] = ()

    @cached_property
    def params(self) -> dict[str, Any]:
        attributes = asdict(self)
        del attributes["bindings"]
        return attributes

    @property
    def dead_letter_target(self) -> str | None:
        """Where its dead letters go. None: they are parked."""
        if self.dead_letter is not None or self.name.endswith(".dead"):
            return self.dead_letter
        return f"{self.name}.dead"


class Claim(NamedTuple):
    """What one claim brought."""

    messages: list[Message]
    #: A suspect was met, and left because the caller did not ask for suspects.
    suspect_met: bool
    #: How many messages the claim took aside: undecodable, or delivered too often.
    dead_lettered: int
    #: Not all that was met was taken.
    more: bool
    #: The queue is paused, or another consumer owns it.
    closed: bool
    #: The lowest and the highest id claimed by the walk in id order. None: it brought nothing.
    walked: tuple[int, int] | None
    #: Seconds from when a message was due until now, by the database's clock. Only where somebody traces.
    waits: dict[int, float]


class Look(NamedTuple):
    """What a consumer sees before it sleeps."""

    exists: bool
    #: Seconds until a delayed message is due. None: there is none.
    due_in: float | None
    orphans: bool


class Nacked(NamedTuple):
    """What became of messages that were to be given back, beside those that were: ids."""

    lost: set[int]
    #: Delivered too often.
    dead_lettered: set[int]


class Extension(NamedTuple):
    """What became of leases that were to be extended: ids."""

    extended: set[int]
    #: Still the caller's, but a settling transaction holds the row.
    locked: set[int]
    lost: set[int]


# --- Connections ----------------------------------------------------------------------------------

_read_committed: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@contextmanager
def _own_cursor(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """
    Give a cursor for one statement of the library's own.

    In autocommit, where the database's default isolation is stricter than READ COMMITTED, the
    statement gets a transaction that says so. There SKIP LOCKED claims would fail with 40001.
    """
    if not connection.get_autocommit() or _defaults_to_read_committed(connection):
        with connection.cursor() as cursor:
            yield cursor
    else:
        with _own_transaction(connection) as cursor:
            yield cursor


def is_read_committed(using: str) -> bool:
    """Tell whether a transaction that Django begins is READ COMMITTED. Not inside one."""
    connection = connections[using]
    connection.ensure_connection()
    # Set by OPTIONS["isolation_level"]; None leaves it to the server.
    level = connection.connection.isolation_level
    if level is None:
        return _defaults_to_read_committed(connection)
    return bool(level == IsolationLevel.READ_COMMITTED)


def make_read_committed(using: str) -> None:
    """Make the transaction that has just begun, and has run no statement yet, READ COMMITTED."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql.READ_COMMITTED)


@contextmanager
def _own_transaction(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Give a cursor in a transaction of the library's own."""
    is_outermost = connection.get_autocommit()
    with transaction.atomic(using=connection.alias, durable=True), connection.cursor() as cursor:
        if is_outermost:
            cursor.execute(sql.READ_COMMITTED)
        yield cursor


def _defaults_to_read_committed(connection: BaseDatabaseWrapper) -> bool:
    raw = connection.connection
    if raw not in _read_committed:
        with connection.cursor() as cursor:
            cursor.execute(sql.DEFAULT_ISOLATION)
            _read_committed[raw] = cursor.fetchone()[0] == "read committed"
    return _read_committed[raw]


def _run(using: str, statement: str, **params: Any) -> list[tuple[Any, ...]]:
    with _own_cursor(connections[using]) as cursor:
        cursor.execute(statement, params)
        return cursor.fetchall() if cursor.description else []


def _run_often(connection: BaseDatabaseWrapper, statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Run a statement of the library's own on a connection that publishes."""
    if not connection.get_autocommit() or _defaults_to_read_committed(connection):
        return fetch_rows(connection, statement, params)
    with _own_transaction(connection) as cursor:
        cursor.execute(statement, params)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


# --- Declaring ------------------------------------------------------------------------------------

# What this process believes, by (alias, database, queue). An entry of _declared is the monotonic
# time until which the queue's row is believed to be there and fresh; _known holds every queue that
# was ever there, so that a vanished queue is told from a first use.
_declared: dict[tuple[str, str, str], float] = {}
_known: set[tuple[str, str, str]] = set()
# What was warned of already.
_mismatched: set[Declaration] = set()
_warned: set[tuple[str, str]] = set()


def _key(connection: BaseDatabaseWrapper, name: str) -> tuple[str, str, str]:
    return connection.alias, connection.settings_dict["NAME"], name


def _believed(key: tuple[str, str, str]) -> bool:
    return time.monotonic() < _declared.get(key, 0.0)


def _remember(connection: BaseDatabaseWrapper, name: str) -> None:
    # What is not committed may still vanish, so it is not believed.
    if connection.get_autocommit():
        key = _key(connection, name)
        for remembered in (_declared, _known, _notified):
            if len(remembered) >= MOST_REMEMBERED:
                remembered.clear()
        _declared[key] = time.monotonic() + settings.DECLARE_TTL
        _known.add(key)


def forget_declared() -> None:
    """Forget which queues this process declared; the next publish looks again."""
    _declared.clear()
    _known.clear()


def age_beliefs(seconds: float) -> None:
    """Let what this process believes be so many seconds older, as after that time. For tests that move time."""
    for times in (_declared, _notified, _beaten):
        for key in list(times):
            times[key] -= seconds  # type: ignore[index]  # each has keys of its own


def declare(declaration: Declaration, using: str) -> bool:
    """
    Make the queue and its dead-letter queue, or write the attributes where they differ.

    Refreshes the queue. May wait for its row. Inside a transaction it is part of it. Returns
    whether the queue was created.
    """
    connection = connections[using]
    target = declaration.dead_letter_target
    known = _is_known(connection, declaration)
    created = False
    _refuse_cycle(declaration, using)
    # In name order, as every statement that touches several queues.
    for name in sorted({declaration.name, target or declaration.name}):
        with _own_cursor(connection) as cursor:
            if name == declaration.name:
                cursor.execute(sql.DECLARE_QUEUE, declaration.params)
                created = cursor.fetchone()[0]
            else:
                cursor.execute(sql.ENSURE_DEAD_LETTER_QUEUE, {"name": declaration.name, "target": target})
    if created:
        _created(connection, declaration, known=known)
    # Once more where it was created: there an error is only logged, and here the caller has to know.
    _bind_declared(declaration, using)
    _remember(connection, declaration.name)
    return created


def _refuse_cycle(declaration: Declaration, using: str) -> None:
    """Raise ``ValueError`` where the stored dead-letter queues would lead back to the queue."""
    if declaration.dead_letter is None:
        return
    rows = _run(using, sql.DEAD_LETTER_CHAIN, target=declaration.dead_letter)
    chain = [name for (name,) in rows]
    if declaration.name in chain:
        there = " -> ".join([declaration.name, *chain[: chain.index(declaration.name) + 1]])
        raise ValueError(f"dead-letter queues must not lead back: {there}")


def _refresh(connection: BaseDatabaseWrapper, declaration: Declaration, key: tuple[str, str, str]) -> None:
    """Mark the queue as in use, at most once per DECLARE_TTL and without waiting; make it if gone."""
    if _believed(key):
        return
    params = {**declaration.params, "ttl": settings.DECLARE_TTL}
    ((exists, fresh, refreshed, differs),) = _run_often(connection, sql.REFRESH_QUEUE, params)
    if not exists:
        _create(connection, declaration)
    elif fresh or refreshed:
        _remember(connection, declaration.name)
    if differs and declaration not in _mismatched:
        _mismatched.add(declaration)
        logger.warning("queue declared differently queue=%s written=%s", declaration.name, refreshed)


def _create(connection: BaseDatabaseWrapper, declaration: Declaration) -> None:
    known = _is_known(connection, declaration)
    with _own_cursor(connection) as cursor:
        cursor.execute(sql.ENSURE_QUEUE, declaration.params)
        created = cursor.fetchone()[0]
    target = declaration.dead_letter_target
    if target is not None:
        _run(connection.alias, sql.ENSURE_DEAD_LETTER_QUEUE, name=declaration.name, target=target)
    if created:
        _created(connection, declaration, known=known)
    _remember(connection, declaration.name)


def _is_known(connection: BaseDatabaseWrapper, declaration: Declaration) -> bool:
    """
    Tell whether this process had known the queue.

    To be asked before a row is made: another thread may come to know the new row before this one tells of it.
    """
    return _key(connection, declaration.name) in _known


def _created(connection: BaseDatabaseWrapper, declaration: Declaration, *, known: bool) -> None:
    """
    Finish a row that was made: its bindings, the event that says why it was gone, and the signal.

    Part of the transaction that made it, if there is one.
    """
    using = connection.alias
    try:
        _bind_declared(declaration, using)
        rows = _run(using, sql.RECORD_RETURN, name=declaration.name, known=known)
    except (DatabaseError, InterfaceError):
        if not connection.get_autocommit():
            raise
        # The queue, and a message with it, is committed: its publisher must not take it for failed.
        rows = [("vanished",)] if known else []
        logger.warning("event of a queue that was made again not recorded queue=%s", declaration.name, exc_info=True)

    def tell() -> None:
        if rows:
            signals.queue_healed.send_robust(
                declaration.name, using=using, cause=rows[0][0], standing=not declaration.auto_deleted
            )
        else:
            signals.queue_created.send_robust(declaration.name, using=using)

    once_committed(tell, using)


def _bind_declared(declaration: Declaration, using: str) -> None:
    for topic, ttl in declaration.bindings:
        bind(topic, declaration.name, ttl, using)


class Stored(NamedTuple):
    """A queue's attributes, as its row has them."""

    durable: bool
    auto_deleted: bool
    exclusive: bool
    dead_letter: str | None
    max_deliveries: int


def stored(name: str, using: str) -> Stored | None:
    """Return a queue's attributes, None if it has no row."""
    rows = _run(using, sql.STORED, name=name)
    return Stored(*rows[0]) if rows else None


def once_committed(tell: Callable[[], object], using: str) -> None:
    """Tell at once, or inside a transaction when it commits: what is rolled back did not happen."""
    if connections[using].in_atomic_block:
        transaction.on_commit(tell, using=using, robust=True)
    else:
        tell()


def pause(name: str, using: str) -> None:
    """Stop claims of a queue. Raises ``QueueNotFound``."""
    if not _run(using, sql.PAUSE, name=name):
        raise QueueNotFound(name)
    once_committed(lambda: signals.queue_paused.send_robust(name, using=using), using)


def resume(name: str, using: str) -> None:
    """Start them again, and wake the consumers. Raises ``QueueNotFound``."""
    if not _run(using, sql.RESUME, name=name):
        raise QueueNotFound(name)

    def tell() -> None:
        signals.queue_resumed.send_robust(name, using=using)
        notify(name, using)

    once_committed(tell, using)


def is_paused(name: str, using: str) -> bool:
    """Tell whether claims of a queue are stopped."""
    return bool(_run(using, sql.IS_PAUSED, name=name))


def touch(names: Sequence[str], using: str) -> set[str]:
    """Mark queues as in use, without waiting. Returns the names of those that exist."""
    rows = _run(
        using,
        sql.TOUCH_QUEUES,
        names=list(names),
        ttl=min(settings.DECLARE_TTL, settings.HEARTBEAT_INTERVAL),
    )
    return {name for (name,) in rows}


# --- Publishing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way in: JSON texts, and seconds from now (None: no delay, no expiry)."""

    payload: str
    headers: str = "{}"
    delay: float | None = None
    expires_in: float | None = None


def seconds_until(due: datetime, using: str) -> float:
    """Return the seconds from now to a moment, by the database's clock. 0 for one that is past."""
    ((seconds,),) = _run(using, sql.SECONDS_UNTIL, due=due)
    return float(seconds)


def publish(declaration: Declaration, outgoing: Outgoing, using: str) -> int:
    """
    Insert a message and return its id.

    In autocommit: one INSERT, committed on return. Inside a transaction it is part of it, and what
    follows a commit (refresh, wake-up) runs when that transaction commits. A queue that is gone is
    made again, or ``QueueNotFound`` is raised, as ``_heal`` decides.
    """
    connection = connections[using]
    key = _key(connection, declaration.name)
    params = {
        "name": declaration.name,
        "payload": outgoing.payload,
        "headers": outgoing.headers,
        "delay": outgoing.delay,
        "expires_in": outgoing.expires_in,
    }
    if not connection.get_autocommit():
        believed = _believed(key)
        ids = fetch_ids(connection, sql.PUBLISH_IF_QUEUE, params)
        message_id = ids[0] if ids else _heal_and_publish(connection, declaration, params, believed=believed)
        _follow_commit(connection, declaration, key, 1)
        return message_id

    _warn_of_other_transaction(connection)
    _refresh(connection, declaration, key)
    believed = _believed(key)
    try:
        (message_id,) = fetch_ids(connection, sql.PUBLISH if declaration.durable else sql.PUBLISH_RELAXED, params)
    except IntegrityError as error:
        if not _is_missing_queue(error):
            raise
        message_id = _heal_and_publish(connection, declaration, params, believed=believed, error=error)
    signals.messages_published.send_robust(declaration.name, using=using, count=1)
    _notify(connection, declaration.name, key)
    return message_id


def publish_many(
    declaration: Declaration,
    chunks: Sequence[str],
    using: str,
    *,
    headers: str = "{}",
    delay: float | None = None,
    expires_in: float | None = None,
) -> list[int]:
    """Insert messages, all or none, and return their ids in order. ``chunks`` are JSON arrays of payloads."""
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
        _warn_of_other_transaction(connection)
        _refresh(connection, declaration, _key(connection, declaration.name))
    if in_autocommit and len(chunks) == 1 and declaration.durable:
        believed = _believed(_key(connection, declaration.name))
        ids = _publish_chunk(connection, params, chunks[0])
        if not ids:
            with transaction.atomic(using=using):
                _heal(connection, declaration, believed=believed)
                ids = _publish_chunk(connection, params, chunks[0])
        signals.messages_published.send_robust(declaration.name, using=using, count=len(ids))
        notify(declaration.name, using)
        return ids
    if in_autocommit:
        with transaction.atomic(using=using):
            if not declaration.durable:
                with connection.cursor() as cursor:
                    cursor.execute(sql.RELAX)
            return _publish_chunks(connection, declaration, params, chunks)
    return _publish_chunks(connection, declaration, params, chunks)


def _publish_chunks(
    connection: BaseDatabaseWrapper,
    declaration: Declaration,
    params: dict[str, Any],
    chunks: Sequence[str],
) -> list[int]:
    key = _key(connection, declaration.name)
    believed = _believed(key)
    ids = _publish_chunk(connection, params, chunks[0])
    if not ids:
        _heal(connection, declaration, believed=believed)
        ids = _publish_chunk(connection, params, chunks[0])
    # From here on this transaction holds KEY SHARE on the queue's row: it cannot go away.
    for chunk in chunks[1:]:
        ids += _publish_chunk(connection, params, chunk)
    _follow_commit(connection, declaration, key, len(ids))
    return ids


def _publish_chunk(connection: BaseDatabaseWrapper, params: dict[str, Any], payloads: str) -> list[int]:
    return fetch_ids(connection, sql.PUBLISH_MANY, {**params, "payloads": payloads})


def _warn_of_other_transaction(connection: BaseDatabaseWrapper) -> None:
    """Warn once when a publish is about to commit while a transaction is open on another database."""
    if len(connections.settings) == 1:
        return
    for other in connections.all(initialized_only=True):
        pair = other.alias, connection.alias
        if other.in_atomic_block and pair not in _warned:
            _warned.add(pair)
            logger.warning("publish is not part of the open transaction transaction=%s queue_database=%s", *pair)


def _is_missing_queue(error: IntegrityError) -> bool:
    """Tell our own foreign key from every other integrity error, a trigger's 23503 included."""
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
    Raise ``QueueNotFound`` where a missing queue must stay loud, and drop the belief in it.

    An auto-deleted queue may always be made again. A standing one only where this process had not
    just seen it: vanished under a fresh cache, something is wrong. ``believed`` is what the process
    believed when it sent the insert: another thread may have made the queue since, and believe in it.
    """
    _declared.pop(_key(connection, declaration.name), None)
    if believed and not declaration.auto_deleted:
        raise QueueNotFound(declaration.name) from error


def _heal_and_publish(
    connection: BaseDatabaseWrapper,
    declaration: Declaration,
    params: dict[str, Any],
    *,
    believed: bool,
    error: IntegrityError | None = None,
) -> int:
    _may_heal(connection, declaration, believed=believed, error=error)
    known = _is_known(connection, declaration)
    with connection.cursor() as cursor:
        cursor.execute(sql.ENSURE_AND_PUBLISH, {**declaration.params, **params})
        message_id: int
        message_id, created = cursor.fetchone()
    if created:
        _created(connection, declaration, known=known)
    _remember(connection, declaration.name)
    return message_id


def _heal(connection: BaseDatabaseWrapper, declaration: Declaration, *, believed: bool) -> None:
    _may_heal(connection, declaration, believed=believed)
    known = _is_known(connection, declaration)
    with connection.cursor() as cursor:
        cursor.execute(sql.ENSURE_QUEUE, declaration.params)
        created = cursor.fetchone()[0]
    if created:
        _created(connection, declaration, known=known)
    _remember(connection, declaration.name)


# --- Topics ---------------------------------------------------------------------------------------

# A notification carries up to 7,999 bytes
# (https://www.postgresql.org/docs/current/sql-notify.html: it must be shorter than 8000 bytes).
MAX_NOTIFICATION_BYTES = 7_999
# Seconds for which a body that does not fit stays: longer than a subscriber's buffer should be behind.
BODY_TTL = 300.0
# The first character of a notification tells whether it carries a message or the id of its body.
INLINE, STORED = "=", "#"


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
        _warn_of_other_transaction(connection)
    with connection.cursor() as cursor:
        cursor.execute(
            sql.PUBLISH_TO_TOPIC,
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
    notification = f"{INLINE}{content}" if fits else f"{STORED}{rows[0][0]}"

    # A plain function: a partial breaks robust hooks on Django 5.2.
    def tell() -> None:
        _notify_topic(topic, notification, using)
        for _, queue in copies:
            signals.messages_published.send_robust(queue, using=using, count=1)
            notify(queue, using)

    if connection.in_atomic_block:
        transaction.on_commit(tell, using=using, robust=True)
    elif connection.get_autocommit():
        tell()
    else:
        # Manual transaction mode has no hooks; a notification of the transaction itself is sent when it
        # commits, though such commits stand in line.
        _run(using, sql.NOTIFY_TOPIC, channel=topic_channel(topic), content=notification)
    return [message_id for message_id, _ in copies]


def _notify_topic(topic: str, notification: str, using: str) -> None:
    try:
        _run(using, sql.NOTIFY_TOPIC, channel=topic_channel(topic), content=notification)
    except (DatabaseError, InterfaceError):
        # What is durable is committed; live subscribers get a message at most once.
        logger.warning("live subscribers not notified topic=%s", topic, exc_info=True)


def read_notification(notification: str, using: str) -> str | None:
    """Return the content of a topic's notification. None: its body is gone. Raises ``ValueError`` for others."""
    kind, rest = notification[:1], notification[1:]
    if kind == INLINE:
        return rest
    if kind != STORED or not rest.isdecimal():
        raise ValueError("not a notification of a topic")
    rows = _run(using, sql.TOPIC_BODY, id=int(rest))
    return rows[0][0] if rows else None


def bind(topic: str, queue: str, ttl: float | None, using: str) -> None:
    """
    Let a queue get a copy of each message of a topic, expiring after ``ttl`` seconds (None: the default).

    Raises ``QueueNotFound``.
    """
    if not _run(using, sql.BIND, topic=topic, queue=queue, ttl=ttl):
        raise QueueNotFound(queue)


def unbind(topic: str, queue: str, using: str) -> bool:
    """End that. Returns whether it was bound. May wait for publishers to the topic."""
    return bool(_run(using, sql.UNBIND, topic=topic, queue=queue))


# --- After commit ---------------------------------------------------------------------------------

# The hooks registered in a connection's current transaction: the list they stand in, a hook for each queue, and
# how many messages it tells of. Django replaces that list at commit, at rollback and when a savepoint rolls
# back, so its identity tells whether a hook seen earlier may be gone.
Hooks = tuple[list[Any] | None, dict[str, Callable[[], None]], dict[str, int]]
_hooks: WeakKeyDictionary[BaseDatabaseWrapper, Hooks] = WeakKeyDictionary()
_notified: dict[tuple[str, str, str], float] = {}


def _follow_commit(
    connection: BaseDatabaseWrapper, declaration: Declaration, key: tuple[str, str, str], count: int
) -> None:
    """See to the refresh and the wake-up after the commit, once per transaction and queue."""
    if not connection.in_atomic_block:
        return  # Manual transaction mode has no hooks; consumers poll.
    name = declaration.name
    listed, hooks, counts = _hooks.get(connection, (None, {}, {}))
    if listed is not connection.run_on_commit:
        present = {id(entry[1]) for entry in connection.run_on_commit}
        hooks = {name: hook for name, hook in hooks.items() if id(hook) in present}
        if hooks:
            for gone in counts.keys() - hooks.keys():
                del counts[gone]
        else:
            # Another transaction. The hooks of the last one may be running just now, and have theirs.
            counts = {}
        _hooks[connection] = connection.run_on_commit, hooks, counts
    if name in hooks:
        counts[name] += count
        return
    counts[name] = count

    # Not the connection itself: held by its own entry, it would never be collected.
    using = connection.alias

    # A plain function: a partial breaks robust hooks on Django 5.2.
    def refresh_and_notify() -> None:
        connection = connections[using]
        signals.messages_published.send_robust(name, using=using, count=counts[name])
        try:
            _refresh(connection, declaration, key)
        except (DatabaseError, InterfaceError):
            logger.warning("queue not refreshed queue=%s", name, exc_info=True)
        _notify(connection, name, key)

    hooks[name] = refresh_and_notify
    connection.on_commit(refresh_and_notify, robust=True)


def notify(name: str, using: str) -> None:
    """Wake the consumers of a queue, at most once per NOTIFY_INTERVAL. Errors are only logged."""
    connection = connections[using]
    _notify(connection, name, _key(connection, name))


def _notify(connection: BaseDatabaseWrapper, name: str, key: tuple[str, str, str]) -> None:
    now = time.monotonic()
    if now - _notified.get(key, -1e9) < settings.NOTIFY_INTERVAL:
        return
    if connection.get_autocommit():
        # Stamped before it is sent, so that publishers in other threads don't send another meanwhile.
        # Inside a transaction it is sent at the commit, which may not come.
        _notified[key] = now
    try:
        _run_often(connection, sql.NOTIFY, {"channel": channel(name)})
    except (DatabaseError, InterfaceError):
        # The message is committed, and a consumer that is not woken polls.
        _notified.pop(key, None)
        logger.warning("consumers not notified queue=%s", name, exc_info=True)


def channel(name: str) -> str:
    """Return the notification channel of a queue. PostgreSQL cuts names at 63 bytes, so long ones are hashed."""
    return _channel(settings.CHANNEL_PREFIX, name)


def topic_channel(topic: str) -> str:
    """Return the notification channel of a topic."""
    return _channel(f"{settings.CHANNEL_PREFIX} topic", topic)


def _channel(prefix: str, name: str) -> str:
    plain = f"{prefix}:{name}"
    if len(plain.encode()) <= 63:
        return plain
    return f"{prefix}#{blake2s(name.encode(), digest_size=16).hexdigest()}"


# --- Claiming and settling ------------------------------------------------------------------------


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

    A suspect (its last lease lapsed) comes alone. With ``suspects`` false none is taken, and the
    answer tells that one was met; with ``skip_suspects`` the claim walks past them. No more is taken
    once it is ``most_bytes`` of stored payload. Of what was never delayed, only ids ``above`` are
    looked at. An exclusive queue is taken over if it has no owner
    that lives. Raises ``RuntimeError`` inside a transaction: a lease that can roll back counts nothing.
    """
    connection = connections[using]
    _refuse_transaction(connection)
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
    began = None if tracing.instrument is None else time.monotonic()
    rows = _run(using, sql.CLAIM, **params)
    if [row[0] for row in rows] == ["foreign"] and take_over(declaration.name, consumer, using):
        rows = _run(using, sql.CLAIM, **params)
    messages: list[Message] = []
    undecodable: list[int] = []
    exhausted: list[int] = []
    flags: set[str] = set()
    waits: dict[int, float] = {}
    walked = None
    time_of = _clock(connection)
    for kind, message_id, payload, headers, count, published_at, lease_expires_at, is_new, read_after, suspect in rows:
        if kind == "claimed":
            try:
                body = decode(payload), {} if headers == "{}" else decode(headers)
            except (ValueError, RecursionError):
                undecodable.append(message_id)
                continue
            times = time_of(published_at), time_of(lease_expires_at)
            minute = int(min(max(published_at, EARLIEST), LATEST) // 60) if is_new else None
            message = Message(message_id, declaration.name, *body, count, *times, token, suspect, len(payload), minute)
            messages.append(message)
            if began is not None:
                waits[message_id] = lease_expires_at - lease - (published_at if read_after is None else read_after)
        elif kind == "exhausted":
            exhausted.append(message_id)
        elif kind == "ready":
            walked = message_id, count
        else:
            flags.add(kind)
    aside = _set_aside(declaration, undecodable, token, "undecodable payload or headers", using)
    aside += _set_aside(declaration, exhausted, None, "worker lost: the lease lapsed on the last delivery", using)
    messages.sort(key=attrgetter("id"))
    if began is not None and messages:
        tracing.claimed(tracing.Target(declaration.name, using, declaration.auto_deleted), messages, began)
    is_closed = not flags.isdisjoint({"paused", "foreign"})
    return Claim(messages, "suspect" in flags, aside, "more" in flags, is_closed, walked, waits)


def _clock(connection: BaseDatabaseWrapper) -> Callable[[float], datetime]:
    """Return what makes a time, as this connection's rows have them, of seconds since 1970."""
    zone = connection.timezone or ZoneInfo(connection.timezone_name)
    is_naive = connection.timezone is None

    # The messages of a claim mostly have two times: one lease, and one publish_many.
    @lru_cache(maxsize=2)
    def time_of(seconds: float) -> datetime:
        # A row that somebody's SQL dated "infinity" must be readable too, with a day to spare for time zones.
        moment = datetime.fromtimestamp(min(max(seconds, EARLIEST), LATEST), zone)
        return moment.replace(tzinfo=None) if is_naive else moment

    return time_of


# Who claims by hand, by process: what a child inherits through fork is the parent's. And when it last
# said so, by monotonic time and alias.
_claimers: dict[int, UUID] = {}
_beaten: dict[tuple[UUID, str], float] = {}


def claim_by_hand(declaration: Declaration, using: str, *, limit: int, lease: float) -> Claim:
    """Claim as this process, not as a running consumer. See ``claim``."""
    consumer = _claimers.setdefault(os.getpid(), uuid4())
    _refuse_transaction(connections[using])
    has_beaten = time.monotonic() - _beaten.get((consumer, using), -1e9) <= settings.HEARTBEAT_INTERVAL
    if declaration.exclusive and not has_beaten:
        _beat_by_hand(declaration, consumer, using)
    found = claim(declaration, using, limit=limit, lease=lease, consumer=consumer)
    if declaration.exclusive and has_beaten and found.closed:
        # Another owns it, or this process's row is gone, as after a flush: then it could not take over.
        _beat_by_hand(declaration, consumer, using)
        found = claim(declaration, using, limit=limit, lease=lease, consumer=consumer)
    return found


def _beat_by_hand(declaration: Declaration, consumer: UUID, using: str) -> None:
    """The owner of an exclusive queue must be seen to live."""
    beat(consumer, socket.gethostname(), os.getpid(), [declaration.name], using)
    _beaten[consumer, using] = time.monotonic()


def take_over(name: str, consumer: UUID, using: str) -> bool:
    """Become the owner of an exclusive queue whose owner missed three heartbeats. Returns whether it worked."""
    taken = bool(_run(using, sql.TAKE_OVER, name=name, consumer=consumer, patience=_patience()))
    if taken:
        signals.queue_taken_over.send_robust(name, using=using, consumer=consumer)
    return taken


def _patience() -> float:
    """Return the seconds after its last heartbeat for which a consumer counts as living."""
    return MISSED_HEARTBEATS * float(settings.HEARTBEAT_INTERVAL)


def _set_aside(declaration: Declaration, ids: Sequence[int], token: UUID | None, reason: str, using: str) -> int:
    """Dead-letter what a claim met and cannot hand out. Returns how many."""
    if not ids:
        return 0
    try:
        return len(dead_letter(declaration, ids, None if token is None else [token] * len(ids), reason, using))
    except (DatabaseError, InterfaceError):
        # The others are leased by now: raising would lose their deliveries, each time anew.
        logger.exception("messages not dead-lettered queue=%s ids=%s", declaration.name, list(ids)[:10])
        return 0


def _refuse_transaction(connection: BaseDatabaseWrapper) -> None:
    # The rule of atomic(durable=True), the exception for TestCase's own transaction included.
    blocks = connection.atomic_blocks
    if (blocks and not getattr(blocks[-1], "_from_testcase", False)) or (
        not blocks and not connection.get_autocommit()
    ):
        raise RuntimeError("claim() cannot be called inside a transaction: its leases could roll back")


def look(name: str, using: str) -> Look:
    """Return what a consumer needs to know before it sleeps."""
    (row,) = _run(using, sql.NEXT_LOOK, name=name)
    return Look(*row)


def extend(messages: Sequence[Message], lease: float, using: str, *, patience: float = 0.0) -> Extension:
    """
    Prolong leases to ``lease`` seconds from now.

    Rows that somebody else has locked are tried again for ``patience`` seconds: a claim locks what
    it looked at, also what it then finds taken, but only for as long as it runs.
    """
    deadline = time.monotonic() + patience
    extension = Extension(set(), {message.id for message in messages}, set())
    while True:
        waiting = [message for message in messages if message.id in extension.locked]
        held = dict(_run(using, sql.EXTEND, **_fence(waiting), lease=lease))
        extended = {message_id for message_id, done in held.items() if done}
        lost = extension.locked - held.keys()
        extension = Extension(extension.extended | extended, held.keys() - extended, extension.lost | lost)
        if not extension.locked or time.monotonic() >= deadline:
            return extension
        time.sleep(LOCK_RETRY)


def ack(messages: Sequence[Message], using: str) -> set[int]:
    """Delete messages that are done. Returns the ids whose lease was lost. Joins a transaction."""
    return _lost(messages, using, _run(using, sql.ACK, **_fence(messages)))


def nack(
    declaration: Declaration,
    messages: Sequence[Message],
    delays: Sequence[float],
    reasons: Sequence[str],
    using: str,
) -> Nacked:
    """
    Give messages back, each due after its delay in seconds.

    One that was delivered ``max_deliveries`` times goes to the dead-letter queue instead.
    """
    reasons = [sanitize(reason) for reason in reasons]
    rows = _run(
        using,
        sql.NACK,
        **_fence(messages),
        told=json.dumps({message.id: told for message, *told in zip(messages, delays, reasons, strict=True)}),
        max_deliveries=declaration.max_deliveries,
    )
    spent = {message_id for message_id, given_back in rows if not given_back}
    taken: list[int] = []
    if spent:
        letters = [letter for letter in zip(messages, reasons, strict=True) if letter[0].id in spent]
        taken = _give_up(declaration, [message for message, _ in letters], [reason for _, reason in letters], using)
    return Nacked(_lost(messages, using, rows), set(taken))


def reject(declaration: Declaration, messages: Sequence[Message], reasons: Sequence[str], using: str) -> set[int]:
    """Send messages to the dead-letter queue. Returns the ids whose lease was lost."""
    taken = _give_up(declaration, messages, reasons, using)
    return _lost(messages, using, [(message_id,) for message_id in taken])


def _give_up(declaration: Declaration, messages: Sequence[Message], reasons: Sequence[str], using: str) -> list[int]:
    ids, tokens = [message.id for message in messages], [message.token for message in messages]
    return dead_letter(declaration, ids, tokens, reasons, using)


def release(messages: Sequence[Message], using: str) -> set[int]:
    """Give back messages that were never started; the delivery does not count."""
    return _lost(messages, using, _run(using, sql.RELEASE, **_fence(messages)))


def release_lease(message_id: int, token: UUID, using: str) -> bool:
    """
    Give back one message whoever holds it; the delivery does not count. Wakes the consumers.

    For an operator: what its consumer does from now on with this lease is refused. Returns whether the lease was
    still there.
    """
    fence = {"ids": f"{{{message_id}}}", "tokens": f"{{{token}}}"}
    if not _run(using, sql.RELEASE, **fence):
        return False
    rows = _run(using, sql.QUEUE_OF, id=message_id)
    if rows:
        notify(rows[0][0], using)
    return True


def dead_letter(
    declaration: Declaration,
    ids: Sequence[int],
    tokens: Sequence[UUID] | None,
    reasons: Sequence[str] | str,
    using: str,
) -> list[int]:
    """
    Set messages aside and return the ids that were taken.

    Fenced by ``tokens``; with None, only messages that nobody holds are taken. The dead-letter
    queue is made if it is not there.
    """
    if isinstance(reasons, str):
        reasons = [reasons] * len(ids)
    reason_of = dict(zip(ids, map(sanitize, reasons), strict=True))
    # Pairs: an id may come with several tokens, when its claimer claimed it again after a lapse.
    fence: Sequence[UUID | None] = [None] * len(ids) if tokens is None else tokens
    waiting = list(zip(ids, fence, strict=True))
    taken: list[int] = []
    while waiting:
        rows = _run(
            using,
            sql.DEAD_LETTER,
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
            _run(using, sql.ENSURE_DEAD_LETTER_QUEUE, name=declaration.name, target=target)
    return taken


def _tell_dead_lettered(name: str, ids: list[int], target: str | None, reason: str, using: str) -> None:
    def tell() -> None:
        signals.messages_dead_lettered.send_robust(name, using=using, ids=ids, target=target, reason=reason)

    once_committed(tell, using)


@dataclass(frozen=True, slots=True)
class Letters:
    """Which dead letters: None of a kind means all."""

    ids: list[int] | None = None
    #: Text that stands in the reason of their last failure.
    reason: str | None = None
    #: JSON of headers that they have.
    headers: str | None = None

    @property
    def params(self) -> dict[str, Any]:
        return {"ids": self.ids, "reason": self.reason, "headers": self.headers}


def redrive(
    declaration: Declaration, letters: Letters, limit: int, after: int, before: datetime, using: str
) -> list[int]:
    """
    Send a batch of dead letters back to the queue, which is made if it is gone.

    Those behind id ``after`` that died up to ``before``. Returns their ids. Consumers are woken once it
    is committed.
    """
    params = {**letters.params, "name": declaration.name, "limit": limit, "before": before}
    ids = [message_id for (message_id,) in _run(using, sql.REDRIVE, **params, after=after)]
    if len(ids) < limit:
        ids += [message_id for (message_id,) in _run(using, sql.UNPARK, **{**params, "limit": limit - len(ids)})]
    if ids:
        _tell_redriven(declaration.name, len(ids), using)
    return ids


def _tell_redriven(name: str, count: int, using: str) -> None:
    def tell() -> None:
        signals.messages_redriven.send_robust(name, using=using, count=count)
        notify(name, using)

    once_committed(tell, using)


def exists(name: str, using: str) -> bool:
    """Tell whether the queue has a row."""
    return bool(_run(using, sql.QUEUE_EXISTS, name=name))


def ensure(declaration: Declaration, using: str) -> None:
    """Make the queue if it is gone."""
    if not exists(declaration.name, using):
        _create(connections[using], declaration)


def redrivable(name: str, letters: Letters, using: str) -> int:
    """Count the dead letters that ``redrive`` would take now."""
    ((count,),) = _run(using, sql.REDRIVABLE, name=name, **letters.params)
    return int(count)


def fates(ids: Sequence[int], since: datetime, using: str) -> dict[int, bool]:
    """Return, of these messages, those that are still there, and whether each has died again after ``since``."""
    rows: list[Any] = _run(using, sql.FATES, ids=list(ids), since=since)
    return dict(rows)


def purge(name: str, limit: int, before: datetime, using: str) -> int:
    """Delete a batch of what nobody holds and was published up to ``before``. Returns how many."""
    count = len(_run(using, sql.PURGE, name=name, limit=limit, before=before))
    if count:
        once_committed(lambda: signals.messages_purged.send_robust(name, using=using, count=count), using)
    return count


def purgeable(name: str, using: str) -> int:
    """Count what ``purge`` would delete now."""
    ((count,),) = _run(using, sql.PURGEABLE, name=name)
    return int(count)


def now(using: str) -> datetime:
    """Return the database's time."""
    value: datetime
    ((value,),) = _run(using, sql.NOW)
    return value


def sanitize(text: object) -> str:
    """Return text that PostgreSQL can store: no NUL, no lone surrogate, capped."""
    text = str(text)
    return storable(text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]}…")


def storable(text: str) -> str:
    """Return text that PostgreSQL can store: no NUL, no lone surrogate."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def _fence(messages: Sequence[Message]) -> dict[str, str]:
    # As PostgreSQL writes arrays: psycopg looks at each element, and neighbours mostly have one token.
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


def _lost(messages: Sequence[Message], using: str, rows: Sequence[tuple[Any, ...]]) -> set[int]:
    lost = {message.id for message in messages} - {row[0] for row in rows}
    if lost:
        signals.lease_lost.send_robust(messages[0].queue, using=using, ids=sorted(lost))
    return lost


def raise_lost(queue: str, lost: set[int]) -> None:
    """Raise ``LeaseLost`` if there is anything to tell."""
    if lost:
        raise LeaseLost(queue, lost)


# --- Tasks ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class TaskRun:
    """A task that a worker runs. Times are those that the database told; JSON as text."""

    message: Message
    task: str
    backend: str
    key: str
    enqueued_at: datetime | None
    run_after: datetime | None
    started_at: datetime | None = None
    last_attempted_at: datetime | None = None
    worker_ids: str = "[]"
    errors: str = "[]"


def start_run(run: TaskRun, using: str) -> bool:
    """Note that a task is started, and let the run know its earlier attempts. Returns whether the lease is held."""
    rows = _run_often(connections[using], sql.START_RUN, _run_params(run))
    if not rows:
        _lost([run.message], using, [])
        return False
    ((run.started_at, run.last_attempted_at, run.worker_ids, run.errors),) = rows
    return True


def finish_run(run: TaskRun, return_value: str, using: str) -> datetime | None:
    """Settle a task that is done and keep its result, both or neither. Returns when. None: the lease was lost."""
    params = {**_run_params(run), "return_value": return_value}
    rows = _run_often(connections[using], sql.FINISH_RUN, params)
    _lost([run.message], using, [(run.message.id,)] if rows else [])
    return rows[0][0] if rows else None


def fail_run(
    declaration: Declaration, run: TaskRun, delay: float | None, reason: str, using: str
) -> tuple[bool, datetime] | None:
    """
    Give the message of a failed attempt back, due after ``delay`` seconds (None: give it up), and note the errors.

    Returns whether it was given up, for its deliveries are spent or because that was asked for, and when.
    None: the lease was lost.
    """
    with _own_transaction(connections[using]) as cursor:
        if delay is None:
            lost = reject(declaration, [run.message], [reason], using)
        else:
            lost = nack(declaration, [run.message], [delay], [reason], using).lost
        if lost:
            return None
        cursor.execute(sql.FAIL_RUN, _run_params(run))
        given_up, at = cursor.fetchone()
    return given_up, at


def _run_params(run: TaskRun) -> dict[str, Any]:
    return {
        "id": run.message.id,
        "token": run.message.token,
        "queue": run.message.queue,
        "task": run.task,
        "backend": run.backend,
        "key": run.key,
        "run_after": run.run_after,
        "enqueued_at": run.enqueued_at,
        "started_at": run.started_at,
        "last_attempted_at": run.last_attempted_at,
        "worker_ids": run.worker_ids,
        "errors": run.errors,
    }


class TaskRecord(NamedTuple):
    """What is known of a task. JSON as text. None where no attempt was noted."""

    has_message: bool
    #: Whether its message is a dead letter, or expired.
    is_dead: bool
    #: Whether the attempt that was noted last still holds the message.
    is_held: bool | None
    headers: str | None
    queue: str
    arguments: str | None
    dead_at: datetime | None
    dead_reason: str | None
    task: str | None
    backend: str | None
    key: str | None
    status: str | None
    run_after: datetime | None
    enqueued_at: datetime | None
    started_at: datetime | None
    last_attempted_at: datetime | None
    finished_at: datetime | None
    worker_ids: str | None
    errors: str | None
    return_value: str | None


def task_record(message_id: int, using: str) -> TaskRecord | None:
    """Return what is known of the task whose message has, or had, this id."""
    rows = _run(using, sql.RESULT_OF, id=message_id)
    return TaskRecord(*rows[0]) if rows else None


def forget_runs(age: float, limit: int, using: str) -> int:
    """Remove a batch of what is known of tasks that ended ``age`` seconds ago or earlier. Returns how many."""
    return len(_run(using, sql.FORGET_RUNS, age=age, limit=limit))


# --- Consumers ------------------------------------------------------------------------------------


def beat(consumer: UUID, host: str, pid: int, queues: Sequence[str], using: str) -> None:
    """Write a consumer's heartbeat."""
    _run(using, sql.BEAT, id=consumer, host=host, pid=pid, queues=json.dumps(list(queues)))


def forget_consumer(consumer: UUID, using: str) -> None:
    """Remove the row of a consumer that ends; others may own its exclusive queues at once."""
    for (name,) in _run(using, sql.FORGET_CONSUMER, id=consumer):
        notify(name, using)


def forget_consumers(age: float, using: str) -> None:
    """Remove the rows of consumers whose last heartbeat is ``age`` seconds old or older."""
    _run(using, sql.FORGET_CONSUMERS, age=age)


# --- Orphans and reaping --------------------------------------------------------------------------


def orphaned_names(using: str) -> list[str]:
    """Return the names of queues that exist and that orphans belong to."""
    return [name for (name,) in _run(using, sql.ORPHANED_NAMES)]


def adopt(name: str, limit: int, using: str) -> int:
    """Give up to ``limit`` orphans back to their queue, in a transaction of its own. Returns how many."""
    count = len(_run(using, sql.ADOPT, name=name, limit=limit))
    if count:
        signals.orphans_adopted.send_robust(name, using=using, count=count)
        notify(name, using)
    return count


def expire(limit: int, using: str) -> tuple[int, int]:
    """
    Remove a batch of expired messages.

    Returns how many were deleted and how many went to a configured dead-letter queue.
    """
    letters: dict[str, list[int]] = {}
    deleted: dict[str, int] = {}
    for message_id, name, is_kept in _run(using, sql.EXPIRE, limit=limit):
        if is_kept:
            letters.setdefault(name, []).append(message_id)
        else:
            deleted[name] = deleted.get(name, 0) + 1
    moved = sum(
        len(dead_letter(Declaration(name), ids, None, "expired", using)) for name, ids in sorted(letters.items())
    )
    for name, count in deleted.items():
        signals.messages_expired.send_robust(name, using=using, count=count)
    return sum(deleted.values()), moved


def dead_letter_exhausted(limit: int, using: str) -> int:
    """Dead-letter lapsed messages that were delivered too often, at the head of each queue. Returns how many."""
    found: dict[str, list[int]] = {}
    for message_id, name in _run(using, sql.EXHAUSTED, limit=limit, patience=_patience()):
        found.setdefault(name, []).append(message_id)
    reason = "worker lost: the lease lapsed on the last delivery"
    return sum(len(dead_letter(Declaration(name), ids, None, reason, using)) for name, ids in sorted(found.items()))


def idle_queues(idle_for: float, using: str) -> list[tuple[str, float]]:
    """Return name and idle seconds of the queues that may be reaped."""
    return [(name, idle) for name, idle in _run(using, sql.IDLE_QUEUES, idle_for=idle_for)]


def reapable(using: str) -> tuple[int, int, int]:
    """Count what the reaper would delete as expired, dead-letter as expired, and adopt."""
    ((expired, moved, orphans),) = _run(using, sql.REAPABLE)
    return expired - moved, moved, orphans


def reap_queue(name: str, idle_for: float, using: str) -> bool:
    """
    Delete one queue if it still is idle and empty, and nobody holds its row.

    Its own short transaction. Returns whether it was deleted.
    """
    with _own_transaction(connections[using]) as cursor:
        cursor.execute(sql.LOCK_IDLE_QUEUE, {"name": name, "idle_for": idle_for})
        if cursor.fetchone() is None:
            return False
        cursor.execute(sql.LOCK_BINDINGS, {"name": name})
        if not cursor.fetchone()[0]:
            return False
        # A statement of its own, for a snapshot that is younger than the locks.
        cursor.execute(sql.DELETE_IDLE_QUEUE, {"name": name, "idle_for": idle_for})
        row = cursor.fetchone()
    if row is None:
        return False
    signals.queue_reaped.send_robust(name, using=using, idle_seconds=row[0])
    return True


def forget_events(age: float, limit: int, using: str) -> int:
    """Remove a batch of events that are ``age`` seconds old or older. Returns how many."""
    return len(_run(using, sql.FORGET_EVENTS, age=age, limit=limit))


def forget_bodies(limit: int, using: str) -> int:
    """Remove a batch of topic bodies that have been there long enough. Returns how many."""
    return len(_run(using, sql.FORGET_BODIES, limit=limit))


# --- History --------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """What became of messages of one queue, in numbers."""

    handled: int = 0
    #: Deliveries after which a message was given back.
    failed: int = 0
    dead_lettered: int = 0
    #: When these were published: how many of them that had not been settled before, by minutes since 1970.
    published: Mapping[int, int] = MappingProxyType({})

    def since(self, earlier: Tally) -> Tally:
        """Return what was added to ``earlier``."""
        published = {minute: count - earlier.published.get(minute, 0) for minute, count in self.published.items()}
        return Tally(
            self.handled - earlier.handled,
            self.failed - earlier.failed,
            self.dead_lettered - earlier.dead_lettered,
            {minute: count for minute, count in published.items() if count > 0},
        )


def count_minute(tallies: Mapping[str, Tally], using: str) -> None:
    """Add what became of messages, by queue, to the minute that it is now and to those of their publishing."""
    told = list(tallies.values())
    published = [(queue, *each) for queue, tally in tallies.items() for each in tally.published.items()]
    _run(
        using,
        sql.COUNT_MINUTE,
        queues=list(tallies),
        handled=[tally.handled for tally in told],
        failed=[tally.failed for tally in told],
        dead_lettered=[tally.dead_lettered for tally in told],
        published_to=[queue for queue, _, _ in published],
        minutes=[minute for _, minute, _ in published],
        published=[count for _, _, count in published],
        age=MINUTE_AGE,
    )


class Minute(NamedTuple):
    """One minute of a queue."""

    #: Minutes before the present one, which is 0.
    ago: int
    handled: int
    failed: int
    dead_lettered: int
    #: In this minute, and settled since.
    published: int = 0


def minutes(names: Sequence[str], count: int, using: str) -> dict[str, list[Minute]]:
    """Return the last ``count`` minutes of these queues, the oldest first. Those in which nothing was are missing."""
    found: dict[str, list[Minute]] = {name: [] for name in names}
    for name, *minute in _run(using, sql.MINUTES, names=list(names), minutes=count):
        found[name].append(Minute(*minute))
    return found


class Newest(NamedTuple):
    """When the newest messages of a queue that wait were published, of those that wait since without a delay."""

    #: How many, by minutes before the present one.
    by_minute: Mapping[int, int] = MappingProxyType({})
    #: Seconds since the first of them.
    span: float = 0.0
    #: Whether there may be more.
    more: bool = False


def newest(names: Sequence[str], most: int, count: int, using: str) -> dict[str, Newest]:
    """
    Look at the newest messages of these queues, no more than ``most`` of each.

    Those that are older than ``count`` minutes are counted together, as of ``count`` minutes ago.
    """
    found: dict[str, dict[int, int]] = {name: {} for name in names}
    span = dict.fromkeys(names, 0.0)
    for name, ago, messages, age in _run(using, sql.NEWEST, names=list(names), most=most, minutes=count):
        found[name][ago] = messages
        span[name] = max(span[name], age)
    return {name: Newest(ages, span[name], sum(ages.values()) >= most) for name, ages in found.items()}


class LetterHistory(NamedTuple):
    """How many messages a queue gave up lately, and before; ``seconds`` that the time before covers."""

    recent: int
    before: int
    seconds: float


def letter_history(names: Sequence[str], age: float, using: str) -> dict[str, LetterHistory]:
    """Return what the minutes of these queues tell of dead letters: of the last ``age`` seconds, and of before."""
    rows = _run(using, sql.LETTER_HISTORY, names=list(names), age=age)
    return {name: LetterHistory(*history) for name, *history in rows}


def forget_minutes(limit: int, using: str) -> int:
    """Remove a batch of minutes that are a day old or older. Returns how many."""
    return len(_run(using, sql.FORGET_MINUTES, age=MINUTE_AGE, limit=limit))


# --- Seeing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One queue in numbers. Ages in seconds, None where there is nothing to measure."""

    name: str
    #: Whether it has a row.
    exists: bool
    #: Messages that a claim may take.
    ready: int = 0
    #: Whose time has not come.
    delayed: int = 0
    #: That consumers hold.
    leased: int = 0
    #: Dead letters that lie here.
    dead: int = 0
    #: Whose TTL has passed, and that the reaper has not met yet.
    expired: int = 0
    #: That lost this queue's row.
    orphaned: int = 0
    #: Of the ready message that has been due for longest.
    oldest_due_age: float | None = None
    #: Since it was last declared, published to or consumed.
    last_active_age: float | None = None
    #: Whether the reaper may delete it now. None: there is nothing of it.
    reapable: bool | None = field(default=None)
    #: Seconds until the last orphan expires (infinity: some never do).
    orphans_expire_in: float | None = None
    #: Whether claims are stopped.
    paused: bool = False
    #: The consumer that owns it, if it is exclusive.
    owner: UUID | None = None
    #: How often it was made again within a day after the reaper had removed it.
    revived_per_day: int = 0
    #: The same, after something else had.
    vanished_per_day: int = 0


def stats(names: Sequence[str] | None, using: str) -> list[QueueStats]:
    """Count the messages of these queues (None: all) by state. Reads all of their messages."""
    rows = _run(using, sql.STATS, names=list(names) if names else None, idle_for=settings.REAP_IDLE_AFTER)
    return [QueueStats(*row) for row in rows]


class Depth(NamedTuple):
    """One queue in numbers that cost little, however many messages there are: each is "at least" where ``more``."""

    name: str
    auto_deleted: bool
    paused: bool
    exclusive: bool
    #: The consumer that owns it, if it is exclusive.
    owner: UUID | None
    #: The configured dead-letter queue. None: the default.
    dead_letter: str | None
    #: Seconds. Infinite where somebody's SQL made it so.
    last_active_age: float
    consumers: int
    ready: int
    delayed: int
    leased: int
    dead: int
    expired: int
    #: Seconds. None: nothing is due among the messages that were looked at.
    oldest_due_age: float | None
    #: Whether there are messages that were not looked at.
    more: bool


def depths(most: int, using: str, names: Sequence[str] | None = None) -> list[Depth]:
    """Count the messages of these queues (None: all) by state, looking at some ``most`` of each."""
    chosen = None if names is None else list(names)
    return [Depth(*row) for row in _run(using, sql.DEPTHS, names=chosen, most=most, patience=_patience())]


def orphans(most: int, using: str) -> dict[str, int]:
    """Count the orphans of each queue, looking at no more than ``most`` of them all."""
    return dict(_run(using, sql.ORPHANS, most=most))


class Orphans(NamedTuple):
    """Of one queue: how many, and seconds until the last expires (None: there are none; infinity: some never do)."""

    messages: int = 0
    expire_in: float | None = None


def orphans_of(names: Sequence[str], most: int, using: str) -> dict[str, Orphans]:
    """Look at the orphans of each of these queues, at no more than ``most`` of each."""
    return {name: Orphans(*found) for name, *found in _run(using, sql.ORPHANS_OF, names=list(names), most=most)}


def dead_letters(names: Sequence[str], most: int, using: str) -> dict[str, int]:
    """Count what each of these queues gave up and that is still there, no more than ``most`` of each."""
    return dict(_run(using, sql.DEAD_LETTERS, names=list(names), most=most))


def events_per_day(using: str) -> dict[tuple[str, str], int]:
    """Count the events of the last day, by queue and kind."""
    return {(queue, kind): count for queue, kind, count in _run(using, sql.EVENTS_PER_DAY)}


@contextmanager
def bounded(seconds: float, using: str) -> Iterator[None]:
    """
    Let each statement in the block fail after so many seconds: a look at tables that somebody has locked ends.

    Inside a transaction, which would keep the limit, it does nothing.
    """
    if connections[using].in_atomic_block:
        yield
        return
    with transaction.atomic(using=using):
        _run(using, sql.STATEMENT_TIMEOUT, limit=f"{round(seconds * 1000)}ms")
        yield


# --- Diagnosing -----------------------------------------------------------------------------------


def foreign_key_state(using: str) -> tuple[bool, ...] | None:
    """Return whether the foreign key is SET NULL, not deferrable, validated, enforced. None: it is missing."""
    rows = _run(using, sql.FOREIGN_KEY)
    return rows[0] if rows else None


class Schema(NamedTuple):
    """What migrations made, as the database has it. None: missing."""

    claim_index: bool | None
    orphan_trigger: bool | None
    #: Tables that autovacuum is switched off for.
    unvacuumed: list[str]


def schema(using: str) -> Schema:
    """Look at what migrations made, but for the foreign key."""
    return Schema(*_run(using, sql.SCHEMA)[0])


class Server(NamedTuple):
    """The server, as the role of this connection sees it."""

    #: As in ``server_version_num``: 180000 and more is PostgreSQL 18.
    version: int
    vacuums: bool
    #: Seconds since 1970.
    clock: float
    #: 0 to 1.
    notification_queue: float
    #: For roles that are no superusers.
    connections: int
    multixact_age: int
    multixact_freeze_age: int
    #: Whether the role sees what other sessions do.
    sees_all: bool


def server(using: str) -> Server:
    """Look at the server."""
    return Server(*_run(using, sql.SERVER)[0])


def dead_rows(using: str) -> list[tuple[str, int, int]]:
    """Return each table with its dead and its live rows, as the server's statistics have them."""
    return [(table, dead, live) for table, dead, live in _run(using, sql.DEAD_ROWS)]


class Holder(NamedTuple):
    """What holds back vacuum: "session", "prepared transaction" or "replication slot"."""

    kind: str
    name: str
    #: None: not known.
    seconds: float | None


def holders(age: float, using: str) -> list[Holder]:
    """Return what has held back vacuum for ``age`` seconds or more, the longest first."""
    return [Holder(*row) for row in _run(using, sql.HOLDERS, age=age)]


class Backlog(NamedTuple):
    """The head of a queue, and who is there to take it."""

    name: str
    paused: bool
    has_consumer: bool
    #: Seconds. None: nothing is due among the messages that were looked at.
    oldest_due_age: float | None


def backlogs(using: str, names: Sequence[str] | None = None) -> list[Backlog]:
    """Look at the head of each of these queues (None: all)."""
    chosen = None if names is None else list(names)
    rows = _run(using, sql.BACKLOGS, names=chosen, patience=_patience(), limit=LOOKED_AT)
    return [Backlog(*row) for row in rows]


def recent_letters(age: float, using: str) -> dict[str, int]:
    """Count the messages of each queue that were set aside within ``age`` seconds. No more than ``LOOKED_AT`` each."""
    return dict(_run(using, sql.RECENT_LETTERS, age=age, limit=LOOKED_AT))


def vanished(age: float, using: str) -> dict[str, int]:
    """Count how often each queue vanished within ``age`` seconds."""
    return dict(_run(using, sql.VANISHED, age=age))


def record_run(seconds: float, report: Mapping[str, Any], using: str) -> None:
    """Note that a run of the reaper has ended, and what it did."""
    _run(using, sql.RECORD_RUN, seconds=seconds, report=json.dumps(report))


def last_run_age(using: str) -> float | None:
    """Return the seconds since a run of the reaper ended. None: none ever did."""
    rows = _run(using, sql.LAST_RUN)
    return rows[0][0] if rows else None


def live_consumers(using: str) -> int:
    """Count the consumer processes that live."""
    count: int = _run(using, sql.LIVE_CONSUMERS, patience=_patience())[0][0]
    return count
