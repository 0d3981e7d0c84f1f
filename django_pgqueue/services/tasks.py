"""The stored results of Django's tasks, written together with settling their messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connections

from django_pgqueue.message import Message
from django_pgqueue.services import session, settling
from django_pgqueue.services.declaring import Declaration


@dataclass(slots=True)
class TaskRun:
    """A task that a worker runs. Times are the database's; JSON values are text."""

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


# START_RUN - record that a worker starts a task whose message it holds, so that the task's result shows it.
# The commit does not wait for the disk: a crash of the server only loses the record of the start. Repeating the
# statement after a lost answer changes nothing.
# Locks: the run's row, which only the holder of the message's lease writes.
# Returns one row: the times of the first start and of this start, the workers and the errors so far. No row: the lease
# was lost.
START_RUN = """
INSERT INTO django_pgqueue_taskrun AS run
    (id, queue, task, backend, key, status, enqueued_at, started_at, last_attempted_at, worker_ids, lease_token)
SELECT item.id, %(queue)s, %(task)s, %(backend)s, %(key)s, 'RUNNING', %(enqueued_at)s::timestamptz,
       statement_timestamp(), statement_timestamp(), jsonb_build_array(item.leased_by), item.lease_token
FROM django_pgqueue_messagequeueitem AS item, set_config('synchronous_commit', 'off', true)
WHERE item.id = %(id)s AND item.lease_token = %(token)s
ON CONFLICT (id) DO UPDATE
SET status = 'RUNNING',
    last_attempted_at = statement_timestamp(),
    finished_at = NULL,
    worker_ids = CASE WHEN run.lease_token = excluded.lease_token THEN run.worker_ids
                      ELSE run.worker_ids || excluded.worker_ids END,
    lease_token = excluded.lease_token
RETURNING started_at, last_attempted_at, worker_ids::text, errors::text
"""


def start_run(run: TaskRun, using: str) -> bool:
    """Record that a task starts, and load its earlier attempts into ``run``. Returns whether the lease is held."""
    rows = session.run_often(connections[using], START_RUN, _run_params(run))
    if not rows:
        settling.lost_of([run.message], using, [])
        return False
    ((run.started_at, run.last_attempted_at, run.worker_ids, run.errors),) = rows
    return True


# FINISH_RUN - delete the message of a finished task and store the task's result, in one statement.
# The row of START_RUN may be missing, so its values are passed again.
# Locks: the message's row, then the run's.
# Returns the time, also when repeated after a lost answer. No row: the lease was lost.
FINISH_RUN = """
WITH mine AS MATERIALIZED (
    SELECT id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s AND lease_token = %(token)s FOR UPDATE
), gone AS (
    DELETE FROM django_pgqueue_messagequeueitem WHERE id = ANY (ARRAY(SELECT id FROM mine)) RETURNING id, payload
), ended AS (
    INSERT INTO django_pgqueue_taskrun AS run
        (id, queue, task, backend, key, status, run_after, enqueued_at, started_at, last_attempted_at, finished_at,
         worker_ids, errors, arguments, return_value, lease_token)
    SELECT gone.id, %(queue)s, %(task)s, %(backend)s, %(key)s,
           'SUCCESSFUL', %(run_after)s::timestamptz,
           %(enqueued_at)s::timestamptz, %(started_at)s::timestamptz, %(last_attempted_at)s::timestamptz,
           statement_timestamp(), %(worker_ids)s::jsonb, %(errors)s::jsonb, gone.payload, %(return_value)s::jsonb,
           %(token)s
    FROM gone
    ON CONFLICT (id) DO UPDATE
    SET status = excluded.status,
        run_after = excluded.run_after,
        finished_at = excluded.finished_at,
        arguments = excluded.arguments,
        return_value = excluded.return_value
    RETURNING finished_at
)
SELECT finished_at FROM ended
UNION ALL
SELECT finished_at
FROM django_pgqueue_taskrun
WHERE id = %(id)s AND lease_token = %(token)s AND status = 'SUCCESSFUL'
"""


def finish_run(run: TaskRun, return_value: str, using: str) -> datetime | None:
    """
    Ack the message of a finished task and store its result, both or neither.

    Returns the time. None: the lease was lost.
    """
    params = {**_run_params(run), "return_value": return_value}
    rows = session.run_often(connections[using], FINISH_RUN, params)
    settling.lost_of([run.message], using, [(run.message.id,)] if rows else [])
    return rows[0][0] if rows else None


# FAIL_RUN - record a failed attempt, in the transaction in which its message was given back or dead-lettered.
# A dead-lettered message has a delivery count of 0; a message that was given back does not.
# Locks: the run's row.
# Returns one row: whether the message was dead-lettered, and the time.
FAIL_RUN = """
INSERT INTO django_pgqueue_taskrun AS run
    (id, queue, task, backend, key, status, run_after, enqueued_at, started_at, last_attempted_at, finished_at,
     worker_ids, errors, arguments, lease_token)
SELECT item.id, %(queue)s, %(task)s, %(backend)s, %(key)s,
       CASE WHEN item.delivery_count = 0 THEN 'FAILED' ELSE 'READY' END,
       %(run_after)s::timestamptz, %(enqueued_at)s::timestamptz, %(started_at)s::timestamptz,
       %(last_attempted_at)s::timestamptz, CASE WHEN item.delivery_count = 0 THEN statement_timestamp() END,
       %(worker_ids)s::jsonb, %(errors)s::jsonb, item.payload, %(token)s
FROM django_pgqueue_messagequeueitem AS item
WHERE item.id = %(id)s
ON CONFLICT (id) DO UPDATE
SET status = excluded.status,
    run_after = excluded.run_after,
    finished_at = excluded.finished_at,
    errors = excluded.errors,
    arguments = excluded.arguments
RETURNING status = 'FAILED', statement_timestamp()
"""


def fail_run(
    declaration: Declaration, run: TaskRun, delay: float | None, reason: str, using: str
) -> tuple[bool, datetime] | None:
    """
    Give back the message of a failed attempt, due after ``delay`` seconds (None: dead-letter it), and store the errors.

    Returns whether the message was dead-lettered, because ``delay`` is None or because it was delivered
    ``max_deliveries`` times, and the time. None: the lease was lost.
    """
    with session.own_transaction(connections[using]) as cursor:
        if delay is None:
            lost = settling.reject(declaration, [run.message], [reason], using)
        else:
            lost = settling.nack(declaration, [run.message], [delay], [reason], using).lost
        if lost:
            return None
        cursor.execute(FAIL_RUN, _run_params(run))
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
    """What the database stores about a task. JSON values are text. The run's fields are None before its first start."""

    has_message: bool
    #: Whether its message is a dead letter or has expired.
    is_dead: bool
    #: Whether the last recorded attempt still holds the message.
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


# RESULT_OF - read what is stored about a task: its message, if it exists, and its run. No lock.
# Returns one row: whether its message exists, whether the message is dead or has expired, whether the last recorded
# attempt still holds it, its headers, queue and arguments, when and why it was dead-lettered; then the columns of the
# run, null before its first start. No row: the task is unknown.
RESULT_OF = """
SELECT item.id IS NOT NULL,
       item.dead_lettered_at IS NOT NULL
           OR (item.expires_at <= statement_timestamp()
               AND (item.lease_expires_at > statement_timestamp()) IS NOT TRUE),
       item.lease_expires_at > statement_timestamp() AND item.lease_token = run.lease_token,
       item.headers::text,
       coalesce(run.queue, item.dead_letter_path ->> 0, item.dead_lettered_from,
                item.queue_id, item.orphaned_from),
       coalesce(item.payload, run.arguments)::text,
       item.dead_lettered_at,
       CASE WHEN item.dead_lettered_at IS NOT NULL THEN item.failures -> -1 ->> 'reason' END,
       run.task, run.backend, run.key, run.status, run.run_after, run.enqueued_at, run.started_at,
       run.last_attempted_at, run.finished_at, run.worker_ids::text, run.errors::text, run.return_value::text
FROM (SELECT %(id)s::bigint AS id) AS asked
LEFT JOIN django_pgqueue_messagequeueitem AS item ON item.id = asked.id
LEFT JOIN django_pgqueue_taskrun AS run ON run.id = asked.id
WHERE item.id IS NOT NULL OR run.id IS NOT NULL
"""


def task_record(message_id: int, using: str) -> TaskRecord | None:
    """Return what is stored about the task whose message has, or had, this id. None: the task is unknown."""
    rows = session.run(using, RESULT_OF, id=message_id)
    return TaskRecord(*rows[0]) if rows else None


# FORGET_RUNS - delete a batch of runs of tasks that ended %(age)s seconds ago or earlier.
# A run whose message still exists, for example as a dead letter, is kept.
# Index: django_pgqueue_run_attempt_idx.
# Returns the ids.
FORGET_RUNS = """
DELETE FROM django_pgqueue_taskrun
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_taskrun AS run
                      WHERE last_attempted_at < statement_timestamp() - %(age)s * interval '1 second'
                        AND coalesce(finished_at, last_attempted_at)
                            < statement_timestamp() - %(age)s * interval '1 second'
                        AND NOT EXISTS (SELECT FROM django_pgqueue_messagequeueitem AS item WHERE item.id = run.id)
                      ORDER BY last_attempted_at
                      LIMIT %(limit)s))
RETURNING id
"""


def forget_runs(age: float, limit: int, using: str) -> int:
    """Delete a batch of runs of tasks that ended ``age`` seconds ago or earlier. Returns how many."""
    return len(session.run(using, FORGET_RUNS, age=age, limit=limit))
