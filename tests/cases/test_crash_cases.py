"""Real failures of other systems over crashes, leases and who owns a claim: B39, B40, B42, B44, B46."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from django.db.models import F
from django.db.models.functions import Now

from django_pgqueue import LeaseLost, Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem, QueueConsumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from tests.support.crew import crew
from tests.support.locks import is_waiting
from tests.support.processes import Worker, command, consuming, worker
from tests.support.rows import payloads, seconds
from tests.support.sessions import connect
from tests.support.waiting import DEADLINE, busy, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

HERE = "tests.cases.test_crash_cases"

# What this process claimed as a member of a crew.
claimed: list[Message] = []


def claim(number: int, limit: int, lease: float) -> list[int]:
    claimed[:] = Queue("work", lease=lease).claim(limit)
    return [message.id for message in claimed]


def age_leases(by: float) -> None:
    """Let all leases end earlier by so many seconds."""
    MessageQueueItem.objects.update(lease_expires_at=F("lease_expires_at") - seconds(by))


def row(message_id: int) -> dict[str, Any]:
    return MessageQueueItem.objects.values().get(pk=message_id)


# --- B39: killed before the handler; in the handler and after it: tests/processes/test_killed.py ---


@pytest.mark.parametrize(
    "a_minute_later",
    [pytest.param(False, id="at once"), pytest.param(True, id="a minute later", marks=pytest.mark.full)],
)
def test_b39_what_was_claimed_and_never_started_is_handled_by_another_worker(a_minute_later: bool) -> None:
    """Case B39 (a): killed between claim and handler, ten come back as second deliveries when the lease ends."""
    ids = Queue("work").publish_many([{}] * 10)
    with crew(1, f"{HERE}:claim") as doomed:
        assert doomed.each(10, 3) == [ids]
        os.kill(doomed.pids[0], signal.SIGKILL)
    if a_minute_later:
        age_leases(60)
    with worker() as running:
        began = time.monotonic()
        wait_until(lambda: not payloads("work"))
        assert time.monotonic() - began < (3 + 2 + 2) * busy()  # Two more for a busy machine.
    seen = Seen.objects.order_by("msg_id").values_list("msg_id", "worker", "attempt")
    assert list(seen) == [(message_id, running.pid, 2) for message_id in ids]


# --- B40: a handler that is longer than the lease ---


@pytest.mark.full
def test_b40_thirty_long_handlers_in_three_workers_are_started_once() -> None:
    """Case B40: leases of two seconds, handlers of seven, ten at once in each worker: one start for each message."""
    short = {"LEASE": 2}
    with (
        worker("--concurrency", "10", "--prefetch", "10", settings=short) as one,
        worker("--concurrency", "10", "--prefetch", "10", settings=short) as two,
        worker("--concurrency", "10", "--prefetch", "10", settings=short) as three,
    ):
        ids = Queue("work").publish_many([{"sleep": 7}] * 30)
        wait_until(lambda: not payloads("work"), 60)
        assert [running.stop() for running in (one, two, three)] == [0, 0, 0]
    assert sorted(Seen.objects.values_list("msg_id", "attempt")) == [(message_id, 1) for message_id in ids]
    assert Seen.objects.values("worker").distinct().count() == 3


# Extensions alone: they change the deadline and leave the token.
SLOW = """
CREATE FUNCTION slow_extension() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_sleep(0.8); RETURN NEW; END $$;
CREATE TRIGGER slow_extension BEFORE UPDATE ON django_pgqueue_messagequeueitem FOR EACH ROW
    WHEN (OLD.lease_token = NEW.lease_token AND NEW.lease_expires_at > OLD.lease_expires_at)
    EXECUTE FUNCTION slow_extension();
"""


@pytest.fixture
def slow_extensions() -> Iterator[None]:
    with connect() as admin:
        admin.execute(SLOW)
        try:
            yield
        finally:
            admin.execute("DROP TRIGGER slow_extension ON django_pgqueue_messagequeueitem")
            admin.execute("DROP FUNCTION slow_extension()")


@pytest.mark.full
def test_b40_slow_extensions_let_no_message_be_handled_twice(slow_extensions: None, settings: Any) -> None:
    """Case B40: an extension takes a third of the lease, handlers two leases: one start each, none is abandoned."""
    settings.PGQUEUE = {"LEASE": 2.4, "POLL_INTERVAL": 0.5}
    queue = Queue("q")
    queue.publish_many([1, 2])
    started: list[tuple[Any, int]] = []

    def handle(message: Message) -> None:
        started.append((message.payload, message.delivery_count))
        time.sleep(5)

    handler = make_handler(queue, handle)
    with consuming(Consumer([handler], prefetch=1)), consuming(Consumer([handler], prefetch=1)):
        wait_until(lambda: not payloads("q"), 30)
    assert sorted(started) == [(1, 1), (2, 1)]


# --- B42: late calls act on somebody else's claim; workers: tests/processes/test_killed.py ---

LATE_CALLS: dict[str, Callable[[Queue], object]] = {
    "extend": lambda queue: queue.extend(*claimed),
    "ack": lambda queue: queue.ack(*claimed),
    "nack": lambda queue: queue.nack(*claimed, delay=0),
    "reject": lambda queue: queue.reject(*claimed, reason="late"),
}


def claim_or_settle(number: int, verb: str, limit: int) -> list[int]:
    """Claim, or settle what was claimed earlier and return the ids that were lost."""
    if verb == "claim":
        return claim(number, limit, 0.5)
    try:
        LATE_CALLS[verb](Queue("work", lease=0.5))
    except LeaseLost as error:
        return error.ids
    return []


@pytest.mark.full
@pytest.mark.parametrize("verb", LATE_CALLS)
def test_b42_a_late_call_is_told_of_the_loss_and_changes_nothing(verb: str) -> None:
    """Case B42: stopped past its lease, another has the message: LeaseLost, and its failure leads to a retry."""
    queue = Queue("work")
    ids = queue.publish_many([1, 2])
    with crew(1, f"{HERE}:claim_or_settle") as stalled:
        assert stalled.each("claim", 2) == [ids]
        os.kill(stalled.pids[0], signal.SIGSTOP)
        wait_until(lambda: MessageQueueItem.objects.ready().count() == 2)
        # Suspects come one at a time.
        taken = queue.claim(1) + queue.claim(1)
        before = [row(message_id) for message_id in ids]
        stalled.start(verb, 0)
        os.kill(stalled.pids[0], signal.SIGCONT)
        assert stalled.results() == [ids]
    assert [row(message_id) for message_id in ids] == before
    queue.nack(*taken, delay=0, reason="on purpose")
    assert sorted(message.payload for message in queue.claim(2)) == [1, 2]


# --- B44: leases of prefetched messages, while they wait their turn ---


@pytest.mark.full
def test_b44_what_waits_behind_slow_messages_is_started_once_and_nobody_starves() -> None:
    """
    Case B44: two workers hold ten each, handlers of half a lease: one start for each message.

    The last of a batch waits for five leases. Neither worker is idle for a lease while messages are ready.
    """
    lease = 1.2
    options = ("--concurrency", "1", "--prefetch", "10")
    with worker(*options, settings={"LEASE": lease}) as one, worker(*options, settings={"LEASE": lease}) as two:
        ids = Queue("work").publish_many([{"sleep": lease / 2}] * 28)
        wait_until(lambda: not MessageQueueItem.objects.ready().exists(), 60)
        all_taken = Seen.objects.latest("at").at
        wait_until(lambda: not payloads("work"), 60)
        assert [running.stop() for running in (one, two)] == [0, 0]
    assert sorted(Seen.objects.values_list("msg_id", "attempt")) == [(message_id, 1) for message_id in ids]
    for running in (one, two):
        starts = list(Seen.objects.filter(worker=running.pid).order_by("at").values_list("at", flat=True))
        assert starts[0] - Seen.objects.earliest("at").at < seconds(lease)
        assert all(later - earlier < seconds(2 * lease) for earlier, later in pairwise(starts) if later < all_taken)


# --- B46: recovery depends on a row that was cleaned up ---


def forget_by_sql(pid: int) -> None:
    QueueConsumer.objects.filter(pid=pid).delete()


def forget_by_reaper(pid: int) -> None:
    QueueConsumer.objects.filter(pid=pid).update(last_heartbeat=Now() - seconds(2 * 86_400))
    Reaper("default").run_once()
    assert not QueueConsumer.objects.filter(pid=pid).exists()


def keep_beating(pid: int) -> None:
    QueueConsumer.objects.filter(pid=pid).update(last_heartbeat=Now() + seconds(3600))


def keep(pid: int) -> None:
    assert QueueConsumer.objects.filter(pid=pid).exists()


@pytest.mark.full
@pytest.mark.parametrize("prune", [forget_by_sql, forget_by_reaper, keep_beating, keep])
def test_b46_a_dead_workers_messages_come_back_whatever_became_of_its_row(
    tmp_path: Path, prune: Callable[[int], None]
) -> None:
    """Case B46: removed, pruned by the reaper, or looking alive: the message's own lease decides."""
    ids = Queue("work").publish_many([{"hold": str(tmp_path / "never"), "times": 1}, {}, {}])
    short = {"LEASE": 1.5}
    with worker(settings=short) as first:
        wait_until(Seen.objects.exists)
        first.kill()
    prune(first.pid)
    with worker(settings=short) as second:
        began = time.monotonic()
        wait_until(lambda: not payloads("work"))
        assert time.monotonic() - began < (1.5 + 2 + 2) * busy()
    assert sorted(Seen.objects.filter(worker=second.pid).values_list("msg_id", "attempt")) == [(one, 2) for one in ids]


@pytest.mark.full
def test_b46_a_worker_claims_nothing_before_its_row_is_written() -> None:
    """Case B46: two workers that cannot register leave the twenty that wait alone, and handle them once later."""
    ids = Queue("work").publish_many([{}] * 20)
    with connect(autocommit=False) as blocker:
        blocker.execute("LOCK TABLE django_pgqueue_queueconsumer IN SHARE MODE")
        with command("consume_queues", queues=["work"]) as one, command("consume_queues", queues=["work"]) as two:
            wait_until(lambda: len(registering()) == 2)
            assert MessageQueueItem.objects.filter(delivery_count=0).count() == 20
            blocker.rollback()
            wait_until(lambda: not payloads("work"))
            assert stop_all(one, two) == [0, 0]
    assert sorted(Seen.objects.values_list("msg_id", "attempt")) == [(message_id, 1) for message_id in ids]


def registering() -> list[int]:
    """Return the backends that wait to write a consumer's row."""
    with connect() as admin:
        found = admin.execute("SELECT pid FROM pg_stat_activity WHERE query LIKE '%INSERT INTO%queueconsumer%'")
        return [pid for (pid,) in found.fetchall() if is_waiting(pid)]


def stop_all(*workers: Worker) -> list[int]:
    return [running.stop() for running in workers]


@pytest.mark.full
def test_b46_claims_of_who_never_registered_are_not_stolen_while_they_live() -> None:
    """Case B46: a process that claims by itself has no row at all; its lease is all that counts."""
    queue = Queue("work", lease=30)
    queue.publish_many([{}] * 20)
    mine = queue.claim(20)
    with worker() as running:
        Reaper("default", idle_for=0).run_once()
        # One that comes after: when it was handled, the worker has looked at the others.
        later = queue.publish({})
        wait_until(lambda: Seen.objects.filter(msg_id=later).exists(), DEADLINE)
        queue.ack(*mine)
        wait_until(lambda: not payloads("work"))
        assert running.stop() == 0
    assert list(Seen.objects.values_list("msg_id", flat=True)) == [later]
