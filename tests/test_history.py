"""What became of each queue's messages, minute by minute: told by consumers, and kept for a day."""

from typing import Any

import pytest
from django.test.utils import override_settings

from django_pgqueue import Message, Nack, Queue, Reject, services
from django_pgqueue.consumer import Consumer
from django_pgqueue.models import MessageQueue, QueueMinute
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import Minute, Tally
from tests.support import fetch, in_threads, make_queue, wait_until
from tests.workers import consuming, worker

pytestmark = pytest.mark.django_db(transaction=True)


def told(name: str = "work") -> tuple[int, int, int]:
    """Return what is told of a queue in all minutes: handled, failed, dead-lettered."""
    rows = QueueMinute.objects.filter(queue=name).values_list("handled", "failed", "dead_lettered")
    handled, failed, dead_lettered = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0, 0)
    return handled, failed, dead_lettered


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

    Consumer([queue.make_handler(handle, ack=ack)], drain=True).run()
    # With an early ack nothing can fail any more.
    assert told() == ((4, 0, 0) if ack == "early" else (3, 1, 1))


def test_it_tells_with_each_heartbeat_and_nothing_twice() -> None:
    """A process that lives for weeks is not silent until its end."""
    queue = Queue("work")
    seen: list[Any] = []
    with override_settings(PGQUEUE={"HEARTBEAT_INTERVAL": 0.1, "POLL_INTERVAL": 0.2}):
        consumer = Consumer([queue.make_handler(lambda message: seen.append(message.payload))])
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

    def tell(number: int) -> None:
        ordered = names if number % 2 else names[::-1]
        for _ in range(20):
            services.count_minute({name: Tally(handled=1, failed=2, dead_lettered=3) for name in ordered}, "default")

    in_threads(6, tell)
    assert {told(name) for name in names} == {(120, 240, 360)}


def test_a_missing_table_stops_neither_consumer_nor_reaper(caplog: pytest.LogCaptureFixture) -> None:
    """New code before `migrate`, or a role without the rights: messages are handled, and it is logged."""
    make_queue("idle", auto_deleted=True, idle=7200)
    queue = Queue("work", exclusive=True)
    fetch("ALTER TABLE django_pgqueue_queueminute RENAME TO elsewhere")
    try:
        seen: list[Any] = []
        with override_settings(PGQUEUE={"HEARTBEAT_INTERVAL": 0.1, "POLL_INTERVAL": 0.2}):
            consumer = Consumer([queue.make_handler(lambda message: seen.append(message.payload))])
            with consuming(consumer):
                for number in range(3):
                    queue.publish(number)
                    wait_until(lambda number=number: seen[-1:] == [number])
                    wait_until(lambda number=number: caplog.text.count("minute not told") > number)
        assert Reaper("default").run_once().queues == ["idle"]
        assert "reaper's run not noted" in caplog.text and "database lost" not in caplog.text
    finally:
        fetch("ALTER TABLE elsewhere RENAME TO django_pgqueue_queueminute")


def test_minutes_are_kept_for_a_day() -> None:
    """The reaper drops older ones, in batches."""
    for hours in (0, 23, 25, 26, 27):
        services.count_minute({f"q{hours}": Tally(handled=1)}, "default")
        fetch(f"UPDATE django_pgqueue_queueminute SET minute = minute - interval '{hours} h' WHERE queue = 'q{hours}'")
    Reaper("default", batch_size=2).run_once()
    assert set(QueueMinute.objects.values_list("queue", flat=True)) == {"q0", "q23"}


def test_the_last_minutes_are_read_in_order() -> None:
    """By how long ago they were; those in which nothing was are missing."""
    for ago in (70, 3, 0):
        services.count_minute({"work": Tally(handled=ago + 1)}, "default")
        fetch(
            f"UPDATE django_pgqueue_queueminute SET minute = minute - interval '{ago} min'"
            f" WHERE handled = {ago + 1} AND queue = 'work'"
        )
    found = services.minutes(["work", "other"], 60, "default")
    assert found == {"work": [Minute(3, 4, 0, 0), Minute(0, 1, 0, 0)], "other": []}


def test_publishing_touches_no_minute() -> None:
    """The publish path writes messages, and nothing else."""
    Queue("work").publish_many(range(3))
    assert not QueueMinute.objects.exists() and MessageQueue.objects.filter(name="work").exists()
