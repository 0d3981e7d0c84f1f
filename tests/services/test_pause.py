"""Pausing: no claim by anybody until the queue is resumed, whatever else goes on."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from django_pgqueue import Message, Queue, QueueNotFound, signals
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import declaring, reaping
from django_pgqueue.services.beliefs import beliefs
from tests.support.processes import consuming, drain, worker
from tests.support.rows import backdate, payloads
from tests.support.sessions import second_session
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue() -> Queue:
    queue = Queue("q")
    queue.declare()
    return queue


def paused_at() -> Any:
    return MessageQueue.objects.values_list("paused_at", flat=True).get(name="q")


class Log:
    """A handler that notes the payloads, and waits in the first one until it is let go."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.go = threading.Event()

    def __call__(self, message: Message) -> None:
        self.seen.append(message.payload)
        self.go.wait(20)


# --- What it stops ---


def test_nobody_claims_from_a_paused_queue_until_it_is_resumed(queue: Queue) -> None:
    """By hand, in a drain: nothing comes, nothing is counted; publishing goes on."""
    queue.publish(1)
    queue.pause()
    assert queue.publish(2)
    assert queue.claim(10) == []
    assert drain(queue) == []
    assert set(MessageQueueItem.objects.values_list("delivery_count", "lease_token")) == {(0, None)}
    queue.resume()
    assert drain(queue) == [1, 2]


def test_what_is_held_ends_normally(queue: Queue) -> None:
    """Acked, extended, given back or rejected as ever: pausing touches no lease."""
    queue.publish_many(range(4))
    one, two, three, four = queue.claim(4)
    queue.pause()
    queue.extend(one, two, three, four)
    queue.ack(one)
    queue.nack(two, delay=0)
    queue.reject(three)
    queue.extend(four)
    assert queue.claim(4) == []
    queue.resume()
    assert [message.payload for message in queue.claim(4)] == [1]


def test_a_running_consumer_ends_what_runs_and_gives_back_what_waits(queue: Queue, settings: Any) -> None:
    """At its next look; what it gives back counts no delivery, and is handled after the resume."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.1}
    queue.publish_many(range(5))
    log = Log()
    with consuming(Consumer([make_handler(queue, log)], prefetch=20)):
        wait_until(lambda: log.seen == [0])
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 5)
        queue.pause()
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 1)
        assert set(MessageQueueItem.objects.ready().values_list("delivery_count", flat=True)) == {0}
        log.go.set()
        wait_until(lambda: payloads("q") == [1, 2, 3, 4])
        assert log.seen == [0]
        queue.resume()
        wait_until(lambda: not payloads("q"))
    assert log.seen == [0, 1, 2, 3, 4]


def test_a_full_consumer_stops_too(queue: Queue, settings: Any) -> None:
    """With its buffer full it has no use for a claim; it looks all the same, every so often."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.1, "LEASE": 3}
    queue.publish_many(range(30))
    log = Log()
    with consuming(Consumer([make_handler(queue, log)], prefetch=20)):
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 20)
        queue.pause()
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 1)
        log.go.set()
        wait_until(lambda: len(payloads("q")) == 29)
        assert log.seen == [0]


def test_two_queues_of_one_consumer_are_paused_one_at_a_time(queue: Queue, settings: Any) -> None:
    """The other goes on."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.1}
    other = Queue("other")
    queue.pause()
    log = Log()
    log.go.set()
    with consuming(Consumer([make_handler(queue, log), make_handler(other, log)])):
        queue.publish("paused")
        for number in range(5):
            other.publish(number)
            wait_until(lambda number=number: number in log.seen)
    assert log.seen == list(range(5))
    assert payloads("q") == ["paused"]


def test_a_real_worker_is_paused_and_resumed(tmp_path: Path) -> None:
    """What was running is finished, what waited is handled once, as a first delivery."""
    with worker("--concurrency", "1") as running:
        queue = Queue("work")
        ids = queue.publish_many([{"hold": str(tmp_path / "go")}] + [{}] * 9)
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 10)
        queue.pause()
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 1)
        (tmp_path / "go").touch()
        wait_until(lambda: len(payloads("work")) == 9)
        queue.resume()
        wait_until(lambda: not payloads("work"))
        assert running.stop() == 0
    assert sorted(Seen.objects.values_list("msg_id", "attempt")) == [(message_id, 1) for message_id in ids]


# --- What leaves it paused ---


def test_no_declare_resumes_a_queue(queue: Queue) -> None:
    """Nor a refresh, a heartbeat, a consumer's start or a redrive: it is the operators' own column."""
    queue.pause()
    before = paused_at()
    queue.declare()
    Queue("q", max_deliveries=9).declare()
    backdate("q", 3600)
    beliefs.forget()
    queue.publish(1)
    backdate("q", 3600)
    declaring.touch(["q"], "default")
    with consuming(Consumer([make_handler(queue, print)])):
        queue.redrive()
    assert paused_at() == before


def test_a_paused_queue_is_not_reaped() -> None:
    """With its row the pause would be gone, and the next publish would make a queue that runs."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    queue.pause()
    backdate("q", 7200)
    assert Reaper("default").preview().queues == []
    assert "q" not in Reaper("default").run_once().queues
    assert not reaping.reap_queue("q", 3600, "default")
    queue.resume()
    assert Reaper("default").run_once().queues == ["q"]


def test_a_queue_that_is_paused_while_the_reaper_looks_at_it_stays() -> None:
    """Paused after it was found idle and before it is locked: looked at again under the lock."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    backdate("q", 7200)
    assert "q" in dict(reaping.idle_queues(3600, "default"))
    with second_session(autocommit=False) as operator:
        operator.execute("UPDATE django_pgqueue_messagequeue SET paused_at = now() WHERE name = 'q'")
        # Locked: passed over.
        assert not reaping.reap_queue("q", 3600, "default")
        operator.commit()
    assert not reaping.reap_queue("q", 3600, "default")
    assert MessageQueue.objects.filter(name="q").exists()


def test_lapsed_messages_of_a_paused_queue_are_still_set_aside(queue: Queue) -> None:
    """Nobody claims there, so that the reaper does what a claim would, though consumers live."""
    queue.publish(1)
    queue.claim()
    MessageQueueItem.objects.update(delivery_count=5, lease_expires_at="2026-01-01T00:00:00Z")
    with consuming(Consumer([make_handler(Queue("elsewhere"), print), make_handler(queue, print)])) as consumer:
        queue.pause()
        wait_until(lambda: consumer is not None and paused_at())
        Reaper("default").run_once()
    assert payloads("q.dead") == [1]


# --- Resuming ---


def test_a_resume_wakes_the_consumers(queue: Queue, settings: Any) -> None:
    """They would look again in a minute."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60}
    queue.pause()
    queue.publish(1)
    seen: list[Any] = []
    with consuming(Consumer([make_handler(queue, lambda message: seen.append(message.payload))])) as consumer:
        wait_until(consumer._channels.listening.is_set)
        wait_until(lambda: consumer.lanes[0].next_look > time.monotonic() + 30)
        assert seen == []
        queue.resume()
        wait_until(lambda: seen == [1], 10)


def test_a_resume_right_after_a_publish_wakes_them_too(queue: Queue, settings: Any) -> None:
    """Its own wake-up is suppressed then: who was woken by the publish looks once more before it sleeps."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60, "NOTIFY_INTERVAL": 2}
    queue.pause()
    seen: list[Any] = []
    with consuming(Consumer([make_handler(queue, lambda message: seen.append(message.payload))])) as consumer:
        wait_until(consumer._channels.listening.is_set)
        wait_until(lambda: consumer.lanes[0].next_look > time.monotonic() + 30)
        time.sleep(2)
        queue.publish(1)
        # Woken, it found the queue paused, and will look again.
        wait_until(lambda: consumer.lanes[0].next_look < time.monotonic() + 30)
        queue.resume()
        wait_until(lambda: seen == [1], 15)


def test_pause_and_resume_join_a_transaction(queue: Queue) -> None:
    """Rolled back they have not happened, and nobody is told or woken."""
    told: list[str] = []

    def paused(sender: str, **kwargs: Any) -> None:
        told.append(f"paused {sender}")

    def resumed(sender: str, **kwargs: Any) -> None:
        told.append(f"resumed {sender}")

    signals.queue_paused.connect(paused)
    signals.queue_resumed.connect(resumed)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        queue.pause()
        raise ZeroDivisionError
    assert (paused_at(), told) == (None, [])
    with transaction.atomic():
        queue.pause()
        queue.resume()
        queue.pause()
        assert told == []
    assert told == ["paused q", "resumed q", "paused q"]
    assert queue.claim() == []


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_queue_that_is_not_there_cannot_be_paused(verb: str) -> None:
    """Loud, and not made by it."""
    with pytest.raises(QueueNotFound):
        getattr(Queue("nobody"), verb)()
    assert not MessageQueue.objects.filter(name="nobody").exists()
