"""Exclusive queues: one consumer at a time, decided at each claim; who takes over, and when."""

import os
import signal
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db.models import F
from django.db.models.functions import Now

from django_pgqueue import Queue, signals
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import consumers, declaring
from django_pgqueue.services.beliefs import beliefs
from tests.support.crew import crew
from tests.support.locks import is_waiting
from tests.support.processes import worker
from tests.support.rows import backdate, delete_queue, payloads, seconds
from tests.support.sessions import Session, connect, fetch, in_threads
from tests.support.waiting import busy, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

HERE = "tests.services.test_exclusive"
EXCLUSIVE = [{"name": "work", "queue": {"exclusive": True}}]


def work(**options: Any) -> Queue:
    return Queue("work", exclusive=True, **options)


def owner() -> UUID | None:
    """Return the consumer that owns the queue."""
    return MessageQueue.objects.values_list("exclusive_consumer_id", flat=True).get(name="work")


def owner_pid() -> int | None:
    return QueueConsumer.objects.filter(id=owner()).values_list("pid", flat=True).first()


def starts() -> dict[int, list[int]]:
    """Return the ids of the messages that each process started."""
    found: dict[int, list[int]] = {}
    for pid, message_id in Seen.objects.order_by("id").values_list("worker", "msg_id"):
        found.setdefault(pid, []).append(message_id)
    return found


# --- One owner ---


def test_of_two_processes_one_handles_everything() -> None:
    """The second is there, beats and gets nothing, however many messages wait."""
    with worker(queues=EXCLUSIVE) as one, worker(queues=EXCLUSIVE) as two:
        ids = work().publish_many([{"sleep": 0.02}] * 60)
        wait_until(lambda: not payloads("work"))
        assert [one.stop(), two.stop()] == [0, 0]
    assert starts() in ({one.pid: ids}, {two.pid: ids})


@pytest.mark.parametrize("waiting", [0, 5], ids=["idle", "with messages in hand"])
def test_an_owner_that_is_stopped_in_good_order_hands_over_at_once(tmp_path: Path, waiting: int) -> None:
    """Neither after three heartbeats nor at the next poll: what it held is handled by the other within seconds."""
    slow = {"POLL_INTERVAL": 60, "HEARTBEAT_INTERVAL": 20, "LEASE": 60}
    with (
        worker("--concurrency", "1", queues=EXCLUSIVE, settings=slow) as one,
        worker("--concurrency", "1", queues=EXCLUSIVE, settings=slow) as two,
    ):
        wait_until(owner)
        first, second = (one, two) if owner_pid() == one.pid else (two, one)
        if waiting:
            work().publish_many([{"hold": str(tmp_path / "go"), "times": 1}] + [{}] * waiting)
            wait_until(lambda: first.pid in starts())
            wait_until(lambda: MessageQueueItem.objects.leased().count() == waiting + 1)
        first.send(signal.SIGTERM)
        if waiting:
            # What it gives back wakes the other while the queue still is the first one's.
            wait_until(lambda: MessageQueueItem.objects.leased().count() == 1)
        (tmp_path / "go").touch()
        assert first.wait() == 0
        began = time.monotonic()
        wait_until(lambda: owner_pid() == second.pid)
        work().publish({})
        wait_until(lambda: not payloads("work"))
        assert time.monotonic() - began < 15 * busy()
    assert len(starts()[second.pid]) == waiting + 1


def heartbeat_age(pid: int) -> float:
    """Return the seconds since a process's last heartbeat."""
    ((age,),) = fetch(
        "SELECT extract(epoch FROM statement_timestamp() - last_heartbeat)::float8"
        " FROM django_pgqueue_queueconsumer WHERE pid = %s",
        [pid],
    )
    return float(age)


def test_a_stopped_owner_is_followed_after_three_heartbeats_and_starts_nothing_when_it_goes_on(tmp_path: Path) -> None:
    """
    Its leases are long and still valid, and its buffer is full: all that waits there is the new owner's.

    Only the handler that was running ends where it began.
    """
    short = {"LEASE": 300, "HEARTBEAT_INTERVAL": 1, "POLL_INTERVAL": 0.2}
    options = ("--concurrency", "1", "--prefetch", "10")
    with worker(*options, queues=EXCLUSIVE, settings=short) as first:
        ids = work().publish_many([{"hold": str(tmp_path / "go"), "times": 1}] + [{}] * 9)
        wait_until(lambda: starts() == {first.pid: ids[:1]})
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 10)
        mine = owner()
        with worker(*options, queues=EXCLUSIVE, settings=short) as second:
            first.send(signal.SIGSTOP)
            wait_until(lambda: owner() != mine)
            assert heartbeat_age(first.pid) >= 3
            assert owner_pid() == second.pid
            first.send(signal.SIGCONT)
            # It beats again, and learns that the queue is another's.
            wait_until(lambda: heartbeat_age(first.pid) < 1)
            wait_until(lambda: len(starts().get(second.pid, [])) == 9)
            (tmp_path / "go").touch()
            wait_until(lambda: not payloads("work"))
            later = work().publish_many([{}] * 20)
            wait_until(lambda: not payloads("work"))
            assert [first.stop(), second.stop()] == [0, 0]
    assert starts() == {first.pid: ids[:1], second.pid: ids[1:] + later}
    assert set(Seen.objects.values_list("attempt", flat=True)) == {1}


def test_a_stopped_owner_with_a_free_worker_starts_nothing_either() -> None:
    """Stopped between two of a stream of messages, with many in its buffer: its workers wait, and start none."""
    short = {"LEASE": 300, "HEARTBEAT_INTERVAL": 1, "POLL_INTERVAL": 0.2}
    with worker("--concurrency", "1", "--prefetch", "50", queues=EXCLUSIVE, settings=short) as first:
        work().publish_many([{"sleep": 0.05}] * 150)
        wait_until(lambda: len(starts().get(first.pid, [])) >= 3)
        mine = owner()
        with worker(queues=EXCLUSIVE, settings=short) as second:
            first.send(signal.SIGSTOP)
            wait_until(lambda: owner() != mine)
            ((moment,),) = fetch("SELECT statement_timestamp()")
            first.send(signal.SIGCONT)
            wait_until(lambda: not payloads("work"), 60)
            assert [first.stop(), second.stop()] == [0, 0]
    # One at the most: that was on its way into the handler when the process was stopped.
    assert Seen.objects.filter(worker=first.pid, at__gt=moment).count() <= 1
    assert Seen.objects.count() == 150


def test_an_owner_that_was_stopped_and_followed_by_nobody_goes_on() -> None:
    """Its next heartbeat and claim make it sure again."""
    short = {"LEASE": 300, "HEARTBEAT_INTERVAL": 0.3, "POLL_INTERVAL": 0.2}
    with worker("--prefetch", "10", queues=EXCLUSIVE, settings=short) as only:
        work().publish_many([{"sleep": 0.05}] * 40)
        wait_until(starts)
        mine = owner()
        only.send(signal.SIGSTOP)
        wait_until(lambda: heartbeat_age(only.pid) > 1.5)
        only.send(signal.SIGCONT)
        wait_until(lambda: not payloads("work"))
        assert owner() == mine
        assert only.stop() == 0
    assert set(Seen.objects.values_list("attempt", flat=True)) == {1}


def test_a_killed_owners_messages_are_handled_by_the_next(tmp_path: Path) -> None:
    """After three heartbeats the queue, after the lease what it held; without anybody's help."""
    with worker(queues=EXCLUSIVE) as first:
        work().publish_many([{"hold": str(tmp_path / "never"), "times": 1}, {}, {}])
        wait_until(starts)
        with worker(queues=EXCLUSIVE) as second:
            first.kill()
            wait_until(lambda: not payloads("work"), 30)
            assert second.stop() == 0
    assert len(starts()[second.pid]) == 3


# --- The race for a dead owner ---


def claim_as(number: int, name: str) -> list[Any]:
    """As a member of a crew: try to claim. Returns whether this process owns the queue then, and how many came."""
    messages = Queue(name, exclusive=True).claim(5)
    mine = beliefs.claimers[os.getpid()]
    return [owner() == mine, len(messages)]


@pytest.mark.full
def test_of_many_candidates_for_a_dead_owner_one_wins() -> None:
    """Twenty rounds in six processes: each time exactly one owns the queue, and only it has messages."""
    queue = work()
    queue.declare()
    with crew(6, f"{HERE}:claim_as", settings={"HEARTBEAT_INTERVAL": 60}) as candidates:
        for _ in range(20):
            MessageQueueItem.objects.all().delete()
            queue.publish_many(range(5))
            MessageQueue.objects.filter(name="work").update(exclusive_consumer_id=uuid4())
            answers = candidates.each("work")
            assert [is_owner for is_owner, _ in answers].count(True) == 1
            assert sorted(answers) == [[False, 0]] * 5 + [[True, 5]]


def test_candidates_that_saw_the_same_dead_owner_do_not_both_win() -> None:
    """Twelve rounds of four sessions at the same moment: the owner is compared again under the lock."""
    work().declare()
    candidates = [uuid4() for _ in range(4)]
    for candidate in candidates:
        consumers.beat(candidate, "here", 1, ["work"], "default")
    for _ in range(12):
        MessageQueue.objects.filter(name="work").update(exclusive_consumer_id=uuid4())
        won = in_threads(4, lambda number: consumers.take_over("work", candidates[number], "default"))
        assert won.count(True) == 1
        assert owner() == candidates[won.index(True)]


def test_a_candidate_whose_snapshot_is_older_than_the_take_over_loses() -> None:
    """It saw the dead owner, and waits at the row's lock until another has it: then that one lives."""
    work().declare()
    dead, one, two = uuid4(), uuid4(), uuid4()
    for candidate in (one, two):
        consumers.beat(candidate, "here", 1, ["work"], "default")
    MessageQueue.objects.filter(name="work").update(exclusive_consumer_id=dead)
    with Session() as session:
        session.begin()
        assert session.run(consumers.take_over, "work", one, "default")
        # The row is locked: a candidate does not wait for it.
        assert not consumers.take_over("work", two, "default")
        session.commit()
    assert not consumers.take_over("work", two, "default")
    assert owner() == one


def test_an_owner_that_beats_is_not_followed_and_one_that_does_not_is() -> None:
    """Three heartbeats, by the database's clock; a row that is gone counts as dead."""
    work().declare()
    mine, other = uuid4(), uuid4()
    consumers.beat(mine, "here", 1, ["work"], "default")
    consumers.beat(other, "here", 2, ["work"], "default")
    assert consumers.take_over("work", mine, "default")
    beats = QueueConsumer.objects.filter(id=mine)
    for age, follows in ((0, False), (179, False), (181, True)):
        beats.update(last_heartbeat=Now() - seconds(age))
        MessageQueue.objects.filter(name="work").update(exclusive_consumer_id=mine)
        assert consumers.take_over("work", other, "default") is follows
    MessageQueue.objects.filter(name="work").update(exclusive_consumer_id=mine)
    beats.delete()
    # Who has no row itself cannot be seen to live, and gets nothing.
    assert not consumers.take_over("work", mine, "default")
    assert consumers.take_over("work", other, "default")


# --- Publishers, reaper, heals ---


def test_declares_and_publishes_never_touch_the_owner() -> None:
    """Stale or not, explicit or on the way, in a transaction or not: owner and heartbeat stay as they are."""
    queue = work()
    queue.publish(0)
    queue.ack(*queue.claim())
    mine, beat = owner(), QueueConsumer.objects.get().last_heartbeat
    assert mine is not None

    def publish_in_block(session: Session) -> None:
        session.begin()
        session.run(queue.publish, 3)
        session.commit()

    with Session() as session:
        for _ in range(2):
            session.run(queue.declare)
            backdate("work", 3600)
            beliefs.forget()
            session.run(queue.publish, 1)
            session.run(queue.publish_many, [2])
            publish_in_block(session)
            session.run(declaring.touch, ["work"], "default")
            session.run(Queue("work", exclusive=True, max_deliveries=9).declare)
    assert owner() == mine
    assert QueueConsumer.objects.get().last_heartbeat == beat


@pytest.mark.parametrize("remove", ["reaped", "deleted"])
def test_the_owner_registers_again_after_a_heal(remove: str) -> None:
    """The queue comes back without an owner: the consumer that is there takes it, and handles what was published."""
    queues = [{"name": "work", "queue": {"exclusive": True, "auto_deleted": True}}]
    with worker(queues=queues, settings={"HEARTBEAT_INTERVAL": 30}) as running:
        queue = work(auto_deleted=True)
        wait_until(owner)
        mine = owner()
        if remove == "reaped":
            backdate("work", 7200)
            assert Reaper("default", idle_for=3600).run_once().queues == ["work"]
        else:
            delete_queue("work")
        queue.publish({})
        wait_until(lambda: not payloads("work"))
        assert owner() == mine
        assert running.stop() == 0
    assert len(starts()[running.pid]) == 1


# --- By hand ---


def test_who_claims_by_hand_owns_the_queue_and_a_stranger_gets_nothing(settings: Any) -> None:
    """In two processes; when the owner is silent for three heartbeats the stranger has the rest."""
    queue = work()
    queue.publish_many(range(5))
    assert len(queue.claim(2)) == 2
    mine = owner()
    with crew(1, f"{HERE}:claim_as", settings={"HEARTBEAT_INTERVAL": 60}) as stranger:
        assert stranger.each("work") == [[False, 0]]
        assert owner() == mine
        assert len(queue.claim(1)) == 1
        QueueConsumer.objects.filter(id=mine).update(last_heartbeat=Now() - seconds(3 * 60 + 1))
        assert stranger.each("work") == [[True, 2]]
    assert queue.claim(1) == []


def test_claiming_now_and_then_keeps_the_queue(settings: Any) -> None:
    """A claim writes the heartbeat if the last one is an interval old, also where it brings nothing."""
    settings.PGQUEUE = {"HEARTBEAT_INTERVAL": 0.2}
    queue = work()
    queue.declare()
    queue.claim()
    before = QueueConsumer.objects.get().last_heartbeat
    time.sleep(0.25)
    assert queue.claim() == []
    assert QueueConsumer.objects.get().last_heartbeat > before


def claim_by_child(number: int) -> list[Any]:
    """Claim, fork, and let the child claim. Returns how many messages each got, and whether they are two claimers."""
    from tests.support.forks import fork

    queue = work()
    mine = len(queue.claim(1))
    return [mine, *fork(lambda: [len(queue.claim(1)), beliefs.claimers[os.getpid()] != owner()])()]


def test_a_forked_child_is_another_claimer() -> None:
    """What its parent owns is not its own, though it inherited all of the parent's memory."""
    work().publish_many(range(3))
    with crew(1, f"{HERE}:claim_by_child") as parent:
        assert parent.each() == [[1, 0, True]]


def test_a_restarted_consumer_that_looks_the_same_inherits_nothing() -> None:
    """Same host, same pid, same name, as in a container: it waits for its predecessor's heartbeat and leases."""
    work().publish_many(range(3))
    with crew(1, f"{HERE}:claim_as", settings={"LEASE": 300}) as predecessor:
        assert predecessor.each("work") == [[True, 3]]
        os.kill(predecessor.pids[0], signal.SIGKILL)
        held = dict(MessageQueueItem.objects.values_list("id", "lease_token"))
    with worker(queues=EXCLUSIVE) as running:
        # It looks like the one before in everything that a person sees.
        QueueConsumer.objects.exclude(pid=running.pid).update(pid=running.pid, last_heartbeat=Now() + seconds(3600))
        wait_until(lambda: QueueConsumer.objects.count() == 2)
        looks = QueueConsumer.objects.values("host", "pid").distinct().count()
        assert looks == 1
        QueueConsumer.objects.filter(last_heartbeat__gt=Now()).update(last_heartbeat=Now() - seconds(3600))
        wait_until(lambda: owner() not in (None, MessageQueueItem.objects.first().leased_by))  # type: ignore[union-attr]
        work().publish({})
        wait_until(starts)
        # Owner by now, it has what is new; what its predecessor holds is still under that one's lease.
        assert dict(MessageQueueItem.objects.filter(id__in=held).values_list("id", "lease_token")) == held
        MessageQueueItem.objects.update(lease_expires_at=F("lease_expires_at") - seconds(300))
        wait_until(lambda: not payloads("work"))
        assert running.stop() == 0
    assert sorted(Seen.objects.values_list("msg_id", "attempt"))[:3] == [(message_id, 2) for message_id in sorted(held)]


def test_the_new_owner_is_told_of(settings: Any) -> None:
    """A signal with the consumer, once for each change and not for each claim."""
    told: list[tuple[str, UUID]] = []

    def receive(sender: str, *, consumer: UUID, **kwargs: Any) -> None:
        told.append((sender, consumer))

    signals.queue_taken_over.connect(receive)
    queue = work()
    queue.publish_many(range(3))
    for _ in range(3):
        queue.claim()
    mine = owner()
    assert mine is not None
    assert told == [("work", mine)]


def test_a_claim_waits_for_a_change_of_the_owner_that_is_under_way() -> None:
    """The old owner's claim and the change cannot pass each other: once that commits the claim brings nothing."""
    queue = work()
    queue.publish_many(range(3))
    queue.ack(*queue.claim())
    other = uuid4()
    with connect(autocommit=False) as changing, Session() as session:
        changing.execute(
            "UPDATE django_pgqueue_messagequeue SET exclusive_consumer_id = %s WHERE name = 'work'", [other]
        )
        # The session's thread is in this process, and so the same claimer.
        claiming = session.start(queue.claim)
        wait_until(lambda: is_waiting(session.pid))
        consumers.beat(other, "there", 1, ["work"], "default")
        changing.commit()
        assert claiming.result(20) == []
    assert owner() == other
