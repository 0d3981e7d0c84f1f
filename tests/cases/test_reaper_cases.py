"""Real failures of other systems over queues that come and go: B59, B60, B64."""

import json
import logging
import random
import threading
import time

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from django_pgqueue import Queue
from django_pgqueue.conf import settings
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import reaping as reaping_services
from tests.support.locks import is_waiting
from tests.support.processes import reaping
from tests.support.rows import backdate, make_message, make_queue, payloads
from tests.support.sessions import in_threads, sessions
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def drain(queue: Queue) -> list:
    seen: list = []
    Consumer([make_handler(queue, lambda message: seen.append(message.payload))], drain=True).run()
    return seen


# --- B59: idle queue deleted under a publisher ---


@pytest.mark.full
def test_b59_publishers_of_a_queue_that_is_reaped_all_the_time_lose_nothing():
    """
    Four publishers, two reapers in a tight loop that think everything idle, a consumer that empties.

    No exception reaches a publisher, and every message is handled. They go on until the queue was
    really reaped a few times.
    """
    queue = Queue("busy", auto_deleted=True, ttl=float("inf"))
    queue.declare()
    handled: list[int] = []
    stop = threading.Event()

    def publish(number: int) -> list[int]:
        chance = random.Random(number)
        published: list[int] = []
        deadline = time.monotonic() + DEADLINE
        while len(published) < 200 or reaps() < 5:
            assert time.monotonic() < deadline, f"only {reaps()} reaps"
            first = number * 1_000_000 + len(published)
            if number % 2:
                queue.publish(first)
                queue.publish_many([first + 1, first + 2, first + 3])
            else:
                with transaction.atomic():
                    for more in range(4):
                        queue.publish(first + more)
            published += range(first, first + 4)
            time.sleep(chance.random() * 0.03)
        return published

    def reaps() -> int:
        return [*one, *other].count("busy")

    def consume() -> None:
        # By hand: a running consumer would keep the queue in use.
        try:
            while not stop.is_set() or MessageQueueItem.objects.exists():
                messages = queue.claim(100)
                queue.ack(*messages)
                handled.extend(message.payload for message in messages)
        finally:
            connections.close_all()

    consumer = threading.Thread(target=consume)
    with reaping(idle_for=0) as one, reaping(idle_for=0) as other:
        consumer.start()
        try:
            published = in_threads(4, publish)
        finally:
            stop.set()
            consumer.join(DEADLINE)
    assert sorted(handled) == sorted(number for numbers in published for number in numbers)
    assert not MessageQueueItem.objects.filter(queue=None).exists()


def test_b59_publishing_counts_as_activity():
    """A queue with producers only, idle limit a second, is never reaped while they publish."""
    queue = Queue("busy", auto_deleted=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(settings), "DECLARE_TTL", 0.2)
        with reaping(idle_for=1) as reaped:
            queue.declare()
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline:
                queue.publish({"n": 1})
                queue.ack(*queue.claim(10))
                time.sleep(0.01)
            assert "busy" not in reaped
        wait_until(lambda: "busy" in Reaper("default", idle_for=1).run_once().queues)


# --- B60: the delete waits for the publisher, then orphans its message ---


@pytest.mark.parametrize("form", ["publish", "publish_many"])
@pytest.mark.parametrize("first", ["publisher", "reaper"])
def test_b60_no_message_is_left_without_a_queue(form, first):
    """A publisher that holds its transaction open and a reaper, whichever starts first."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    backdate("q", 9999)
    params = {"name": "q", "idle_for": 3600}

    def publish() -> None:
        queue.publish({}) if form == "publish" else queue.publish_many([{}])

    with sessions(2) as (publisher, reaper):
        publisher.begin()
        if first == "publisher":
            publisher.run(publish)
            assert reaper.run(reaping_services.reap_queue, "q", 3600, "default") is False
        else:
            reaper.begin()
            assert reaper.sql(reaping_services.LOCK_IDLE_QUEUE, params)
            publishing = publisher.start(publish)
            wait_until(lambda: is_waiting(publisher.pid), what="the publisher to wait for the reaper")
            assert reaper.sql(reaping_services.DELETE_IDLE_QUEUE, params)
            reaper.commit()
            publishing.result(DEADLINE)
        publisher.commit()
    assert not MessageQueueItem.objects.filter(queue=None).exists()
    assert drain(queue) == [{}]


@pytest.mark.parametrize(
    "state",
    [{"due_in": 9999}, {"lease": 60}, {"lease": -60}, {"dead_lettered_from": "other"}],
    ids=["future", "claimed", "lapsed", "dead letters"],
)
def test_b60_a_queue_with_only_such_messages_is_never_reaped(state):
    """Pending, future, claimed, dead: the queue stays."""
    make_queue("q", idle=9999, auto_deleted=True)
    make_message("q", **state)
    assert Reaper("default", idle_for=3600).run_once().queues == []
    assert MessageQueueItem.objects.get().queue_id == "q"


# --- B64: messages expire unseen while consumers are down ---


def grow_older(seconds: float) -> None:
    """Let every message look `seconds` older than it is."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "UPDATE django_pgqueue_messagequeueitem SET published_at = published_at - %(age)s * interval '1 second',"
            " read_after = read_after - %(age)s * interval '1 second',"
            " expires_at = expires_at - %(age)s * interval '1 second'",
            {"age": seconds},
        )


@pytest.mark.parametrize("outage", [301, 3_601, 2 * 86_400], ids=["5 minutes", "1 hour", "2 days"])
def test_b64_by_default_nothing_expires_on_a_standing_queue(outage):
    """However long the consumers were down."""
    queue = Queue("orders")
    queue.publish_many(range(100))
    grow_older(outage)
    assert Reaper("default").run_once().expired == 0
    assert sorted(drain(queue)) == list(range(100))


def test_b64_what_expires_is_counted_in_the_output_and_in_the_log(caplog, capsys):
    """A TTL that was asked for, and the default one of auto-deleted queues."""
    Queue("orders").publish_many(range(100), ttl=2)
    Queue("tmp", auto_deleted=True).publish_many(range(10))
    grow_older(301)
    with caplog.at_level(logging.INFO, "django_pgqueue"):
        call_command("reap_queues", format="json")
    assert json.loads(capsys.readouterr().out)["expired"] == 110
    told = {record.message for record in caplog.records}
    assert {"messages expired queue=orders count=100", "messages expired queue=tmp count=10"} <= told


def test_b64_with_a_dead_letter_queue_configured_the_expired_go_there():
    """Not one is dropped, and each tells why it is there."""
    queue = Queue("orders", dead_letter="graveyard")
    queue.publish_many(range(100), ttl=2)
    grow_older(3)
    reaped = Reaper("default", batch_size=30).run_once()
    assert (reaped.expired, reaped.dead_lettered) == (0, 100)
    assert sorted(payloads("graveyard")) == list(range(100))
    assert {item.failures[-1]["reason"] for item in MessageQueueItem.objects.all()} == {"expired"}


def test_b64_an_expired_message_is_not_delivered():
    """A claim passes it over even when no reaper has run."""
    queue = Queue("orders")
    queue.publish("late", ttl=2)
    queue.publish("fine")
    grow_older(3)
    assert drain(queue) == ["fine"]


def test_b64_a_ttl_that_passes_while_the_message_is_handled_takes_nothing_away():
    """It stays beneath its handler, and the ack works."""
    queue = Queue("orders")
    queue.publish({"n": 1}, ttl=2)
    (message,) = queue.claim()
    grow_older(3)
    assert Reaper("default").run_once().expired == 0
    queue.extend(message)
    queue.ack(message)
    assert not MessageQueueItem.objects.exists()


def test_b64_a_ttl_goes_on_through_a_retry():
    """Given back, it expires as it would have: the retry is not a new publish."""
    queue = Queue("orders")
    queue.publish({"n": 1}, ttl=2)
    (message,) = queue.claim()
    queue.nack(message, delay=0)
    grow_older(3)
    assert queue.claim() == []
    assert Reaper("default").run_once().expired == 1


def test_b64_the_ttl_counts_from_the_due_time():
    """A delayed message has its whole TTL once it is due."""
    queue = Queue("orders")
    queue.publish({"n": 1}, delay=100, ttl=50)
    grow_older(120)
    assert Reaper("default").run_once().expired == 0
    assert drain(queue) == [{"n": 1}]
