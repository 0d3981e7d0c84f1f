"""Rows of the tables, in any state."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.db import transaction
from django.db.models.functions import Now

from django_pgqueue.models import MessageQueue, MessageQueueItem
from tests.support.sessions import connect, fetch


def truncate_messages() -> None:
    """Empty the messages' table down to no page. Deleted rows leave pages, and the planner counts these."""
    fetch("TRUNCATE django_pgqueue_messagequeueitem")


def make_queue(name: str, *, idle: float = 0, **columns: Any) -> MessageQueue:
    """Make a queue's row, last active `idle` seconds ago."""
    queue = MessageQueue.objects.create(name=name, **columns)
    return backdate(queue.name, idle)


def backdate(name: str, idle: float) -> MessageQueue:
    """Let a queue's row look as if it was last active `idle` seconds ago."""
    MessageQueue.objects.filter(name=name).update(last_active=Now() - seconds(idle))
    return MessageQueue.objects.get(name=name)


def make_message(
    queue: str,
    payload: Any = None,
    *,
    due_in: float | None = None,
    expires_in: float | None = None,
    lease: float | None = None,
    **columns: Any,
) -> MessageQueueItem:
    """
    Make a message's row in any state; times are seconds from now, negative ones are past.

    `lease`: when its lease ends; a negative one has lapsed. The queue's row must be there.
    """
    times: dict[str, Any] = {"queue": queue}
    if due_in is not None:
        times["read_after"] = Now() + seconds(due_in)
    if expires_in is not None:
        times["expires_at"] = Now() + seconds(expires_in)
    if lease is not None:
        times.update(lease_expires_at=Now() + seconds(lease), lease_token=uuid4())
        times["delivery_count"] = columns.get("delivery_count", 1)
    # In one transaction: a consumer that runs beside sees the row in its final state only.
    with transaction.atomic():
        item = MessageQueueItem.objects.create(queue_id=queue, payload={} if payload is None else payload, **columns)
        MessageQueueItem.objects.filter(pk=item.pk).update(**times)
        item.refresh_from_db()
    return item


def seconds(value: float) -> Any:
    """Return an interval for use in a query."""
    return timedelta(seconds=value)


def payloads(name: str) -> list[Any]:
    """Return what is stored on a queue, in the order of publishing."""
    return list(MessageQueueItem.objects.filter(queue=name).order_by("id").values_list("payload", flat=True))


def version(name: str) -> tuple[Any, ...]:
    """Return what identifies the version of a queue's row: any update of it changes this."""
    (row,) = fetch("SELECT xmin, ctid, last_active FROM django_pgqueue_messagequeue WHERE name = %s", [name])
    return row


def age_of(name: str) -> float:
    """Return how many seconds ago a queue was last active, by the database's clock."""
    ((age,),) = fetch(
        "SELECT extract(epoch FROM statement_timestamp() - last_active)::float8"
        " FROM django_pgqueue_messagequeue WHERE name = %s",
        [name],
    )
    return float(age)


def locker(name: str) -> str:
    """Return the xmax of a queue's row: any lock taken on it, even one since released, changes this."""
    ((xmax,),) = fetch("SELECT xmax::text FROM django_pgqueue_messagequeue WHERE name = %s", [name])
    return str(xmax)


def delete_queue(name: str) -> None:
    """Delete a queue's row by hand, from a session that knows nothing of Django."""
    with connect() as admin:
        admin.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = %s", [name])
