"""Why a queue was gone: revived, vanished or first used, told once in every way in which it can come back."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

from django_pgqueue import Queue, message, signals
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueEvent
from django_pgqueue.queue_internals import declaration_of, make_handler
from django_pgqueue.reaper import EVENT_AGE, Reaper
from django_pgqueue.services import reaping
from django_pgqueue.services.beliefs import beliefs
from tests.support.processes import consuming, drain, run
from tests.support.rows import backdate, delete_queue, make_queue, payloads
from tests.support.sessions import connect, fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue() -> Queue:
    return Queue("tmp", auto_deleted=True)


@pytest.fixture
def told() -> Iterator[list[tuple[str, str, Any, Any]]]:
    """What the signals said: (signal, queue, cause, standing)."""
    heard: list[tuple[str, str, Any, Any]] = []

    def healed(sender: str, *, using: str, cause: str, standing: bool, **kwargs: Any) -> None:
        assert using == "default"
        heard.append(("healed", sender, cause, standing))

    def created(sender: str, *, using: str, **kwargs: Any) -> None:
        assert using == "default"
        heard.append(("created", sender, None, None))

    signals.queue_healed.connect(healed)
    signals.queue_created.connect(created)
    yield heard
    signals.queue_healed.disconnect(healed)
    signals.queue_created.disconnect(created)


def events(name: str = "tmp") -> list[str]:
    """Return what is on record for a queue, oldest first."""
    return list(QueueEvent.objects.filter(queue=name).order_by("id").values_list("kind", flat=True))


def reap(name: str = "tmp") -> None:
    backdate(name, 7200)
    assert reaping.reap_queue(name, 3600, "default")


def reap_in_another_process(name: str = "tmp") -> None:
    backdate(name, 7200)
    assert run("reap_queues", "--idle-for", "3600").returncode == 0
    assert not MessageQueue.objects.filter(name=name).exists()


def delete(name: str = "tmp") -> None:
    delete_queue(name)


# --- Every way back ---


def in_atomic(use: Callable[[Queue], object]) -> Callable[[Queue], None]:
    def call(queue: Queue) -> None:
        with transaction.atomic():
            use(queue)

    return call


def publish(queue: Queue) -> None:
    queue.publish(1)


def publish_behind_the_cache(queue: Queue) -> None:
    """With a cold cache: the refresh ahead of the insert finds it missing."""
    beliefs.declared.clear()
    queue.publish(1)


def publish_many(queue: Queue) -> None:
    queue.publish_many([1, 2])


def publish_chunks(queue: Queue) -> None:
    queue.publish_many([1] * (message.CHUNK_ROWS + 1))


def beat(queue: Queue) -> None:
    Heartbeat("default", declared=[declaration_of(queue)]).run_once()


def redrive(queue: Queue) -> None:
    # A letter from another life, or a redrive would not make the queue.
    MessageQueueItem.objects.update_or_create(
        orphaned_from="tmp.dead",
        defaults={"payload": 1, "dead_lettered_from": "tmp", "dead_lettered_at": "2026-01-01T00:00:00Z"},
    )
    queue.redrive()


WAYS: dict[str, Callable[[Queue], object]] = {
    "publish": publish,
    "publish, cold cache": publish_behind_the_cache,
    "publish in atomic": in_atomic(publish),
    "publish_many": publish_many,
    "publish_many in atomic": in_atomic(publish_many),
    "publish_many, several statements": publish_chunks,
    "declare": Queue.declare,
    "declare in atomic": in_atomic(Queue.declare),
    "heartbeat": beat,
    "redrive": redrive,
    "consumer": drain,
}

each_way = pytest.mark.parametrize("use", WAYS.values(), ids=WAYS)


@each_way
def test_a_first_use_is_no_event(queue: Queue, use: Callable[[Queue], object], told: Any) -> None:
    """A queue that was never there is created: nothing is on record, and nobody is warned."""
    use(queue)
    assert told == [("created", "tmp", None, None)]
    assert events() == []


@each_way
def test_a_reaped_queue_is_revived(queue: Queue, use: Callable[[Queue], object], told: Any) -> None:
    """The reaper left a tombstone: whoever brings it back, the record says so once, and again only after a reap."""
    queue.declare()
    reap()
    told.clear()
    use(queue)
    use(queue)
    assert told == [("healed", "tmp", "revived", False)]
    assert events() == ["reaped", "revived"]


@each_way
def test_a_queue_that_something_else_removed_has_vanished(
    queue: Queue, use: Callable[[Queue], object], told: Any
) -> None:
    """This process had known it, and no reaper removed it."""
    queue.declare()
    delete()
    told.clear()
    use(queue)
    use(queue)
    assert told == [("healed", "tmp", "vanished", False)]
    assert events() == ["vanished"]


def test_a_process_that_never_knew_it_cannot_tell_that_it_vanished(queue: Queue, told: Any) -> None:
    """To it this is a first use; a tombstone is on record for everybody."""
    queue.declare()
    delete()
    assert run("publish_messages", "tmp", "--auto-deleted", stdin="1\n").returncode == 0
    assert events() == []
    MessageQueueItem.objects.all().delete()
    reap()
    assert run("publish_messages", "tmp", "--auto-deleted", stdin="1\n").returncode == 0
    assert events() == ["reaped", "revived"]


def test_a_queue_that_another_process_reaped_is_revived(queue: Queue, told: Any) -> None:
    """This process had known it, too: the tombstone counts more."""
    queue.publish(1)
    drain(queue)
    reap_in_another_process()
    told.clear()
    queue.publish(1)
    assert told == [("healed", "tmp", "revived", False)]


def test_a_revived_queue_that_is_deleted_has_vanished(queue: Queue) -> None:
    """Only the last event counts: a tombstone is used up."""
    queue.declare()
    reap()
    queue.publish(1)
    delete()
    queue.publish(1)
    delete()
    queue.publish(1)
    MessageQueueItem.objects.all().delete()
    reap()
    queue.publish(1)
    assert events() == ["reaped", "revived", "vanished", "vanished", "reaped", "revived"]


def test_a_running_consumer_and_its_heartbeat_bring_a_queue_back(queue: Queue, settings: Any, told: Any) -> None:
    """Once, whichever of them sees it first."""
    settings.PGQUEUE = {"POLL_INTERVAL": 0.1, "HEARTBEAT_INTERVAL": 0.1}
    with consuming(Consumer([make_handler(queue, print)])):
        wait_until(lambda: MessageQueue.objects.filter(name="tmp").exists())
        # Committed before it is told.
        wait_until(lambda: told == [("created", "tmp", None, None)])
        delete()
        wait_until(lambda: len(told) == 2)
    assert told[1] == ("healed", "tmp", "vanished", False)
    assert events() == ["vanished"]


def test_a_standing_queue_that_vanished_is_told_as_such(told: Any) -> None:
    """Where it may be made again: explicitly, or by a process that had not just seen it."""
    queue = Queue("orders")
    queue.declare()
    delete("orders")
    told.clear()
    queue.declare()
    delete("orders")
    beliefs.declared.clear()
    queue.publish(1)
    assert told == [("healed", "orders", "vanished", True)] * 2
    assert events("orders") == ["vanished", "vanished"]


# --- Transactions ---


def test_a_rollback_leaves_no_event_and_tells_nobody(queue: Queue, told: Any) -> None:
    """The queue is as gone as before, and the tombstone still stands for the next one."""
    queue.declare()
    reap()
    told.clear()
    for use in (publish, publish_many, Queue.declare):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            use(queue)
            assert events() == ["reaped", "revived"]
            raise ZeroDivisionError
        assert (events(), told) == (["reaped"], [])
    queue.publish(1)
    assert events() == ["reaped", "revived"]


def test_a_savepoint_that_is_rolled_back_takes_its_event_along(queue: Queue, told: Any) -> None:
    """The outer transaction commits without it."""
    queue.declare()
    delete()
    told.clear()
    with transaction.atomic(), pytest.raises(ZeroDivisionError), transaction.atomic():
        queue.publish(1)
        raise ZeroDivisionError
    assert (events(), told, payloads("tmp")) == ([], [], [])


@pytest.fixture
def no_record() -> Iterator[None]:
    """Let the table of events be away."""
    with connect() as admin:
        admin.execute("ALTER TABLE django_pgqueue_queueevent RENAME TO elsewhere")
        try:
            yield
        finally:
            admin.execute("ALTER TABLE elsewhere RENAME TO django_pgqueue_queueevent")


def test_a_committed_heal_whose_event_cannot_be_recorded_is_no_failure(
    queue: Queue, told: Any, no_record: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The message is committed: its publisher would publish it twice. It is logged, and told by what is known."""
    queue.declare()
    delete()
    told.clear()
    caplog.clear()
    assert queue.publish(1)
    assert payloads("tmp") == [1]
    assert told == [("healed", "tmp", "vanished", False)]
    assert "event of a recreated queue not recorded queue=tmp" in caplog.text
    delete()
    queue.declare()
    assert told[1:] == [("healed", "tmp", "vanished", False)]


def test_in_a_transaction_it_fails_and_nothing_is_committed(queue: Queue, told: Any, no_record: None) -> None:
    """There the caller can still be told the truth."""
    for use in (in_atomic(publish), publish_many):
        queue.declare()
        delete()
        told.clear()
        with pytest.raises(Exception, match="queueevent"):
            use(queue)
        assert (told, MessageQueueItem.objects.count()) == ([], 0)
        assert not MessageQueue.objects.filter(name="tmp").exists()


# --- What people see ---


@pytest.mark.parametrize(
    ("remove", "level", "cause"), [(reap, logging.INFO, "revived"), (delete, logging.WARNING, "vanished")]
)
def test_only_what_vanished_is_a_warning(
    queue: Queue, remove: Callable[[], None], level: int, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle queue that is reaped and comes back is everyday life."""
    queue.declare()
    remove()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "django_pgqueue"):
        queue.publish(1)
    (record,) = [record for record in caplog.records if "queue healed" in record.message]
    assert record.levelno == level
    assert record.message == f"queue healed queue=tmp using=default cause={cause} standing=False"


def test_a_first_use_is_logged_for_debugging_only(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """It happens once for each queue."""
    with caplog.at_level(logging.DEBUG, "django_pgqueue"):
        queue.publish(1)
    (record,) = [record for record in caplog.records if "queue=tmp" in record.message]
    assert (record.levelno, record.message) == (logging.DEBUG, "queue created queue=tmp using=default")


def test_a_receiver_that_raises_changes_nothing(queue: Queue) -> None:
    """The publish has happened, and so has the event."""

    def fail(sender: str, **kwargs: Any) -> None:
        raise RuntimeError

    queue.declare()
    delete()
    signals.queue_healed.connect(fail)
    try:
        queue.publish(1)
    finally:
        signals.queue_healed.disconnect(fail)
    assert (payloads("tmp"), events()) == ([1], ["vanished"])


def test_inspect_queues_shows_how_often_a_day(queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the last day, by cause; what is older does not count."""
    make_queue("tmp", auto_deleted=True)
    QueueEvent.objects.bulk_create(
        QueueEvent(queue=name, kind=kind)
        for name, kind in [*[("tmp", "revived")] * 3, *[("tmp", "vanished")] * 2, ("tmp", "reaped"), ("x", "vanished")]
    )
    old = QueueEvent.objects.create(queue="tmp", kind="vanished")
    fetch("UPDATE django_pgqueue_queueevent SET at = at - interval '25 hours' WHERE id = %s", [old.pk])
    stats = queue.stats()
    assert (stats.revived_per_day, stats.vanished_per_day) == (3, 2)
    call_command("inspect_queues", "tmp")
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[-3:] == ["revived/d", "vanished/d", "state"]
    assert row.split()[-5:] == ["3", "2", "reapable", "in", "60.0min"]


def test_events_are_kept_for_a_week(queue: Queue) -> None:
    """The reaper drops older ones, in batches, and says how many."""
    QueueEvent.objects.bulk_create(QueueEvent(queue=f"q{number}", kind="reaped") for number in range(25))
    fetch("UPDATE django_pgqueue_queueevent SET at = at - %s * interval '1 second'", [EVENT_AGE - 60])
    assert Reaper("default", batch_size=10).run_once().events == 0
    fetch("UPDATE django_pgqueue_queueevent SET at = at - interval '2 minutes' WHERE queue <> 'q7'")
    assert Reaper("default", batch_size=10).run_once().events == 24
    assert list(QueueEvent.objects.values_list("queue", flat=True)) == ["q7"]


def test_a_reaped_queue_that_never_comes_back_leaves_nothing() -> None:
    """Neither orphans nor, after a week, a tombstone: ten thousand reply queues a day do not add up."""
    for number in range(20):
        name = f"replies.{number}"
        queue = Queue(name, auto_deleted=True)
        queue.publish(1)
        queue.reject(*queue.claim(1))
        queue.publish_many([2, 3], ttl=0.001)
        for each in (name, f"{name}.dead"):
            backdate(each, 7200)
    wait_until(lambda: MessageQueueItem.objects.expired().count() == 40)
    MessageQueueItem.objects.filter(queue__name__endswith=".dead").delete()
    reaped = Reaper("default").run_once()
    assert len(reaped.queues) == 40
    assert MessageQueueItem.objects.count() == 0
    assert not MessageQueue.objects.filter(name__startswith="replies").exists()
    fetch("UPDATE django_pgqueue_queueevent SET at = at - interval '8 days'")
    Reaper("default").run_once()
    assert QueueEvent.objects.count() == 0
