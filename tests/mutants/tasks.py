"""
The mutants of Django's Tasks: what is enqueued, run and known.

As in ``promises.py``.
"""

from tests.mutants.mutant import Mutant

ENQUEUED = "enqueueing a task is one publish"
KNOWN = "the status of a task is true"
ONE = "a finished task and its ack are one"
RUN = "tasks run as Django says"
KEPT = "results are kept for their time"

BACKEND = "tests/test_task_backend.py"
WORKER = "tests/test_task_worker.py"

MUTANTS = (
    Mutant(
        ENQUEUED,
        "a past run_after is refused",
        "sql.py",
        "greatest(date_part('epoch', %(due)s::timestamptz - statement_timestamp()), 0)",
        "date_part('epoch', %(due)s::timestamptz - statement_timestamp())",
        (f"{BACKEND}::test_a_past_run_after_is_due_now",),
    ),
    Mutant(
        ENQUEUED,
        "run_after is a delay by this machine's clock",
        "queues.py",
        "services.seconds_until(due, self.using)",
        "max(0, (due - __import__('django.utils.timezone').utils.timezone.now()).total_seconds())",
        (f"{BACKEND}::test_run_after_is_by_the_database_s_clock",),
    ),
    Mutant(
        ENQUEUED,
        "arguments are taken as Django takes them",
        "task_backend.py",
        "        payload = encode(call, settings.MAX_PAYLOAD_BYTES)\n",
        "        payload = json.dumps(call)\n",
        (f"{BACKEND}::test_what_cannot_be_stored_is_refused_before_any_sql",),
    ),
    Mutant(
        ENQUEUED,
        "a receiver's error is the caller's",
        "task_backend.py",
        "        task_enqueued.send_robust(",
        "        task_enqueued.send(",
        (f"{BACKEND}::test_it_tells_what_is_enqueued",),
    ),
    Mutant(
        KNOWN,
        "the key is not compared",
        "task_backend.py",
        "(ticket.backend, ticket.result_id(message_id)) != (self.alias, result_id)",
        "ticket.backend != self.alias",
        (f"{BACKEND}::test_a_result_is_not_found_by_the_message_s_id_alone",),
    ),
    Mutant(
        KNOWN,
        "any backend's result is found",
        "task_backend.py",
        "(ticket.backend, ticket.result_id(message_id)) != (self.alias, result_id)",
        "ticket.result_id(message_id) != result_id",
        (f"{BACKEND}::test_results_are_of_their_backend",),
    ),
    Mutant(
        KNOWN,
        "RUNNING is what a worker noted",
        "sql.py",
        "       item.lease_expires_at > statement_timestamp() AND item.lease_token = run.lease_token,\n",
        "       run.status = 'RUNNING',\n",
        (f"{WORKER}::test_a_status_follows_from_the_lease_not_from_what_a_worker_noted",),
    ),
    Mutant(
        KNOWN,
        "whoever holds the message runs the task",
        "sql.py",
        "       item.lease_expires_at > statement_timestamp() AND item.lease_token = run.lease_token,\n",
        "       item.lease_expires_at > statement_timestamp(),\n",
        (f"{WORKER}::test_a_status_follows_from_the_lease_not_from_what_a_worker_noted",),
    ),
    Mutant(
        KNOWN,
        "a dead letter is ready",
        "task_backend.py",
        "        return TaskResultStatus.FAILED if record.is_dead else TaskResultStatus.READY\n",
        "        return TaskResultStatus.READY\n",
        (f"{BACKEND}::test_an_expired_task_has_failed",),
    ),
    Mutant(
        KNOWN,
        "an attempt that is noted twice counts twice",
        "sql.py",
        "    worker_ids = CASE WHEN run.lease_token = excluded.lease_token THEN run.worker_ids\n"
        "                      ELSE run.worker_ids || excluded.worker_ids END,\n",
        "    worker_ids = run.worker_ids || excluded.worker_ids,\n",
        (f"{WORKER}::test_a_statement_that_is_sent_twice_changes_nothing",),
    ),
    Mutant(
        ONE,
        "an answer that got lost is a lost lease",
        "sql.py",
        "WHERE id = %(id)s AND lease_token = %(token)s AND status = 'SUCCESSFUL'",
        "WHERE id = %(id)s AND lease_token = %(token)s AND status = 'DONE'",
        (f"{WORKER}::test_a_statement_that_is_sent_twice_changes_nothing",),
    ),
    Mutant(
        ONE,
        "the end is noted without the lease",
        "sql.py",
        "    SELECT id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s AND lease_token = %(token)s FOR UPDATE\n",
        "    SELECT id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s FOR UPDATE\n",
        (f"{WORKER}::test_a_lost_lease_ends_the_attempt_silently",),
    ),
    Mutant(
        ONE,
        "a start without the lease",
        "sql.py",
        "WHERE item.id = %(id)s AND item.lease_token = %(token)s\n",
        "WHERE item.id = %(id)s\n",
        (f"{WORKER}::test_a_lost_lease_ends_the_attempt_silently",),
    ),
    Mutant(
        ONE,
        "while the database is away a finished task is given up",
        "task_worker.py",
        "                if connection.in_atomic_block or not is_passing(error):\n",
        "                if connection.in_atomic_block or is_passing(error):\n",
        (f"{WORKER}::test_while_the_database_is_away_a_finished_task_waits",),
    ),
    Mutant(
        ONE,
        "a task is done though its transaction was rolled back",
        "workers.py",
        "            outcome.attempt.error = error\n",
        "            pass\n",
        (f"{WORKER}::test_a_transaction_that_a_task_leaves_open_is_a_failure",),
    ),
    Mutant(
        RUN,
        "a failed attempt is told as the end",
        "task_worker.py",
        '        return self._ended("given up", finished_at) if given_up else',
        '        return self._ended("given up", finished_at) if finished_at else',
        (f"{WORKER}::test_a_task_that_fails_is_tried_again_and_its_attempts_show",),
    ),
    Mutant(
        RUN,
        "async tasks wait for sync ones",
        "task_backend.py",
        "            is_for_loop=belongs_on_loop,\n",
        "",
        (f"{WORKER}::test_a_long_sync_task_does_not_hold_up_async_ones",),
    ),
    Mutant(
        RUN,
        "what an async task does wrong in SQL ends a test",
        "inline.py",
        "function=wrap(handler.function, block), async_function=on_loop)",
        "function=wrap(handler.function, block))",
        (f"{WORKER}::InATestCase",),
    ),
    Mutant(
        RUN,
        "any function is run",
        "task_worker.py",
        "        if not isinstance(found, Task):\n",
        "        if not callable(found):\n",
        (f"{WORKER}::test_a_task_that_is_not_there_is_tried_again",),
    ),
    Mutant(
        RUN,
        "only declared queues are consumed",
        "task_queues.py",
        "    tasks = task_handlers(names)\n",
        "    tasks = {} if names else task_handlers(names)\n",
        (f"{BACKEND}::test_consume_queues_runs_them",),
    ),
    Mutant(
        RUN,
        "a declared queue is not the task's",
        "task_backend.py",
        "find_queue(name, self.using) or Queue(",
        "Queue(",
        (f"{BACKEND}::test_a_declared_queue_is_the_task_s",),
    ),
    Mutant(
        KEPT,
        "for ever",
        "reaper.py",
        "            self._forget_runs()\n",
        "",
        (f"{BACKEND}::test_results_are_forgotten_after_their_time",),
    ),
    Mutant(
        KEPT,
        "a dead letter's is forgotten",
        "sql.py",
        "                        AND NOT EXISTS (SELECT FROM django_pgqueue_messagequeueitem AS item"
        " WHERE item.id = run.id)\n",
        "",
        (f"{BACKEND}::test_results_are_forgotten_after_their_time",),
    ),
    Mutant(
        KEPT,
        "it counts from the start",
        "sql.py",
        "                        AND coalesce(finished_at, last_attempted_at)\n"
        "                            < statement_timestamp() - %(age)s * interval '1 second'\n",
        "",
        (f"{BACKEND}::test_a_task_that_ended_just_now_is_remembered_however_long_it_ran",),
    ),
)
