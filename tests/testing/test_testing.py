"""The helpers for people's own tests, inside a transaction that is rolled back and outside of one."""

import math
import threading
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models.functions import Now
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_pgqueue import LeaseLost, Message, Nack, Queue, QueueNotFound, Reject, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import consumers, notifying
from django_pgqueue.services.beliefs import beliefs
from django_pgqueue.testing import (
    ANYTHING,
    Published,
    advance,
    assert_published,
    capture_published,
    drain,
    immediate,
    journal,
    lapse_lease,
    live_consumer,
    lose_notifications,
    mark,
    published,
    reap,
    vanish,
)
from tests.support.rows import age_of, payloads
from tests.support.sessions import fetch, second_session
from tests.support.waiting import wait_until

# What is noted of a publish counts until the table is truncated.
pytestmark = pytest.mark.django_flush
in_transaction = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)
both = pytest.mark.parametrize(
    "kind", [pytest.param("in_transaction", marks=in_transaction), pytest.param("committed", marks=committed)]
)


class Undone(Exception):
    """Raised to roll a block back."""


@pytest.fixture
def orders() -> Queue:
    return Queue("orders", max_deliveries=3, backoff={"base": 10, "jitter": 0})


# --- What was published ---


@both
def test_what_was_published_is_known_with_all_that_was_said(orders, kind):
    """Also after it was handled."""
    one = orders.publish({"order_id": 1}, headers={"trace": "x"}, delay=5, ttl=60)
    two, three = orders.publish_many([{"order_id": 2}, {"order_id": 3}])
    expected = [
        Published(one, "orders", {"order_id": 1}, {"trace": "x"}, 5.0, 60.0),
        Published(two, "orders", {"order_id": 2}, {}, 0.0, None),
        Published(three, "orders", {"order_id": 3}, {}, 0.0, None),
    ]
    assert published(orders) == published("orders") == published() == expected
    orders.handler(lambda message: None)
    drain(include_delayed=True)
    assert not MessageQueueItem.objects.exists()
    assert published(orders) == expected


@both
def test_neither_a_retry_nor_a_dead_letter_changes_what_was_published(orders, kind):
    """It was published where it was published, and plain SQL is told from its row."""
    orders.declare()
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('orders', '1')")
    orders.publish(2, ttl=60)

    def fail(message: Message) -> None:
        if message.payload == 1:
            raise Reject("no")
        raise Nack(delay=50)

    orders.handler(fail)
    drain()
    assert [(each.payload, each.delay, each.ttl) for each in published(orders)] == [(1, 0.0, None), (2, 0.0, 60.0)]
    assert published("orders.dead") == []


@in_transaction
def test_what_a_savepoint_rolled_back_was_not_published(orders):
    """Neither Django's, nor one made by hand, nor what was handled inside it."""
    orders.handler(lambda message: None)
    with capture_published() as captured:
        orders.publish("before")
        with pytest.raises(Undone), transaction.atomic():
            orders.publish("inside")
            with transaction.atomic():
                orders.publish("deeper")
            raise Undone
        fetch("SAVEPOINT by_hand")
        orders.publish("by hand")
        drain(orders)
        fetch("ROLLBACK TO SAVEPOINT by_hand")
        with transaction.atomic():
            orders.publish("kept")
        assert captured.payloads == ["before", "kept"]
    drain(orders)
    orders.publish("after")
    assert captured.payloads == ["before", "kept"]
    assert len(captured) == 2 and captured[0].payload == "before" and captured.to(orders) == list(captured)
    assert captured.to("other") == []


@committed
def test_what_a_rollback_took_was_not_published(orders):
    """Outside of a TestCase."""
    with capture_published() as captured:
        with pytest.raises(Undone), transaction.atomic():
            orders.publish(1)
            raise Undone
        with transaction.atomic():
            orders.publish(2)
    assert captured.payloads == [2]


@in_transaction
def test_more_savepoints_than_the_server_keeps_at_hand(orders):
    """Beyond 64 it looks elsewhere."""
    for number in range(150):
        with transaction.atomic():
            orders.publish(number)
    with pytest.raises(Undone), transaction.atomic():
        orders.publish("no")
        raise Undone
    assert [each.payload for each in published(orders)] == list(range(150))


@both
def test_the_copies_of_a_topic_are_published_to_the_bound_queues(kind):
    """To each of them, with the TTL that its binding has."""
    one, two = Queue("one", ttl=30), Queue("two")
    topic = Topic("prices")
    topic.bind(one)
    topic.bind(two)
    with capture_published() as captured:
        topic.publish({"price": 1.5}, headers={"a": 1})
    assert [(each.queue, each.payload, each.headers, each.ttl) for each in captured] == [
        ("one", {"price": 1.5}, {"a": 1}, 30.0),
        ("two", {"price": 1.5}, {"a": 1}, None),
    ]
    assert_published("two", {"price": 1.5})


@both
def test_only_what_came_after_a_mark_counts(orders, kind):
    """Whatever has become of what was before."""
    orders.publish(1)
    before = mark()
    orders.publish(2)
    assert [each.payload for each in published(orders, since=before)] == [2]
    assert_published(orders, since=before, count=1)
    assert_published(orders, 1, since=before, count=0)


@both
def test_noting_and_asking_runs_no_query_that_a_test_counts(orders, kind):
    """A publish costs what it costs without."""
    orders.declare()
    with CaptureQueriesContext(connection) as queries:
        published(orders)
        orders.publish(1)
        assert_published(orders, 1)
    assert len([query for query in queries if "INSERT" in query["sql"]]) == 1
    assert not [query for query in queries if "xmin" in query["sql"] or "filenode" in query["sql"]]


@committed
def test_what_others_have_taken_already_is_known(orders):
    """A consumer may be faster than the noting."""
    topic = Topic("prices")
    topic.bind(orders)
    with second_session() as other:
        # Gone with the commit: what a very fast consumer does.
        other.execute(
            "CREATE FUNCTION take() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN DELETE FROM django_pgqueue_messagequeueitem WHERE id = NEW.id; RETURN NULL; END'"
        )
        other.execute(
            "CREATE TRIGGER take AFTER INSERT ON django_pgqueue_messagequeueitem FOR EACH ROW EXECUTE FUNCTION take()"
        )
        try:
            orders.publish({"n": 1}, headers={"a": 1}, delay=2, ttl=3)
            orders.publish_many([2, 3], delay=1)
            topic.publish(4, ttl=9)
        finally:
            other.execute("DROP TRIGGER take ON django_pgqueue_messagequeueitem")
            other.execute("DROP FUNCTION take")
    assert [(each.payload, each.headers, each.delay, each.ttl) for each in published(orders)] == [
        ({"n": 1}, {"a": 1}, 2.0, 3.0),
        (2, {}, 1.0, None),
        (3, {}, 1.0, None),
        (4, {}, 0.0, 9.0),
    ]


@committed
def test_the_journal_of_a_suite_that_never_asks_does_not_grow(orders, monkeypatch):
    """What a flush or a rollback took is forgotten on the way."""
    monkeypatch.setattr(journal, "PRUNE_THRESHOLD", 5)
    for number in range(20):
        with pytest.raises(Undone), transaction.atomic():
            orders.publish(number)
            raise Undone
    assert len(journal._journal) <= 6
    orders.publish("kept")
    assert [each.payload for each in published()] == ["kept"]


# --- Assertions ---


@in_transaction
def test_an_assertion_that_holds_returns_the_messages(orders):
    """So that a test can look at more of them."""
    orders.publish({"id": 1, "at": "now"}, headers={"trace": "x", "b": 2}, delay=5)
    orders.publish({"id": 2, "at": "now"})
    (message,) = assert_published(orders, {"id": 1, "at": ANYTHING}, headers={"trace": "x"}, delay=5, ttl=None)
    assert message.payload == {"id": 1, "at": "now"}
    assert len(assert_published(orders, count=2)) == 2
    assert_published("nothing here", count=0)


@in_transaction
def test_an_assertion_that_fails_tells_what_was_there_instead(orders):
    """What was expected, what was published, where, and how the closest differs."""
    with pytest.raises(AssertionError) as caught:
        assert_published(orders, {"id": 1})
    assert str(caught.value).splitlines() == [
        "no message like this was published to 'orders':",
        "    payload={'id': 1}",
        "published to 'orders': 0",
    ]
    one = orders.publish({"id": 1, "email": "ada@example.com"}, headers={"a": 1}, delay=3)
    two = orders.publish("something else")
    Queue("other").publish(1)
    with pytest.raises(AssertionError) as caught:
        assert_published(orders, {"id": 2, "email": "ada@example.com"})
    assert str(caught.value).splitlines() == [
        "no message like this was published to 'orders':",
        "    payload={'id': 2, 'email': 'ada@example.com'}",
        "published to 'orders': 2",
        f"    #{one} payload={{'id': 1, 'email': 'ada@example.com'}} headers={{'a': 1}} delay=3.0",
        f"    #{two} payload='something else'",
        "to other queues: 'other' (1)",
        f"the closest, #{one} (- expected, + published):",
        "- payload: {'email': 'ada@example.com', 'id': 2}",
        "?                                             ^",
        "+ payload: {'email': 'ada@example.com', 'id': 1}",
        "?                                             ^",
    ]
    with pytest.raises(AssertionError, match="1 messages like this were published to 'orders', expected 2"):
        assert_published(orders, "something else", count=2)
    for wrong in ({"headers": {"a": 2}}, {"headers": {"b": 1}}, {"delay": 4}, {"ttl": 1}):
        with pytest.raises(AssertionError):
            assert_published(orders, {"id": 1, "email": "ada@example.com"}, **wrong)


@in_transaction
def test_a_payload_is_compared_as_it_arrives(orders):
    """A tuple arrives as a list, so a test that expects a tuple is wrong."""
    orders.publish({"pair": (1, 2)})
    assert_published(orders, {"pair": [1, 2]})
    with pytest.raises(AssertionError):
        assert_published(orders, {"pair": (1, 2)})


# --- Draining ---


@both
def test_a_drain_tells_what_happened(orders, kind):
    """Handled, failed, given up; a retry waits for its back-off."""
    ids = orders.publish_many(["well", "fail", "reject", "nack"])
    seen: list = []

    @orders.handler
    def handle(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == "fail":
            raise ValueError("broken")
        if message.payload == "reject":
            raise Reject("no such order")
        if message.payload == "nack":
            raise Nack(delay=100)

    done = drain(orders)
    assert sorted(seen) == ["fail", "nack", "reject", "well"]
    assert [message.id for message in done.handled] == ids[:1]
    assert sorted((message.id, type(error)) for message, error in done.failed) == [
        (ids[1], ValueError),
        (ids[2], Reject),
        (ids[3], Nack),
    ]
    assert done.dead_lettered == [(ids[2], "orders", "no such order")]
    assert str(done.error()) == "broken" and done.deliveries == 4 and done.lost == []
    assert payloads("orders") == ["fail", "nack"] and payloads("orders.dead") == ["reject"]
    assert drain(orders).deliveries == 0


@both
def test_delayed_messages_are_drained_only_when_asked_for(orders, kind):
    """Retries too: then time passes from one due time to the next, until they are handled or dead."""
    orders.publish("later", delay=3600)
    orders.publish("never well")
    seen: list = []

    @orders.handler
    def handle(message: Message) -> None:
        seen.append((message.payload, message.delivery_count))
        if message.payload == "never well":
            raise ValueError

    drain()
    assert seen == [("never well", 1)]
    done = drain(include_delayed=True)
    assert seen[1:] == [("never well", 2), ("never well", 3), ("later", 1)]
    assert [letter.queue for letter in done.dead_lettered] == ["orders"]
    # The dead letter is not retried, though it is there.
    assert drain(include_delayed=True).deliveries == 0


@both
@pytest.mark.parametrize("ack", ["late", "early", "atomic"])
def test_an_error_of_a_handler_is_raised_where_asked_for(orders, kind, ack):
    """Once its message is settled as in production, and before another is started."""
    orders.publish_many([1, 2, 3])
    seen: list = []

    @orders.handler(ack=ack, concurrency=3)
    def handle(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == 1:
            raise Nack(delay=50)
        raise ZeroDivisionError("the handler's own")

    with pytest.raises(ZeroDivisionError, match="own"):
        drain(orders, raises=True)
    assert seen == [1, 2]
    left = {item.payload: item for item in MessageQueueItem.objects.all()}
    assert left[3].delivery_count == 0 and left[3].lease_token is None
    assert (2 in left) == (ack != "early")


@both
def test_a_drain_ends_at_its_limit(orders, kind):
    """So many deliveries; and without a limit something that publishes for ever is an error."""

    @orders.handler
    def handle(message: Message) -> None:
        orders.publish(message.payload + 1)

    orders.publish(0)
    assert [message.payload for message in drain(limit=3).handled] == [0, 1, 2]
    assert payloads("orders") == [3]


@in_transaction
def test_a_drain_without_an_end_is_an_error(orders, monkeypatch):
    """A test should not hang."""
    monkeypatch.setattr("django_pgqueue.testing.draining.DELIVERY_LIMIT", 20)
    orders.handler(lambda message: orders.publish(1))
    orders.publish(0)
    with pytest.raises(RuntimeError, match="20 deliveries without an end"):
        drain()


@in_transaction
def test_a_drain_takes_the_queues_that_are_named(orders):
    """One, some, all; one without a handler is an error."""
    others = Queue("others")
    seen: list = []
    for queue in (orders, others):
        queue.publish(queue.name)
        queue.handler(lambda message: seen.append(message.payload))
    drain("others")
    assert seen == ["others"]
    others.publish("again")
    drain([orders, "others"])
    assert sorted(seen) == ["again", "orders", "others"]
    with pytest.raises(LookupError, match="no handler"):
        drain("nobody")


@in_transaction
def test_a_drain_inside_the_callers_own_block_is_refused(orders):
    """A worker would not see what is not committed."""
    orders.handler(lambda message: None)
    with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
        orders.publish(1)
        drain(orders)
    assert drain(orders).deliveries == 1


@in_transaction
def test_a_drain_in_a_broken_transaction_is_an_error(orders):
    """It neither hangs nor closes the test's connection."""
    orders.handler(lambda message: None)
    orders.publish(1)
    pid = connection.connection.info.backend_pid
    fetch("SAVEPOINT before")
    with pytest.raises(DatabaseError):
        fetch("SELECT 1 / 0")
    with pytest.raises(DatabaseError):
        drain(orders)
    connection.connection.execute("ROLLBACK TO SAVEPOINT before")
    assert drain(orders).deliveries == 1 and connection.connection.info.backend_pid == pid


def break_sql(message: Message) -> None:
    Group.objects.create(name="before")
    fetch("SELECT 1 / 0")


def break_orm(message: Message) -> None:
    Group.objects.create(name="before")
    Group.objects.create(name="before")


def break_raw(message: Message) -> None:
    connection.connection.execute("SELECT 1 / 0")


async def break_async(message: Message) -> None:
    await Group.objects.acreate(name="before")
    await Group.objects.acreate(name="before")


@in_transaction
@pytest.mark.parametrize("ack", ["late", "early", "atomic"])
@pytest.mark.parametrize("handler", [break_sql, break_orm, break_raw, break_async])
def test_a_handler_that_fails_in_sql_leaves_the_tests_transaction_as_it_was(orders, handler, ack):
    """What it wrote before is there as after a worker in autocommit, and gone with ack="atomic"."""
    if handler is break_async and ack == "atomic":
        return
    Group.objects.create(name="of the test")
    orders.publish(1)
    orders.handler(handler, ack=ack)
    done = drain(orders)
    assert len(done.failed) == 1
    kept = ack != "atomic" and handler is not break_raw
    assert set(Group.objects.values_list("name", flat=True)) == {"of the test"} | ({"before"} if kept else set())
    assert payloads("orders") == ([] if ack == "early" else [1])
    assert connection.in_atomic_block and not connection.needs_rollback


@in_transaction
def test_a_statement_that_fails_in_an_atomic_handler_ends_its_transaction(orders):
    """As in a worker, where it runs inside atomic(): catching the error does not help."""
    seen: list = []

    @orders.handler(ack="atomic")
    def handle(message: Message) -> None:
        with pytest.raises(DatabaseError):
            fetch("SELECT 1 / 0")
        with pytest.raises(DatabaseError):
            Group.objects.count()
        seen.append(message.payload)

    orders.publish(1)
    done = drain(orders)
    assert seen == [1] and done.handled == [] and "current transaction is aborted" in str(done.error())
    assert payloads("orders") == [1]


@in_transaction
def test_a_handler_that_catches_an_error_of_sql_goes_on_as_in_a_worker(orders):
    """A statement that fails harms no other; its own atomic() is a transaction of its own."""

    @orders.handler
    def handle(message: Message) -> None:
        Group.objects.create(name="one")
        with pytest.raises(IntegrityError):
            Group.objects.create(name="one")
        Group.objects.create(name="two")
        with pytest.raises(Undone), transaction.atomic():
            Group.objects.create(name="three")
            raise Undone
        with transaction.atomic():
            Group.objects.create(name="four")

    orders.publish(1)
    assert drain(orders, raises=True).deliveries == 1
    assert sorted(Group.objects.values_list("name", flat=True)) == ["four", "one", "two"]


@in_transaction
def test_a_drain_can_be_counted(orders):
    """It does not reset what a test counts."""
    orders.handler(lambda message: Group.objects.count())
    orders.publish_many([1, 2, 3])
    with CaptureQueriesContext(connection) as queries:
        fetch("SELECT 1")
        drain()
    sent = [query["sql"] for query in queries]
    assert sent[0] == "SELECT 1" and len([text for text in sent if "auth_group" in text]) == 3


@both
def test_a_lease_that_was_lost_is_told(orders, kind):
    """Somebody else claimed the message meanwhile."""

    @orders.handler
    def handle(message: Message) -> None:
        if message.delivery_count == 1:
            lapse_lease(message)
            assert [again.suspect for again in orders.claim()] == [True]

    number = orders.publish(1)
    done = drain()
    assert done.lost == [number]
    assert MessageQueueItem.objects.leased().count() == 1


# --- Immediately ---


@both
def test_a_handler_runs_when_its_message_would_be_committed(orders, kind):
    """At once outside of a block, at the end of the outermost one, and never when that is rolled back."""
    seen: list = []
    orders.handler(lambda message: seen.append((message.payload, Group.objects.count())))
    with immediate() as done:
        orders.publish("at once")
        assert seen == [("at once", 0)]
        with transaction.atomic():
            with transaction.atomic():
                orders.publish_many(["in a block"])
            assert len(seen) == 1
            Group.objects.create(name="of the block")
        assert seen[1:] == [("in a block", 1)]
        with pytest.raises(Undone), transaction.atomic():
            orders.publish("rolled back")
            raise Undone
        with transaction.atomic():
            orders.publish("kept")
            with pytest.raises(Undone), transaction.atomic():
                orders.publish("inside, rolled back")
                raise Undone
        assert seen[2:] == [("kept", 1)]
    assert [message.payload for message in done.handled] == ["at once", "in a block", "kept"]
    orders.publish("after it")
    assert len(seen) == 3


@both
@pytest.mark.parametrize("ack", ["late", "atomic"])
def test_what_a_handler_publishes_is_handled_too(orders, kind, ack):
    """In its turn, not inside the handler."""
    others = Queue("others")
    order: list = []
    inside = threading.local()

    @orders.handler(ack=ack)
    def first(message: Message) -> None:
        inside.first = True
        others.publish(message.payload)
        order.append(("first ends", False))
        inside.first = False

    others.handler(lambda message: order.append(("second", getattr(inside, "first", False))))
    with immediate():
        orders.publish(1)
    # Once it is committed, a worker thread may take the second before the first ends.
    expected = [("first ends", False), ("second", False)]
    assert (sorted(order) if kind == "committed" else order) == expected


@committed
def test_a_message_that_falls_due_as_the_consumer_of_a_drain_ends_is_handled(orders, monkeypatch):
    """It was delayed at the consumer's last look, and no longer when the drain looks for what is delayed."""
    run = Consumer.run

    def run_until_it_is_due(consumer: Consumer) -> int:
        handled = run(consumer)
        wait_until(lambda: not MessageQueueItem.objects.filter(read_after__gt=Now()).exists())
        return handled

    monkeypatch.setattr(Consumer, "run", run_until_it_is_due)
    orders.handler(lambda message: None)
    orders.publish(1, delay=0.2)
    assert len(drain(orders, include_delayed=True).handled) == 1


@both
def test_an_error_reaches_the_publisher_only_where_asked_for(orders, kind):
    """In production it never does."""

    @orders.handler
    def fail(message: Message) -> None:
        Group.objects.create(name="one")
        Group.objects.create(name="one")

    with immediate() as done:
        orders.publish(1)
    assert isinstance(done.error(), IntegrityError)
    Group.objects.all().delete()
    with immediate(raises=True):
        with pytest.raises(IntegrityError), transaction.atomic():
            orders.publish(2)
        # The block had ended well: what raised came after it.
        assert_published(orders, 2)
    assert payloads("orders") == [1, 2]


@immediate("orders")
def handled_at_once(queue: Queue) -> None:
    queue.publish(1)


@in_transaction
def test_immediate_is_a_decorator_for_some_queues(orders):
    """Each call anew; other queues wait."""
    others, seen = Queue("others"), []
    for queue in (orders, others):
        queue.handler(lambda message: seen.append(message.queue))
    others.publish(1)
    handled_at_once(orders)
    handled_at_once(orders)
    assert seen == ["orders", "orders"]
    Queue("nobody's").publish(1)
    orders.publish(1)
    assert len(seen) == 2


# --- Time ---


@both
def test_delays_end_messages_expire_and_leases_lapse(orders, kind):
    """A second before they do not."""
    orders.publish("delayed", delay=60)
    orders.publish("expires", ttl=60)
    orders.publish("leased")
    first = {message.payload: message for message in orders.claim(3)}
    assert sorted(first) == ["expires", "leased"]
    orders.nack(first["expires"], delay=0)
    advance(58)
    assert [message.payload for message in orders.claim(3)] == ["expires"]
    advance(timedelta(seconds=2))
    again = orders.claim(3)
    assert [(message.payload, message.suspect) for message in again] == [("leased", True)]
    with pytest.raises(LeaseLost):
        orders.ack(first["leased"])
    orders.ack(*again)
    assert [message.payload for message in orders.claim(3)] == ["delayed"]


@both
def test_queues_fall_idle_owners_are_missed_tombstones_are_forgotten(kind):
    """All that counts time in a row."""
    idle = Queue("idle", auto_deleted=True)
    idle.declare()
    consumers.beat(Consumer([make_handler(idle, print)]).id, "host", 1, ["idle"], "default")
    advance(3599)
    assert Reaper("default").run_once().queues == []
    assert age_of("idle") > 3598
    advance(2)
    assert Reaper("default").run_once().queues == ["idle", "idle.dead"]
    assert fetch("SELECT kind FROM django_pgqueue_queueevent") == [("reaped",)] * 2
    assert QueueConsumer.objects.count() == 1
    advance(timedelta(days=8))
    Reaper("default").run_once()
    assert fetch("SELECT kind FROM django_pgqueue_queueevent") == []
    assert QueueConsumer.objects.count() == 0


@both
def test_what_is_parked_stays_parked(orders, kind):
    """Its due time is a sign, no time."""
    parked = Queue("orders.dead")
    parked.publish(1)
    parked.reject(*parked.claim())
    before = fetch("SELECT read_after FROM django_pgqueue_messagequeueitem")
    advance(timedelta(days=365))
    assert fetch("SELECT read_after FROM django_pgqueue_messagequeueitem") == before
    assert parked.redrive() == 1


@committed
def test_what_the_process_believes_grows_older(orders):
    """After DECLARE_TTL it looks again, so a standing queue that vanished is made again, and not missed."""
    orders.publish(1)
    vanish(orders)
    with pytest.raises(QueueNotFound):
        orders.publish(2)
    orders.publish(3)
    vanish(orders)
    advance(16)
    orders.publish(4)
    assert payloads("orders") == [4]


@in_transaction
@pytest.mark.parametrize("wrong", [0, -1, math.inf, "1", None])
def test_time_does_not_go_back(wrong):
    """Nor on by what is no number."""
    with pytest.raises(ValueError, match="seconds"):
        advance(wrong)


@in_transaction
def test_a_lease_that_is_lost_cannot_lapse(orders):
    """Nor the lease of a message that is gone."""
    orders.publish(1)
    (message,) = orders.claim()
    lapse_lease(message)
    (again,) = orders.claim()
    with pytest.raises(LeaseLost):
        lapse_lease(message)
    orders.ack(again)
    with pytest.raises(LeaseLost):
        lapse_lease(again)


# --- Faults ---


@committed
def test_a_lost_wake_up_is_told_and_not_sent(orders):
    """The message is there all the same."""
    topic = Topic("prices")
    with second_session() as listener:
        listener.execute(f'LISTEN "{notifying.channel("orders")}"')
        listener.execute(f'LISTEN "{notifying.topic_channel("prices")}"')
        with lose_notifications() as lost:
            orders.publish(1)
            topic.publish(2)
        assert lost == ["orders", "prices"]
        assert list(listener.notifies(timeout=0.2)) == []
        orders.publish(3)
        assert len(list(listener.notifies(timeout=20, stop_after=1))) == 1
    assert payloads("orders") == [1, 3]


@both
def test_a_queue_that_is_lost_leaves_orphans(kind):
    """An auto-deleted one heals, and takes them in."""
    queue = Queue("work", auto_deleted=True)
    queue.publish(1)
    vanish(queue)
    assert MessageQueueItem.objects.orphaned().count() == 1
    with pytest.raises(QueueNotFound):
        vanish("work")
    queue.publish(2)
    queue.handler(lambda message: None)
    assert sorted(message.payload for message in drain().handled) == [1, 2]


@both
def test_a_queue_is_reaped_on_demand(kind):
    """Where the reaper would, later."""
    queue = Queue("work", auto_deleted=True)
    queue.declare()
    reap(queue)
    assert not MessageQueue.objects.filter(name="work").exists()
    assert fetch("SELECT kind FROM django_pgqueue_queueevent") == [("reaped",)]
    queue.publish(1)
    Queue("standing").declare()
    for name in ("work", "standing", "none"):
        with pytest.raises(ValueError, match="not reaped"):
            reap(name)


# --- A live consumer ---


@committed
def test_a_live_consumer_handles_what_is_committed(orders):
    """In threads, woken at once, and it ends with the block."""
    orders.handler(lambda message: Group.objects.create(name=message.payload))
    with live_consumer(orders) as live:
        with transaction.atomic():
            orders.publish("one")
        live.wait_until(lambda: live.done.handled)
        orders.publish_many(["two", "three"])
        live.wait_until_idle()
        assert Group.objects.count() == 3
        with pytest.raises(TimeoutError, match="waited 0.1 s for a miracle"):
            live.wait_until(lambda: False, "a miracle", timeout=0.1)
    assert not QueueConsumer.objects.exists()
    orders.publish("after it")
    assert payloads("orders") == ["after it"]


@committed
def test_a_live_consumer_that_ends_by_itself_tells_why(orders, monkeypatch):
    """Its thread's error is the test's."""
    orders.handler(lambda message: None)
    monkeypatch.setattr(Consumer, "_consume", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError), live_consumer(orders):
        pass


@in_transaction
def test_a_live_consumer_in_a_transaction_is_refused(orders):
    """It would wait for ever."""
    orders.handler(lambda message: None)
    with pytest.raises(RuntimeError, match="TransactionTestCase"), live_consumer(orders):
        pass


# --- One test after the other ---


class FirstTests(TestCase):
    """What a rolled-back test declared must not be believed: the second test finds none of it."""

    def test_one(self) -> None:
        self.declares_afresh()

    def test_two(self) -> None:
        self.declares_afresh()

    def declares_afresh(self) -> None:
        self.assertEqual(published(), [])
        self.assertFalse(MessageQueue.objects.filter(name="rolled back").exists())
        queue = Queue("rolled back")
        with self.captureOnCommitCallbacks(execute=True):
            queue.publish(1)
        self.assertEqual([each.payload for each in published(queue)], [1])
        self.assertFalse([key for key in beliefs.declared if key[2] == "rolled back"])
        self.assertFalse([key for key in beliefs.known if key[2] == "rolled back"])
        self.assertFalse([key for key in beliefs.notified if key[2] == "rolled back"])


@committed
@pytest.mark.parametrize("time", [1, 2])
def test_a_flush_between_two_tests_does_no_harm(time):
    """Neither to what is believed nor to what was published."""
    queue = Queue("flushed")
    assert published() == []
    queue.publish(time)
    assert [each.payload for each in published(queue)] == [time]
    wait_until(lambda: payloads("flushed") == [time])
