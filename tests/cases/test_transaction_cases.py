"""Real failures of other systems over transactions and clocks: B47, B53, B54."""

import re
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection, transaction
from django.utils import timezone

import django_pgqueue
from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import declaring
from tests.support.processes import consuming
from tests.support.rows import age_of, backdate, delete_queue, make_queue, payloads
from tests.support.sessions import Session, fetch
from tests.support.waiting import DEADLINE, busy, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def handled(queue: Queue) -> list:
    seen: list = []
    Consumer([make_handler(queue, lambda message: seen.append(message.payload))], drain=True).run()
    return seen


# --- B53: the foreign-key failure arrives only at COMMIT ---

PUBLISH = {
    "publish": lambda queue: queue.publish({"n": 1}),
    "publish_many": lambda queue: queue.publish_many([{"n": 1}]),
}


@pytest.fixture(params=PUBLISH)
def publish(request):
    return PUBLISH[request.param]


@pytest.mark.parametrize("nested", [False, True], ids=["outer", "nested"])
def test_b53_a_reaper_beside_an_open_publisher_never_breaks_its_commit(publish, nested):
    """A publishes to an idle queue and pauses; B reaps; A commits, and its message is handled."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()

    def work() -> None:
        make_queue("business row")
        if nested:
            with transaction.atomic():
                publish(queue)
        else:
            publish(queue)

    with Session() as a:
        a.begin()
        a.run(work)
        backdate("q", 9999)
        assert Reaper("default", idle_for=3600).run_once().queues == []
        a.commit()
    assert MessageQueue.objects.filter(name="business row").exists()
    assert not MessageQueueItem.objects.filter(queue=None).exists()
    assert handled(queue) == [{"n": 1}]


@pytest.mark.parametrize("nested", [False, True], ids=["outer", "nested"])
def test_b53_a_queue_deleted_after_the_first_query_and_before_the_insert_is_healed(publish, nested):
    """The healing happens inside publish, so COMMIT has nothing left to complain about; two queues at once."""
    one, two = Queue("q1", auto_deleted=True), Queue("q2", auto_deleted=True)
    for queue in (one, two):
        queue.declare()
    with transaction.atomic():
        make_queue("business row")
        for queue in (one, two):
            delete_queue(queue.name)
        if nested:
            with transaction.atomic():
                publish(one)
        else:
            publish(one)
        publish(two)
    assert MessageQueue.objects.filter(name="business row").exists()
    assert handled(one) == handled(two) == [{"n": 1}]


PLAIN_INSERT = "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('q', %s) RETURNING id"


# --- B54: self-healing inside atomic breaks the outer transaction ---


BLOCKS = {"atomic": {}, "durable": {"durable": True}, "no savepoint": {"savepoint": False}, "autocommit": None}


@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
def test_b54_rows_before_and_after_a_heal_are_there(publish, options):
    """Never a TransactionManagementError, never needs_rollback."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()

    def work() -> None:
        make_queue("row 1")
        delete_queue("q")
        publish(queue)
        assert not connection.needs_rollback
        make_queue("row 2")

    if options is None:
        work()
    elif "savepoint" in options:
        with transaction.atomic(), transaction.atomic(**options):
            work()
    else:
        with transaction.atomic(**options):
            work()
    assert MessageQueue.objects.filter(name__startswith="row").count() == 2
    assert payloads("q") == [{"n": 1}]


def test_b54_a_thousand_publishes_in_one_transaction_take_one_transaction_id():
    """No savepoint each: that would be two more round trips and an id of its own for every publish."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    delete_queue("q")
    with transaction.atomic():
        (before,) = fetch("SELECT pg_current_xact_id()::text::bigint")[0]
        started = time.perf_counter()
        for n in range(1_000):
            queue.publish({"n": n})
        publishing = time.perf_counter() - started
        started = time.perf_counter()
        with connection.cursor() as cursor:
            for n in range(1_000):
                cursor.execute(PLAIN_INSERT, [f'{{"n": {n}}}'])
                cursor.fetchone()
        plain = time.perf_counter() - started
    with transaction.atomic():
        (after,) = fetch("SELECT pg_current_xact_id()::text::bigint")[0]
    assert MessageQueueItem.objects.filter(queue="q").values("payload__n").distinct().count() == 1_000
    # The healed queue's hook took one, other tables' vacuum may take some: savepoints would take 1,000.
    assert after - before < 100
    assert publishing < 4 * plain + 0.5


# --- B47: application and database clocks disagree ---

SHIFTS = {"10 minutes ahead": 600, "10 minutes behind": -600, "a day ahead": 86_400}


@pytest.fixture(params=SHIFTS)
def shifted(request, monkeypatch):
    """Let this process's wall clock be wrong; elapsed time is monotonic and stays right."""
    shift, real, now = SHIFTS[request.param], time.time, timezone.now
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    monkeypatch.setattr(timezone, "now", lambda: now() + timedelta(seconds=shift))
    return shift


def test_b47_delays_leases_and_expiry_do_not_follow_the_applications_clock(shifted):
    """Due after its delay, held for its lease, expired after its TTL: all by the database."""
    queue = Queue("q", lease=1.5)
    began = time.monotonic()
    queue.publish({"n": 1}, delay=0.5)
    queue.publish({"n": 2}, ttl=3600)
    queue.publish({"n": 3}, ttl=0.3)
    (due,) = [message.payload for message in queue.claim(1)]
    assert due == {"n": 2}
    wait_until(lambda: queue.stats().expired == 1, timeout=2)
    assert 0.3 <= time.monotonic() - began < 1.3 * busy()
    # What is delayed comes after its delay, what is leased after its lease, and what expired never.
    seen = {}
    while len(seen) < 2 and time.monotonic() - began < DEADLINE:
        for message in queue.claim(10):
            seen[message.payload["n"]] = time.monotonic() - began
            queue.ack(message)
        time.sleep(0.02)
    assert 0.5 <= seen[1] < 1.5 * busy()
    assert 1.5 <= seen[2] < 2.9 * busy()


def test_b47_idleness_does_not_follow_the_applications_clock(shifted):
    """A queue that was used a minute ago is not idle for an hour, whatever this host thinks."""
    make_queue("used", idle=60, auto_deleted=True)
    make_queue("idle", idle=3700, auto_deleted=True)
    assert Reaper("default", idle_for=3600).run_once().queues == ["idle"]
    declaring.touch(["used"], "default")
    assert abs(age_of("used")) < 5


def test_b47_leases_are_extended_and_messages_expire_by_the_databases_clock(shifted):
    """A handler of two leases is started once by two consumers, and a reaper takes what expired and nothing else."""
    queue = Queue("q", lease=1)
    started: list = []

    def handle(message: Message) -> None:
        started.append((message.payload, message.delivery_count))
        time.sleep(2)

    queue.publish_many(["slow", "slow too"])
    with consuming(Consumer([make_handler(queue, handle)])), consuming(Consumer([make_handler(queue, handle)])):
        wait_until(lambda: not payloads("q"))
    assert sorted(started) == [("slow", 1), ("slow too", 1)]
    queue.publish("expires soon", ttl=0.2)
    queue.publish("expires in an hour", ttl=3600)
    wait_until(lambda: queue.stats().expired == 1, timeout=2)
    assert Reaper("default").run_once().expired == 1
    assert payloads("q") == ["expires in an hour"]


#: What would tell the time of this host.
WALL_CLOCK = re.compile(r"\btime\.time\b|\btime_ns\b|\b(timezone|datetime)\.now\b|utcnow|\.today\b|CLOCK_REALTIME")


def test_b47_no_module_of_the_package_asks_this_host_for_the_time():
    """The database's clock decides, and what elapses here is measured by a monotonic one."""
    modules = list(Path(django_pgqueue.__file__).parent.rglob("*.py"))
    assert len(modules) > 20
    # Which compares the two clocks, to tell where they differ; which dates the span of a claim; and which tells when a
    # task was enqueued, and refuses a run_after of another age of the world.
    found = {module.name for module in modules if WALL_CLOCK.search(module.read_text())}
    assert found == {"diagnosis.py", "opentelemetry.py", "backend.py"}


@pytest.mark.parametrize("form", ["publish", "publish_many", "heal"])
def test_b47_delay_and_ttl_count_from_the_publish_in_a_long_transaction(form):
    """Not from the transaction's start, which may be long ago."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    if form == "heal":
        delete_queue("q")
    with transaction.atomic():
        fetch("SELECT pg_sleep(0.3)")
        if form == "publish_many":
            queue.publish_many([{"n": 1}], delay=10, ttl=20)
        else:
            queue.publish({"n": 1}, delay=10, ttl=20)
        ((due, expires),) = fetch(
            "SELECT extract(epoch FROM read_after - now()), extract(epoch FROM expires_at - now())"
            " FROM django_pgqueue_messagequeueitem"
        )
    assert due >= 10.3
    assert expires >= 30.3


def test_b47_a_clock_that_steps_back_while_a_consumer_runs_changes_nothing(monkeypatch):
    """A delayed message is handled on time; the consumer's waits are of elapsed time."""
    queue = Queue("q")
    seen: list[float] = []
    consumer = Consumer([make_handler(queue, lambda message: seen.append(time.monotonic()))])
    with Session() as thread:
        running: Future[int] = thread.start(consumer.run)
        try:
            queue.publish({"n": 1})
            wait_until(lambda: len(seen) == 1)
            real = time.time
            monkeypatch.setattr(time, "time", lambda: real() - 300)
            began = time.monotonic()
            queue.publish({"n": 2}, delay=1)
            wait_until(lambda: len(seen) == 2)
            assert 1 <= seen[1] - began < 2 * busy()
        finally:
            consumer.stop()
            running.result(DEADLINE)
