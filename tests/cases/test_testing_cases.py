"""Real failures of other systems inside test suites: B112 and B114."""

import datetime
import decimal
import math
import subprocess
import sys
import uuid

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.test import TestCase

from django_pgqueue import PayloadError, Queue, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import notifying
from django_pgqueue.services.beliefs import beliefs
from django_pgqueue.testing import capture_published, immediate, published
from django_pgqueue.testing import drain as drain_registered
from tests.support.databases import database
from tests.support.processes import ROOT, environment
from tests.support.rows import make_queue, payloads
from tests.support.sessions import connect, second_session

# As test_testing.py.
pytestmark = pytest.mark.django_flush
in_transaction = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


def drain(queue: Queue, **options) -> list:
    seen: list = []
    Consumer([make_handler(queue, lambda message: seen.append(message.payload), **options)], drain=True).run()
    return seen


# --- B112: running the worker inside a test ---


@committed
def test_b112_a_projects_own_tests_with_djangos_runner():
    """TestCase and TransactionTestCase, in one process or several, on kept databases: no message is left over."""
    runner = [sys.executable, "-m", "django", "test", "tests.testapp.suite", "--noinput", "--keepdb"]
    try:
        for options in ([], ["--parallel", "2"]):
            done = subprocess.run(
                [*runner, *options], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Ran 5 tests" in done.stderr
    finally:
        with connect() as admin:
            for suffix in ("", "_1", "_2"):
                admin.execute(f'DROP DATABASE IF EXISTS "test_{admin.info.dbname}{suffix}" WITH (FORCE)')


@committed
@pytest.mark.parametrize("ack", ["late", "early", "atomic"])
def test_b112_a_drain_in_the_tests_process_leaves_the_tests_connection_as_it_was(ack):
    """The same session, usable, outside any transaction; what follows sees what the handlers committed."""
    queue = Queue("work")
    queue.publish_many([{"n": n} for n in range(5)])
    pid = connection.connection.info.backend_pid
    assert sorted(payload["n"] for payload in drain(queue, ack=ack, concurrency=2)) == list(range(5))
    assert connection.connection.info.backend_pid == pid
    assert not connection.in_atomic_block and connection.get_autocommit()
    assert not MessageQueueItem.objects.exists()


@committed
def test_b112_a_drain_does_not_listen():
    """It ends by itself, so nobody needs to wake it."""
    queue = Queue("work")
    queue.publish({"n": 1})
    listening: list = []

    def look(message) -> None:
        with connect() as admin:
            listening.extend(admin.execute("SELECT query FROM pg_stat_activity WHERE query LIKE 'LISTEN%'").fetchall())

    Consumer([make_handler(queue, look)], drain=True).run()
    assert listening == []


@committed
@pytest.mark.parametrize("how", ["consumer", "command"])
def test_b112_a_drain_inside_a_transaction_is_refused_and_leaves_it_usable(how):
    """A lease that can roll back counts nothing. Nothing is handled, and what the block wrote is kept."""
    queue = Queue("work")
    queue.publish({"n": 1})
    seen: list = []
    queue.handler(lambda message: seen.append(message))
    with transaction.atomic():
        make_queue("business row")
        with pytest.raises(RuntimeError, match="inside a transaction"):
            if how == "consumer":
                Consumer([make_handler(queue, lambda message: seen.append(message))], drain=True).run()
            else:
                call_command("consume_queues", "work", drain=True)
        make_queue("another row")
    assert seen == []
    assert payloads("work") == [{"n": 1}]


@in_transaction
def test_b112_claim_settle_and_reap_work_inside_a_tests_transaction():
    """Without committing: the exception that `durable` blocks make for a TestCase is made here, too."""
    queue = Queue("work", auto_deleted=True)
    queue.publish_many([{"n": 1}, {"n": 2}, {"n": 3}])
    one, two, three = queue.claim(3)
    queue.ack(one)
    queue.nack(two, delay=0)
    queue.reject(three, reason="no")
    assert [message.payload for message in queue.claim(3)] == [{"n": 2}]
    assert Reaper("default", idle_for=0).run_once().queues == []
    assert connection.in_atomic_block
    with second_session() as other:
        assert other.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchone() == (0,)


@committed
def test_b112_databases_of_parallel_tests_do_not_wake_each_other():
    """Each has the same queues on one server; a wake-up stays in its database."""
    with database("other") as other, second_session() as listener:
        listener.execute(f'LISTEN "{notifying.channel("work")}"')
        Queue("work", using=other).publish({"n": 1})
        assert list(listener.notifies(timeout=0.2)) == []
        beliefs.notified.clear()
        Queue("work").publish({"n": 1})
        assert len(list(listener.notifies(timeout=20, stop_after=1))) == 1


# --- B114: a test that accepts what production refuses ---

NUL = chr(0)
DEEP: list = []
for _ in range(600):
    DEEP = [DEEP]

REFUSED = {
    "zero character": f"x{NUL}",
    "zero character in a key": {NUL: 1},
    "half of a pair": chr(0xD800),
    "uuid": uuid.UUID(int=1),
    "datetime": datetime.datetime(2026, 1, 1),
    "decimal": decimal.Decimal("1.10"),
    "set": {1},
    "bytes": b"x",
    "number as a key": {1: "a"},
    "not a number": math.nan,
    "infinity": math.inf,
    "too deep": DEEP,
}
ARRIVES = {
    "tuple": ((1, 2), [1, 2]),
    "emoji": ("\U0001f600", "\U0001f600"),
    "six characters": ("\\u0000", "\\u0000"),
    "null": (None, None),
    "big number": (2**80, 2**80),
    "float": (0.1, 0.1),
    # PostgreSQL writes it out, and so it comes back as a whole number.
    "long float": (1e22, 10**22),
    "empty": ({}, {}),
}
WAYS = {
    "publish": lambda queue, payload: queue.publish(payload),
    "publish_many": lambda queue, payload: queue.publish_many([payload]),
}


def in_immediate_mode(queue: Queue, payload) -> None:
    with immediate(queue):
        queue.publish(payload)


def in_immediate_mode_in_a_block(queue: Queue, payload) -> None:
    with immediate(queue), transaction.atomic():
        queue.publish_many([payload])


def captured_topic(queue: Queue, payload) -> None:
    Topic("topic").bind(queue)
    with capture_published():
        Topic("topic").publish(payload)


# Each way into a queue that a test has: what a helper offers, too, leads through the same checks.
HELPED = {
    "immediate": in_immediate_mode,
    "immediate in a block": in_immediate_mode_in_a_block,
    "captured topic": captured_topic,
}


def refuses(way, payload) -> None:
    queue = Queue("work")
    queue.declare()
    with pytest.raises(PayloadError):
        WAYS[way](queue, payload)
    assert not MessageQueueItem.objects.exists()


@in_transaction
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_b114_a_test_in_a_transaction_refuses_what_production_refuses(way, payload):
    """There is no other way in: a test publishes through the same function, with the same checks."""
    refuses(way, payload)


@committed
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_b114_as_does_a_test_that_commits(way, payload):
    """The other kind of test, and production."""
    refuses(way, payload)


@in_transaction
@pytest.mark.parametrize("way", HELPED)
@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_b114_no_helper_accepts_what_production_refuses(way, payload):
    """Inside a TestCase; nothing is published, nothing is handled, and the transaction is usable."""
    helped_refuses(way, payload)


@committed
@pytest.mark.parametrize("way", HELPED)
@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_b114_nor_does_one_that_commits(way, payload):
    """Outside of one."""
    helped_refuses(way, payload)


def helped_refuses(way, payload) -> None:
    queue, seen = Queue("work"), []
    queue.handler(lambda message: seen.append(message))
    with capture_published() as captured, pytest.raises(PayloadError):
        HELPED[way](queue, payload)
    assert not MessageQueueItem.objects.exists()
    assert list(captured) == published() == seen == []


@in_transaction
@pytest.mark.parametrize("way", [*WAYS, *HELPED])
@pytest.mark.parametrize("kind", ["sync", "async", "batch"])
@pytest.mark.parametrize(("payload", "as_what"), ARRIVES.values(), ids=ARRIVES)
def test_b114_a_payload_arrives_as_in_production_whatever_the_helper(way, kind, payload, as_what):
    """What a handler gets, and what is said to have been published, has the types that a worker sees."""
    helped_arrives(way, kind, payload, as_what)


@committed
@pytest.mark.parametrize("way", [*WAYS, *HELPED])
@pytest.mark.parametrize(("payload", "as_what"), ARRIVES.values(), ids=ARRIVES)
def test_b114_as_it_does_where_a_test_commits(way, payload, as_what):
    """By worker threads."""
    helped_arrives(way, "sync", payload, as_what)


def helped_arrives(way, kind, payload, as_what) -> None:
    queue, seen = Queue("work"), []

    async def see_async(message) -> None:
        seen.append(message.payload)

    handlers = {
        "sync": lambda message: seen.append(message.payload),
        "async": see_async,
        "batch": lambda messages: seen.extend(message.payload for message in messages),
    }
    queue.handler(handlers[kind], batch=3 if kind == "batch" else None)
    {**WAYS, **HELPED}[way](queue, payload)
    drain_registered(queue, raises=True)
    for values in (seen, [message.payload for message in published(queue)]):
        (arrived,) = values
        assert arrived == as_what and type(arrived) is type(as_what)


@in_transaction
def test_b114_hooks_on_commit_and_the_helpers_work_together():
    """A message is there before any hook; in immediate mode its handler too, when the block ends."""
    queue, order = Queue("work"), []
    queue.handler(lambda message: order.append(message.payload))
    with TestCase.captureOnCommitCallbacks(execute=True):
        with immediate(), transaction.atomic():
            transaction.on_commit(lambda: order.append("hook"))
            queue.publish("message")
        assert order == ["message"]
        with capture_published() as captured:
            transaction.on_commit(lambda: queue.publish("of a hook"))
    assert order == ["message", "hook"]
    # Published when the hooks ran, after the block of the capture.
    assert list(captured) == []
    assert [message.payload for message in published(queue)] == ["message", "of a hook"]
    drain_registered()
    assert order[2:] == ["of a hook"]


def arrives(payload, as_what, take) -> None:
    queue = Queue("work")
    for publish in WAYS.values():
        publish(queue, payload)
        (arrived,) = take(queue)
        assert arrived == as_what and type(arrived) is type(as_what)


def claimed(queue: Queue) -> list:
    (message,) = queue.claim()
    queue.ack(message)
    return [message.payload]


@in_transaction
@pytest.mark.parametrize(("payload", "as_what"), ARRIVES.values(), ids=ARRIVES)
def test_b114_what_a_test_claims_has_the_types_that_a_worker_sees(payload, as_what):
    """It went through the database, as in production."""
    arrives(payload, as_what, claimed)


@committed
@pytest.mark.parametrize(("payload", "as_what"), ARRIVES.values(), ids=ARRIVES)
def test_b114_what_a_drain_hands_to_a_handler_has_them_too(payload, as_what):
    """The worker itself."""
    arrives(payload, as_what, drain)


@in_transaction
def test_b114_a_message_is_there_at_once_and_its_wake_up_is_a_commit_hook():
    """Nothing waits for on_commit but the wake-up and the refresh; captured hooks run in the caller's order."""
    queue = Queue("work")
    queue.declare()
    order: list[str] = []
    with TestCase.captureOnCommitCallbacks(execute=True) as callbacks:
        transaction.on_commit(lambda: order.append("before"))
        queue.publish({"n": 1})
        queue.publish({"n": 2})
        transaction.on_commit(lambda: order.append("after"))
        assert payloads("work") == [{"n": 1}, {"n": 2}]
    assert order == ["before", "after"]
    # One for the queue, however many were published.
    assert len(callbacks) == 3
    with TestCase.captureOnCommitCallbacks(execute=True):
        transaction.on_commit(lambda: queue.publish({"n": 3}))
        assert len(payloads("work")) == 2
    assert payloads("work") == [{"n": 1}, {"n": 2}, {"n": 3}]


# --- Draining inside a TestCase ---


def handle_sync(message) -> None:
    MessageQueue.objects.create(name=f"effect of {message.payload}")


async def handle_async(message) -> None:
    await MessageQueue.objects.acreate(name=f"effect of {message.payload}")


def handle_batch(messages) -> None:
    for message in messages:
        handle_sync(message)


@in_transaction
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (handle_sync, {"ack": "late", "concurrency": 3}),
        (handle_sync, {"ack": "early"}),
        (handle_sync, {"ack": "atomic"}),
        (handle_async, {}),
        (handle_async, {"ack": "early"}),
        (handle_batch, {"batch": 2}),
        (handle_batch, {"batch": 2, "ack": "atomic"}),
    ],
)
def test_b112_a_drain_inside_a_testcase_is_part_of_its_transaction(function, options):
    """Handlers see what the test published; what they write is seen by the test, and by nobody else."""
    queue = Queue("work")
    queue.publish_many([1, 2, 3])
    pid = connection.connection.info.backend_pid
    consumer = Consumer([make_handler(queue, function, **options)], drain=True)
    assert consumer.run() == 3
    assert MessageQueue.objects.filter(name__startswith="effect of ").count() == 3
    assert not MessageQueueItem.objects.exists()
    assert connection.in_atomic_block and connection.connection.info.backend_pid == pid
    with second_session() as other:
        assert not other.execute("SELECT FROM django_pgqueue_messagequeue WHERE name LIKE 'effect of %'").fetchall()
    # The test goes on.
    queue.publish(4)
    assert payloads("work") == [4]


@in_transaction
def test_b112_what_fails_inside_a_testcase_is_retried_and_dead_lettered_there():
    """As in production, and within the same transaction."""
    queue = Queue("work", max_deliveries=2, backoff={"base": 0})
    queue.publish(1)

    def fail(message) -> None:
        raise ValueError("no")

    Consumer([make_handler(queue, fail)], drain=True).run()
    (letter,) = MessageQueueItem.objects.filter(queue="work.dead")
    assert [failure["reason"] for failure in letter.failures] == ["builtins.ValueError: no"] * 2


@in_transaction
def test_b112_an_atomic_handler_that_fails_inside_a_testcase_leaves_the_test_usable():
    """Its changes are rolled back to where it began, and nothing else is."""
    queue = Queue("work", max_deliveries=1)
    queue.publish(1)

    def fail(message) -> None:
        MessageQueue.objects.create(name="effect")
        raise ValueError("no")

    Consumer([make_handler(queue, fail, ack="atomic")], drain=True).run()
    assert not MessageQueue.objects.filter(name="effect").exists()
    assert payloads("work.dead") == [1]
