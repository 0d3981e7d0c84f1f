"""Faults that are injected while everything runs."""

import contextlib
import time
from collections.abc import Callable, Iterator

from django.db import DatabaseError, InterfaceError, connection, transaction

from example_project.demo.processes import Slot
from example_project.demo.tables import fetch

# Seconds between two attempts at a fault that the present state does not allow.
RETRY = 0.02

# What a process holds and what has to come again when it dies, unless it expires soon.
HOLDS = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem AS item
JOIN django_pgqueue_queueconsumer AS consumer ON consumer.id = item.leased_by
WHERE consumer.pid = %s
  AND item.lease_expires_at > statement_timestamp()
  AND (item.expires_at IS NULL OR item.expires_at > statement_timestamp() + interval '1 minute')
"""
LOCK = "SELECT FROM django_pgqueue_messagequeue WHERE name = %s FOR UPDATE"
COUNT = """
SELECT count(*), count(*) FILTER (WHERE lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
FROM django_pgqueue_messagequeueitem
WHERE queue_id = %s
"""
DELETE = "DELETE FROM django_pgqueue_messagequeue WHERE name = %s RETURNING name"


def hold(consumer: Slot, wait: Callable[[float], None], within: float) -> int:
    """Wait until a consumer holds messages, and return how many. ``wait(seconds)`` lets the run go on meanwhile."""
    deadline = time.monotonic() + within
    held = 0
    while not held and time.monotonic() < deadline:
        wait(RETRY)
        with if_there():
            held = fetch(HOLDS, consumer.pid)[0][0]
    return held


def delete_queue(name: str, *, even_empty: bool = True) -> tuple[int, int] | None:
    """
    Delete a queue's row, and return how many messages that cut loose, and how many of them were waiting.

    None: it was not deleted. A session that is idle in its transaction, or a handler that is stopped in one, may
    hold the row. The deletion can also deadlock with a consumer that settles: both lock the same messages, each
    in its own order, and the server may end the deletion. Nothing is lost by that.
    """
    with if_there(), transaction.atomic():
        fetch("SET LOCAL lock_timeout = '1s'")
        # Locked first, so that nobody publishes to it between the count and the deletion.
        fetch(LOCK, name)
        messages, waiting = fetch(COUNT, name)[0]
        if (waiting or even_empty) and fetch(DELETE, name):
            return messages, waiting
    return None


@contextlib.contextmanager
def if_there() -> Iterator[None]:
    """Ignore database errors: the server may be away, or the session may have been ended."""
    try:
        yield
    except (DatabaseError, InterfaceError):
        if connection.connection is not None and not connection.is_usable():
            connection.close()
