"""
Case B102: real workers, real signals.

A stop lets running handlers end and gives back the rest; a kill gives back all by its lease.
"""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem, QueueConsumer
from tests.support.processes import command, worker
from tests.support.rows import payloads
from tests.support.sessions import connect
from tests.support.waiting import busy, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

LATE = {"POLL_INTERVAL": 60}


def seen() -> list[tuple[int, int]]:
    """Return message and attempt of each start of a handler."""
    return list(Seen.objects.order_by("id").values_list("msg_id", "attempt"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_at_once(number: int) -> None:
    """In LISTEN, with a minute of polling ahead: exit status 0 within two seconds, nothing left behind."""
    with worker(settings=LATE) as running:
        time.sleep(0.3)  # Let it fall asleep.
        began = time.monotonic()
        running.send(number)
        assert running.wait() == 0
        assert time.monotonic() - began < 2 * busy()
        assert running.output == ""
    assert not QueueConsumer.objects.exists()


def test_running_handlers_finish_and_waiting_messages_are_given_back(tmp_path: Path) -> None:
    """Four handlers run, sixteen messages wait: these are free at once, uncounted, and the four are acked."""
    queue, hold = Queue("work"), tmp_path / "hold"
    queue.publish_many([{"hold": str(hold)}] * 20)
    with worker("--concurrency", "4", "--grace", "20", settings={"LEASE": 30}) as running:
        wait_until(lambda: Seen.objects.count() == 4)
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 20)
        running.send(signal.SIGTERM)
        wait_until(lambda: MessageQueueItem.objects.ready().filter(delivery_count=0).count() == 16, 1.5)
        queue.publish("after the signal")
        hold.touch()
        assert running.wait() == 0
    assert Seen.objects.count() == 4
    assert MessageQueueItem.objects.leased().count() == 0
    assert MessageQueueItem.objects.ready().filter(delivery_count=0).count() == 17


def test_a_handler_that_outlives_the_grace_is_abandoned_unacked() -> None:
    """The worker ends after its grace; the message is leased until then, and is handled again."""
    Queue("work").publish({"sleep": 30, "times": 1})
    with worker("--grace", "0.5") as running:
        wait_until(seen)
        began = time.monotonic()
        assert running.stop() == 0
        assert 0.4 < time.monotonic() - began < 4 * busy()
        assert "outlived the grace" in running.output
    (row,) = MessageQueueItem.objects.values("lease_expires_at", "delivery_count", "failures")
    assert row["lease_expires_at"] is not None
    assert (row["delivery_count"], row["failures"]) == (1, None)
    with worker():
        wait_until(lambda: [attempt for _, attempt in seen()] == [1, 2])
        wait_until(lambda: not payloads("work"))


@pytest.mark.parametrize("function", ["handle", "handle_async", "block_async"])
def test_a_second_signal_ends_it_now(function: str) -> None:
    """Whatever the grace is and whatever the handler does; leases cover what it held."""
    Queue("work").publish_many([{"sleep": 30}] * 2)
    with worker("--grace", "60", queues=[{"name": "work", "function": function}]) as running:
        wait_until(seen)
        running.send(signal.SIGINT)
        time.sleep(0.3)  # One signal alone lets it run on.
        assert running.is_running
        began = time.monotonic()
        running.send(signal.SIGINT)
        running.wait(4)
        assert time.monotonic() - began < 3 * busy()
    assert MessageQueueItem.objects.count() == 2


def test_an_async_worker_finishes_what_runs() -> None:
    """Tasks on the event loop get their grace like threads."""
    Queue("work").publish_many([{"sleep": 0.5}] * 3)
    with worker("--concurrency", "3", queues=[{"name": "work", "function": "handle_async"}]) as running:
        wait_until(lambda: Seen.objects.count() == 3)
        assert running.stop() == 0
    assert payloads("work") == []


def test_a_signal_during_start_ends_it() -> None:
    """While the worker still waits for a lock to declare its queue, or has just begun."""
    Queue("work").declare()
    with connect(autocommit=False) as admin:
        admin.execute("SELECT FROM django_pgqueue_messagequeue WHERE name = 'work' FOR UPDATE")
        with command("consume_queues", queues=["work"]) as running:
            wait_until(_somebody_waits_for_the_queue)
            running.send(signal.SIGTERM)
            admin.rollback()
            assert running.wait() == 0
            assert "Traceback" not in running.output


def _somebody_waits_for_the_queue() -> bool:
    with connect() as other:
        (count,) = other.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        ).fetchone() or (0,)
    return bool(count)


def test_an_idle_worker_uses_almost_no_processor() -> None:
    """Listening is waiting: three seconds cost less than a tenth of one."""
    with worker() as running:
        time.sleep(1)  # What starting costs is over.
        before: Any = running.cpu_seconds()
        time.sleep(3)
        assert running.cpu_seconds() - before < 0.15
