"""Workers that are killed, stopped, or kill themselves: B39, B42, B67 with real processes."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem
from tests.support.processes import worker
from tests.support.rows import payloads
from tests.support.waiting import busy, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)


def starts() -> list[tuple[int, int, int]]:
    """Return worker, message and attempt of each start of a handler."""
    return list(Seen.objects.order_by("id").values_list("worker", "msg_id", "attempt"))


def test_a_killed_workers_messages_come_back(tmp_path: Path) -> None:
    """
    Case B39: killed in the handler with ten messages in hand, all are handled by another worker.

    Within the lease and two seconds of that worker's start; the one that had started is a second
    attempt. Those that were only held count the delivery as well: nobody can tell that they had
    not started.
    """
    queue = Queue("work")
    ids = queue.publish_many([{"hold": str(tmp_path / "never"), "times": 1}, *[{}] * 9])
    with worker(queues=["work"]) as first:
        wait_until(starts)
        assert MessageQueueItem.objects.leased().count() == 10
        first.kill()
    with worker() as second:
        began = time.monotonic()
        wait_until(lambda: Seen.objects.filter(worker=second.pid).count() == 10)
        assert time.monotonic() - began < (3 + 2 + 2) * busy()  # Two more for a busy machine.
        wait_until(lambda: not payloads("work"))
    assert starts()[0] == (first.pid, ids[0], 1)
    assert sorted(starts()[1:]) == [(second.pid, message_id, 2) for message_id in ids]


@pytest.mark.parametrize(("ack", "effects"), [("atomic", 1), ("late", 2)])
def test_a_crash_between_the_handlers_effect_and_the_ack(tmp_path: Path, ack: str, effects: int) -> None:
    """Case B39 (c): atomic leaves exactly one effect, late (at least once) leaves two; the message is gone in both."""
    mark = tmp_path / "started"
    Queue("work").publish({"mark": str(mark), "exit": 1, "times": 1})
    queues = [{"name": "work", "handler": {"ack": ack}}]
    with worker(queues=queues) as first:
        assert first.wait() == 1
        assert mark.exists()
    with worker(queues=queues):
        wait_until(lambda: not payloads("work"))
    assert Seen.objects.count() == effects


def test_an_early_acked_message_dies_with_its_worker() -> None:
    """At most once is what early says."""
    Queue("work").publish({"exit": 1})
    with worker(queues=[{"name": "work", "handler": {"ack": "early"}}]) as running:
        assert running.wait() == 1
    assert Seen.objects.count() == 1
    assert payloads("work") == []


@pytest.mark.parametrize(
    ("ack", "outcome"),
    [("late", {}), ("atomic", {}), ("late", {"fail": "late"}), ("late", {"reject": "late"})],
    ids=["ack", "atomic ack", "nack", "reject"],
)
def test_a_stalled_worker_settles_nothing_that_is_no_longer_its_own(
    tmp_path: Path, ack: str, outcome: dict[str, str]
) -> None:
    """
    Case B42: SIGSTOP past the lease, another worker is in mid-handler, SIGCONT: its claim stays untouched.

    Whatever the stale worker makes of it, it is told that it lost the lease; when the new owner fails, the
    message is retried.
    """
    hold, hold_second = tmp_path / "first", tmp_path / "second"
    queues = [{"name": "work", "handler": {"ack": ack}}]
    mark = tmp_path / "started"
    Queue("work").publish_many([{"mark": str(mark), "hold": str(hold), "times": 1, **outcome}, {}])
    with worker(queues=queues) as stale:
        wait_until(mark.exists)
        stale.send(signal.SIGSTOP)
        mark.unlink()
        MessageQueueItem.objects.filter(payload__has_key="mark").update(
            payload={"mark": str(mark), "hold": str(hold_second), "times": 2, "fail": "on purpose"}
        )
        hold.touch()
        with worker(queues=queues):
            wait_until(mark.exists)
            before = MessageQueueItem.objects.filter(payload__has_key="mark").values().get()
            assert before["delivery_count"] == 2
            stale.send(signal.SIGCONT)
            wait_until(lambda: "lease lost" in stale.output)
            after = MessageQueueItem.objects.filter(payload__has_key="mark").values().get()
            assert after["lease_token"] == before["lease_token"]
            assert after["lease_expires_at"] >= before["lease_expires_at"]
            assert (after["delivery_count"], after["failures"]) == (2, None)
            assert stale.stop() == 0
            hold_second.touch()
            wait_until(lambda: not payloads("work"))
    # The message that failed on purpose came back. The neighbour, whose lease nobody took, was handled once.
    assert Seen.objects.filter(attempt=3).count() == 1
    assert Seen.objects.exclude(msg_id=before["id"]).count() == 1


@pytest.mark.parametrize(
    "death",
    [
        pytest.param({"signal": signal.SIGKILL}, id="SIGKILL"),
        pytest.param({"exit": 1}, id="exit", marks=pytest.mark.full),
        pytest.param({"segfault": True}, id="segfault", marks=pytest.mark.full),
    ],
)
def test_a_message_that_kills_its_workers_is_set_aside_and_takes_nobody_along(death: dict[str, Any]) -> None:
    """
    Case B67: after max_deliveries deaths it is a dead letter "worker lost"; twenty neighbours are handled.

    The first death takes the neighbours' leases along; from then on the killer is alone. Four starts
    of a worker are enough.
    """
    queue = Queue("work", max_deliveries=3)
    queues = [{"name": "work", "queue": {"max_deliveries": 3}}]
    queue.publish_many([{}] * 10)
    killer = queue.publish(death)
    queue.publish_many([{}] * 10)
    begun = 0
    while payloads("work"):
        begun += 1
        assert begun <= 4
        with worker(queues=queues, settings={"LEASE": 1}) as running:
            wait_until(lambda running=running: not payloads("work") or not running.is_running)  # type: ignore[misc]
    dead = MessageQueueItem.objects.get(queue="work.dead")
    assert dead.pk == killer
    assert dead.failures is not None
    assert "worker lost" in dead.failures[-1]["reason"]
    assert dead.failures[-1]["delivery_count"] == 3
    assert Seen.objects.filter(msg_id=killer).count() == 3
    assert Seen.objects.exclude(msg_id=killer).values("msg_id").distinct().count() == 20


def test_a_message_that_takes_too_much_memory_kills_no_worker() -> None:
    """
    Case B67: where the limit is the process's own, the handler fails with MemoryError and the worker lives.

    It is retried, and a dead letter after max_deliveries; the neighbours are handled by the same worker.
    """
    queue = Queue("work", max_deliveries=3)
    greedy = queue.publish({"megabytes": 300})
    queue.publish_many([{}] * 20)
    with worker(queues=[{"name": "work", "queue": {"max_deliveries": 3}}]) as running:
        wait_until(lambda: not payloads("work"))
        assert running.stop() == 0
    dead = MessageQueueItem.objects.get(queue="work.dead")
    assert dead.pk == greedy
    assert dead.failures is not None
    assert [failure["reason"] for failure in dead.failures] == ["builtins.MemoryError: "] * 3
    assert Seen.objects.exclude(msg_id=greedy).count() == 20


def test_with_one_delivery_a_killed_worker_takes_only_what_it_was_handling() -> None:
    """What waits behind would count as delivered: so nothing is held that cannot start."""
    queue = Queue("work", max_deliveries=1)
    queue.publish_many([{"signal": signal.SIGKILL}, *({"n": number} for number in range(20))])
    with worker(queues=[{"name": "work", "queue": {"max_deliveries": 1}}]) as running:
        running.wait()
    with worker(queues=[{"name": "work", "queue": {"max_deliveries": 1}}]):
        wait_until(lambda: Seen.objects.count() == 21)
        wait_until(lambda: len(payloads("work.dead")) == 1)
    assert not payloads("work")
