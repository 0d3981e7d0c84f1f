"""Running tasks: their status, errors and attempts, whatever becomes of the worker; the signals."""

import json
import logging
import time

import pytest
from django.core.management import call_command
from django.db import connections
from django.test import TestCase, override_settings

from django_pgqueue import Queue
from django_pgqueue.consumer import handler as handler_module
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem, TaskRun
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import tasks as tasks_services
from django_pgqueue.task_backend.compat import TaskResultStatus, task_backends, task_finished, task_started
from django_pgqueue.task_backend.queues import task_handlers
from django_pgqueue.testing import drain, immediate
from tests.support.processes import consuming, worker
from tests.support.sessions import second_session
from tests.support.waiting import wait_until
from tests.task_backend.taskrun import run_tasks, tasks_setting
from tests.testapp import tasks
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


@pytest.fixture(autouse=True)
def backend(settings):
    settings.TASKS = tasks_setting()
    settings.PGQUEUE = {"BACKOFF": {"base": 0.01, "jitter": 0}, "MAX_DELIVERIES": 2}


@pytest.fixture
def told():
    """What the signals tell: started or finished, status, attempts, and what the table says at that moment."""
    seen = []

    def receiver(word):
        def receive(sender, task_result, **kwargs):
            kept = task_backends["default"].get_result(task_result.id)
            seen.append((word, task_result.status, kept.status, task_result.attempts))

        return receive

    receivers = {task_started: receiver("started"), task_finished: receiver("finished")}
    for signal, receive in receivers.items():
        signal.connect(receive)
    yield seen
    for signal, receive in receivers.items():
        signal.disconnect(receive)


def known(result):
    return task_backends["default"].get_result(result.id)


def refreshed(result):
    result.refresh()
    return result


def run_until_known(result, *statuses):
    """Run tasks until the status is one of these."""

    def is_known():
        run_tasks()
        return known(result).status in statuses

    wait_until(is_known)
    return known(result)


# --- The life of a task ---


def test_a_task_that_fails_is_tried_again_and_its_attempts_show(told):
    """READY with its error until the next attempt; SUCCESSFUL with the errors of before."""
    result = tasks.fail_first.enqueue(1)
    run_tasks(max_messages=1)
    between = known(result)
    assert (between.status, between.attempts, between.finished_at) == (READY, 1, None)
    assert between.errors[0].exception_class is ValueError
    assert between.errors[0].traceback.endswith("ValueError: attempt 1\n")
    done = run_until_known(result, SUCCESSFUL)
    assert (done.return_value, done.attempts, len(done.errors)) == (2, 2, 1)
    assert done.started_at == between.started_at < done.last_attempted_at <= done.finished_at
    assert told == [
        ("started", RUNNING, RUNNING, 1),
        ("started", RUNNING, RUNNING, 2),
        ("finished", SUCCESSFUL, SUCCESSFUL, 2),
    ]


def test_a_task_that_fails_for_good_is_a_dead_letter(told, caplog):
    """FAILED with all its errors, told once; redriven it is READY again, and may succeed."""
    caplog.set_level(logging.ERROR)
    result = tasks.fail_first.enqueue(2)
    dead = run_until_known(result, FAILED)
    assert [error.exception_class_path for error in dead.errors] == ["builtins.ValueError"] * 2
    assert dead.finished_at >= dead.last_attempted_at and told[-1] == ("finished", FAILED, FAILED, 2)
    assert [word for word, *_ in told] == ["started", "started", "finished"]
    assert any("ValueError: attempt 2" in (record.exc_text or "") for record in caplog.records)
    assert MessageQueueItem.objects.get().queue_id == "default.dead"
    assert Queue("default").redrive() == 1
    again = known(result)
    assert (again.status, again.finished_at, len(again.errors)) == (READY, None, 2)
    done = run_until_known(result, SUCCESSFUL)
    assert (done.return_value, done.attempts, len(done.errors)) == (3, 3, 2)


@pytest.mark.parametrize(
    ("task", "args", "path", "attempts"),
    [
        (tasks.reject, (), "django_pgqueue.exceptions.Reject", 1),
        (tasks.leave, (), "builtins.SystemExit", 2),
        (tasks.fail, ("a\0b" + chr(0xDC00),), None, 0),
        (tasks.give_back, ("object",), "builtins.TypeError", 2),
        (tasks.give_back, ("lambda",), "builtins.TypeError", 2),
        (tasks.give_back, ("nul",), "django_pgqueue.exceptions.PayloadError", 2),
        (tasks.give_back, ("nan",), "django_pgqueue.exceptions.PayloadError", 2),
        (tasks.add, ("1", 2), "builtins.TypeError", 2),
        (tasks.add, (1, 2, 3, 4), "builtins.TypeError", 2),
    ],
)
def test_whatever_is_wrong_is_a_failure(task, args, path, attempts):
    """What it raises, and a return value that cannot be kept. Rejected it is not tried again."""
    if path is None:
        with pytest.raises(ValueError):
            task.enqueue(*args)
        return
    result = run_until_known(task.enqueue(*args), FAILED)
    assert (result.errors[-1].exception_class_path, result.attempts) == (path, attempts)
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018


def test_errors_are_storable_and_capped(monkeypatch):
    """A text that PostgreSQL cannot store, and one without end: the end of a traceback is kept."""
    monkeypatch.setattr(
        tasks.fail.func, "__code__", (lambda text: raise_(f"\0{chr(0xD800)}{'x' * 100_000} end")).__code__
    )
    monkeypatch.setitem(tasks.fail.func.__globals__, "raise_", raise_)
    result = run_until_known(tasks.fail.enqueue("text"), FAILED)
    assert result.errors[0].traceback.endswith("x end\n") and len(result.errors[0].traceback) <= 20_000


def raise_(text):
    raise ValueError(text)


def test_a_task_asks_for_its_own_delay():
    """Nack with a delay, as in a handler."""
    result = tasks.nack.enqueue(60)
    run_tasks()
    assert known(result).status == READY and Queue("default").stats().delayed == 1


def test_a_task_that_is_not_there_is_tried_again():
    """It may be deployed by then. No signal tells of what cannot be found."""
    for path in ("tests.testapp.tasks.missing", "tests.testapp.nowhere.task", "tests.testapp.tasks.plain"):
        result = tasks.add.enqueue(1)
        MessageQueueItem.objects.update(headers={**MessageQueueItem.objects.get().headers, "task": path})
        with pytest.raises(Exception, match=r"missing|nowhere|not a task"):
            run_until_known(result, FAILED)
        wait_until(lambda: run_tasks() is not None and Queue("default").stats().ready == 0)
        wait_until(lambda: run_tasks() is not None and MessageQueueItem.objects.get().queue_id == "default.dead")
        run = TaskRun.objects.get()
        assert (run.status, len(run.worker_ids)) == ("FAILED", 2) and run.errors[0]["traceback"]
        MessageQueueItem.objects.all().delete()
        TaskRun.objects.all().delete()


def test_the_context_tells_of_the_attempt():
    """As Django does."""
    result = tasks.tell.enqueue()
    run_tasks()
    assert known(result).return_value == {"id": result.id, "attempt": 1, "status": "RUNNING", "errors": 0}


def test_without_results_the_context_tells_of_the_attempt_too(settings):
    """By the message's deliveries."""
    settings.TASKS = tasks_setting(results=False)
    finished = []

    def receive(sender, task_result, **kwargs):
        finished.append((task_result.attempts, task_result.status, task_result.return_value))

    task_finished.connect(receive)
    try:
        tasks.fail_first.enqueue(1)
        wait_until(lambda: run_tasks() is not None and not MessageQueueItem.objects.exists())
    finally:
        task_finished.disconnect(receive)
    assert finished == [(2, SUCCESSFUL, 2)]


def test_a_transaction_that_a_task_leaves_open_is_a_failure(told):
    """Its changes are rolled back, and nobody is told that it was done."""
    result = run_until_known(tasks.leave_open.enqueue(), FAILED)
    assert "left a transaction open" in result.errors[-1].traceback and not Seen.objects.exists()
    assert told[-1] == ("finished", FAILED, FAILED, 2)


# --- Threads and the loop ---


def test_sync_tasks_run_in_threads_and_async_ones_on_one_loop(settings):
    """Both kinds from one queue, beside each other."""
    settings.TASKS = tasks_setting(concurrency=2)
    loops = [tasks.loop.enqueue() for _ in range(4)]
    places = [tasks.place.enqueue() for _ in range(4)]
    sums = [tasks.add_async.enqueue(number, 1) for number in range(4)]
    assert run_tasks() == 12
    assert len({known(result).return_value for result in loops}) == 1
    assert {known(result).return_value for result in places} <= {"pgqueue default/0", "pgqueue default/1"}
    assert [known(result).return_value for result in sums] == [1, 2, 3, 4]


def test_a_long_sync_task_does_not_hold_up_async_ones(tmp_path):
    """Each kind has its own workers."""
    mark, until = tmp_path / "mark", tmp_path / "until"
    tasks.hold.enqueue(str(mark), str(until))
    with consuming(Consumer(list(task_handlers(["default"]).values()))):
        wait_until(mark.exists)
        result = tasks.add_async.enqueue(1, 2)
        wait_until(lambda: known(result).status == SUCCESSFUL)
        until.touch()


def test_the_drain_of_the_testing_helpers_runs_tasks():
    """Sync and async ones, and tells what became of them, retries included."""
    results = [tasks.fail_first.enqueue(1), tasks.add_async.enqueue(1, 2), tasks.reject.enqueue()]
    done = drain("default", include_delayed=True)
    assert (len(done.handled), len(done.failed), len(done.dead_lettered)) == (2, 2, 1)
    assert [known(result).status for result in results] == [SUCCESSFUL, SUCCESSFUL, FAILED]


class InATestCase(TestCase):
    """Tasks that are drained inside a test's transaction."""

    def test_sync_and_async_tasks_run_in_the_calling_thread(self):
        """On the test's connection, and all is rolled back with it."""
        with override_settings(TASKS=tasks_setting()):
            results = [tasks.note.enqueue(7), tasks.add_async.enqueue(1, 2), tasks.reject.enqueue()]
            call_command("consume_queues", "default", drain=True)
            assert [known(result).status for result in results] == [SUCCESSFUL, SUCCESSFUL, FAILED]
            assert Seen.objects.get().msg_id == 7

    def test_they_are_drained_by_the_testing_helpers(self):
        """As any handler; what a task does wrong in SQL harms nothing else."""
        with override_settings(TASKS=tasks_setting()):
            results = [tasks.wrong_sql.enqueue(), tasks.wrong_sql_async.enqueue(), tasks.add.enqueue(1)]
            done = drain("default", include_delayed=True)
            assert [known(result).status for result in results] == [FAILED, FAILED, SUCCESSFUL]
            assert len(done.handled) == 1 and len(done.dead_lettered) == 2

    def test_in_immediate_mode_they_run_at_once(self):
        """As handlers do."""
        with override_settings(TASKS=tasks_setting("default")), immediate():
            assert refreshed(tasks.add.enqueue(1, 2)).return_value == 3


# --- Leases, crashes, outages ---


def test_a_lost_lease_ends_the_attempt_silently(told):
    """Who lost it keeps no result and tells of no end; the message is another's."""
    tasks.add.enqueue(1)
    (message,) = Queue("default").claim()
    (handler,) = task_handlers(["default"]).values()
    attempt = handler.function(message)
    MessageQueueItem.objects.update(lease_token="00000000-0000-0000-0000-000000000000")
    assert attempt.settle(handler_module.ACK) == handler_module.LOST
    attempt.error = ValueError()
    assert attempt.settle(handler_module.Settlement(handler_module.Outcome.NACK, "failed")) == handler_module.LOST
    assert handler.function(message) is None
    assert MessageQueueItem.objects.count() == 1 and TaskRun.objects.get().status == "RUNNING"
    assert [word for word, *_ in told] == ["started"]


def test_a_status_follows_from_the_lease_not_from_what_a_worker_noted():
    """RUNNING while the lease lasts; then READY, also where another has claimed it and not begun."""
    result = tasks.add.enqueue(1)
    (message,) = Queue("default").claim()
    assert known(result).status == READY
    (handler,) = task_handlers(["default"]).values()
    handler.function(message)
    assert known(result).status == RUNNING
    MessageQueueItem.objects.update(lease_expires_at="2000-01-01 00:00:00Z")
    assert known(result).status == READY
    Queue("default").claim()
    assert known(result).status == READY


def test_a_statement_that_is_sent_twice_changes_nothing():
    """As after an answer that got lost: the attempt counts once, and a finished task is not taken for a lost one."""
    result = tasks.add.enqueue(1)
    (message,) = Queue("default").claim()
    headers = message.headers
    run = tasks_services.TaskRun(message, headers["task"], "default", headers["key"], None, None)
    assert tasks_services.start_run(run, "default") and tasks_services.start_run(run, "default")
    assert len(json.loads(run.worker_ids)) == 1
    first = tasks_services.finish_run(run, "3", "default")
    assert first is not None and tasks_services.finish_run(run, "3", "default") == first
    assert known(result).return_value == 3


def test_a_result_is_kept_though_the_start_was_lost():
    """A crash of the server may take what was noted of the start, and the claim survives it."""
    result = tasks.add.enqueue(1)
    (message,) = Queue("default").claim()
    (handler,) = task_handlers(["default"]).values()
    attempt = handler.function(message)
    TaskRun.objects.all().delete()
    attempt.settle(handler_module.ACK)
    assert (known(result).status, known(result).return_value, known(result).attempts) == (SUCCESSFUL, 1, 1)


def test_while_the_database_is_away_a_finished_task_waits():
    """It is not run again: its end is settled when the database is back."""
    result = tasks.add.enqueue(1)
    (message,) = Queue("default").claim()
    (handler,) = task_handlers(["default"]).values()
    attempt = handler.function(message)
    with second_session() as other:
        pid = connections["default"].connection.info.backend_pid
        other.execute("SELECT pg_terminate_backend(%s)", [pid])
    assert attempt.settle(handler_module.ACK).outcome is handler_module.Outcome.SETTLED
    assert known(result).status == SUCCESSFUL


def test_a_finished_status_and_the_ack_are_one():
    """Where the result cannot be kept the message stays."""
    tasks.add.enqueue(1)
    (message,) = Queue("default").claim()
    (handler,) = task_handlers(["default"]).values()
    attempt = handler.function(message)
    attempt.returned = '"not JSON'
    with pytest.raises(Exception, match="json"):
        attempt.settle(handler_module.ACK)
    assert MessageQueueItem.objects.get().lease_token == message.token


def test_a_worker_that_dies_with_each_delivery_leaves_a_failed_task():
    """Given up by nobody who ran it: the last error says so."""
    result = tasks.add.enqueue(1)
    (handler,) = task_handlers(["default"]).values()
    for _ in range(2):
        (message,) = Queue("default").claim()
        handler.function(message)
        MessageQueueItem.objects.update(lease_expires_at="2000-01-01 00:00:00Z")
    assert Queue("default").claim() == []
    dead = known(result)
    assert (dead.status, dead.attempts) == (FAILED, 2)
    assert (dead.errors[-1].exception_class_path, dead.finished_at is None) == (
        "django_pgqueue.exceptions.LeaseLost",
        False,
    )
    Reaper("default").run_once()
    assert known(result).status == FAILED


@pytest.mark.full
def test_a_killed_worker_s_task_runs_again(tmp_path):
    """RUNNING, then READY when its lease has lapsed, then SUCCESSFUL with two attempts by two workers."""
    mark, until = tmp_path / "mark", tmp_path / "until"
    result = tasks.hold.enqueue(str(mark), str(until))
    with worker("default", queues=(), tasks=tasks_setting()) as first:
        wait_until(mark.exists)
        assert (known(result).status, known(result).attempts) == (RUNNING, 1)
        first.kill()
    wait_until(lambda: known(result).status == READY, what="the lease to lapse")
    until.touch()
    with worker("default", queues=(), tasks=tasks_setting()) as second:
        wait_until(lambda: known(result).status == SUCCESSFUL)
        done = known(result)
        assert (done.return_value, done.attempts, len(set(done.worker_ids))) == (second.pid, 2, 2)
        assert second.stop() == 0


def test_tasks_wake_a_worker_at_once(settings):
    """A worker that sleeps runs it without polling."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60}
    consumer = Consumer(list(task_handlers(["default"]).values()))
    with consuming(consumer):
        wait_until(lambda: consumer.condition().listening and consumer.condition().claim_age)
        time.sleep(0.3)
        result = tasks.add.enqueue(1)
        wait_until(lambda: known(result).status == SUCCESSFUL, timeout=5)
