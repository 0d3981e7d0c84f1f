"""The reaper: what is idle and empty goes, what holds a message stays, whatever runs beside it."""

import json
import logging

import pytest
from django.core.management import call_command
from django.db.models.functions import Now
from django.test.utils import override_settings

from django_pgqueue import Queue, reaper
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer
from django_pgqueue.reaper import Reaped, Reaper
from django_pgqueue.services import declaring, reaping
from django_pgqueue.services.beliefs import beliefs
from tests.support.locks import is_waiting, lock_waits
from tests.support.rows import age_of, backdate, delete_queue, make_message, make_queue, payloads
from tests.support.sessions import Session, fetch, sessions
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def reap(**options) -> Reaped:
    return Reaper("default", **{"idle_for": 3600, **options}).run_once()


#: Queue and payload of a publish in plain SQL.
RAW = ["tmp", '{"n": 1}']


def no_message_is_cut_loose() -> bool:
    return not MessageQueueItem.objects.filter(queue=None).exists()


# --- Which queues go ---


def test_an_idle_empty_auto_deleted_queue_is_reaped(caplog):
    """It goes, it is reported and logged; standing and fresh queues stay."""
    make_queue("idle", idle=3700, auto_deleted=True)
    make_queue("fresh", idle=3500, auto_deleted=True)
    make_queue("standing", idle=9_999_999)
    assert Reaper("default", idle_for=3600).preview().queues == ["idle"]
    with caplog.at_level(logging.INFO, "django_pgqueue"):
        assert reap().queues == ["idle"]
    assert set(MessageQueue.objects.values_list("name", flat=True)) >= {"fresh", "standing"}
    assert not MessageQueue.objects.filter(name="idle").exists()
    assert "queue reaped queue=idle" in caplog.text


def test_the_idle_time_is_the_setting_unless_it_is_given():
    """REAP_IDLE_AFTER is read live."""
    make_queue("tmp", idle=120, auto_deleted=True)
    with override_settings(PGQUEUE={"REAP_IDLE_AFTER": 100}):
        assert Reaper("default").preview().queues == ["tmp"]
    with override_settings(PGQUEUE={"REAP_IDLE_AFTER": 130}):
        assert Reaper("default").run_once().queues == []


KEEPS = {
    "ready": {},
    "ready without expiry": {"expires_in": None},
    "delayed": {"due_in": 5000},
    "delayed with expiry": {"due_in": 5000, "expires_in": 6000},
    "leased": {"lease": 60},
    "leased and past its expiry": {"lease": 60, "expires_in": -10},
    "lapsed": {"lease": -60},
    "dead": {"dead_lettered_from": "other", "due_in": -5},
    "parked": {"due_in": 9_999_999},
}


@pytest.mark.parametrize("state", KEEPS)
def test_a_queue_that_holds_a_message_is_never_reaped(state):
    """Delayed, leased, lapsed, dead: each keeps its queue, however long that was idle."""
    make_queue("tmp", idle=9999, auto_deleted=True)
    item = make_message("tmp", **KEEPS[state])
    assert reap().queues == []
    item.refresh_from_db()
    assert item.queue_id == "tmp"


@pytest.mark.parametrize("state", KEEPS)
def test_a_preview_names_no_queue_that_holds_a_message(state):
    """The search for idle queues looks for messages itself: a preview does not get as far as the deletion."""
    make_queue("empty", idle=9999, auto_deleted=True)
    make_queue("tmp", idle=9999, auto_deleted=True)
    make_message("tmp", **KEEPS[state])
    assert Reaper("default", idle_for=3600).preview().queues == ["empty"]


def test_an_expired_message_does_not_keep_its_queue():
    """It goes first, and then the queue, in one run."""
    make_queue("tmp", idle=9999, auto_deleted=True)
    make_message("tmp", expires_in=-1)
    reaped = reap()
    assert (reaped.expired, reaped.queues) == (1, ["tmp"])
    assert not MessageQueueItem.objects.exists()


def test_a_queue_in_use_is_never_reaped():
    """A publisher's refresh after its commit, and a touch, keep it alive; both are no more than needed."""
    queue = Queue("tmp", auto_deleted=True)
    queue.publish({"n": 1})
    queue.ack(*queue.claim())
    for use in (lambda: queue.publish({"n": 2}), lambda: declaring.touch(["tmp"], "default")):
        backdate("tmp", 3700)
        beliefs.declared.clear()  # As DECLARE_TTL seconds later.
        use()
        MessageQueueItem.objects.all().delete()
        assert age_of("tmp") < 5
        assert reap().queues == []


# --- Against publishers, in every order ---


@pytest.mark.parametrize("form", ["publish", "publish_many", "raw"])
def test_an_open_publisher_keeps_its_queue_and_nobody_waits(form):
    """The publisher's transaction is open when the reaper comes: skipped, at once."""
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    with Session() as publisher, lock_waits() as waits:
        publisher.begin()
        if form == "publish":
            publisher.run(queue.publish, {"n": 1})
        elif form == "publish_many":
            publisher.run(queue.publish_many, [{"n": 1}])
        else:
            publisher.sql("INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES (%s, %s)", RAW)
        backdate("tmp", 9999)
        assert reaping.idle_queues(3600, "default"), "an uncommitted message is not seen"
        assert reap().queues == []
        publisher.commit()
    assert waits == []
    assert payloads("tmp") == [{"n": 1}]
    assert no_message_is_cut_loose()


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("in_transaction", [False, True], ids=["autocommit", "atomic"])
def test_a_publisher_that_meets_an_open_reaper_heals_after_it(in_transaction, end):
    """The reaper has deleted the row and not committed: the publisher waits, and its message has a queue."""
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    backdate("tmp", 9999)
    params = {"name": "tmp", "idle_for": 3600}

    with sessions(2) as (reaper, publisher):
        reaper.begin()
        assert reaper.sql(reaping.LOCK_IDLE_QUEUE, params)
        assert reaper.sql(reaping.DELETE_IDLE_QUEUE, params)
        if in_transaction:
            publisher.begin()
        publishing = publisher.start(queue.publish, {"n": 1})
        wait_until(lambda: is_waiting(publisher.pid))
        reaper.commit() if end == "commit" else reaper.rollback()
        publishing.result(DEADLINE)
        if in_transaction:
            publisher.commit()
    assert payloads("tmp") == [{"n": 1}]
    assert no_message_is_cut_loose()


def test_a_message_committed_between_the_reapers_look_and_its_delete_keeps_the_queue(monkeypatch):
    """The publisher commits after the reaper chose the queue and before it locks the row."""
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    backdate("tmp", 9999)
    look = reaping.idle_queues

    def look_then_publish(*args):
        found = look(*args)
        with Session() as publisher:
            publisher.run(queue.publish, {"n": 1})
        return found

    monkeypatch.setattr(reaping, "idle_queues", look_then_publish)
    assert reap().queues == []
    assert payloads("tmp") == [{"n": 1}]
    assert no_message_is_cut_loose()


def test_the_delete_sees_what_was_committed_while_the_lock_was_taken():
    """
    A publisher commits between the locking statement's snapshot and its lock.

    The two statements are driven by hand; the first is made to wait for another session's lock,
    as it would if it did not skip, so that its snapshot is old by the time it has the row.
    """
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    backdate("tmp", 9999)
    params = {"name": "tmp", "idle_for": 3600}
    waiting_lock = reaping.LOCK_IDLE_QUEUE.replace("SKIP LOCKED", "")
    assert waiting_lock != reaping.LOCK_IDLE_QUEUE

    with sessions(2) as (publisher, reaper):
        publisher.begin()
        publisher.run(queue.publish, {"n": 1})
        reaper.begin()
        locking = reaper.start(fetch, waiting_lock, params)
        wait_until(lambda: is_waiting(reaper.pid))
        publisher.commit()
        assert [name for name, *_ in locking.result(DEADLINE)] == ["tmp"], "the lock alone does not see the message"
        assert reaper.sql(reaping.DELETE_IDLE_QUEUE, params) == []
        reaper.commit()
    assert payloads("tmp") == [{"n": 1}]
    assert no_message_is_cut_loose()


def test_the_reaper_locks_before_it_looks_for_messages():
    """While it holds the row no publisher gets in, so that "no message" stays true until it commits."""
    queue = Queue("tmp", auto_deleted=True)
    queue.declare()
    backdate("tmp", 9999)
    params = {"name": "tmp", "idle_for": 3600}
    with sessions(2) as (reaper, publisher):
        reaper.begin()
        assert reaper.sql(reaping.LOCK_IDLE_QUEUE, params)
        publishing = publisher.start(queue.publish, {"n": 1})
        wait_until(lambda: is_waiting(publisher.pid), what="the publisher to wait for the reaper's lock")
        assert reaper.sql(reaping.DELETE_IDLE_QUEUE, params)
        reaper.commit()
        publishing.result(DEADLINE)
    assert payloads("tmp") == [{"n": 1}]


def test_a_queue_refreshed_after_the_look_stays(monkeypatch):
    """The idle time is tested again under the lock."""
    make_queue("tmp", idle=9999, auto_deleted=True)
    look = reaping.idle_queues

    def look_then_touch(*args):
        found = look(*args)
        with Session() as other:
            other.run(declaring.touch, ["tmp"], "default")
        return found

    monkeypatch.setattr(reaping, "idle_queues", look_then_touch)
    assert reap().queues == []
    assert MessageQueue.objects.filter(name="tmp").exists()


def test_several_reapers_at_once_do_not_wait_for_each_other():
    """One holds a queue's row: the other passes it over and reaps the rest."""
    for name in ("one", "two"):
        make_queue(name, idle=9999, auto_deleted=True)
    with Session() as first, lock_waits() as waits:
        first.begin()
        assert first.sql(reaping.LOCK_IDLE_QUEUE, {"name": "one", "idle_for": 3600})
        assert reap().queues == ["two"]
        first.rollback()
    assert waits == []
    assert reap().queues == ["one"]


# --- Expiry, lapsed leases, consumers ---


def test_expired_messages_go_in_batches_and_are_counted(caplog):
    """What has no configured dead-letter queue is deleted; report and log give the number."""
    make_queue("orders")
    for _ in range(25):
        make_message("orders", expires_in=-1)
    make_message("orders", {"kept": 1}, expires_in=60)
    make_message("orders", {"kept": 2})
    assert reap(batch_size=10).expired == 25
    assert payloads("orders") == [{"kept": 1}, {"kept": 2}]
    assert sum(int(record.message.rpartition("count=")[2]) for record in caplog.records) == 25


def test_the_reaper_takes_small_batches_and_rests_after_each(monkeypatch):
    """What everybody else commits goes to the disk in between."""
    rests = []
    monkeypatch.setattr(reaper.time, "sleep", rests.append)
    make_queue("orders")
    for _ in range(2 * reaper.EXPIRED_AT_ONCE + 1):
        make_message("orders", expires_in=-1)
    make_queue("one", auto_deleted=True, idle=7200)
    make_queue("two", auto_deleted=True, idle=7200)
    assert reap(batch_size=1000).expired == 2 * reaper.EXPIRED_AT_ONCE + 1
    assert len(rests) == 3 + 2
    assert all(0 < rest <= reaper.LONGEST_REST for rest in rests)


def test_expired_messages_go_to_a_configured_dead_letter_queue():
    """They keep their payload, tell why, and do not expire there."""
    make_queue("orders", dead_letter="graveyard")
    make_message("orders", {"n": 1}, expires_in=-1)
    reaped = reap()
    assert (reaped.expired, reaped.dead_lettered) == (0, 1)
    item = MessageQueueItem.objects.get(queue="graveyard")
    assert (item.payload, item.expires_at, item.dead_lettered_from) == ({"n": 1}, None, "orders")
    assert item.failures[-1]["reason"] == "expired"


def test_nothing_expires_under_a_live_lease():
    """A message that is being handled stays, and its ack works; once the lease has lapsed it goes."""
    queue = Queue("orders")
    queue.publish({"n": 1}, ttl=0.2)
    (message,) = queue.claim()
    wait_until(lambda: MessageQueueItem.objects.filter(expires_at__lt=Now()).exists())
    assert reap().expired == 0
    queue.ack(message)
    make_message("orders", lease=-1, expires_in=-1)
    assert reap().expired == 1


def test_lapsed_messages_of_abandoned_queues_are_dead_lettered():
    """Delivered max_deliveries times and nobody claims: the reaper sets them aside, and leaves the others."""
    make_queue("orders", max_deliveries=3)
    make_message("orders", {"n": 1}, lease=-1, delivery_count=3)
    make_message("orders", {"n": 2}, lease=-1, delivery_count=2)
    make_message("orders", {"n": 3}, lease=60, delivery_count=3)
    assert reap().dead_lettered == 1
    assert payloads("orders.dead") == [{"n": 1}]
    assert payloads("orders") == [{"n": 2}, {"n": 3}]


def test_rows_of_consumers_long_gone_are_removed():
    """A day after the last heartbeat."""
    for host, age in (("gone", "25 hours"), ("here", "23 hours")):
        fetch(
            "INSERT INTO django_pgqueue_queueconsumer (id, host, pid, queues, last_heartbeat)"
            " VALUES (gen_random_uuid(), %s, 1, '[]', now() - %s::interval)",
            [host, age],
        )
    reap()
    assert list(QueueConsumer.objects.values_list("host", flat=True)) == ["here"]


def test_a_dry_run_tells_what_would_go_and_changes_nothing(capsys):
    """Its numbers are those of the run that follows."""
    make_queue("tmp", idle=9999, auto_deleted=True)
    make_queue("orders", dead_letter="graveyard")
    make_queue("plain")
    make_message("orders", expires_in=-1)
    make_message("plain", expires_in=-1)
    make_message("plain")
    delete_queue("plain")
    make_queue("plain")
    before = list(MessageQueueItem.objects.order_by("id").values()), list(MessageQueue.objects.values())
    call_command("reap_queues", dry_run=True, format="json")
    told = json.loads(capsys.readouterr().out)
    assert before == (list(MessageQueueItem.objects.order_by("id").values()), list(MessageQueue.objects.values()))
    call_command("reap_queues", format="json")
    assert json.loads(capsys.readouterr().out) == told
    assert told == {"expired": 1, "dead_lettered": 1, "adopted": 1, "bodies": 0, "events": 0, "queues": ["tmp"]}


def test_the_cron_run_says_nothing_where_nothing_was_done(capsys):
    """Cron mails what is printed."""
    call_command("reap_queues")
    assert capsys.readouterr().out == ""
