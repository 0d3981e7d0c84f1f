"""Results: Django's ``TaskResult``, built from a task's message and from the record that workers keep of it."""

from __future__ import annotations

import json
import re
from typing import Any

from django_pgqueue.exceptions import LeaseLost
from django_pgqueue.message import decode
from django_pgqueue.services.tasks import TaskRecord
from django_pgqueue.task_backend.compat import TaskError, TaskResult, TaskResultStatus
from django_pgqueue.task_backend.runner import Ticket, set_on

# The id of a result consists of the id of the message and a random key.
RESULT_ID = re.compile("([1-9][0-9]{0,18})-([A-Za-z0-9]{8})")
KEY_LENGTH = 8
MAX_ID = 2**63 - 1

# The error of a task that was dead-lettered because its workers died.
LOST_PATH = f"{LeaseLost.__module__}.{LeaseLost.__qualname__}"


def message_id_of(result_id: object) -> int | None:
    """Return the id of the message from the id of a result. None: it is not the id of a result."""
    match = RESULT_ID.fullmatch(result_id) if isinstance(result_id, str) else None
    return int(match[1]) if match and int(match[1]) <= MAX_ID else None


def ticket_of(record: TaskRecord) -> Ticket | None:
    """Return the ticket from the message's headers, or from the record if there is no message. None: it is no task."""
    if not record.has_message:
        assert record.task is not None and record.backend is not None and record.key is not None
        return Ticket(record.task, record.backend, record.key, record.enqueued_at, record.run_after)
    try:
        return Ticket.of(decode(record.headers or "{}"))
    except (ValueError, RecursionError):
        return None


def status_of(record: TaskRecord) -> TaskResultStatus:
    """Return the status. The message, as long as it exists, overrides what a worker recorded before it died."""
    if record.has_message:
        if record.is_held:
            return TaskResultStatus.RUNNING
        return TaskResultStatus.FAILED if record.is_dead else TaskResultStatus.READY
    # If the message was purged or expired before the task finished, it will not run again.
    is_done = record.status == TaskResultStatus.SUCCESSFUL
    return TaskResultStatus.SUCCESSFUL if is_done else TaskResultStatus.FAILED


def make_result(result_id: str, record: TaskRecord, ticket: Ticket) -> TaskResult[..., Any]:
    """Return a record as Django's ``TaskResult``. Raises what ``Ticket.load()`` raises."""
    status = status_of(record)
    is_finished = status in (TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED)
    errors = json.loads(record.errors or "[]")
    if (
        record.dead_reason is not None
        and record.status != TaskResultStatus.FAILED
        and status == TaskResultStatus.FAILED
    ):
        # It was dead-lettered without an error of the task, for example because its worker died on the last delivery.
        errors.append({"exception_class_path": LOST_PATH, "traceback": record.dead_reason})
    call = decode(record.arguments) if record.arguments is not None else {"args": [], "kwargs": {}}
    result: TaskResult[..., Any] = TaskResult(
        task=ticket.load(record.queue),
        id=result_id,
        status=status,
        enqueued_at=ticket.enqueued_at,
        started_at=record.started_at,
        last_attempted_at=record.last_attempted_at,
        finished_at=(record.finished_at or record.dead_at) if is_finished else None,
        args=call["args"],
        kwargs=call["kwargs"],
        backend=ticket.backend,
        errors=[TaskError(**error) for error in errors],
        worker_ids=json.loads(record.worker_ids or "[]"),
    )
    if status == TaskResultStatus.SUCCESSFUL and record.return_value is not None:
        set_on(result, _return_value=decode(record.return_value))
    return result
