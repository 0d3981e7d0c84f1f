"""Live subscribers: every message of every size, in order, to all of a process and of other processes."""

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from django_pgqueue import Queue, Topic, TopicMessage
from django_pgqueue.conf import settings as pgqueue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import TopicBody
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.runtime import listener
from django_pgqueue.services import notifying
from tests.runtime.test_listener import listeners
from tests.support.processes import consuming
from tests.support.sessions import connect, fetch, second_session
from tests.support.subscriber import digest, hearing, subscribers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

# What a notification carries besides a text: its first character, the id, the names, the quotes.
AROUND = len('={"id":"00000000-0000-0000-0000-000000000000","payload":"","headers":{}}')

TEXTS = {"one byte": "x", "two bytes": "ü", "three bytes": "語", "four bytes": "😀", "escaped": '"'}


def text_of(size: int, character: str) -> str:
    """Return a text whose notification has exactly `size` bytes of UTF-8."""
    left = size - AROUND
    width = len(json.dumps(character, ensure_ascii=False).encode()) - 2
    return character * (left // width) + "x" * (left % width)


def notifications(session: Any, count: int) -> list[str]:
    """Return what a session that listens gets."""
    told: list[str] = []
    deadline = time.monotonic() + 20
    while len(told) < count and time.monotonic() < deadline:
        # All that come in one packet.
        told += [notify.payload for notify in session.notifies(timeout=1, stop_after=1)]
    return told


# --- Size ---


@pytest.mark.parametrize("character", TEXTS.values(), ids=TEXTS)
def test_the_limit_is_measured_in_bytes_of_the_whole_notification(character: str) -> None:
    """7,999 bytes travel in the notification; from 8,000 on the body is stored once and told by its id."""
    with hearing(Topic("t")) as heard, second_session() as session:
        session.execute(f'LISTEN "{notifying.topic_channel("t")}"')
        sizes = [7_900, 7_998, 7_999, 8_000, 8_001, 8_100]
        texts = [text_of(size, character) for size in sizes]
        for text in texts:
            Topic("t").publish(text)
        wait_until(lambda: len(heard) == len(sizes))
        told = notifications(session, len(sizes))
    assert heard == texts
    assert [len(text.encode()) for text in told[:3]] == [7_900, 7_998, 7_999]
    assert [text[0] for text in told] == ["=", "=", "=", "#", "#", "#"]
    assert all(len(text) < 30 for text in told[3:])
    assert TopicBody.objects.count() == 3


def test_b06_every_size_around_the_limit_arrives() -> None:
    """B06: payloads of 7,900 to 8,100 bytes, 2,500 emoji, headers that make the difference, a long name."""
    topic = Topic("t" * 250)
    sent = [text_of(size, "x") for size in range(7_900, 8_101, 10)] + ["😀" * 2_500]
    got: list[TopicMessage] = []
    with topic.subscribe(got.append), second_session() as session:
        session.execute(f'LISTEN "{notifying.topic_channel(topic.name)}"')
        for text in sent:
            topic.publish(text)
        for size in range(1, 200, 20):
            topic.publish(text_of(7_900, "x"), headers={"h": "ü" * size})
        wait_until(lambda: len(got) == len(sent) + 10)
        told = notifications(session, len(got))
    assert [digest(message.payload) for message in got[: len(sent)]] == [digest(text) for text in sent]
    assert [len(message.headers["h"]) for message in got[len(sent) :]] == list(range(1, 200, 20))
    assert all(len(text.encode()) <= 7_999 for text in told)


@pytest.mark.full
def test_a_payload_of_the_largest_size_arrives() -> None:
    """16 MiB, also of characters that are four bytes each, with all that follows."""
    most = pgqueue.MAX_PAYLOAD_BYTES
    with hearing(Topic("t")) as heard:
        Topic("t").publish("x" * (most - 2))
        Topic("t").publish("small")
        Topic("t").publish("😀" * ((most - 2) // 4))
        wait_until(lambda: len(heard) == 3, 60)
    assert [len(text) for text in heard] == [most - 2, 5, (most - 2) // 4]
    assert heard[1] == "small"


VALUES = [None, True, 0, -1, 2**70, 1.5, "", "a\\u0000b", "😀\u2028", [], {}, {"a": [1, {"b": None}]}, [[[[]]]]]


@pytest.mark.parametrize("padding", [0, 9_000], ids=["inline", "stored"])
def test_every_value_arrives_as_it_was_published(padding: int) -> None:
    """With its headers, and an id of its own."""
    got: list[TopicMessage] = []
    with Topic("t").subscribe(got.append):
        for value in VALUES:
            Topic("t").publish(value, headers={"pad": "x" * padding, "ü": 1})
        wait_until(lambda: len(got) == len(VALUES))
    assert [message.payload for message in got] == VALUES
    assert {message.topic for message in got} == {"t"}
    assert all(message.headers == {"pad": "x" * padding, "ü": 1} for message in got)
    assert len({message.id for message in got}) == len(VALUES)


def test_bodies_that_are_reaped_in_time_were_read_by_all(settings: Any) -> None:
    """Reading takes nothing away: the reaper does, when its time has come."""
    topic = Topic("t")
    with hearing(topic) as one, hearing(topic) as two:
        topic.publish("x" * 10_000)
        wait_until(lambda: one and two)
        assert TopicBody.objects.count() == 1
        call_command("reap_queues", verbosity=0)
        assert TopicBody.objects.count() == 1
        fetch("UPDATE django_pgqueue_topicbody SET expires_at = statement_timestamp()")
        call_command("reap_queues", verbosity=0)
        assert TopicBody.objects.count() == 0
        topic.publish("y" * 10_000)
        wait_until(lambda: len(one) == len(two) == 2)


# --- Who hears what ---


def test_all_subscriptions_of_a_process_hear_every_message_in_order() -> None:
    """Over one connection, small and large ones mixed; other topics are not theirs."""
    sent = [f"{number} " + "x" * (9_000 if number % 3 == 0 else 10) for number in range(60)]
    with hearing(Topic("t")) as one, hearing(Topic("t")) as two, hearing(Topic("other")) as other:
        for text in sent[:30]:
            Topic("t").publish(text)
        with transaction.atomic():
            for text in sent[30:]:
                Topic("t").publish(text)
        wait_until(lambda: len(one) == len(two) == 60)
        assert len(listeners()) == 1
    assert one == two == sent
    assert other == []


def test_a_consumer_and_all_subscriptions_share_one_connection() -> None:
    """Whatever comes first; it stays while one of them is there, and goes with the last."""
    seen: list[Any] = []
    consumer = Consumer([make_handler(Queue("q"), lambda message: seen.append(message.payload))])
    with hearing(Topic("t")) as heard:
        ((pid, *_),) = listeners()
        with consuming(consumer), hearing(Topic("t2")) as second:
            Queue("q").publish(1)
            Topic("t").publish(2)
            Topic("t2").publish(3)
            wait_until(lambda: (seen, heard, second) == ([1], [2], [3]))
            assert [row[0] for row in listeners()] == [pid]
        Topic("t").publish(4)
        wait_until(lambda: heard == [2, 4])
        assert [row[0] for row in listeners()] == [pid]
    wait_until(lambda: not listeners())


def test_subscribers_in_other_processes_hear_every_message_in_order(tmp_path: Path) -> None:
    """Each process over one connection of its own."""
    sent = [f"{number} " + "x" * (9_000 if number % 3 == 0 else 10) for number in range(30)]
    with subscribers("t", tmp_path, delays=[0, 0, 0.01]) as others, hearing(Topic("t")) as here:
        assert len(listeners()) == 4
        for text in sent:
            Topic("t").publish(text)
        wait_until(lambda: all(len(other.heard) == 30 for other in others) and len(here) == 30)
        assert here == sent
        for other in others:
            assert other.heard == [digest(text) for text in sent]
            assert other.process.stop() == 0
            assert other.process.output == ""


def test_a_subscription_hears_what_is_published_from_its_start_to_its_end() -> None:
    """Not before, not after; a message that is buffered when it is closed is dropped."""
    blocked, go_on = threading.Event(), threading.Event()
    got: list[Any] = []

    def slowly(message: TopicMessage) -> None:
        got.append(message.payload)
        blocked.set()
        go_on.wait(10)

    Topic("t").publish("before")
    subscription = Topic("t").subscribe(slowly)
    assert subscription.is_listening
    with hearing(Topic("t")) as heard:
        Topic("t").publish("first")
        Topic("t").publish("second")
        assert blocked.wait(10)
        wait_until(lambda: len(heard) == 2)
        subscription.close()
        assert subscription.is_closed
        assert not subscription.is_listening
        go_on.set()
        Topic("t").publish("after")
        wait_until(lambda: len(heard) == 3)
    assert got == ["first"]


def listener_threads() -> int:
    return sum(thread.name == "pgqueue listener" for thread in threading.enumerate())


def test_one_that_opens_while_the_last_one_closes_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the server takes to say goodbye: one connection, and no message twice."""
    wait_until(lambda: not listener_threads())
    ended = threading.Event()
    own_connection = listener.own_connection

    class Slowly:
        """The connection of a listener, that takes long to close."""

        def __init__(self, *arguments: Any) -> None:
            self._own = own_connection(*arguments)

        def __enter__(self) -> None:
            return self._own.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._own.__exit__(*error)
            ended.set()
            closed.wait(10)

    monkeypatch.setattr(listener, "own_connection", Slowly)
    closed = threading.Event()
    with hearing(Topic("t")) as first:
        Topic("t").publish(0)
        wait_until(lambda: first == [0])
    assert ended.wait(10)
    with hearing(Topic("t")) as second:
        closed.set()
        wait_until(lambda: listener_threads() == 1)
        for number in range(5):
            Topic("t").publish(number)
        wait_until(lambda: len(second) >= 5)
        assert len(listeners()) == 1
        assert second == list(range(5))


# --- Callbacks ---


def test_what_a_callback_raises_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Not even what is meant to end a program."""
    heard: list[Any] = []
    errors = [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit]

    def fail(message: TopicMessage) -> None:
        heard.append(message.payload)
        raise errors[message.payload]

    with Topic("t").subscribe(fail), hearing(Topic("t")) as neighbour:
        for number in range(len(errors)):
            Topic("t").publish(number)
        wait_until(lambda: len(heard) == len(neighbour) == len(errors))
        wait_until(lambda: caplog.text.count("subscriber failed topic=t id=") == len(errors))


def leave_transaction_open() -> None:
    transaction.set_autocommit(False)
    fetch("INSERT INTO django_pgqueue_messagequeue (name) VALUES ('left open')")


def fail_in_transaction() -> None:
    connection.connection.execute("BEGIN; SELECT 1/0")


LEAVING_OPEN = [leave_transaction_open, fail_in_transaction]
BREAKAGES = {
    "closed": lambda: connection.connection.close(),
    "terminated": lambda: terminated(connection.connection.info.backend_pid),
    "left in a failed transaction": fail_in_transaction,
    "left in a transaction": leave_transaction_open,
    "role": lambda: fetch("SET ROLE pg_read_all_stats"),
    "search path": lambda: fetch("SET search_path = nowhere"),
}


def terminated(pid: int) -> None:
    with connect() as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])


@pytest.mark.parametrize("breakage", BREAKAGES.values(), ids=BREAKAGES)
def test_a_callback_that_breaks_its_connection_breaks_nothing_else(
    breakage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The next message finds a usable one, and what was left open is rolled back, which is logged."""
    found: list[Any] = []

    def work(message: TopicMessage) -> None:
        found.append(fetch("SELECT count(*) FROM django_pgqueue_messagequeue WHERE name = 'left open'"))
        if message.payload == "break":
            breakage()

    with Topic("t").subscribe(work), hearing(Topic("t")) as neighbour:
        for payload in ("break", "after", "break", "after"):
            Topic("t").publish(payload)
        wait_until(lambda: len(found) == len(neighbour) == 4)
        assert found == [[(0,)]] * 4
        assert len(listeners()) == 1
    assert ("left a transaction open" in caplog.text) == (breakage in LEAVING_OPEN)


def test_a_callback_must_be_something_that_runs_when_it_is_called() -> None:
    """An async function would not."""
    wait_until(lambda: not listener_threads())

    async def hear(message: TopicMessage) -> None: ...

    for wrong in (None, "print", hear):
        with pytest.raises(ValueError, match=r"callable|async"):
            Topic("t").subscribe(wrong)  # type: ignore[arg-type]
    for buffer in (0, -1, True, "10", 1.5):
        with pytest.raises(ValueError, match="buffer"):
            Topic("t").subscribe(print, buffer=buffer)  # type: ignore[arg-type]
    assert not listener_threads()


def test_a_callback_may_publish_subscribe_and_close() -> None:
    """It runs in a thread of its own, and holds no lock."""
    heard: list[Any] = []

    def answer(message: TopicMessage) -> None:
        subscription.close()
        with hearing(Topic("answers")) as answers:
            Topic("answers").publish(message.payload + 1)
            wait_until(lambda: answers)
            heard.extend(answers)

    subscription = Topic("t").subscribe(answer)
    Topic("t").publish(1)
    wait_until(lambda: heard == [2])


def test_a_process_with_subscriptions_ends_when_its_main_thread_does(tmp_path: Path) -> None:
    """However busy they are, and closed or not."""
    with subscribers("t", tmp_path, delays=[30]) as (one,):
        Topic("t").publish(1)
        one.process.send(signal.SIGTERM)
        assert one.process.wait(10) == 0
        assert one.process.output == ""
