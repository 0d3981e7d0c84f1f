"""Live subscribers that are slow, dead or deaf: they lose messages, are told so, and harm nobody else."""

import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_pgqueue import Queue, Topic, TopicMessage, signals, subscriptions
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.devdb import DevCluster
from django_pgqueue.models import TopicBody
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import notifying
from tests.runtime.test_listener import listeners, terminate
from tests.support.processes import consuming
from tests.support.sessions import connect, drop_connections, second_session
from tests.support.subscriber import digest, hearing, subscribers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def lags() -> Iterator[list[tuple[str, str, int | None]]]:
    """What `subscription_lagged` told: topic, reason, dropped."""
    told: list[tuple[str, str, int | None]] = []

    def note(sender: str, *, reason: str, dropped: int | None, **kwargs: Any) -> None:
        assert kwargs["using"] == "default"
        told.append((sender, reason, dropped))

    signals.subscription_lagged.connect(note)
    yield told
    signals.subscription_lagged.disconnect(note)


class Stuck:
    """A subscriber that does not return from its first message until it is told to."""

    def __init__(self, **options: Any) -> None:
        self.got: list[Any] = []
        self.done = 0
        self.go_on = threading.Event()
        self.subscription = Topic("t").subscribe(self.hear, **options)

    def hear(self, message: TopicMessage) -> None:
        self.got.append(message.payload)
        self.go_on.wait(60)
        self.done += 1

    def __enter__(self) -> "Stuck":
        return self

    def __exit__(self, *error: object) -> None:
        self.subscription.close()
        self.go_on.set()


def publish(numbers: range, size: int = 0) -> None:
    for number in numbers:
        Topic("t").publish([number, "x" * size])


# --- Slow and dead ones ---


def test_beyond_its_buffer_a_slow_subscriber_loses_the_oldest_messages(
    lags: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted, and told once; it goes on with those that are left, and another one has them all."""
    with Stuck(buffer=10) as slow, hearing(Topic("t")) as quick:
        publish(range(1))
        wait_until(lambda: slow.got)
        publish(range(1, 31))
        wait_until(lambda: len(quick) == 31)
        wait_until(lambda: slow.subscription.dropped == 20)
        assert lags == [("t", "full", 1)]
        slow.go_on.set()
        wait_until(lambda: len(slow.got) == 11)
        assert [number for number, _ in slow.got] == [0, *range(21, 31)]
        assert [number for number, _ in quick] == list(range(31))
    assert [record.message for record in caplog.records if "lagged" in record.message] == [
        "subscription lagged topic=t reason=full dropped=1"
    ]


def test_it_is_told_again_when_it_had_caught_up_in_between(lags: list[Any]) -> None:
    """Once for each time that it falls behind, however much it loses."""
    with Stuck(buffer=5) as slow:
        for episode in range(1, 4):
            slow.go_on.clear()
            publish(range(1))
            wait_until(lambda episode=episode: len(slow.got) == 6 * episode - 5)  # type: ignore[misc]
            publish(range(15))
            wait_until(lambda episode=episode: slow.subscription.dropped == 10 * episode)  # type: ignore[misc]
            assert lags == [("t", "full", 1)] * episode
            slow.go_on.set()
            wait_until(lambda episode=episode: slow.done == 6 * episode)  # type: ignore[misc]
            assert slow.subscription.take() is None


def test_the_buffer_is_bounded_in_size_as_well(monkeypatch: pytest.MonkeyPatch, lags: list[Any]) -> None:
    """Of large messages it keeps fewer; one it keeps always."""
    monkeypatch.setattr(subscriptions, "BUFFER_CHARACTERS", 100_000)
    with Stuck() as slow, hearing(Topic("t"), buffer=1_000) as other:
        publish(range(1))
        wait_until(lambda: slow.got and len(other) == 1)
        publish(range(1, 21), size=30_000)
        wait_until(lambda: slow.subscription.dropped == 17)
        publish(range(21, 22), size=200_000)
        wait_until(lambda: slow.subscription.dropped == 20)
        slow.go_on.set()
        wait_until(lambda: len(slow.got) == 2)
        assert [number for number, _ in slow.got] == [0, 21]
    assert ("t", "full", 1) in lags


@pytest.mark.full
def test_a_dead_subscriber_holds_back_nobody_and_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of messages later: consumers are woken, others hear, and only the buffer is held."""
    monkeypatch.setattr(subscriptions, "BUFFER_CHARACTERS", 1_000_000)
    handled: list[Any] = []
    consumer = Consumer([make_handler(Queue("q"), lambda message: handled.append(message.payload))])
    heard = 0

    def count(message: TopicMessage) -> None:
        nonlocal heard
        heard += 1

    with Stuck(buffer=100) as dead, consuming(consumer), Topic("t").subscribe(count):
        publish(range(150), size=7_000)
        wait_until(lambda: heard == 150)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            publish(range(600), size=7_000)
            wait_until(lambda: heard == 750, 60)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Four megabytes went through.
        assert after - before < 2_000_000
        assert dead.subscription.dropped == 750 - 101
        Queue("q").publish("woken")
        wait_until(lambda: handled == ["woken"])


def test_a_process_that_does_not_read_holds_back_nobody(tmp_path: Path) -> None:
    """Stopped for a while, it has everything once it goes on: the server and the buffer kept it."""
    import signal

    with subscribers("t", tmp_path, delays=[0, 0]) as (stopped, other), hearing(Topic("t")) as here:
        stopped.process.send(signal.SIGSTOP)
        sent = [[number, "x" * (9_000 if number % 10 == 0 else 100)] for number in range(100)]
        for payload in sent:
            Topic("t").publish(payload)
        wait_until(lambda: len(here) == len(other.heard) == 100)
        assert stopped.heard == []
        stopped.process.send(signal.SIGCONT)
        wait_until(lambda: len(stopped.heard) == 100)
        assert stopped.heard == other.heard == [digest(payload) for payload in sent]


# --- Deaf ones ---


def test_after_a_reconnect_it_is_told_that_messages_may_be_missing(lags: list[Any]) -> None:
    """Each subscription once for each outage, with a number that nobody knows; the first connect is none."""
    with hearing(Topic("t")) as heard, hearing(Topic("t2")) as second:
        assert lags == []
        for round_number in (1, 2):
            ((pid, *_),) = wait_until(listeners)
            terminate(pid)
            wait_until(lambda number=round_number: len(lags) == 2 * number)  # type: ignore[misc]
            Topic("t").publish(round_number)
            Topic("t2").publish(round_number)
            wait_until(lambda number=round_number: len(heard) == len(second) == number)  # type: ignore[misc]
    assert sorted(lags) == [("t", "disconnected", None)] * 2 + [("t2", "disconnected", None)] * 2


def test_a_body_that_was_reaped_before_it_was_read_is_counted(lags: list[Any]) -> None:
    """It is lost for who was too late; the next one arrives."""
    with Topic("t").subscribe(print) as subscription, hearing(Topic("t")) as heard, second_session() as session:
        session.execute("SELECT pg_notify(%s, '#4711')", [notifying.topic_channel("t")])
        wait_until(lambda: lags == [("t", "expired", 1)] * 2)
        assert subscription.dropped == 1
        Topic("t").publish("x" * 10_000)
        wait_until(lambda: len(heard) == 1)


GARBAGE = {
    "nothing": "",
    "not json": "not json",
    "long": "x" * 7_000,
    "an inline nothing": "=",
    "half of a message": '={"id":"00000000-0000-0000-0000-000000000000","payload"',
    "no message": "=[1, 2]",
    "a message without id": '={"payload":1,"headers":{}}',
    "an id that is a number": '={"id":1,"payload":1,"headers":{}}',
    "an id that is null": '={"id":null,"payload":1,"headers":{}}',
    "an id that is none": '={"id":"x","payload":1,"headers":{}}',
    "headers that are none": '={"id":"00000000-0000-0000-0000-000000000000","payload":1,"headers":3}',
    "very deep": "=" + "[" * 7_900,
    "very many digits": "=" + "1" * 7_900,
    "a body without id": "#",
    "a body by name": "#x",
    "a body below zero": "#-1",
    "other digits": "#٣",
    "an id beyond all": "#" + "9" * 30,
    "an id of a thousand digits": "#" + "9" * 1_000,
    "an id with too many digits": "#" + "9" * 7_000,
    "another kind": "?1",
    "line separator": "\u2028",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_b15_notifications_that_are_no_messages_do_no_harm(garbage: str, caplog: pytest.LogCaptureFixture) -> None:
    """B15: sent by hand on a topic's channel; real messages before and after arrive, over the same connection."""
    with hearing(Topic("t")) as heard, second_session() as session:
        ((pid, *_),) = listeners()
        for number in range(3):
            Topic("t").publish(number)
            session.execute("SELECT pg_notify(%s, %s)", [notifying.topic_channel("t"), garbage])
        Topic("t").publish(3)
        wait_until(lambda: len(heard) == 4)
        assert heard == [0, 1, 2, 3]
        assert [row[0] for row in listeners()] == [pid]
        assert any(thread.name == "pgqueue topic t" for thread in threading.enumerate())
    warned = [record.message for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]
    # A number may be the id of a body that was there.
    is_number = garbage[:1] == "#" and garbage[1:].isdecimal() and len(garbage) < 4_000
    assert warned == (["subscription lagged topic=t reason=expired dropped=1"] * 3 if is_number else [])


def test_b15_what_is_no_message_may_stand_in_a_body_too(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever may write the table may write anything."""
    with hearing(Topic("t")) as heard, second_session() as session:
        for content in ("", "x", "[]", "[" * 100_000, '{"id": 1, "payload": 1, "headers": {}}'):
            body = TopicBody.objects.create(content=content, expires_at="2100-01-01T00:00:00Z")
            session.execute("SELECT pg_notify(%s, %s)", [notifying.topic_channel("t"), f"#{body.pk}"])
        Topic("t").publish("good")
        wait_until(lambda: heard == ["good"])
    assert [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []


# --- The database is away ---


def test_subscribing_while_the_database_is_away_works_once_it_is_back(
    pg: DevCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lags: list[Any]
) -> None:
    """It does not wait for ever, says that it hears nothing yet, and hears by itself from then on."""
    monkeypatch.setattr(subscriptions, "HEARD_WITHIN", 0.5)
    pg.stop("fast")
    try:
        with hearing(Topic("t")) as heard:
            assert caplog.text.count("subscribed, but not connected yet topic=t") == 1
            pg.start()
            wait_until(listeners)
            wait_until(lambda: published_and_heard(heard))
            assert lags == []
    finally:
        pg.start()


def test_subscriptions_outlive_a_restart_of_the_server(pg: DevCluster, lags: list[Any]) -> None:
    """They are told that messages may be missing, and hear the next ones."""
    with hearing(Topic("t")) as heard, Topic("t").subscribe(print) as other:
        pg.stop("immediate")
        wait_until(lambda: not other.is_listening)
        pg.start()
        wait_until(lambda: other.is_listening)
        wait_until(lambda: published_and_heard(heard))
    assert lags == [("t", "disconnected", None)] * 2


def published_and_heard(heard: list[Any]) -> bool:
    """Publish on a connection of this moment; tell whether anything was heard."""
    drop_connections()
    Topic("t").publish("hello")
    deadline = time.monotonic() + 1
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(heard)


def test_without_the_right_to_read_bodies_small_messages_still_arrive(lags: list[Any]) -> None:
    """What it may not read is lost to it, loudly; the listener goes on."""
    with hearing(Topic("t")) as heard, connect() as admin:
        admin.execute("ALTER TABLE django_pgqueue_topicbody RENAME TO hidden")
        try:
            admin.execute("SELECT pg_notify(%s, '#1')", [notifying.topic_channel("t")])
            wait_until(lambda: lags == [("t", "disconnected", None)])
        finally:
            admin.execute("ALTER TABLE hidden RENAME TO django_pgqueue_topicbody")
        Topic("t").publish(1)
        wait_until(lambda: heard == [1])
