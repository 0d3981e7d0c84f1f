"""Topics and the queues bound to them: each message goes to all of them or to none, and nobody waits long."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pgqueue import InvalidQueueName, PayloadError, Queue, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem, TopicBinding, TopicBody
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from tests.support.processes import consuming, drain
from tests.support.rows import backdate, delete_queue, payloads, seconds
from tests.support.sessions import fetch, run_async
from tests.support.subscriber import hearing
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = 3_600.0


def bound(*names: str, topic: str = "t", **options: Any) -> list[Queue]:
    """Return queues that are bound to a topic."""
    queues = [Queue(name, **options) for name in names]
    for queue in queues:
        Topic(topic).bind(queue)
    return queues


def ttl_of_the_copy() -> float | None:
    statement = "SELECT extract(epoch FROM expires_at - published_at)::float8 FROM django_pgqueue_messagequeueitem"
    ((ttl,),) = fetch(statement)
    return None if ttl is None else float(ttl)


def bindings() -> list[tuple[str, str]]:
    return list(TopicBinding.objects.values_list("topic", "queue"))


@contextmanager
def refusing(table: str, condition: str) -> Iterator[None]:
    """Let the database refuse rows of a table."""
    fetch(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = 'P0042'; END $$"
    )
    fetch(f"CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()")
    try:
        yield
    finally:
        fetch("DROP FUNCTION refuse CASCADE")


# --- Publishing ---


def test_each_bound_queue_gets_a_copy() -> None:
    """With payload and headers; the ids come in the order of the queues' names. Other topics' queues get none."""
    bound("b", "a")
    bound("other", topic="t2")
    ids = Topic("t").publish({"n": 1}, headers={"trace": "x"})
    items = MessageQueueItem.objects.order_by("queue_id")
    assert [(item.pk, item.queue_id, item.payload, item.headers) for item in items] == [
        (ids[0], "a", {"n": 1}, {"trace": "x"}),
        (ids[1], "b", {"n": 1}, {"trace": "x"}),
    ]


def test_a_topic_without_anybody_takes_messages() -> None:
    """It is no error, and leaves no row, whatever happens in a transaction."""
    assert Topic("nobody").publish(1) == []
    with transaction.atomic():
        assert Topic("nobody").publish(1) == []
    assert run_async(Topic("nobody").apublish(1)) == []
    assert not MessageQueueItem.objects.exists()
    assert not TopicBody.objects.exists()


def test_a_queue_may_be_bound_to_several_topics_and_has_its_own_messages_too() -> None:
    """They are messages like all others."""
    (queue,) = bound("q")
    bound("q", topic="t2")
    Topic("t").publish(1)
    queue.publish(2)
    assert run_async(Topic("t2").apublish(3))
    assert drain(queue) == [1, 2, 3]


def test_a_copy_wakes_the_consumer_of_its_queue(settings: Any) -> None:
    """It is handled at once, however seldom consumers poll."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60}
    (queue,) = bound("q")
    seen: list[Any] = []
    consumer = Consumer([make_handler(queue, lambda message: seen.append(message.payload))])
    with consuming(consumer):
        for number in range(3):
            time.sleep(0.3)  # Let it fall asleep.
            Topic("t").publish(number)
            wait_until(lambda number=number: len(seen) == number + 1, 10)  # type: ignore[misc]


def test_bad_payloads_are_refused_before_any_sql() -> None:
    """And the caller's transaction stays usable."""
    bound("q")
    with transaction.atomic():
        with CaptureQueriesContext(connection) as queries:
            for bad in ({"a": "\0"}, {1: 1}, b"x", float("nan"), "\ud800"):
                with pytest.raises(PayloadError):
                    Topic("t").publish(bad)
            with pytest.raises(PayloadError):
                Topic("t").publish(1, headers={"a": object()})
            with pytest.raises(ValueError, match="ttl"):
                Topic("t").publish(1, ttl=-1)
        assert len(queries) == 0
        Topic("t").publish("good")
    assert payloads("q") == ["good"]


NAMES = ["", " x", "x ", "a\nb", "a\0b", "e\u0301", "x" * 251, "..", 7, None, b"x"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:10])
def test_names_are_those_of_queues(name: Any) -> None:
    """A topic's name is refused as a queue's is."""
    with pytest.raises(InvalidQueueName):
        Topic(name)


NAMES_IN_USE = ["x" * 250, "Größe/ünïcödé-" * 5, 'quote"s and spaces', "UPPER", "😀" * 32]


@pytest.mark.parametrize("name", NAMES_IN_USE, ids=lambda name: name[:9])
def test_every_name_works(name: str) -> None:
    """Bound and live, also where a channel's 63 bytes do not hold it; a similar name hears nothing."""
    bound("q", topic=name)
    with hearing(Topic(name)) as heard, hearing(Topic(name[:-1] + "!")) as similar:
        Topic(name).publish(1)
        wait_until(lambda: heard == [1])
    assert similar == []
    assert payloads("q") == [1]


# --- When copies expire ---

TTLS: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "standing": ({}, {}, None),
    "auto-deleted": ({"auto_deleted": True}, {}, 300),
    "the queue's": ({"ttl": 7}, {}, 7),
    "the queue's, auto-deleted": ({"auto_deleted": True, "ttl": 7}, {}, 7),
    "the queue's: never": ({"auto_deleted": True, "ttl": math.inf}, {}, None),
    "the publisher's": ({"ttl": 7}, {"ttl": 20}, 20),
    "the publisher's: never": ({"auto_deleted": True}, {"ttl": math.inf}, None),
}


@pytest.mark.parametrize(("queue", "publish", "expected"), TTLS.values(), ids=TTLS)
def test_copies_expire_as_the_queues_own_messages_do(
    queue: dict[str, Any], publish: dict[str, Any], expected: float | None
) -> None:
    """Unless the publisher asks for another time."""
    bound("q", **queue)
    Topic("t").publish(1, **publish)
    ttl = ttl_of_the_copy()
    assert ttl == (expected if expected is None else pytest.approx(expected, abs=0.01))


def test_a_standing_queue_has_the_projects_default(settings: Any) -> None:
    """DEFAULT_TTL as it is when the message is published."""
    bound("q")
    settings.PGQUEUE = {"DEFAULT_TTL": 33}
    Topic("t").publish(1)
    assert MessageQueueItem.objects.filter(expires_at__lt=Now() + seconds(34)).exists()


def test_a_queue_that_is_declared_with_another_ttl_is_bound_with_that() -> None:
    """Binding again changes the time, and makes no second copy."""
    bound("q", ttl=7)
    bound("q", ttl=9)
    assert list(TopicBinding.objects.values_list("ttl", flat=True)) == [9]
    assert len(Topic("t").publish(1)) == 1


# --- All or none ---


@pytest.mark.parametrize("in_transaction", [False, True], ids=["autocommit", "atomic"])
def test_when_one_queue_cannot_take_it_none_does(in_transaction: bool) -> None:
    """Nor does a live subscriber hear of it, nor is a body stored."""
    bound("a", "b", "c")
    with hearing(Topic("t")) as heard:
        with refusing("django_pgqueue_messagequeueitem", "NEW.queue_id = 'b'"), pytest.raises(DatabaseError):
            if in_transaction:
                with transaction.atomic():
                    Topic("t").publish("x" * 10_000)
            else:
                Topic("t").publish("x" * 10_000)
        assert not MessageQueueItem.objects.exists()
        assert not TopicBody.objects.exists()
        Topic("t").publish("good")
        wait_until(lambda: heard)
    assert heard == ["good"]
    assert payloads("a") == payloads("b") == payloads("c") == ["good"]


def test_inside_a_transaction_it_is_part_of_it() -> None:
    """Others see copies, and live subscribers hear, after the commit; after a rollback never."""
    bound("a", "b")
    with hearing(Topic("t")) as heard:
        with pytest.raises(RuntimeError), transaction.atomic():
            Topic("t").publish("rolled back")
            Topic("t").publish("rolled back" * 1_000)
            raise RuntimeError
        with transaction.atomic():
            Topic("t").publish("committed")
            Topic("t").publish("committed" * 1_000)
            time.sleep(0.2)  # A notification would come at once.
            assert heard == []
        wait_until(lambda: len(heard) == 2)
    assert heard == payloads("a") == payloads("b") == ["committed", "committed" * 1_000]


def test_what_a_savepoint_rolls_back_is_not_published() -> None:
    """What stands around it is, in its order."""
    bound("q")
    with hearing(Topic("t")) as heard:
        with transaction.atomic():
            Topic("t").publish(1)
            with pytest.raises(RuntimeError), transaction.atomic():
                Topic("t").publish(2)
                raise RuntimeError
            with transaction.atomic():
                Topic("t").publish(3)
        wait_until(lambda: len(heard) == 2)
    assert heard == payloads("q") == [1, 3]


def test_in_manual_transaction_mode_it_stands_or_falls_with_the_commit() -> None:
    """Live subscribers hear it too: the transaction carries the notification."""
    bound("q")
    with hearing(Topic("t")) as heard:
        transaction.set_autocommit(False)
        try:
            Topic("t").publish("rolled back")
            transaction.rollback()
            Topic("t").publish("committed")
            Topic("t").publish("committed" * 1_000)
            time.sleep(0.2)  # A notification would come at once.
            assert heard == []
            transaction.commit()
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)
        wait_until(lambda: len(heard) == 2)
    assert heard == payloads("q") == ["committed", "committed" * 1_000]


def test_a_notification_that_fails_does_not_fail_the_publish(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copies are committed by then; it is logged."""
    bound("q")
    # Too long for the server: it refuses the notification.
    monkeypatch.setattr("django_pgqueue.services.notifying.topic_channel", lambda topic: "c" * 64)
    assert Topic("t").publish(1)
    with transaction.atomic():
        Topic("t").publish(2)
    assert payloads("q") == [1, 2]
    assert caplog.text.count("live subscribers not notified topic=t") == 2


# --- Queues that are gone, or that nobody uses ---


def test_a_bound_queue_whose_row_was_deleted_by_hand_loses_nothing() -> None:
    """Its copies wait as orphans, and come in, in their order, when it is back."""
    (queue, _) = bound("a", "b")
    Topic("t").publish(1)
    delete_queue("a")
    with transaction.atomic():
        assert len(Topic("t").publish(2)) == 2
    assert set(MessageQueueItem.objects.orphaned().values_list("orphaned_from", flat=True)) == {"a"}
    queue.declare()
    Topic("t").publish(3)
    assert Reaper("default").run_once().adopted == 2
    assert sorted(drain(queue)) == [1, 2, 3]
    assert payloads("b") == [1, 2, 3]


def test_copies_for_an_auto_deleted_queue_that_was_deleted_by_hand_expire() -> None:
    """As they would have in the queue: nobody may ever come back for them."""
    bound("gone", auto_deleted=True)
    delete_queue("gone")
    Topic("t").publish(1)
    ttl = ttl_of_the_copy()
    assert ttl == pytest.approx(300, abs=0.01)
    MessageQueueItem.objects.update(expires_at=Now() - seconds(1))
    assert Reaper("default").run_once().expired == 1
    assert not MessageQueueItem.objects.exists()


def test_a_queue_that_nobody_uses_any_more_gets_no_copies(settings: Any) -> None:
    """An auto-deleted one, from REAP_IDLE_AFTER on; a standing one gets all for ever."""
    settings.PGQUEUE = {"REAP_IDLE_AFTER": 100}
    bound("auto.fresh", "auto.idle", auto_deleted=True)
    bound("standing")
    backdate("auto.fresh", 90)
    backdate("auto.idle", 110)
    backdate("standing", 100_000)
    assert len(Topic("t").publish(1)) == 2
    assert (payloads("auto.fresh"), payloads("auto.idle"), payloads("standing")) == ([1], [], [1])
    # Used again, it is served again.
    Queue("auto.idle", auto_deleted=True).declare()
    Topic("t").publish(2)
    assert payloads("auto.idle") == [2]


def test_copies_do_not_keep_a_queue_in_use() -> None:
    """Publishing to the topic is no use of the queue: its subscriber is gone."""
    bound("q", auto_deleted=True)
    last_active = backdate("q", HOUR - 60).last_active
    Topic("t").publish(1)
    with transaction.atomic():
        Topic("t").publish(2)
    assert MessageQueue.objects.get(name="q").last_active == last_active


def test_reaping_a_queue_ends_its_bindings() -> None:
    """All of them, and of no other queue; who bound it here is bound again by declaring it."""
    (queue, _) = bound("q", "other", auto_deleted=True)
    bound("q", topic="t2")
    Topic("t3").bind(queue)
    backdate("q", HOUR + 1)
    assert Reaper("default").run_once().queues == ["q"]
    assert bindings() == [("t", "other")]
    queue.declare()
    assert bindings() == [("t", "other"), ("t", "q"), ("t3", "q")]


@pytest.mark.parametrize("in_transaction", [False, True], ids=["autocommit", "atomic"])
def test_a_publish_that_makes_the_queue_again_binds_it_again(in_transaction: bool) -> None:
    """In the process that had bound it."""
    (queue,) = bound("q", auto_deleted=True)
    backdate("q", HOUR + 1)
    assert Reaper("default").run_once().queues == ["q"]
    if in_transaction:
        with transaction.atomic():
            queue.publish("own")
    else:
        queue.publish("own")
    Topic("t").publish("topic's")
    assert payloads("q") == ["own", "topic's"]


def test_what_does_not_fit_into_a_notification_is_kept_for_five_minutes() -> None:
    """Whatever fits is not stored; the reaper removes bodies that have been there long enough."""
    Topic("t").publish("small")
    Topic("t").publish("x" * 10_000)
    Topic("t").publish("y" * 10_000)
    ((ttl,),) = set(
        fetch(
            "SELECT extract(epoch FROM max(expires_at) - statement_timestamp())::float8 FROM django_pgqueue_topicbody"
        )
    )
    assert 290 < ttl <= 300
    assert TopicBody.objects.count() == 2
    TopicBody.objects.filter(content__contains="yyy").update(expires_at=Now())
    assert Reaper("default").run_once().bodies == 1
    assert "xxx" in TopicBody.objects.get().content
