"""Binding queues to topics: when it is written, what undoes it, and who waits for whom meanwhile."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_pgqueue import Queue, QueueNotFound, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer, TopicBinding
from django_pgqueue.queue_internals import add_binding, declaration_of, make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import reaping, topics
from tests.services.test_topics import HOUR, bindings, bound, refusing
from tests.support.locks import is_waiting, lock_waits
from tests.support.processes import consuming, run, worker
from tests.support.rows import backdate, delete_queue, locker, make_queue, payloads
from tests.support.sessions import Session, in_threads, second_session, sessions
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


# --- Binding and unbinding ---


def test_unbinding_ends_it_and_tells_whether_it_was_bound() -> None:
    """Messages that the queue has stay; declaring it does not bind it again."""
    (queue, _) = bound("q", "other")
    Topic("t").publish(1)
    assert Topic("t").unbind(queue) is True
    assert Topic("t").unbind(queue) is False
    Topic("t").publish(2)
    queue.declare()
    Topic("t").publish(3)
    assert payloads("q") == [1]
    assert payloads("other") == [1, 2, 3]


def test_a_queue_can_be_bound_and_unbound_in_another_process() -> None:
    """What is bound is in the database: any Queue of the name unbinds it."""
    bound("q")
    assert Topic("t").unbind(Queue("q"))
    assert bindings() == []


def test_binding_makes_the_queue() -> None:
    """With its declared attributes."""
    bound("q", auto_deleted=True, max_deliveries=2)
    row = MessageQueue.objects.get(name="q")
    assert (row.auto_deleted, row.max_deliveries) == (True, 2)


def test_a_binding_is_part_of_the_transaction() -> None:
    """Rolled back, the queue is not bound, and nothing binds it later."""
    queue = Queue("q")
    queue.declare()
    with pytest.raises(RuntimeError), transaction.atomic():
        Topic("t").bind(queue)
        raise RuntimeError
    assert bindings() == []
    queue.declare()
    assert bindings() == []
    with transaction.atomic():
        Topic("t").bind(queue)
    TopicBinding.objects.all().delete()
    queue.declare()
    assert bindings() == [("t", "q")]


def test_so_is_unbinding() -> None:
    """Rolled back, the queue stays bound, and is bound again where it has to be."""
    (queue,) = bound("q", auto_deleted=True)
    with pytest.raises(RuntimeError), transaction.atomic():
        assert Topic("t").unbind(queue)
        raise RuntimeError
    assert bindings() == [("t", "q")]
    backdate("q", HOUR + 1)
    assert Reaper("default").run_once().queues == ["q"]
    queue.declare()
    assert bindings() == [("t", "q")]


@pytest.mark.parametrize("exists", [False, True], ids=["new queue", "known queue"])
def test_a_binding_that_cannot_be_written_is_no_secret(exists: bool) -> None:
    """The error is the caller's, also where the queue was just made; so it is when the queue is declared."""
    queue = Queue("q")
    if exists:
        queue.declare()
    with refusing("django_pgqueue_topicbinding", "true"), pytest.raises(DatabaseError, match="refused"):
        Topic("t").bind(queue)
    add_binding(queue, "t")
    if not exists:
        MessageQueue.objects.filter(name="q").delete()
    with refusing("django_pgqueue_topicbinding", "true"), pytest.raises(DatabaseError, match="refused"):
        queue.declare()
    queue.declare()
    assert bindings() == [("t", "q")]


def test_a_queue_that_is_not_there_cannot_be_bound() -> None:
    """It vanished after it was declared: that is told, and no binding is left that leads nowhere."""
    with pytest.raises(QueueNotFound):
        topics.bind("t", "missing", None, "default")
    assert bindings() == []


def test_a_queue_of_another_database_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic puts messages where its own statements run."""
    monkeypatch.setitem(connections.settings, "elsewhere", connections.settings["default"])
    with pytest.raises(ValueError, match="elsewhere"):
        Topic("t").bind(Queue("q", using="elsewhere"))
    assert bindings() == []


def test_threads_that_bind_one_queue_to_many_topics_bind_it_to_all() -> None:
    """None of the declarations is lost, nor one of the rows."""
    queue = Queue("q")
    queue.declare()

    def bind(number: int) -> None:
        for more in range(10):
            Topic(f"t{number}.{more}").bind(queue)

    in_threads(4, bind)
    assert TopicBinding.objects.count() == len(declaration_of(queue).bindings) == 40


def test_a_consumer_that_makes_its_queue_again_binds_it_as_it_is_bound_by_now(settings: Any) -> None:
    """Not as it was when the consumer started."""
    settings.PGQUEUE = {"HEARTBEAT_INTERVAL": 0.2, "POLL_INTERVAL": 60}
    (queue,) = bound("q", auto_deleted=True)
    consumer = Consumer([make_handler(queue, print)])
    with consuming(consumer):
        wait_until(QueueConsumer.objects.exists)
        Topic("t").unbind(queue)
        Topic("later").bind(queue)
        # As by a reaper that took the consumer for gone.
        TopicBinding.objects.all().delete()
        delete_queue("q")
        wait_until(lambda: bindings() == [("later", "q")])


# --- Declared while Django starts ---


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Django as it is while it imports queues.py modules."""
    with monkeypatch.context() as context:
        context.setattr(apps, "ready", False)
        yield


def test_declared_while_django_starts_it_runs_no_sql(starting: None) -> None:
    """It says what is to be, as the queue itself."""
    with CaptureQueriesContext(connection) as queries:
        queue = Queue("q")
        Topic("t").bind(queue)
    assert len(queries) == 0
    assert declaration_of(queue).bindings == (("t", None),)


def test_it_is_written_when_the_queue_is_declared_by_migrate(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a standing queue; an auto-deleted one's comes with the first that makes it."""
    standing, ephemeral = Queue("standing"), Queue("ephemeral", auto_deleted=True)
    with monkeypatch.context() as context:
        context.setattr(apps, "ready", False)
        for queue in (standing, ephemeral):
            Topic("t").bind(queue)
    call_command("migrate", verbosity=0)
    assert bindings() == [("t", "standing")]
    ephemeral.publish("first use")
    assert bindings() == [("t", "ephemeral"), ("t", "standing")]


def test_real_processes_write_what_their_queues_py_declares() -> None:
    """`migrate` for standing queues, a starting consumer for all of its own: its messages come at once."""
    declared = [
        {"name": "standing", "topics": ["t"]},
        {"name": "ephemeral", "queue": {"auto_deleted": True}, "topics": ["t", "t2"], "function": "do_nothing"},
    ]
    assert run("migrate", queues=declared).returncode == 0
    assert bindings() == [("t", "standing")]
    with worker("ephemeral", queues=declared) as running:
        assert bindings() == [("t", "ephemeral"), ("t", "standing"), ("t2", "ephemeral")]
        assert len(Topic("t").publish({})) == 2
        wait_until(lambda: payloads("ephemeral") == [])
        assert running.stop() == 0
    assert payloads("standing") == [{}]


# --- At the same time ---


def publish(message: Any) -> list[int]:
    return Topic("t").publish(message)


def test_publishers_do_not_wait_for_each_other() -> None:
    """However long their transactions are open."""
    bound("a", "b", "c")
    with sessions(8) as publishers, lock_waits() as waits:
        for number, publisher in enumerate(publishers):
            publisher.begin()
            assert len(publisher.run(publish, number)) == 3
        for publisher in publishers:
            publisher.commit()
    assert waits == []
    assert sorted(payloads("a")) == sorted(payloads("c")) == list(range(8))


def test_declaring_a_bound_queue_waits_for_no_publisher() -> None:
    """Nor does binding it again, or to another topic."""
    (queue,) = bound("q")
    with Session() as publisher, lock_waits() as waits:
        publisher.begin()
        publisher.run(publish, 1)
        queue.declare()
        Topic("t").bind(Queue("q", ttl=5))
        Topic("t2").bind(queue)
        publisher.commit()
    assert waits == []


def test_unbinding_waits_for_a_publisher_that_puts_a_message_there() -> None:
    """So that when it returns no message comes any more."""
    (queue,) = bound("q")
    with sessions(2) as (publisher, other):
        publisher.begin()
        publisher.run(publish, 1)
        unbound = other.start(Topic("t").unbind, queue)
        wait_until(lambda: is_waiting(other.pid))
        publisher.commit()
        assert unbound.result(10) is True
    assert payloads("q") == [1]
    assert publish(2) == []


def test_a_publisher_waits_for_an_unbinding_that_is_not_committed() -> None:
    """And leaves the queue out where it is: no message to a queue that is not bound, no error."""
    (queue, _) = bound("a", "b")
    with sessions(2) as (other, publisher):
        other.begin()
        other.run(Topic("t").unbind, queue)
        published = publisher.start(publish, 1)
        wait_until(lambda: is_waiting(publisher.pid))
        other.commit()
        assert len(published.result(10)) == 1
        other.begin()
        other.run(Topic("t").unbind, Queue("b"))
        published = publisher.start(publish, 2)
        wait_until(lambda: is_waiting(publisher.pid))
        other.rollback()
        assert len(published.result(10)) == 1
    assert (payloads("a"), payloads("b")) == ([], [1, 2])


def test_unbinding_ends_also_while_others_publish_without_a_pause() -> None:
    """Publishers that overlap all the time do not starve it."""
    queues = bound("a", "b", "c")
    stop = threading.Event()

    def work(number: int) -> float:
        try:
            if number == 0:
                for queue in queues:
                    assert Topic("t").unbind(queue)
                return 0.0
            published = 0
            while not stop.is_set():
                publish(published)
                published += 1
            return published
        finally:
            if number == 0:
                stop.set()

    assert all(in_threads(5, work)[1:])
    assert bindings() == []


def test_the_reaper_leaves_a_queue_that_a_topics_publisher_is_just_serving(settings: Any) -> None:
    """It does not wait for it either. What is committed then keeps the queue; rolled back, it is reaped."""
    bound("q", auto_deleted=True)
    # Idle for the reaper, and not yet for the publisher.
    settings.PGQUEUE = {"REAP_IDLE_AFTER": 1000}
    backdate("q", 500)
    with Session() as publisher:
        publisher.begin()
        publisher.run(publish, 1)
        with lock_waits() as waits:
            assert Reaper("default", idle_for=100).run_once().queues == []
        assert waits == []
        publisher.commit()
        assert Reaper("default", idle_for=100).run_once().queues == []
        assert payloads("q") == [1]
        MessageQueueItem.objects.all().delete()
        publisher.begin()
        publisher.run(publish, 2)
        publisher.rollback()
    assert Reaper("default", idle_for=100).run_once().queues == ["q"]
    assert bindings() == []


def test_a_publisher_that_comes_while_a_queue_is_reaped_leaves_it_out(settings: Any) -> None:
    """It waits for the reaper's short transaction; no error, no orphan, and the other queues get theirs."""
    bound("q", auto_deleted=True)
    bound("other")
    settings.PGQUEUE = {"REAP_IDLE_AFTER": 1000}
    backdate("q", 500)
    idle = {"name": "q", "idle_for": 100}
    with second_session() as reaper, Session() as publisher:
        with reaper.transaction():
            assert reaper.execute(reaping.LOCK_IDLE_QUEUE, idle).fetchone()
            assert reaper.execute(reaping.LOCK_BINDINGS, idle).fetchone() == (True,)
            published = publisher.start(publish, 1)
            wait_until(lambda: is_waiting(publisher.pid))
            assert reaper.execute(reaping.DELETE_IDLE_QUEUE, idle).fetchone()
        assert len(published.result(10)) == 1
    assert payloads("other") == [1]
    assert not MessageQueueItem.objects.orphaned().exists()


def test_the_reaper_gives_way_to_a_publisher_that_waits_for_it() -> None:
    """The publisher holds the binding and waits for the queue: the reaper does not wait for the binding then."""
    bound("q", auto_deleted=True)
    backdate("q", 500)
    idle = {"name": "q", "idle_for": 100}
    with second_session() as reaper, Session() as publisher:
        with reaper.transaction():
            assert reaper.execute(reaping.LOCK_IDLE_QUEUE, idle).fetchone()
            published = publisher.start(publish, 1)
            wait_until(lambda: is_waiting(publisher.pid))
            assert reaper.execute(reaping.LOCK_BINDINGS, idle).fetchone() == (False,)
        assert len(published.result(10)) == 1
    assert payloads("q") == [1]


def test_a_queue_that_is_deleted_by_hand_during_a_publish_gets_its_copy_as_an_orphan() -> None:
    """The publisher waits for the deletion, and meets no foreign key then; undone, the queue has it."""
    bound("a", "b")
    with second_session() as other, Session() as publisher:
        for ends in ("ROLLBACK", "COMMIT"):
            other.execute("BEGIN")
            other.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = 'a'")
            published = publisher.start(publish, ends)
            wait_until(lambda: is_waiting(publisher.pid))
            other.execute(ends)
            assert len(published.result(10)) == 2
    orphans = MessageQueueItem.objects.orphaned().order_by("id")
    assert list(orphans.values_list("orphaned_from", "payload")) == [("a", "ROLLBACK"), ("a", "COMMIT")]
    assert payloads("b") == ["ROLLBACK", "COMMIT"]


def test_a_binding_that_comes_while_a_queue_is_reaped_waits_for_it() -> None:
    """It is bound to the queue that is made again: the reaper meets no binding that it has not locked."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    backdate("q", HOUR + 1)
    idle = {"name": "q", "idle_for": HOUR}
    with second_session() as reaper, sessions(2) as (declaring, binding):
        with reaper.transaction():
            assert reaper.execute(reaping.LOCK_IDLE_QUEUE, idle).fetchone()
            assert reaper.execute(reaping.LOCK_BINDINGS, idle).fetchone() == (True,)
            bound_again = declaring.start(Topic("t").bind, queue)
            alone = binding.start(topics.bind, "t2", "q", None, "default")
            wait_until(lambda: is_waiting(declaring.pid) and is_waiting(binding.pid))
            assert reaper.execute(reaping.DELETE_IDLE_QUEUE, idle).fetchone()
        bound_again.result(10)
        # Whether the queue was there again already is a matter of luck; no binding without a queue is left.
        if alone.exception(10) is None:
            assert bindings() == [("t", "q"), ("t2", "q")]
        else:
            assert isinstance(alone.exception(), QueueNotFound)
            assert bindings() == [("t", "q")]


def test_queues_that_nobody_uses_are_not_locked() -> None:
    """They may be many: subscribers of a month. A publish writes nothing to their rows."""
    bound("idle", "used", auto_deleted=True)
    backdate("idle", HOUR + 1)
    before = locker("idle"), locker("used")
    publish(1)
    assert locker("idle") == before[0]
    assert locker("used") != before[1]


def test_a_standing_queue_that_was_never_declared_here_gets_copies() -> None:
    """Who publishes needs to know none of the queues."""
    make_queue("elsewhere")
    TopicBinding.objects.create(topic="t", queue="elsewhere")
    assert len(publish(1)) == 1
