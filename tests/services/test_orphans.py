"""Orphans: messages whose queue row was deleted by hand know where they belong and come back."""

import shutil
import subprocess

import pytest
from django.test.utils import override_settings

from django_pgqueue import Queue, signals
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import notifying, reaping
from tests.support.locks import is_waiting, lock_waits
from tests.support.rows import delete_queue, make_message, make_queue, payloads
from tests.support.sessions import Session, connect, fetch, second_session, sessions
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def delete_by_orm(name: str) -> None:
    MessageQueue.objects.get(name=name).delete()


def delete_by_queryset(name: str) -> None:
    MessageQueue.objects.filter(name=name).delete()


def delete_by_psql(name: str) -> None:
    psql = shutil.which("psql")
    if psql is None:
        return delete_queue(name)
    with connect() as session:
        info = session.info
        command = [psql, "-h", info.host, "-p", str(info.port), "-U", info.user, "-d", info.dbname]
        environment = {"PGPASSWORD": info.password}
    statement = f"DELETE FROM django_pgqueue_messagequeue WHERE name = '{name}'"
    subprocess.run([*command, "-c", statement], check=True, env=environment, capture_output=True)


DELETE = {"psql": delete_by_psql, "orm": delete_by_orm, "queryset": delete_by_queryset}


@pytest.fixture(params=DELETE)
def delete(request):
    return DELETE[request.param]


def drain(queue: Queue) -> list:
    """Handle what is there, with a real consumer, and return the payloads."""
    handled = []
    Consumer([make_handler(queue, lambda message: handled.append(message.payload))], drain=True).run()
    return handled


def orphans(name: str) -> int:
    return MessageQueueItem.objects.filter(queue=None, orphaned_from=name).count()


# --- Deleted, and back again ---


@pytest.mark.parametrize("auto_deleted", [False, True], ids=["standing", "auto-deleted"])
def test_messages_of_a_deleted_queue_are_handled_once_it_is_there_again(delete, auto_deleted):
    """Deleted by whatever hand: none is dropped, none comes twice, the consumer adopts them."""
    queue = Queue("tmp", auto_deleted=auto_deleted)
    queue.publish_many([{"n": n} for n in range(50)])
    delete("tmp")
    assert orphans("tmp") == 50
    assert sorted(message["n"] for message in drain(queue)) == list(range(50))
    assert not MessageQueueItem.objects.exists()


def test_the_reaper_adopts_where_nobody_consumes(delete, caplog):
    """Once the queue is declared again; in batches, counted and logged."""
    queue = Queue("tmp")
    queue.publish_many(range(25))
    delete("tmp")
    assert Reaper("default").run_once().adopted == 0
    assert orphans("tmp") == 25
    queue.declare()
    assert Reaper("default", batch_size=10).run_once().adopted == 25
    assert payloads("tmp") == list(range(25))
    assert sum(int(r.message.rpartition("count=")[2]) for r in caplog.records if "adopted" in r.message) == 25


def test_a_publish_never_adopts():
    """It would lock a hundred thousand rows until the caller commits."""
    queue = Queue("tmp", auto_deleted=True)
    queue.publish_many(range(5))
    delete_queue("tmp")
    queue.publish("new")
    assert payloads("tmp") == ["new"]
    assert orphans("tmp") == 5
    assert sorted(map(str, drain(queue))) == ["0", "1", "2", "3", "4", "new"]


def test_everything_that_a_message_knew_survives():
    """Expiry, headers, due time, count and history are those from before."""
    make_queue("tmp")
    history = [{"reason": "earlier"}]
    made = make_message(
        "tmp", {"n": 1}, headers={"h": 1}, expires_in=900, due_in=-5, delivery_count=2, failures=history
    )
    delete_queue("tmp")
    make_queue("tmp")
    assert reaping.adopt("tmp", 10, "default") == 1
    adopted = MessageQueueItem.objects.get(pk=made.pk)
    for column in ("payload", "headers", "expires_at", "read_after", "delivery_count", "failures", "published_at"):
        assert getattr(adopted, column) == getattr(made, column), column
    assert (adopted.queue_id, adopted.orphaned_from) == ("tmp", None)


def test_a_delayed_orphan_stays_delayed():
    """Adoption does not make it due."""
    make_queue("tmp")
    make_message("tmp", due_in=500)
    delete_queue("tmp")
    queue = Queue("tmp")
    queue.declare()
    assert reaping.adopt("tmp", 10, "default") == 1
    assert queue.claim(10) == []


def test_expired_orphans_are_deleted():
    """The TTL goes on while they are orphaned, with or without a queue to return to."""
    make_queue("tmp")
    make_message("tmp", expires_in=-1)
    make_message("tmp", expires_in=500)
    delete_queue("tmp")
    assert Reaper("default").run_once().expired == 1
    assert orphans("tmp") == 1


def test_a_held_message_stays_its_owners_through_deletion_and_adoption():
    """Ack, nack and extend match id and token only; a leased orphan is not delivered to another."""
    queue = Queue("tmp")
    queue.publish_many(range(4))
    acked, nacked, extended, rejected = queue.claim(4)
    delete_queue("tmp")
    queue.ack(acked)
    queue.nack(nacked, delay=0)
    queue.extend(extended, seconds=60)
    queue.reject(rejected, reason="no")
    assert payloads("tmp.dead") == [3]
    queue.declare()
    assert reaping.adopt("tmp", 10, "default") == 2
    (again,) = queue.claim(10)
    assert again.payload == 1
    queue.ack(extended, again)
    assert payloads("tmp") == []


def test_a_running_consumer_adopts_within_its_poll():
    """The row is deleted behind a consumer's back: it makes the queue again and handles all of it."""
    queue = Queue("tmp")
    handled = []
    with override_settings(PGQUEUE={"POLL_INTERVAL": 0.2}):
        consumer = Consumer([make_handler(queue, lambda message: handled.append(message.payload))])
        with Session() as thread:
            running = thread.start(consumer.run)
            try:
                queue.publish(0)
                wait_until(lambda: handled == [0])
                make_message("tmp", 1, due_in=3600)
                delete_queue("tmp")
                MessageQueueItem.objects.update(read_after=None)
                wait_until(lambda: handled == [0, 1])
            finally:
                consumer.stop()
                running.result(DEADLINE)


# --- Deleted beside others ---


def test_a_deleter_waits_for_an_open_publisher_and_cuts_loose_what_it_commits(delete):
    """The message of a transaction that was open at the time is orphaned with its name, not lost."""
    queue = Queue("tmp")
    queue.publish({"n": 1})
    with sessions(2) as (publisher, deleter):
        publisher.begin()
        publisher.run(queue.publish, {"n": 2})
        deleting = deleter.start(delete, "tmp")
        wait_until(lambda: fetch(WAITERS)[0][0] == 1, what="the deleter to wait")
        publisher.commit()
        deleting.result(DEADLINE)
    assert orphans("tmp") == 2
    assert sorted(message["n"] for message in drain(queue)) == [1, 2]


WAITERS = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"


def test_a_queue_deleted_again_and_again_under_publishers_loses_nothing():
    """Four publishers, in autocommit and in transactions, one deleter: every message is handled once."""
    queue = Queue("tmp", auto_deleted=True, ttl=float("inf"))
    queue.declare()

    def publish(start: int) -> None:
        for n in range(start, start + 100):
            queue.publish({"n": n})

    def publish_in_blocks(session: Session, start: int) -> None:
        for n in range(start, start + 100, 5):
            session._begin({})
            queue.publish({"n": n})
            queue.publish_many([{"n": n + more} for more in range(1, 5)])
            session._leave(None)

    with sessions(4) as (one, two, three, four), second_session() as deleter:
        running = [
            one.start(publish, 0),
            two.start(publish, 100),
            three.start(publish_in_blocks, three, 200),
            four.start(publish_in_blocks, four, 300),
        ]
        deleted = 0
        while not all(future.done() for future in running):
            deleted += deleter.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = 'tmp'").rowcount
        for future in running:
            future.result()
    assert deleted > 3
    assert orphans("tmp") > 0
    assert MessageQueueItem.objects.count() == 400
    assert sorted(message["n"] for message in drain(queue)) == list(range(400))


def test_adopting_from_two_sides_takes_each_orphan_once():
    """Rows that another adopter holds are passed over, without waiting."""
    queue = Queue("tmp")
    queue.publish_many(range(20))
    delete_queue("tmp")
    queue.declare()
    with Session() as other, lock_waits() as waits:
        other.begin()
        assert len(other.sql(reaping.ADOPT, {"name": "tmp", "limit": 5})) == 5
        assert reaping.adopt("tmp", 100, "default") == 15
        other.commit()
    assert waits == []
    assert sorted(payloads("tmp")) == list(range(20))


def test_adopting_into_a_queue_that_is_deleted_again_is_no_error():
    """The adopter waits for the deleter and finds nothing to do."""
    queue = Queue("tmp")
    queue.publish_many(range(3))
    delete_queue("tmp")
    queue.declare()
    with sessions(2) as (deleter, adopter):
        deleter.begin()
        deleter.sql("DELETE FROM django_pgqueue_messagequeue WHERE name = 'tmp'")
        adopting = adopter.start(reaping.adopt, "tmp", 10, "default")
        wait_until(lambda: is_waiting(adopter.pid))
        deleter.commit()
        assert adopting.result(DEADLINE) == 0
    assert orphans("tmp") == 3


def test_adoption_is_told_and_wakes_the_consumers():
    """A signal with the count, and a notification."""
    queue = Queue("tmp.adopted")
    queue.publish(1)
    delete_queue(queue.name)
    queue.declare()
    told = []

    def receive(sender, *, count, **kwargs):
        told.append((sender, count))

    signals.orphans_adopted.connect(receive)
    with second_session() as listener, override_settings(PGQUEUE={"NOTIFY_INTERVAL": 0}):
        listener.execute(f'LISTEN "{notifying.channel(queue.name)}"')
        reaping.adopt(queue.name, 10, "default")
        assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1
    assert told == [(queue.name, 1)]


# --- The trigger and its guard ---


def test_a_disabled_orphan_trigger_is_loud():
    """Messages that would forget where they belong stop the deletion: the CHECK refuses it."""
    queue = Queue("tmp")
    queue.publish(1)
    with second_session() as admin:
        admin.execute("ALTER TABLE django_pgqueue_messagequeue DISABLE TRIGGER django_pgqueue_orphan_messages")
        try:
            with pytest.raises(Exception, match="django_pgqueue_item_queue_or_orphan"):
                admin.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = 'tmp'")
        finally:
            admin.execute("ALTER TABLE django_pgqueue_messagequeue ENABLE TRIGGER django_pgqueue_orphan_messages")
    assert payloads("tmp") == [1]


def test_a_message_on_no_queue_at_all_is_refused():
    """Neither a queue nor the name of one that was deleted: nobody would ever handle it."""
    with second_session() as psql, pytest.raises(Exception, match="django_pgqueue_item_queue_or_orphan"):
        psql.execute("INSERT INTO django_pgqueue_messagequeueitem (payload) VALUES ('1')")


def test_a_role_that_may_delete_queues_needs_no_right_on_the_messages():
    """The trigger runs as its owner, with a fixed search_path: also for a role whose own path is empty."""
    queue = Queue("tmp")
    queue.publish(1)
    role = "django_pgqueue_deleter"
    with second_session() as admin:
        admin.execute(f"CREATE ROLE {role}")
        try:
            admin.execute(f"GRANT SELECT, DELETE ON django_pgqueue_messagequeue TO {role}")
            admin.execute(f"SET ROLE {role}")
            admin.execute("SET search_path = ''")
            admin.execute("DELETE FROM public.django_pgqueue_messagequeue WHERE name = 'tmp'")
        finally:
            admin.execute("RESET ROLE")
            admin.execute("RESET search_path")
            admin.execute(f"DROP OWNED BY {role}")
            admin.execute(f"DROP ROLE {role}")
    assert orphans("tmp") == 1


def test_the_stamp_costs_one_update_per_message():
    """Stamping and cutting loose are one update, so the foreign key finds nothing left to do."""
    queue = Queue("tmp")
    queue.publish_many(range(10))
    before = dict(MessageQueueItem.objects.values_list("id", "payload"))
    with second_session() as psql, psql.transaction():
        psql.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = 'tmp'")
        (updated,) = psql.execute(
            "SELECT pg_stat_get_xact_tuples_updated('django_pgqueue_messagequeueitem'::regclass)"
        ).fetchone()
    assert updated == 10
    assert dict(MessageQueueItem.objects.filter(orphaned_from="tmp").values_list("id", "payload")) == before
