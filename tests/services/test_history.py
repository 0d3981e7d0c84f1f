"""What became of each queue's messages, minute by minute: told by consumers, and kept for a day."""

import re
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import override_settings

from django_pgqueue import Message, Nack, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.handler import Outcome
from django_pgqueue.consumer.lane import MAX_MINUTES, Lane
from django_pgqueue.models import MessageQueue, QueueMinute
from django_pgqueue.monitoring import queue_numbers
from django_pgqueue.monitoring.queue_numbers import numbers_of
from django_pgqueue.queue_internals import declaration_of, make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import claiming, session, settling
from django_pgqueue.services import minutes as minutes_services
from django_pgqueue.services.minutes import Minute, Tally
from tests.support.processes import consuming, worker
from tests.support.rows import make_queue, truncate_messages
from tests.support.sessions import fetch, in_threads
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def told(name: str = "work") -> tuple[int, int, int]:
    """Return what is told of a queue in all minutes: handled, failed, dead-lettered."""
    rows = QueueMinute.objects.filter(queue=name).values_list("handled", "failed", "dead_lettered")
    handled, failed, dead_lettered = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0, 0)
    return handled, failed, dead_lettered


def published(name: str = "work") -> dict[int, int]:
    """Return how many messages of a queue were published by minutes ago, as its numbers have it."""
    return numbers_of([name], "default")[name].published


def told_published(name: str = "work") -> dict[int, int]:
    """Return of how many consumers have told."""
    return {
        each.ago: each.published for each in minutes_services.minutes([name], 60, "default")[name] if each.published
    }


def backdate_messages(minutes: int, name: str = "work") -> None:
    """Let what waits look as if it was published in the middle of a minute so many minutes ago."""
    fetch(
        "UPDATE django_pgqueue_messagequeueitem SET published_at ="
        f" date_trunc('minute', statement_timestamp()) - interval '{minutes} min' + interval '30 s'"
        f" WHERE queue_id = '{name}'"
    )


@pytest.fixture
def early_in_the_minute() -> None:
    """Begin where the minute does not end before the test."""
    fetch("SELECT pg_sleep(61 - extract(second FROM now())) WHERE extract(second FROM now()) > 45")


@pytest.mark.parametrize("ack", ["late", "early", "atomic"])
def test_a_consumer_tells_what_became_of_messages(ack: str) -> None:
    """Handled, failed, given up; by its last word at the end."""
    queue = Queue("work", backoff={"base": 0, "jitter": 0})
    queue.publish_many(["fine", "fine", "bad", "again"])

    def handle(message: Message) -> None:
        if message.payload == "bad":
            raise Reject("no")
        if message.payload == "again" and message.delivery_count == 1:
            raise Nack(delay=0)

    Consumer([make_handler(queue, handle, ack=ack)], drain=True).run()
    # With an early ack nothing can fail any more.
    assert told() == ((4, 0, 0) if ack == "early" else (3, 1, 1))


def test_what_is_given_up_is_told_however_it_was(tmp_path: Any) -> None:
    """At the last delivery, by a handler's word, or because nobody can decode it; a delivery before it has failed."""
    queue = Queue("work", max_deliveries=2, backoff={"base": 0, "jitter": 0})
    queue.publish_many(["fails", "no"])
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " SELECT 'work', ('[' || repeat('7', 5000) || ']')::jsonb"
    )

    def handle(message: Message) -> None:
        raise Reject("no") if message.payload == "no" else ValueError("fails")

    Consumer([make_handler(queue, handle)], drain=True).run()
    assert told() == (0, 1, 3)


@pytest.mark.usefixtures("early_in_the_minute")
def test_what_was_published_is_what_was_settled_and_what_waits() -> None:
    """Each message once, in the minute of its publishing, wherever it is on its way."""
    queue = Queue("work", max_deliveries=2, backoff={"base": 0, "jitter": 0})
    queue.publish_many(["fine"] * 5)
    backdate_messages(50)
    queue.publish_many(["again", "bad", "fails", "fine"])
    backdate_messages(3)
    fetch(
        "UPDATE django_pgqueue_messagequeueitem SET published_at = published_at - interval '47 min'"
        " WHERE id IN (SELECT id FROM django_pgqueue_messagequeueitem ORDER BY id LIMIT 5)"
    )
    assert (published(), told_published()) == ({50: 5, 3: 4}, {})
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == "bad":
            raise Reject("no")
        if message.payload == "fails" or (message.payload == "again" and message.delivery_count == 1):
            raise Nack(delay=0)

    # In parts: what was given back by one consumer is settled by another.
    for count in (6, 100):
        Consumer([make_handler(queue, handle)], drain=True, max_messages=count).run()
        assert published() == {50: 5, 3: 4}
    assert seen.count("again") == seen.count("fails") == 2 and told() == (7, 2, 2)
    assert (told_published(), told_published("work.dead")) == ({50: 5, 3: 4}, {})
    # Redriven, or handled from its dead-letter queue, it is no new message.
    queue.redrive(limit=1)
    Consumer([make_handler(queue, lambda message: None)], drain=True).run()
    letters = Queue("work.dead")
    Consumer([make_handler(letters, lambda message: None)], drain=True).run()
    assert told("work.dead") == (1, 0, 0)
    assert (published(), published("work.dead")) == ({50: 5, 3: 4}, {})


def test_a_delayed_message_counts_when_it_is_settled_and_one_given_back_unstarted_does_not_count_twice() -> None:
    """Neither does one whose worker was lost."""
    queue = Queue("work")
    queue.publish_many(range(2), delay=0.001)
    queue.publish(2)
    queue.publish(3)
    fetch("SELECT pg_sleep(0.01)")
    claim = claiming.claim(declaration_of(queue), "default", limit=4, lease=60, consumer=uuid4())
    settling.release(claim.messages[:3], "default")
    fetch("UPDATE django_pgqueue_messagequeueitem SET lease_expires_at = '2026-01-01' WHERE lease_token IS NOT NULL")
    Consumer([make_handler(queue, lambda message: None)], drain=True).run()
    assert sum(told_published().values()) == 4 and told() == (4, 0, 0)


def test_minutes_of_publishing_that_are_not_kept_are_dropped() -> None:
    """A message of last week, or dated by somebody to next year, makes no minute."""
    queue = Queue("work")
    for time in ("now() - interval '8 days'", "now() + interval '1 year'", "'infinity'", "'-infinity'"):
        queue.publish(1)
        fetch(
            f"UPDATE django_pgqueue_messagequeueitem SET published_at = {time}"
            " WHERE id = (SELECT max(id) FROM django_pgqueue_messagequeueitem)"
        )
    assert sum(published().values()) == 2
    Consumer([make_handler(queue, lambda message: None)], drain=True).run()
    assert told() == (4, 0, 0) and told_published() == {}
    assert QueueMinute.objects.count() == 1


def test_a_lane_keeps_no_more_minutes_than_so_many() -> None:
    """A backlog of years does not fill a consumer's memory, and what is dropped is never told as negative."""
    lane = Lane(make_handler(Queue("work"), lambda message: None), prefetch=1, concurrency=1)
    now = datetime.now(UTC)
    fields = {"queue": "work", "payload": 1, "headers": {}, "delivery_count": 1, "token": uuid4()}
    times = {"published_at": now, "lease_expires_at": now}
    for minute in range(2 * MAX_MINUTES):
        lane.count(Outcome.ACK, [Message(id=minute, **fields, **times, minute=minute)] * 2, 0)
        assert len(lane.published) <= MAX_MINUTES
    before = lane.counted
    assert before.handled == 4 * MAX_MINUTES and max(before.published) == 2 * MAX_MINUTES - 1
    lane.count(Outcome.ACK, [Message(id=0, **fields, **times, minute=0)], 0)
    assert lane.counted.since(Tally(published={0: 2, 2 * MAX_MINUTES - 1: 1})).published.get(0) is None
    assert lane.counted.since(before) == Tally(handled=1, published={0: 1})


def test_no_more_of_the_newest_messages_are_looked_at_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The minute in which the look ends is not exact, nor what is before it. Other queues are counted as a whole."""
    monkeypatch.setattr(queue_numbers, "NEWEST", 4)
    Queue("long").publish_many(range(3))
    backdate_messages(8, "long")
    fetch("UPDATE django_pgqueue_messagequeueitem SET queue_id = 'long'")
    Queue("new").publish_many(range(3))
    backdate_messages(4, "new")
    fetch("UPDATE django_pgqueue_messagequeueitem SET queue_id = 'long' WHERE queue_id = 'new'")
    Queue("short").publish_many(range(3))
    found = numbers_of(["long", "short", "none"], "default")
    assert (found["long"].published, found["long"].exact_minutes) == ({4: 3, 8: 1}, 8)
    assert 420 < found["long"].newest.span < 540
    assert (sum(found["short"].published.values()), found["short"].exact_minutes) == (3, 60)
    assert (found["none"].published, found["none"].exact_minutes) == ({}, 60)
    assert numbers_of(["long"], "default")["long"].exact_minutes == 60


def test_the_newest_messages_are_found_from_the_end_of_the_claim_index() -> None:
    """Whatever the statistics say: no sort, and no message more than is looked at."""
    Queue("a").declare()
    truncate_messages()
    fetch("ANALYZE django_pgqueue_messagequeueitem")
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) SELECT 'a', '{}' FROM generate_series(1, 3000)"
    )
    with connection.cursor() as cursor:
        cursor.execute(
            f"EXPLAIN (ANALYZE, FORMAT TEXT) {minutes_services.NEWEST}", {"names": ["a"], "most": 10, "minutes": 60}
        )
        plan = "\n".join(row[0] for row in cursor.fetchall())
    walk = plan[plan.index("LATERAL") if "LATERAL" in plan else plan.index("Limit") :]
    assert "Index Scan Backward using django_pgqueue_item_claim_idx" in walk and "Sort" not in walk
    assert re.search(r"Backward using django_pgqueue_item_claim_idx .*actual.* rows=10(\.00)? ", walk), plan


def test_it_tells_with_each_heartbeat_and_nothing_twice() -> None:
    """A process that lives for weeks is not silent until its end."""
    queue = Queue("work")
    seen: list[Any] = []
    with override_settings(PGQUEUE={"HEARTBEAT_INTERVAL": 0.1, "POLL_INTERVAL": 0.2}):
        consumer = Consumer([make_handler(queue, lambda message: seen.append(message.payload))])
        with consuming(consumer):
            for count in (3, 5):
                queue.publish_many(range(count))
                wait_until(lambda: told()[0] == len(seen) > 0 and consumer.condition().held == 0)
            wait_until(lambda: told() == (8, 0, 0))
    assert told() == (8, 0, 0)


def test_a_killed_process_had_told_what_it_had(tmp_path: Any) -> None:
    """What it did since its last heartbeat is missing, and nothing else is wrong."""
    with worker(settings={"HEARTBEAT_INTERVAL": 0.3}) as running:
        Queue("work").publish_many(range(4))
        wait_until(lambda: told() == (4, 0, 0))
        running.kill()
    assert told() == (4, 0, 0)


def test_counts_of_several_processes_add_up() -> None:
    """At the same time, and for the same queues in whatever order."""
    names = [f"q{number}" for number in range(5)]
    minute = int(session.now("default").timestamp() // 60)

    def tell(number: int) -> None:
        ordered = names if number % 2 else names[::-1]
        for _ in range(20):
            published = {minute - number % 2: 1, minute - 9: 2}
            tally = Tally(handled=1, failed=2, dead_lettered=3, published=published)
            minutes_services.count_minute(dict.fromkeys(ordered, tally), "default")

    in_threads(6, tell)
    assert {told(name) for name in names} == {(120, 240, 360)}
    assert {sum(told_published(name).values()) for name in names} == {360}


def test_a_missing_table_stops_neither_consumer_nor_reaper(caplog: pytest.LogCaptureFixture) -> None:
    """New code before `migrate`, or a role without the rights: messages are handled, and it is logged."""
    make_queue("idle", auto_deleted=True, idle=7200)
    queue = Queue("work", exclusive=True)
    fetch("ALTER TABLE django_pgqueue_queueminute RENAME TO elsewhere")
    try:
        seen: list[Any] = []
        with override_settings(PGQUEUE={"HEARTBEAT_INTERVAL": 0.1, "POLL_INTERVAL": 0.2}):
            consumer = Consumer([make_handler(queue, lambda message: seen.append(message.payload))])
            with consuming(consumer):
                for number in range(3):
                    queue.publish(number)
                    wait_until(lambda number=number: seen[-1:] == [number])
                    wait_until(lambda number=number: caplog.text.count("minute counts not written") > number)
        assert Reaper("default").run_once().queues == ["idle"]
        assert "reaper run not recorded" in caplog.text and "database lost" not in caplog.text
    finally:
        fetch("ALTER TABLE elsewhere RENAME TO django_pgqueue_queueminute")


def test_minutes_are_kept_for_a_day() -> None:
    """The reaper drops older ones, in batches."""
    for hours in (0, 23, 25, 26, 27):
        minutes_services.count_minute({f"q{hours}": Tally(handled=1)}, "default")
        fetch(f"UPDATE django_pgqueue_queueminute SET minute = minute - interval '{hours} h' WHERE queue = 'q{hours}'")
    Reaper("default", batch_size=2).run_once()
    assert set(QueueMinute.objects.values_list("queue", flat=True)) == {"q0", "q23"}


def test_the_last_minutes_are_read_in_order() -> None:
    """By how long ago they were; those in which nothing was are missing."""
    for ago in (70, 3, 0):
        minutes_services.count_minute({"work": Tally(handled=ago + 1)}, "default")
        fetch(
            f"UPDATE django_pgqueue_queueminute SET minute = minute - interval '{ago} min'"
            f" WHERE handled = {ago + 1} AND queue = 'work'"
        )
    found = minutes_services.minutes(["work", "other"], 60, "default")
    assert found == {"work": [Minute(3, 4, 0, 0), Minute(0, 1, 0, 0)], "other": []}


def test_publishing_touches_no_minute() -> None:
    """The publish path writes messages, and nothing else."""
    Queue("work").publish_many(range(3))
    assert not QueueMinute.objects.exists() and MessageQueue.objects.filter(name="work").exists()
