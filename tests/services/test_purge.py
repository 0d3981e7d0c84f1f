"""Purging: what waits on a queue is deleted for good, what somebody holds is not."""

import time
from typing import Any

import pytest
from django.db import transaction

from django_pgqueue import Queue, signals
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queues import PURGE_BATCH
from tests.support.locks import lock_waits
from tests.support.rows import delete_queue, make_message, make_queue, payloads
from tests.support.sessions import Session, fetch, in_threads

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue() -> Queue:
    make_queue("q")
    return Queue("q")


def test_what_waits_is_deleted_in_whatever_state(queue: Queue) -> None:
    """Ready, delayed, expired, dead, and what a dead worker left; other queues and what is held stay."""
    make_message("q", "ready")
    make_message("q", "delayed", due_in=60)
    make_message("q", "expired", expires_in=-1)
    make_message("q", "dead", dead_lettered_from="x", dead_lettered_at="2026-01-01T00:00:00Z")
    make_message("q", "lapsed", lease=-1)
    make_message("q", "held", lease=60)
    make_queue("other")
    make_message("other", "other")
    assert queue.purge() == 5
    assert payloads("q") == ["held"]
    assert payloads("other") == ["other"]
    assert queue.purge() == 0


def test_orphans_belong_to_no_queue_and_stay(queue: Queue) -> None:
    """The queue's row was deleted with messages on it: they come in when it is back, and may be purged then."""
    make_message("q", 1)
    delete_queue("q")
    assert queue.purge() == 0
    assert MessageQueueItem.objects.orphaned().count() == 1


def test_a_limit_deletes_so_many(queue: Queue) -> None:
    """What was due first goes first, as a claim would take it; what was never delayed comes after."""
    for number in range(3):
        make_message("q", f"ready {number}")
    for number in range(3):
        make_message("q", f"due {number}", due_in=number - 10)
    assert queue.purge(2) == 2
    assert payloads("q") == ["ready 0", "ready 1", "ready 2", "due 2"]
    assert queue.purge(100) == 4


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_a_limit_that_is_no_count_is_refused(queue: Queue, limit: Any) -> None:
    """Before anything is deleted."""
    make_message("q")
    with pytest.raises(ValueError, match="limit"):
        queue.purge(limit)
    assert len(payloads("q")) == 1


def test_what_comes_in_meanwhile_stays(queue: Queue) -> None:
    """A purge beside a busy publisher ends, and deletes only what was there when it began."""
    queue.publish_many(range(PURGE_BATCH + 5))
    later: list[int] = []
    assert queue.purge(progress=lambda _: later.append(queue.publish("later"))) == PURGE_BATCH + 5
    assert len(later) == 2
    assert payloads("q") == ["later", "later"]


def test_the_row_of_the_queue_stays(queue: Queue) -> None:
    """Purging is no deletion of the queue, and is not what keeps it in use."""
    before = fetch("SELECT xmin, ctid FROM django_pgqueue_messagequeue WHERE name = 'q'")
    make_message("q")
    queue.purge()
    assert fetch("SELECT xmin, ctid FROM django_pgqueue_messagequeue WHERE name = 'q'") == before


def test_a_queue_that_was_never_made_has_nothing_to_purge() -> None:
    """And is not made by it."""
    assert Queue("nobody").purge() == 0
    assert fetch("SELECT name FROM django_pgqueue_messagequeue WHERE name = 'nobody'") == []


def test_inside_a_transaction_all_of_it_is_part_of_that(queue: Queue) -> None:
    """Rolled back nothing is gone and nobody was told; committed the signal tells how many."""
    told: list[tuple[Any, Any]] = []

    def receive(sender: str, *, count: int, **kwargs: Any) -> None:
        told.append((sender, count))

    signals.messages_purged.connect(receive)
    queue.publish_many([1, 2])
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert queue.purge() == 2
        raise ZeroDivisionError
    assert (payloads("q"), told) == ([1, 2], [])
    with transaction.atomic():
        queue.purge()
        assert told == []
    assert (payloads("q"), told) == ([], [("q", 2)])


def test_rows_that_others_have_locked_are_passed_over_without_waiting(queue: Queue) -> None:
    """An open transaction that acks, and a second purge."""
    queue.publish_many(range(10))
    (held,) = queue.claim()
    with Session() as acking, Session() as purging, lock_waits() as waits:
        acking.begin()
        acking.run(queue.ack, held)
        purging.begin()
        assert purging.run(queue.purge, 4) == 4
        assert queue.purge() == 5
        purging.commit()
        acking.commit()
    assert waits == []
    assert payloads("q") == []


def test_purges_at_once_add_up(queue: Queue) -> None:
    """Each message is deleted, and counted, once."""
    queue.publish_many(range(500))
    assert sum(in_threads(6, lambda _: queue.purge())) == 500


@pytest.mark.full
def test_a_hundred_thousand_are_purged_in_bounded_time(queue: Queue) -> None:
    """In batches, beside a publisher who never waits; the last batch costs what the first did."""
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " SELECT 'q', '1' FROM generate_series(1, 100000)"
    )
    times = [time.monotonic()]

    def progress(count: int) -> None:
        times.append(time.monotonic())
        queue.publish("later")

    with lock_waits() as waits:
        assert queue.purge(progress=progress) == 100_000
    assert waits == []
    steps = sorted(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    assert len(steps) == 101
    assert sum(steps[-10:]) < (times[-1] - times[0]) / 2
    assert times[-1] - times[0] < 60
    assert set(payloads("q")) == {"later"}
