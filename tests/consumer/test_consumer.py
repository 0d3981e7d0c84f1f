"""The consumer: what it claims when, how it ends, and what it costs when there is nothing to do."""

import threading
import time
from typing import Any

import pytest

from django_pgqueue import Message, Nack, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import claiming, notifying
from tests.support.processes import consuming
from tests.support.rows import make_message, make_queue, payloads
from tests.support.sessions import connect
from tests.support.waiting import busy, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def slow_poll(settings: Any) -> None:
    """Polling is too slow to hide a wake-up that does not arrive."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60}


class Gate:
    """A handler that is held until it is opened, and knows who is inside."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.most = 0
        self.seen: list[Any] = []
        self._open = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            self.inside.append(message.payload)
            self.seen.append(message.payload)
            self.most = max(self.most, len(self.inside))
        self._open.wait(20)
        with self._lock:
            self.inside.remove(message.payload)

    def open(self) -> None:
        self._open.set()


# --- How much at once ---


def test_no_more_handlers_run_at_once_than_the_concurrency() -> None:
    """Three of ten, and the other seven wait."""
    queue, gate = Queue("q"), Gate()
    queue.publish_many(list(range(10)))
    with consuming(Consumer([make_handler(queue, gate, concurrency=3)])):
        wait_until(lambda: len(gate.inside) == 3)
        time.sleep(0.1)  # A fourth would come at once.
        gate.open()
        wait_until(lambda: len(gate.seen) == 10)
    assert gate.most == 3


def test_no_more_messages_are_held_than_the_prefetch() -> None:
    """Running and waiting ones together; the rest is left for others."""
    queue, gate = Queue("q"), Gate()
    queue.publish_many(list(range(20)))
    with consuming(Consumer([make_handler(queue, gate, concurrency=2)], prefetch=5)):
        wait_until(lambda: len(gate.inside) == 2)
        assert MessageQueueItem.objects.leased().count() == 5
        time.sleep(0.1)  # Another claim would come at once.
        assert MessageQueueItem.objects.leased().count() == 5
        gate.open()
        wait_until(lambda: not payloads("q"))
    assert sorted(gate.seen) == list(range(20))


def test_max_messages_ends_after_so_many() -> None:
    """No more is claimed, not even by prefetch."""
    queue = Queue("q")
    queue.publish_many(list(range(10)))
    seen: list[Any] = []
    consumer = Consumer(
        [make_handler(queue, lambda message: seen.append(message.payload), concurrency=2)], max_messages=4
    )
    assert consumer.run() == 4
    assert sorted(seen) == [0, 1, 2, 3]
    assert payloads("q") == [4, 5, 6, 7, 8, 9]
    assert MessageQueueItem.objects.leased().count() == 0


def test_several_queues_are_served_by_one_consumer() -> None:
    """A full queue does not starve another one."""
    big, small = Queue("big"), Queue("small")
    big.publish_many(list(range(300)))
    small.publish("small")
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)

    assert Consumer([make_handler(big, handle), make_handler(small, handle)], drain=True).run() == 301
    assert seen.index("small") < 250


def test_a_consumer_is_for_one_database() -> None:
    """Nothing to consume is an error too."""
    with pytest.raises(ValueError, match="one database"):
        Consumer([])


# --- Drain ---


def test_drain_ends_when_nothing_is_ready_and_nothing_is_held() -> None:
    """What the handlers publish on the way is handled too; what is delayed stays."""
    queue = Queue("q")
    queue.publish_many([3, 0])
    queue.publish("later", delay=60)

    def handle(message: Message) -> None:
        if message.payload:
            queue.publish(message.payload - 1)

    assert Consumer([make_handler(queue, handle)], drain=True).run() == 5
    assert payloads("q") == ["later"]


def test_drain_waits_for_a_message_that_is_given_back_at_once() -> None:
    """Given back by a slow handler, long after the last look found nothing, it is ready and is handled."""
    queue = Queue("q")
    queue.publish(1)

    def handle(message: Message) -> None:
        if message.delivery_count == 1:
            time.sleep(0.3)
            raise Nack(delay=0)

    assert Consumer([make_handler(queue, handle)], drain=True).run() == 2
    assert payloads("q") == []


def test_draining_an_empty_queue_ends_at_once() -> None:
    """And makes it, as its first use."""
    queue = Queue("q")
    assert Consumer([make_handler(queue, print)], drain=True).run() == 0
    assert MessageQueue.objects.filter(name="q").exists()


# --- When it looks ---


def test_a_publish_wakes_the_consumer(slow_poll: None) -> None:
    """A minute of polling interval, and each message is handled within a blink."""
    queue = Queue("q")
    seen: list[Any] = []
    with consuming(Consumer([make_handler(queue, lambda message: seen.append(message.payload))])) as consumer:
        wait_until(lambda: consumer._channels.listening.is_set())
        for number in range(5):
            time.sleep(0.15)  # Let it fall asleep again.
            queue.publish(number)
            wait_until(lambda number=number: len(seen) == number + 1, 5)  # type: ignore[misc]


def test_a_burst_that_is_notified_once_is_handled_whole(slow_poll: None) -> None:
    """Publishers suppress wake-ups within NOTIFY_INTERVAL: the consumer looks once more by itself."""
    queue = Queue("q")
    seen: list[Any] = []
    with consuming(Consumer([make_handler(queue, lambda message: seen.append(message.payload))])) as consumer:
        wait_until(lambda: consumer._channels.listening.is_set())
        for _ in range(10):
            time.sleep(0.1)
            before = len(seen)
            for number in range(5):
                queue.publish(number)
                time.sleep(0.005)
            wait_until(lambda before=before: len(seen) == before + 5, 5)  # type: ignore[misc]


def test_a_wake_up_during_the_last_look_is_not_lost(slow_poll: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published after the claim and heard before the consumer has decided to sleep: it looks again."""
    queue = Queue("q")
    seen: list[Any] = []
    consumer = Consumer([make_handler(queue, lambda message: seen.append(message.payload))])
    real_look = claiming.look
    published = threading.Event()

    def look(name: str, using: str) -> claiming.SleepPlan:
        found = real_look(name, using)
        if consumer._channels.listening.is_set() and not published.is_set():
            queue.publish("in between")
            # What the listener's thread does when the notification arrives.
            consumer._receiver(consumer.lanes[0])("")
            published.set()
        return found

    monkeypatch.setattr(claiming, "look", look)
    # Heard through the line above alone.
    monkeypatch.setattr(notifying, "wake", lambda *told: None)
    with consuming(consumer):
        wait_until(published.is_set)
        wait_until(lambda: seen == ["in between"], 5)


def test_a_delayed_message_is_handled_when_it_is_due(slow_poll: None) -> None:
    """Nobody notifies then: the consumer sleeps no longer than until the earliest due time."""
    queue = Queue("q")
    seen: list[Any] = []
    with consuming(Consumer([make_handler(queue, lambda message: seen.append(time.monotonic()))])) as consumer:
        wait_until(lambda: consumer._channels.listening.is_set())
        began = time.monotonic()
        queue.publish("now", delay=0.6)
        wait_until(lambda: seen, 5)
    assert 0.5 < seen[0] - began < 2.5 * busy()


def test_a_retry_is_handled_when_it_is_due(slow_poll: None) -> None:
    """The consumer that gave it back looks in time, though it was leased when the last look was planned."""
    queue = Queue("q")
    seen: list[int] = []

    def handle(message: Message) -> None:
        seen.append(message.delivery_count)
        if message.delivery_count == 1:
            time.sleep(0.4)
            raise Nack(delay=0.3)

    queue.publish(1)
    with consuming(Consumer([make_handler(queue, handle)])):
        wait_until(lambda: seen == [1, 2], 5)


def test_a_consumer_makes_its_queue_again_and_adopts_its_messages(settings: Any) -> None:
    """The row deleted by hand while it runs: at its next look the queue is back, with its messages."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.2}
    queue = Queue("q")
    seen: list[Any] = []
    with consuming(Consumer([make_handler(queue, lambda message: seen.append(message.payload))])):
        wait_until(lambda: MessageQueue.objects.filter(name="q").exists())
        with connect(autocommit=False) as admin:
            admin.execute("INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('q', '1')")
            admin.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = 'q'")
        wait_until(lambda: seen == [1])
    assert MessageQueue.objects.filter(name="q").exists()


def test_a_paused_queue_is_left_alone_without_spinning(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that just became due and cannot be claimed are no reason to look a thousand times a second."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.5}
    make_queue("q", paused_at="2026-01-01T00:00:00Z")
    queue = Queue("q")
    for tenth in range(10):
        make_message("q", due_in=tenth / 10)
    looks: list[float] = []
    real_look = claiming.look

    def look(name: str, using: str) -> claiming.SleepPlan:
        looks.append(time.monotonic())
        return real_look(name, using)

    monkeypatch.setattr(claiming, "look", look)
    with consuming(Consumer([make_handler(queue, print)])):
        time.sleep(1.2)
    assert len(payloads("q")) == 10
    assert len(looks) < 80


# --- Suspects ---


def test_suspects_are_handled_with_nothing_else_in_hand() -> None:
    """Among twenty messages and four workers, each suspect runs alone; then the others run together."""
    queue = Queue("q")
    queue.publish_many(list(range(10)))
    suspects = {make_message("q", f"suspect {number}", lease=-1).payload for number in range(3)}
    queue.publish_many(list(range(10, 20)))
    lock = threading.Lock()
    inside: list[Any] = []
    beside: dict[Any, int] = {}

    def handle(message: Message) -> None:
        with lock:
            inside.append(message.payload)
        for _ in range(5):
            time.sleep(0.01)
            with lock:
                leased = len(inside)
                beside[message.payload] = max(beside.get(message.payload, 0), leased)
        if message.payload in suspects:
            assert MessageQueueItem.objects.leased().count() == 1
        with lock:
            inside.remove(message.payload)

    assert Consumer([make_handler(queue, handle, concurrency=4)], drain=True).run() == 23
    assert payloads("q") == []
    assert len(beside) == 23
    assert {beside[suspect] for suspect in suspects} == {1}
    assert max(beside.values()) > 1


def test_a_suspect_waits_until_nothing_is_held(settings: Any) -> None:
    """Met while another handler runs, it is left alone, and so is what was published meanwhile: it comes first."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.1}
    queue, gate = Queue("q"), Gate()
    queue.publish("long")
    consumer = Consumer([make_handler(queue, gate, concurrency=2)])
    with consuming(consumer):
        wait_until(lambda: gate.inside == ["long"])
        make_message("q", "suspect", lease=-1)
        wait_until(lambda: consumer.lanes[0].suspect_waiting)
        queue.publish("fresh")
        time.sleep(0.3)  # Three polls.
        assert gate.seen == ["long"]
        gate.open()
        wait_until(lambda: len(gate.seen) == 3)
    assert gate.seen == ["long", "suspect", "fresh"]


def test_a_stream_of_suspects_does_not_starve_fresh_messages() -> None:
    """After a prefetch of suspects in a row others get a turn, however many suspects stand before them."""
    queue = Queue("q")
    queue.declare()
    for number in range(30):
        make_message("q", f"suspect {number}", lease=-1)
    queue.publish("fresh")
    seen: list[Any] = []
    Consumer([make_handler(queue, lambda message: seen.append(message.payload))], prefetch=5, drain=True).run()
    assert len(seen) == 31
    assert seen.index("fresh") == 5


def test_a_suspect_does_not_wait_for_a_handler_that_runs_for_hours(settings: Any) -> None:
    """It is taken beside a handler that has been running for longer than a lease."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.1}
    queue, gate = Queue("q", lease=0.5), Gate()
    queue.publish("long")
    consumer = Consumer([make_handler(queue, gate, concurrency=2)])
    with consuming(consumer):
        wait_until(lambda: gate.inside == ["long"])
        make_message("q", "suspect", lease=-1)
        wait_until(lambda: gate.inside == ["long", "suspect"])
        gate.open()
        wait_until(lambda: not payloads("q"))
    assert gate.seen == ["long", "suspect"]


# --- Stopping ---


def test_stop_gives_back_what_has_not_started() -> None:
    """At once, uncounted, while a handler still runs; that one ends and is acked."""
    queue, gate = Queue("q"), Gate()
    queue.publish_many(list(range(8)))
    with consuming(Consumer([make_handler(queue, gate)])) as consumer:
        wait_until(lambda: gate.inside == [0])
        assert MessageQueueItem.objects.leased().count() == 8
        consumer.stop()
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 1)
        assert MessageQueueItem.objects.ready().filter(delivery_count=0).count() == 7
        gate.open()
    assert gate.seen == [0]
    assert payloads("q") == [1, 2, 3, 4, 5, 6, 7]


def test_a_handler_that_outlives_the_grace_keeps_its_message_leased() -> None:
    """Neither acked nor given back: its lease runs out, and somebody else handles it."""
    queue, gate = Queue("q"), Gate()
    queue.publish(1)
    began = time.monotonic()
    with consuming(Consumer([make_handler(queue, gate)], grace=0.3)) as consumer:
        wait_until(lambda: gate.inside == [1])
        consumer.stop()
    assert time.monotonic() - began < 5 * busy()
    assert MessageQueueItem.objects.leased().count() == 1
    gate.open()
    wait_until(lambda: not any(thread.name.startswith("pgqueue q/") for thread in threading.enumerate()))
    assert MessageQueueItem.objects.leased().count() == 1


def test_what_is_given_back_wakes_another_consumer(slow_poll: None) -> None:
    """The messages of a worker that stops are not left until the next poll."""
    queue, first, seen = Queue("q"), Gate(), []
    queue.publish_many(list(range(6)))
    with consuming(Consumer([make_handler(queue, first)])) as stopping:
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 6)
        idle = Consumer([make_handler(queue, lambda message: seen.append(message.payload))])
        with consuming(idle):
            wait_until(lambda: idle.lanes[0].next_look > time.monotonic() + 30)
            stopping.stop()
            wait_until(lambda: seen == [1, 2, 3, 4, 5], 5)
        first.open()


def test_outcomes_of_many_kinds_are_settled_in_one_go() -> None:
    """Acks, retries and rejects that end together each find their way."""
    queue = Queue("q", max_deliveries=2)
    queue.publish_many(list(range(60)))

    def handle(message: Message) -> None:
        if message.payload % 3 == 1:
            raise Nack(delay=0)
        if message.payload % 3 == 2:
            raise Reject("no")

    assert Consumer([make_handler(queue, handle, concurrency=4)], drain=True).run() == 80
    assert payloads("q") == []
    assert sorted(payloads("q.dead")) == [number for number in range(60) if number % 3]
