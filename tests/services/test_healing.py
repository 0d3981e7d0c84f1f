"""Healing: a publish makes a vanished auto-deleted queue again; a vanished standing one stays loud."""

from contextlib import contextmanager

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.utils import OperationalError
from django.test.utils import CaptureQueriesContext

from django_pgqueue import PGQueueError, Queue, QueueNotFound, signals
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.services import declaring, reaping
from django_pgqueue.services import publishing as publishing_services
from django_pgqueue.services.beliefs import beliefs
from tests.support.locks import is_waiting, lock_waits
from tests.support.rows import age_of, backdate, delete_queue, make_queue, payloads, version
from tests.support.sessions import Session, fetch, in_threads, sessions
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

#: How a publish is written; each must behave the same towards a queue that is gone.
PUBLISH = {
    "publish": lambda queue, payload: queue.publish(payload),
    "publish_many": lambda queue, payload: queue.publish_many([payload])[0],
}


@pytest.fixture(params=PUBLISH)
def publish(request):
    return PUBLISH[request.param]


@contextmanager
def autocommit():
    yield


#: What a publish may stand in.
BLOCKS = {"autocommit": autocommit, "atomic": transaction.atomic}


@pytest.fixture(params=BLOCKS)
def block(request):
    return BLOCKS[request.param]


@pytest.fixture
def told():
    """The signals sent while the test ran: (signal's name, queue, standing)."""
    heard = []

    def healed(sender, **kwargs):
        heard.append(("healed", sender, kwargs["standing"]))

    def created(sender, **kwargs):
        heard.append(("created", sender, None))

    signals.queue_healed.connect(healed)
    signals.queue_created.connect(created)
    yield heard
    signals.queue_healed.disconnect(healed)
    signals.queue_created.disconnect(created)


# --- Auto-deleted queues ---


@pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])
def test_a_publish_to_a_reaped_auto_deleted_queue_heals_it(publish, block, exclusive, told):
    """The row comes back with its declared attributes and a fresh last_active, and holds the message."""
    queue = Queue("tmp", auto_deleted=True, exclusive=exclusive, durable=False, dead_letter="lost", max_deliveries=9)
    queue.declare()
    backdate("tmp", 7200)
    assert reaping.reap_queue("tmp", 3600, "default")
    told.clear()

    with block():
        message_id = publish(queue, {"n": 1})

    row = MessageQueue.objects.get(name="tmp")
    assert (row.auto_deleted, row.exclusive, row.durable) == (True, exclusive, False)
    assert (row.dead_letter, row.max_deliveries) == ("lost", 9)
    assert age_of("tmp") < 5
    assert MessageQueueItem.objects.get(pk=message_id).queue_id == "tmp"
    assert told == [("healed", "tmp", False)]


def test_healing_in_autocommit_is_one_statement_after_the_failed_insert():
    """Queue and message are made together, so no moment is left for a reaper in between."""
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    delete_queue("tmp")
    with CaptureQueriesContext(connection) as queries:
        queue.publish({"n": 1})
    writes = [query["sql"] for query in queries if "INSERT" in query["sql"]]
    # The third tells why it was gone.
    assert len(writes) == 3
    assert "INSERT INTO django_pgqueue_messagequeue\n" in writes[1]
    assert "INSERT INTO django_pgqueue_messagequeueitem" in writes[1]


def test_healing_joins_the_callers_transaction(publish, told):
    """A rollback takes queue and message with it, nobody is told, and the next publish heals again."""
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    delete_queue("tmp")
    told.clear()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        publish(queue, {"n": 1})
        assert MessageQueue.objects.filter(name="tmp").exists()
        with Session() as other:
            assert other.sql("SELECT count(*) FROM django_pgqueue_messagequeue WHERE name = 'tmp'") == [(0,)]
        raise ZeroDivisionError
    assert not MessageQueue.objects.filter(name="tmp").exists()
    assert not MessageQueueItem.objects.exists()
    assert told == []
    publish(queue, {"n": 2})
    assert payloads("tmp") == [{"n": 2}]
    assert told == [("healed", "tmp", False)]


def test_concurrent_heals_of_one_queue_all_succeed(publish):
    """Sixteen publishers meet the gap together, half of them in transactions with other writes."""
    queue = Queue("tmp", auto_deleted=True)
    for round_number in range(5):
        queue.declare()
        MessageQueueItem.objects.all().delete()
        delete_queue("tmp")

        def heal(number: int, round_number: int = round_number) -> int:
            with transaction.atomic() if number % 2 else autocommit():
                if number % 2:
                    make_queue(f"other.{round_number}.{number}")
                return publish(queue, {"n": number})

        ids = in_threads(16, heal)
        assert len(set(ids)) == 16
        assert sorted(payload["n"] for payload in payloads("tmp")) == list(range(16))
        assert MessageQueue.objects.filter(name__startswith=f"other.{round_number}.").count() == 8


def test_a_heal_and_an_open_publisher_do_not_wait_for_each_other():
    """
    The healing statement locks the row as an update of a non-key column does.

    The queue is there again when the healer comes, and a publisher's transaction is open on it.
    """
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    params = {
        **declaration_of(queue).params,
        "payload": "{}",
        "headers": "{}",
        "delay": None,
        "expires_in": None,
        "due": None,
    }
    with sessions(2) as (publisher, healer), lock_waits() as waits:
        publisher.begin()
        publisher.run(queue.publish, {"n": 1})
        # What a healer sends that found the queue missing just before somebody made it.
        for statement in (publishing_services.ENSURE_AND_PUBLISH, declaring.ENSURE_QUEUE):
            healer.begin()
            healer.sql(statement, params)
            publisher.run(queue.publish, {"n": 2})
            healer.commit()
        publisher.commit()
    assert waits == []
    assert len(payloads("tmp")) == 4


def test_two_open_publishers_that_both_heal_do_not_deadlock():
    """Both hold KEY SHARE on the row and then run the healing statement: a key lock would be a deadlock."""
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    with sessions(2) as (one, two):
        for session in (one, two):
            session.begin()
            session.run(queue.publish, {})
        one.sql(declaring.ENSURE_QUEUE, declaration_of(queue).params)
        second = two.start(fetch, declaring.ENSURE_QUEUE, declaration_of(queue).params)
        wait_until(lambda: is_waiting(two.pid), what="the second healer to wait for the first's update")
        one.commit()
        second.result(DEADLINE)
        two.commit()
    assert len(payloads("tmp")) == 2


def test_a_healer_waits_for_the_first_creator_and_then_succeeds(publish, block):
    """While a heal is uncommitted others who need the queue wait for that commit, or heal after its rollback."""
    queue = Queue("tmp", auto_deleted=True)
    with sessions(2) as (first, second):
        for end in (first.commit, first.rollback):
            MessageQueueItem.objects.all().delete()
            delete_queue("tmp")
            first.begin()
            first.run(queue.publish, {"n": 1})

            def heal() -> None:
                with block():
                    publish(queue, {"n": 2})

            healing = second.start(heal)
            wait_until(lambda: is_waiting(second.pid))
            end()
            healing.result(DEADLINE)
            assert {"n": 2} in payloads("tmp")
    assert payloads("tmp") == [{"n": 2}]


def test_a_publisher_that_meets_an_uncommitted_deletion_heals_after_it(publish, block):
    """It waits for the deleter, and its message ends on a queue in either case."""
    queue = Queue("tmp", auto_deleted=True)
    with sessions(2) as (deleter, publisher):
        for end in (deleter.commit, deleter.rollback):
            queue.declare()
            deleter.begin()
            deleter.sql("DELETE FROM django_pgqueue_messagequeue WHERE name = 'tmp'")

            def put() -> None:
                with block():
                    publish(queue, {"n": 1})

            publishing = publisher.start(put)
            wait_until(lambda: is_waiting(publisher.pid))
            end()
            publishing.result(DEADLINE)
    assert payloads("tmp") == [{"n": 1}, {"n": 1}]
    assert not MessageQueueItem.objects.filter(queue=None).exists()


def test_under_repeatable_read_a_heal_fails_loudly_and_leaves_nothing():
    """A queue made after the transaction's snapshot cannot be healed: 40001 reaches the caller, who retries."""
    queue = Queue("tmp", auto_deleted=True)
    with Session() as caller:
        caller.begin()
        caller.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        caller.sql("SELECT count(*) FROM django_pgqueue_messagequeue")
        queue.publish({"n": 1})
        with pytest.raises(OperationalError) as failure:
            caller.run(queue.publish, {"n": 2})
        assert failure.value.__cause__.sqlstate == "40001"
        caller.rollback()
        caller.run(queue.publish, {"n": 3})
    assert payloads("tmp") == [{"n": 1}, {"n": 3}]


# --- Standing queues ---


def test_a_vanished_standing_queue_is_loud_and_loses_nothing_else(publish):
    """In autocommit: QueueNotFound, an IntegrityError with SQLSTATE 23503, raised by the publish itself."""
    queue = Queue("orders")
    queue.declare()
    delete_queue("orders")
    with pytest.raises(QueueNotFound, match="'orders'") as failure:
        publish(queue, {"n": 1})
    assert isinstance(failure.value, IntegrityError) and isinstance(failure.value, PGQueueError)
    assert (failure.value.sqlstate, failure.value.queue) == ("23503", "orders")
    assert not MessageQueueItem.objects.exists()
    assert not MessageQueue.objects.filter(name="orders").exists()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_vanished_standing_queue_leaves_the_transaction_usable(publish, depth):
    """Inside atomic(), nested or not, the caller catches QueueNotFound and its other writes commit."""
    queue = Queue("orders")
    queue.declare()
    delete_queue("orders")
    blocks = [transaction.atomic(savepoint=level != 2) for level in range(depth)]
    for one in blocks:
        one.__enter__()
    make_queue("before")
    with pytest.raises(QueueNotFound) as failure:
        publish(queue, {"n": 1})
    assert failure.value.sqlstate == "23503"
    assert not connection.needs_rollback
    make_queue("after")
    for one in reversed(blocks):
        one.__exit__(None, None, None)
    assert set(MessageQueue.objects.values_list("name", flat=True)) >= {"before", "after"}
    assert not MessageQueue.objects.filter(name="orders").exists()


def test_the_same_in_manual_transaction_mode(publish):
    """set_autocommit(False) goes the way of atomic(): no error at the server, the work before it stays."""
    queue = Queue("orders")
    queue.declare()
    delete_queue("orders")
    transaction.set_autocommit(False)
    try:
        make_queue("before")
        with pytest.raises(QueueNotFound):
            publish(queue, {"n": 1})
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert MessageQueue.objects.filter(name="before").exists()


def test_a_standing_queue_is_declared_where_the_cache_is_cold_or_stale(publish, block, told, caplog):
    """First use makes it silently; one that this process had known is made again with a warning."""
    queue = Queue("orders", max_deliveries=7)
    with block():
        publish(queue, {"n": 1})
    assert told == [("created", "orders", None)]
    assert "healed" not in caplog.text

    queue.declare()
    MessageQueueItem.objects.all().delete()
    delete_queue("orders")
    beliefs.declared.clear()  # As DECLARE_TTL seconds later.
    with block():
        publish(queue, {"n": 2})
    assert told[1:] == [("healed", "orders", True)]
    assert "queue healed queue=orders using=default cause=vanished standing=True" in caplog.text
    assert MessageQueue.objects.get(name="orders").max_deliveries == 7
    assert payloads("orders") == [{"n": 2}]


def test_two_threads_that_use_a_new_queue_first_both_succeed(publish, block):
    """One finds it missing, the other makes it before the first can: that is a first use, not a vanished queue."""
    queue = Queue("orders")
    with Session() as other:
        met = []

        def meet(execute, statement, params, many, context):
            result = execute(statement, params, many, context)
            if "messagequeueitem" in statement and not met:
                met.append(other.run(queue.publish, {"n": 1}))
            return result

        with connection.execute_wrapper(meet), block():
            publish(queue, {"n": 2})
    assert sorted(payload["n"] for payload in payloads("orders")) == [1, 2]


def test_the_belief_in_a_queue_is_dropped_once_it_was_found_missing(publish):
    """The publish after QueueNotFound looks again, and a queue that is there again is used as it is."""
    queue = Queue("orders")
    queue.declare()
    delete_queue("orders")
    with pytest.raises(QueueNotFound):
        publish(queue, {"n": 1})
    make_queue("orders", idle=3)
    before = version("orders")
    publish(queue, {"n": 2})
    assert payloads("orders") == [{"n": 2}]
    assert version("orders") == before


def test_only_the_own_foreign_key_means_a_missing_queue():
    """Somebody's trigger that raises 23503 on the messages' table is not taken for a vanished queue."""
    queue = Queue("orders")
    queue.declare()
    fetch(
        """
        CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE foreign_key_violation USING MESSAGE = 'not this one'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON django_pgqueue_messagequeueitem
        FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse();
        """
    )
    try:
        with pytest.raises(IntegrityError, match="not this one") as failure:
            queue.publish({"n": 1})
        assert not isinstance(failure.value, QueueNotFound)
    finally:
        fetch("DROP TRIGGER refuse ON django_pgqueue_messagequeueitem")
