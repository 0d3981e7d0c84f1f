"""Leases in a running consumer: extended while held, not trusted when old, given up at the timeout."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.lane import Held, Lane
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import consuming
from tests.support.rows import payloads
from tests.support.sessions import connect
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def short(settings: Any) -> Iterator[None]:
    settings.PGQUEUE = {"LEASE": 0.9, "POLL_INTERVAL": 0.3}
    yield


def is_leased() -> bool:
    return MessageQueueItem.objects.leased().exists()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_handler_longer_than_the_lease_is_started_once(is_async: bool) -> None:
    """
    Case B40: three consumers, handlers of more than two leases: one start for each message.

    The messages that wait behind them keep their leases as well.
    """
    queue = Queue("q")
    queue.publish_many(list(range(6)))
    started: list[Any] = []

    def handle(message: Message) -> None:
        started.append(message.payload)
        time.sleep(2)

    async def handle_async(message: Message) -> None:
        started.append(message.payload)
        await asyncio.sleep(2)

    handler = make_handler(queue, handle_async if is_async else handle, concurrency=2)
    with consuming(Consumer([handler])), consuming(Consumer([handler])), consuming(Consumer([handler])):
        wait_until(lambda: not payloads("q"))
    assert sorted(started) == list(range(6))


def test_a_lease_is_extended_at_least_twice_while_it_lasts() -> None:
    """A third of the lease is the interval: one extension may fail."""
    queue = Queue("q", lease=3)
    queue.publish(1)
    ends: set[Any] = set()
    go_on = threading.Event()
    with consuming(Consumer([make_handler(queue, lambda message: go_on.wait(20))])):
        wait_until(is_leased)
        ends_at = time.monotonic() + 3
        while time.monotonic() < ends_at:
            ends.add(MessageQueueItem.objects.get().lease_expires_at)
            time.sleep(0.05)
        go_on.set()
    assert len(ends) >= 3


def test_a_lease_is_no_longer_extended_after_the_handlers_timeout() -> None:
    """A handler that hangs keeps its message for a while, not for ever: another consumer takes over."""
    queue = Queue("q")
    queue.publish(1)
    go_on = threading.Event()
    seen: list[int] = []
    first = Consumer([make_handler(queue, lambda message: go_on.wait(20), timeout=1.2)])
    second = Consumer([make_handler(queue, lambda message: seen.append(message.delivery_count))])
    with consuming(first):
        wait_until(is_leased)
        began = time.monotonic()
        with consuming(second):
            wait_until(lambda: seen == [2])
            assert time.monotonic() - began > 1
            wait_until(lambda: not payloads("q"))
        go_on.set()


def test_a_message_whose_lease_was_taken_is_not_started() -> None:
    """What waits behind a long handler leaves the buffer when its extension finds no row."""
    queue = Queue("q")
    queue.publish_many([1, 2])
    go_on = threading.Event()
    started: list[Any] = []

    def handle(message: Message) -> None:
        started.append(message.payload)
        go_on.wait(20)

    consumer = Consumer([make_handler(queue, handle)])
    with consuming(consumer):
        wait_until(lambda: started == [1])
        with connect() as admin:
            admin.execute(
                "UPDATE django_pgqueue_messagequeueitem SET lease_token = gen_random_uuid(),"
                " lease_expires_at = now() + interval '1 hour' WHERE payload = '2'"
            )
        (lane,) = consumer.lanes
        wait_until(lambda: [held for held in list(lane.held.values()) if held.lost])
        go_on.set()
        wait_until(lambda: len(lane.held) == 0)
    assert started == [1]
    (row,) = MessageQueueItem.objects.values("delivery_count", "failures")
    assert row == {"delivery_count": 1, "failures": None}


def test_nothing_starts_on_an_old_confirmation() -> None:
    """A process that was stopped and goes on finds that half a lease has passed since the last extension."""
    queue = Queue("q", lease=60)
    consumer = Consumer([make_handler(queue, print)])
    (lane,) = consumer.lanes
    queue.publish(1)
    (message,) = queue.claim()
    now = time.monotonic()
    assert lane.may_start(Held(message, now - 29, due=now))
    assert not lane.may_start(Held(message, now - 31, due=now))
    assert not lane.may_start(Held(message, now, due=now, lost=True))


@pytest.mark.parametrize(("age", "is_late"), [(50, True), (25, False)])
def test_an_extension_that_is_late_but_in_time_is_warned_of(
    age: float, is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The message stays, the log tells its id: the database or this process is too slow."""
    queue = Queue("q", lease=60)
    queue.publish(1)
    consumer = Consumer([make_handler(queue, lambda message: None)])
    (lane,) = consumer.lanes
    (message,) = queue.claim()
    lane.held[message.id] = held = Held(message, time.monotonic() - age, due=0.0)
    consumer.leases.extend()
    assert not held.lost and time.monotonic() - held.confirmed < 10
    assert (f"leases extended late queue=q ids=[{message.id}]" in caplog.text) is is_late


def test_waiting_messages_of_an_old_confirmation_are_given_back_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are claimed again, once each, and handled."""
    queue = Queue("q", lease=60)
    queue.publish_many([1, 2, 3])
    seen: list[tuple[Any, int]] = []
    consumer = Consumer([make_handler(queue, lambda message: seen.append((message.payload, message.delivery_count)))])
    real = Lane.may_start
    refused: list[int] = []

    def may_start(lane: Lane, held: Held) -> bool:
        if len(refused) < 3:
            # As if the process had been stopped between the claim and now.
            refused.append(held.message.id)
            held.confirmed -= 100
        return real(lane, held)

    monkeypatch.setattr(Lane, "may_start", may_start)
    with consuming(consumer):
        wait_until(lambda: not payloads("q"))
    assert sorted(seen) == [(1, 1), (2, 1), (3, 1)]


def test_an_outage_of_the_lease_connection_is_survived() -> None:
    """Its backend is terminated: it connects again in time, and the handler is not run twice."""
    queue = Queue("q", lease=2)
    queue.publish(1)
    started: list[int] = []
    go_on = threading.Event()

    def handle(message: Message) -> None:
        started.append(message.delivery_count)
        go_on.wait(20)

    with consuming(Consumer([make_handler(queue, handle)])), consuming(Consumer([make_handler(queue, handle)])):
        wait_until(lambda: started == [1])
        wait_until(_terminate_lease_connections)
        time.sleep(3)
        assert started == [1]
        go_on.set()
        wait_until(lambda: not payloads("q"))
    assert started == [1]


def _terminate_lease_connections() -> bool:
    with connect() as admin:
        gone = admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'django_pgqueue leases'"
        ).fetchall()
    return bool(gone)
