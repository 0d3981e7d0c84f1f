"""A redrive that sends a few ahead and waits for their fate, and one of a hundred thousand letters."""

import time
from typing import Any

import pytest

from django_pgqueue import CanaryFailed, Message, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from tests.support.locks import lock_waits
from tests.support.processes import consuming
from tests.support.rows import payloads
from tests.support.sessions import fetch
from tests.support.waiting import busy, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue() -> Queue:
    return Queue("q", max_deliveries=1)


def kill(queue: Queue, count: int) -> list[int]:
    """Publish messages and reject them. Returns their ids."""
    ids = queue.publish_many(range(count))
    queue.reject(*queue.claim(count), reason="bad")
    return ids


def test_the_others_follow_a_canary_that_ends_well(queue: Queue) -> None:
    """Two go and are handled; only then do the other eight."""
    kill(queue, 10)
    handled: list[Any] = []

    def handle(message: Message) -> None:
        if len(handled) < 2:
            # Nobody follows while one of them is being handled.
            time.sleep(0.3)
            assert len(payloads("q.dead")) == 8
        handled.append(message.payload)

    with consuming(Consumer([make_handler(queue, handle)])):
        assert queue.redrive(canary=2) == 10
        wait_until(lambda: len(handled) == 10)
    assert sorted(handled[:2]) == [0, 1]
    assert payloads("q.dead") == []


def test_a_canary_that_dies_again_stops_the_redrive(queue: Queue) -> None:
    """The error names it and says how many were sent; the others stay dead, each reason is kept."""
    ids = kill(queue, 10)

    def handle(message: Message) -> None:
        if message.payload == 1:
            raise Reject("still bad")

    with consuming(Consumer([make_handler(queue, handle)])), pytest.raises(CanaryFailed) as raised:
        queue.redrive(canary=3)
    assert (raised.value.queue, raised.value.redriven, raised.value.died) == ("q", 3, [ids[1]])
    assert f"died again [{ids[1]}]" in str(raised.value)
    assert set(raised.value.pending) <= {ids[0], ids[2]}
    assert sorted(payloads("q.dead")) == [1, 3, 4, 5, 6, 7, 8, 9]
    failures = MessageQueueItem.objects.get(pk=ids[1]).failures
    assert failures is not None
    assert [failure["reason"] for failure in failures] == ["bad", "still bad"]


def test_a_canary_that_nobody_settles_stops_the_redrive_in_time(queue: Queue) -> None:
    """Without a consumer: it waits for the seconds that it was given, and names what is pending."""
    ids = kill(queue, 5)
    began = time.monotonic()
    with pytest.raises(CanaryFailed) as raised:
        queue.redrive(canary=2, canary_timeout=0.5)
    assert 0.5 <= time.monotonic() - began < 10 * busy()
    assert (raised.value.died, raised.value.pending, raised.value.redriven) == ([], ids[:2], 2)
    assert (payloads("q"), payloads("q.dead")) == ([0, 1], [2, 3, 4])


def test_a_canary_that_is_retried_is_waited_for(queue: Queue, settings: Any) -> None:
    """Failing once is not dying: the second delivery decides."""
    settings.PGQUEUE = {"BACKOFF": {"base": 0.2, "jitter": 0}}
    patient = Queue("q", max_deliveries=3)
    kill(patient, 3)

    def handle(message: Message) -> None:
        if message.delivery_count == 1:
            raise ValueError("not yet")

    with consuming(Consumer([make_handler(patient, handle)])):
        assert patient.redrive(canary=1) == 3


@pytest.mark.parametrize(("options", "count"), [({"canary": 9}, 4), ({"canary": 3, "limit": 2}, 2)], ids=str)
def test_a_canary_larger_than_all_there_is_is_the_whole(queue: Queue, options: dict[str, Any], count: int) -> None:
    """It is waited for all the same, so that the exit status tells how it ended."""
    kill(queue, 4)
    with consuming(Consumer([make_handler(queue, lambda message: None)])):
        assert queue.redrive(**options) == count
    assert len(payloads("q.dead")) == 4 - count


def test_a_canary_of_parked_letters(queue: Queue) -> None:
    """They stay where they are; dying there again counts as dying again."""
    dead = Queue("q.dead")
    kill(dead, 3)

    def handle(message: Message) -> None:
        raise Reject("again")

    with consuming(Consumer([make_handler(dead, handle)])), pytest.raises(CanaryFailed) as raised:
        dead.redrive(canary=1)
    assert len(raised.value.died) == 1
    assert MessageQueueItem.objects.filter(delivery_count=0, queue="q.dead").count() == 3


@pytest.mark.full
def test_a_hundred_thousand_go_back_in_bounded_time(queue: Queue) -> None:
    """In small transactions beside a publisher who never waits, and the last batch costs what the first did."""
    queue.declare()
    Queue("q.dead").declare()
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem"
        " (queue_id, payload, read_after, dead_lettered_from, dead_letter_path, dead_lettered_at, failures)"
        " SELECT 'q.dead', to_jsonb(n), statement_timestamp(), 'q', '[\"q\"]', statement_timestamp(),"
        '        \'[{"reason": "bad"}]\''
        " FROM generate_series(1, 100000) AS n"
    )
    batches: list[tuple[float, int]] = []
    began = time.monotonic()

    def progress(count: int) -> None:
        batches.append((time.monotonic() - began, count))
        queue.publish(0)

    with lock_waits() as waits:
        assert queue.redrive(progress=progress) == 100_000
    assert waits == []
    # Each batch is committed by itself, the longest takes a small part of the whole.
    times = [0.0, *(elapsed for elapsed, _ in batches)]
    steps = sorted(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    assert len(batches) >= 100
    assert sum(steps[-10:]) < times[-1] / 2
    assert times[-1] < 60
    assert MessageQueueItem.objects.filter(queue="q", dead_lettered_from=None).count() == 100_000 + len(batches)
