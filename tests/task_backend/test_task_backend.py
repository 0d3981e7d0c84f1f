"""The backend for Django's Tasks: enqueueing is a publish, and what is enqueued is known until it is forgotten."""

import sys
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pgqueue import PayloadError, Queue
from django_pgqueue.exceptions import PayloadTooLarge
from django_pgqueue.models import MessageQueue, MessageQueueItem, TaskRun
from django_pgqueue.reaper import Reaper
from django_pgqueue.task_backend import compat, queues
from django_pgqueue.task_backend.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
)
from tests.docs.findings import provokes
from tests.support.sessions import fetch, run_async
from tests.support.waiting import wait_until
from tests.task_backend.taskrun import run_tasks, tasks_setting
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(transaction=True)

READY, FAILED, SUCCESSFUL = TaskResultStatus.READY, TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


@pytest.fixture(autouse=True)
def backend(settings):
    settings.TASKS = tasks_setting()
    settings.PGQUEUE = {"BACKOFF": {"base": 0.01, "jitter": 0}, "MAX_DELIVERIES": 2}


def known(result):
    """Return what is known of a result's task by now."""
    return task_backends[result.backend].get_result(result.id)


# --- Enqueueing ---


def test_a_task_is_enqueued_run_and_known():
    """From READY to SUCCESSFUL; its message goes."""
    result = tasks.add.enqueue(1, b=2)
    assert (result.status, result.attempts, result.is_finished) == (READY, 0, False)
    assert known(result) == result
    assert run_tasks() == 1
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (SUCCESSFUL, 3, 1)
    assert (result.args, result.kwargs, result.task) == ([1], {"b": 2}, tasks.add)
    assert result.enqueued_at < result.started_at == result.last_attempted_at <= result.finished_at
    assert not MessageQueueItem.objects.exists()


def test_enqueueing_is_one_insert():
    """No second row, and no other statement once the queue is known."""
    tasks.add.enqueue(1)
    with CaptureQueriesContext(connections["default"]) as queries, transaction.atomic():
        tasks.add.enqueue(1)
        assert [query["sql"].split()[0] for query in queries if "SAVEPOINT" not in query["sql"]] == ["BEGIN", "INSERT"]
    assert not TaskRun.objects.exists()


def test_it_is_part_of_the_transaction():
    """What is rolled back was not enqueued."""
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        result = tasks.add.enqueue(1)
        assert known(result).status == READY
        1 / 0  # noqa: B018
    with pytest.raises(TaskResultDoesNotExist):
        known(result)


def test_it_heals_and_is_asynchronous(settings):
    """A reaped queue is made again by the next enqueue, on the event loop as well."""
    Queue("default", auto_deleted=True).declare()
    queue = Queue("default", auto_deleted=True)
    tasks.add.enqueue(1)
    MessageQueueItem.objects.all().delete()
    MessageQueue.objects.all().delete()

    async def enqueue():
        result = await tasks.add_async.aenqueue(2, 3)
        await result.arefresh()
        return result

    result = run_async(enqueue())
    assert result.status == READY and MessageQueue.objects.get(name="default").auto_deleted
    run_tasks()
    assert known(result).return_value == 5
    assert queue.stats().ready == 0


@pytest.mark.parametrize("skew", [-3600, 0, 3600])
def test_run_after_is_by_the_database_s_clock(monkeypatch, skew):
    """However wrong this machine's clock is, it is due at that moment."""
    due = fetch("SELECT statement_timestamp() + interval '1 hour'")[0][0]
    monkeypatch.setattr(timezone, "now", lambda: datetime.now(tz=due.tzinfo) + timedelta(seconds=skew))
    result = tasks.add.using(run_after=due).enqueue(1)
    # Never before it, and no more than a statement later.
    assert timedelta() <= MessageQueueItem.objects.get().read_after - due < timedelta(seconds=1)
    assert known(result).task.run_after == due
    assert run_tasks() == 0


def test_a_past_run_after_is_due_now():
    """It neither waits nor is it put before what was enqueued earlier."""
    tasks.add.using(run_after=timezone.now() - timedelta(days=1)).enqueue(1)
    assert MessageQueueItem.objects.get().read_after is None
    assert run_tasks() == 1


def test_the_ttl_counts_from_run_after():
    """As from any due time."""
    queue = Queue("default", ttl=60)
    tasks.add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(1)
    item = MessageQueueItem.objects.get()
    assert item.expires_at - item.read_after == timedelta(seconds=60) and queue.stats().delayed == 1


@pytest.mark.parametrize("far", [timedelta(days=200 * 365), timedelta(days=7000 * 365)])
def test_a_run_after_beyond_a_hundred_years_is_refused(far):
    """PostgreSQL's times reach further than Python's."""
    with pytest.raises(InvalidTask, match="run_after must be within"):
        tasks.add.using(run_after=timezone.now() + far)


# --- Arguments ---

REFUSED = [
    pytest.param(uuid4(), TypeError, id="UUID"),
    (Decimal("1.10"), TypeError),
    ({1, 2}, TypeError),
    (timezone.now(), TypeError),
    (timedelta(1), TypeError),
    (TaskRun(), TypeError),
    ({1: "a"}, ValueError),
    ({1: "a", "1": "b"}, ValueError),
    ("a\0b", ValueError),
    (chr(0xD800), ValueError),
    (float("nan"), ValueError),
    (b"\xff", ValueError),
]


@pytest.mark.parametrize(("value", "kind"), REFUSED, ids=lambda value: repr(value)[:20])
def test_what_cannot_be_stored_is_refused_before_any_sql(value, kind):
    """With the error that Django raises, which is a PayloadError with the path too; as publish refuses it."""
    with CaptureQueriesContext(connections["default"]) as queries:
        with pytest.raises(PayloadError) as caught:
            tasks.add.enqueue([0, {"x": value}])
        with pytest.raises(PayloadError):
            Queue("q").publish(value)
    assert isinstance(caught.value, kind) and "args[0][1].x" in str(caught.value), caught.value
    assert not queries.captured_queries


def test_too_large_arguments_are_refused(settings):
    """By the setting for payloads."""
    settings.PGQUEUE = {"MAX_PAYLOAD_BYTES": 1000}
    with pytest.raises(PayloadTooLarge):
        tasks.add.enqueue("x" * 1000)


def test_what_is_stored_arrives_as_django_says():
    """Tuples as lists, bytes as text, and the returned result says so already."""
    result = tasks.add.enqueue((1, 2), b=[b"x", {"y": ()}])
    assert (result.args, result.kwargs) == ([[1, 2]], {"b": ["x", {"y": []}]})
    assert known(result) == result


@pytest.mark.parametrize("name", ["", " x", "x" * 251, "a\nb"])
def test_a_queue_name_that_none_can_have_is_an_invalid_task(name):
    """As any other that Django refuses."""
    with pytest.raises(InvalidTask):
        tasks.add.using(queue_name=name)


# --- Results ---


@pytest.mark.parametrize(
    "id_", ["abc", "", "123", "1-abcdefgh", f"{10**30}-abcdefgh", "0-abcdefgh", 5, None, "１-abcdefgh"]
)
def test_what_is_no_id_of_a_result_does_not_exist(id_):
    """Whatever is asked for."""
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["default"].get_result(id_)


def test_a_result_is_not_found_by_the_message_s_id_alone():
    """Its key is not to be guessed, before and after the task has run."""
    result = tasks.add.enqueue(1)
    number, _, key = result.id.partition("-")
    for _ in range(2):
        with pytest.raises(TaskResultDoesNotExist):
            task_backends["default"].get_result(f"{number}-{key[::-1].swapcase()}")
        run_tasks()
    assert known(result).status == SUCCESSFUL


def test_messages_that_are_no_tasks_have_no_result():
    """Nor are they run: they are dead letters."""
    queue = Queue("default")
    for payload, headers in (({}, {}), ({"args": []}, {"task": "x.y"}), (1, {"task": 1, "backend": 2, "key": 3})):
        queue.publish(payload, headers=headers)
    run_tasks()
    letters = MessageQueueItem.objects.filter(dead_lettered_from="default")
    assert {letter.failures[-1]["reason"] for letter in letters} == {"not a task"} and len(letters) == 3


def test_results_are_of_their_backend(settings):
    """An id of another alias is none."""
    settings.TASKS = {**tasks_setting(), "other": tasks_setting()["default"]}
    result = tasks.add.using(backend="other").enqueue(1)
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["default"].get_result(result.id)
    run_tasks()
    assert known(result).backend == "other" and known(result).status == SUCCESSFUL


def test_a_purged_task_has_failed_or_was_never_there():
    """It will not run again."""
    fresh, tried = tasks.add.enqueue(1), tasks.nack.enqueue(60)
    run_tasks(max_messages=2)
    assert known(tried).status == READY
    fresh = tasks.add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(1)
    Queue("default").purge()
    with pytest.raises(TaskResultDoesNotExist):
        known(fresh)
    gone = known(tried)
    assert (gone.status, gone.attempts, gone.errors[0].exception_class_path) == (
        FAILED,
        1,
        "django_pgqueue.exceptions.Nack",
    )


def test_an_expired_task_has_failed():
    """Nobody will run it; once it was reaped, nothing is known of it."""
    Queue("default", ttl=60).declare()
    result = tasks.add.enqueue(1)
    MessageQueueItem.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert known(result).status == FAILED
    Reaper("default").run_once()
    with pytest.raises(TaskResultDoesNotExist):
        known(result)


def test_results_are_forgotten_after_their_time(settings):
    """By the reaper. What is known of a dead letter stays as long as that does; with None all of it stays."""
    done, dead = tasks.add.enqueue(1), tasks.reject.enqueue()
    run_tasks()
    fetch(
        "UPDATE django_pgqueue_taskrun SET last_attempted_at = last_attempted_at - interval '1 day',"
        " finished_at = finished_at - interval '1 day'"
    )
    for ttl in (None, 2 * 86_400):
        settings.PGQUEUE = {"TASK_RESULT_TTL": ttl}
        Reaper("default").run_once()
        assert known(done).status == SUCCESSFUL
    settings.PGQUEUE = {}
    Reaper("default").run_once()
    with pytest.raises(TaskResultDoesNotExist):
        known(done)
    assert known(dead).errors[0].exception_class_path == "django_pgqueue.exceptions.Reject"
    Queue("default.dead").purge()
    Reaper("default").run_once()
    with pytest.raises(TaskResultDoesNotExist):
        known(dead)


def test_a_task_that_ended_just_now_is_remembered_however_long_it_ran(settings):
    """The time counts from its end."""
    result = tasks.add.enqueue(1)
    run_tasks()
    TaskRun.objects.update(last_attempted_at=timezone.now() - timedelta(days=9))
    Reaper("default").run_once()
    assert known(result).status == SUCCESSFUL


def test_without_results_nothing_is_kept(settings):
    """They cannot be asked for, the tasks run all the same, and know their attempt."""
    settings.TASKS = tasks_setting(results=False)
    result = tasks.fail_first.enqueue(1)
    assert task_backends["default"].supports_get_result is False
    with pytest.raises(NotImplementedError):
        known(result)
    wait_until(lambda: run_tasks() is not None and not MessageQueueItem.objects.exists())
    assert not TaskRun.objects.exists()


# --- Queues ---


def test_a_declared_queue_is_the_task_s(settings):
    """What the project says of it holds: how often it is tried, and where its dead letters go."""
    queue = Queue("mail", max_deliveries=1, dead_letter="lost mail")
    settings.TASKS = tasks_setting("default", "mail")
    result = tasks.fail.using(queue_name="mail").enqueue("no")
    run_tasks("mail")
    assert (known(result).status, known(result).attempts) == (FAILED, 1)
    assert MessageQueueItem.objects.get().queue_id == "lost mail" and queue.stats().ready == 0


def test_consume_queues_runs_them(settings):
    """Those that TASKS names without being asked, and any name where it names none."""
    settings.TASKS = tasks_setting("default", "mail")
    results = [tasks.add.using(queue_name=name).enqueue(1) for name in ("default", "mail")]
    call_command("consume_queues", "mail", drain=True)
    assert [known(result).status for result in results] == [READY, SUCCESSFUL]
    call_command("consume_queues", drain=True)
    assert known(results[0]).status == SUCCESSFUL
    settings.TASKS = tasks_setting()
    result = tasks.add.using(queue_name="whatever").enqueue(1)
    call_command("consume_queues", "whatever", drain=True)
    assert known(result).status == SUCCESSFUL


@provokes("E013")
def test_the_handler_of_a_queue_beside_tasks(settings):
    """Runs beside them; on the same queue it is an error, also for check."""
    settings.TASKS = tasks_setting("default")
    seen = []
    orders = Queue("orders")
    orders.handler(lambda message: seen.append(message.payload))
    orders.publish(1)
    result = tasks.add.enqueue(1)
    call_command("consume_queues", "orders", "default", drain=True)
    assert seen == [1] and known(result).status == SUCCESSFUL
    Queue("default").handler(print)
    with pytest.raises(CommandError, match="'default' has a handler of its own"):
        call_command("consume_queues", "default", drain=True)
    assert [error.id for error in task_backends["default"].check()] == ["django_pgqueue.E013"]


def test_queues_that_tasks_names_are_there_after_migrate(settings):
    """And so are their dead-letter queues."""
    settings.TASKS = tasks_setting("mail")
    call_command("migrate", verbosity=0)
    assert {"mail", "mail.dead"} <= set(MessageQueue.objects.values_list("name", flat=True))


@provokes("E011")
@provokes("E012")
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (tasks_setting("mail", concurency=2), "OPTIONS has no 'concurency'. Did you mean 'concurrency'?"),
        (tasks_setting(zzz=2), "OPTIONS has no 'zzz'. The options are: database, concurrency, timeout, results."),
        (tasks_setting(database="elsewhere"), "there is no database alias 'elsewhere'"),
        (tasks_setting(concurrency=0), "concurrency must be a whole number"),
        (tasks_setting(timeout="1"), "timeout must be seconds"),
        (tasks_setting(results="no"), "'results' must be True or False"),
        (tasks_setting("a\nb"), "a queue name must have printable characters only"),
    ],
)
def test_check_names_what_is_wrong(settings, setting, expected):
    """Before anything is enqueued."""
    settings.TASKS = setting
    (error,) = task_backends["default"].check()
    assert expected in f"{error.msg} {error.hint or ''}"


# --- Signals ---


def test_it_tells_what_is_enqueued():
    """At once, with the backend's class as sender; a receiver that raises harms nobody."""
    told = []

    def receive(sender, task_result, **kwargs):
        told.append((sender.__name__, task_result.id))
        raise ValueError

    task_enqueued.connect(receive)
    try:
        result = tasks.add.enqueue(1)
    finally:
        task_enqueued.disconnect(receive)
    assert told == [("PGQueueBackend", result.id)]


def test_a_result_is_got_on_the_event_loop():
    """By the async methods of the task and the backend."""

    async def get():
        result = await tasks.add.aenqueue(1)
        return result, await tasks.add.aget_result(result.id)

    result, again = run_async(get())
    assert result == again


# --- Without Tasks ---


def test_a_django_without_tasks_is_told_what_to_install(monkeypatch):
    """On 5.2 without the backport."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Django 6.0 or newer, .* pip install django-pg-messagequeue\[tasks\]"):
        exec(Path(compat.__file__).read_text(), {"__name__": "compat"})


def test_only_who_uses_the_backend_needs_tasks(monkeypatch, settings):
    """`TASKS` may be of another app; where it names the backend, its absence is loud."""
    monkeypatch.setitem(sys.modules, "django_pgqueue.task_backend.compat", None)
    monkeypatch.delitem(sys.modules, "django_pgqueue.task_backend.backend")
    monkeypatch.delattr("django_pgqueue.task_backend.backend")
    settings.TASKS = {"default": {"BACKEND": "another.Backend"}}
    assert queues.task_handlers() == {} and queues.make_queues("default") == []
    settings.TASKS = tasks_setting()
    with pytest.raises(ImportError):
        queues.task_handlers()
