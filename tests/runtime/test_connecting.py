"""Every path over every kind of connection: plain, bound by the server, pooled, strictly isolated."""

import threading

import pytest
from django.db import connection, connections, transaction
from django.db.backends.postgresql.base import DatabaseWrapper

from django_pgqueue import LeaseLost, Queue, QueueNotFound
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import declaring
from django_pgqueue.services.beliefs import beliefs
from tests.support.rows import age_of, backdate, delete_queue, make_message, make_queue, payloads
from tests.support.sessions import Session, connect, fetch, in_threads
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

OPTIONS = {
    "plain": {},
    "server_side_binding": {"server_side_binding": True},
    "pool": {"pool": {"min_size": 0, "max_size": 4, "timeout": 5}},
    "pool and server_side_binding": {"pool": {"min_size": 0, "max_size": 4}, "server_side_binding": True},
    "repeatable read": {"options": "-c default_transaction_isolation=repeatable\\ read"},
    "serializable": {"options": "-c default_transaction_isolation=serializable"},
}


@pytest.fixture(params=OPTIONS, autouse=True)
def connected(request):
    """Let the default alias, in every thread, connect in one of these ways."""
    settings = connections.settings["default"]
    before = settings["OPTIONS"]
    kept = {key: value for key, value in before.items() if key not in ("pool", "server_side_binding")}
    close(connection)
    settings["OPTIONS"] = {**kept, **OPTIONS[request.param]}
    try:
        yield request.param
    finally:
        close(connection)
        settings["OPTIONS"] = before


def close(wrapper: DatabaseWrapper) -> None:
    wrapper.close()
    if wrapper.alias in wrapper._connection_pools:
        wrapper.close_pool()


def test_the_connection_is_of_the_kind_that_is_meant(connected):
    """Else the tests below would prove nothing."""
    ((isolation,),) = fetch("SELECT current_setting('default_transaction_isolation')")
    assert isolation == (connected if connected in ("repeatable read", "serializable") else "read committed")
    assert ("default" in connection._connection_pools) == connected.startswith("pool")
    with connection.cursor() as cursor:
        assert ("ServerBinding" in type(cursor.cursor).__name__) == ("server_side_binding" in connected)


def test_publishing_and_consuming(connected):
    """Both hot paths, headers, times, every way to settle."""
    queue = Queue("q")
    ids = [queue.publish({"n": 0}, headers={"h": 1}, delay=0.001, ttl=60)]
    with transaction.atomic():
        ids += [queue.publish({"n": 1})]
        ids += queue.publish_many([{"n": 2}, {"n": 3}], ttl=60)
    ids += queue.publish_many([{"n": 4}, {"n": 5}], headers={"h": 2}, delay=0.001)
    wait_until(lambda: queue.stats().ready == 6)
    messages = sorted(queue.claim(10), key=lambda message: message.id)
    assert [message.id for message in messages] == sorted(ids)
    queue.extend(*messages, seconds=50)
    queue.ack(*messages[:2])
    queue.nack(messages[2], delay=0, reason="again")
    queue.reject(messages[3], reason="no")
    with transaction.atomic():
        queue.ack(messages[4])
    with pytest.raises(LeaseLost):
        queue.ack(messages[0], messages[5])
    (again,) = queue.claim(10)
    assert (again.id, again.delivery_count) == (messages[2].id, 2)
    assert Queue("q.dead").claim()[0].id == messages[3].id


@pytest.mark.parametrize("form", ["publish", "publish_many"])
def test_healing_and_loud_failure(connected, form):
    """In autocommit, in a transaction and in a nested one; the caller's other writes stay."""

    def publish(queue: Queue) -> None:
        queue.publish({}) if form == "publish" else queue.publish_many([{}])

    tmp, orders = Queue("tmp", auto_deleted=True), Queue("orders")
    for queue in (tmp, orders):
        queue.declare()
        delete_queue(queue.name)
    publish(tmp)
    with pytest.raises(QueueNotFound):
        publish(orders)

    for queue in (tmp, orders):
        queue.declare()
        delete_queue(queue.name)
    with transaction.atomic():
        make_queue("before")
        with transaction.atomic():
            publish(tmp)
            with pytest.raises(QueueNotFound) as failure:
                publish(orders)
            assert failure.value.sqlstate == "23503"
        assert not connection.needs_rollback
        make_queue("after")
    assert MessageQueue.objects.filter(name__in=["before", "after", "tmp"]).count() == 3
    assert payloads("tmp") == [{}]
    assert MessageQueueItem.objects.filter(orphaned_from="tmp").count() == 1


def test_a_consumer_with_its_listener(connected):
    """It drains, it is woken by a publish, it adopts; a pool of four is not used up by its threads."""
    queue = Queue("q")
    queue.publish_many(range(50))
    delete_queue("q")
    queue.declare()
    handled: list[int] = []

    def handle(message) -> None:
        fetch("SELECT 1")
        handled.append(message.payload)

    consumer = Consumer([make_handler(queue, handle, concurrency=2)])
    with Session() as thread:
        running = thread.start(consumer.run)
        try:
            wait_until(lambda: len(handled) == 50)
            wait_until(lambda: consumer._channels.listening.is_set())
            with transaction.atomic():
                queue.publish(50)
            wait_until(lambda: len(handled) == 51, timeout=4, what="the wake-up")
        finally:
            consumer.stop()
            running.result(DEADLINE)
    assert sorted(handled) == list(range(51))
    wait_until(lambda: threading.active_count() < 20)


def test_reaping(connected):
    """Expiry, adoption, idle queues and what killed its workers, in one run."""
    make_queue("idle", idle=9999, auto_deleted=True)
    make_queue("orders", dead_letter="graveyard", max_deliveries=1)
    make_queue("plain")
    make_message("orders", expires_in=-1)
    make_message("orders", lease=-1)
    make_message("plain", expires_in=-1)
    make_message("plain", due_in=500)
    delete_queue("plain")
    make_queue("plain")
    reaped = Reaper("default", idle_for=3600).run_once()
    assert (reaped.expired, reaped.dead_lettered, reaped.adopted, reaped.queues) == (1, 2, 1, ["idle"])


def test_declaring_and_refreshing(connected):
    """The refresh before and after a publish, the touch of a heartbeat."""
    queue = Queue("q")
    for publish in (lambda: queue.publish(1), lambda: in_a_transaction(queue)):
        queue.declare()
        backdate("q", 60)
        beliefs.declared.clear()
        publish()
        assert age_of("q") < 5
    assert declaring.touch(["q", "none"], "default") == {"q"}


def in_a_transaction(queue: Queue) -> None:
    with transaction.atomic():
        queue.publish(1)


def test_six_claimers_lose_nothing_and_raise_nothing(connected):
    """Claims, settles and refreshes are READ COMMITTED whatever the database's default: no 40001."""
    queue = Queue("q")
    queue.publish_many(range(600))
    taken = threading.Lock()
    handled: list[int] = []

    def consume(number: int) -> None:
        while messages := queue.claim(7):
            queue.extend(*messages)
            declaring.touch(["q"], "default")
            queue.ack(*messages)
            with taken:
                handled.extend(message.payload for message in messages)

    count = 6 if not connected.startswith("pool") else 3
    in_threads(count, consume)
    assert sorted(handled) == list(range(600))
    with connect() as reader:
        assert reader.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchone() == (0,)
