"""Real failures of other systems over claims and locks under contention: B33, B34, B36, B38."""

import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Count

from django_pgqueue import LeaseLost, Queue
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.reaper import Reaper
from django_pgqueue.services.beliefs import beliefs
from tests.support.crew import crew
from tests.support.processes import reaping, worker
from tests.support.rows import make_message, make_queue, payloads
from tests.support.sessions import fetch, in_threads, second_session
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

HERE = "tests.cases.test_concurrency_cases"


# --- B33: a claim returns or locks more rows than asked ---


def claim_blindly(number: int, limit: int) -> dict[int, str]:
    """Claim as a member of a crew, under a planner that is left with the worst of its choices."""
    for option in ("enable_hashjoin", "enable_mergejoin", "enable_material"):
        fetch(f"SET {option} = off")
    # What psycopg prepares would keep the plan of the first rounds.
    connection.connection.prepare_threshold = None
    return {message.id: str(message.token) for message in Queue("q").claim(limit)}


@pytest.mark.full
@pytest.mark.parametrize("statistics", ["none", "wrong"])
def test_b33_a_claim_takes_no_more_than_it_returns_whatever_the_statistics_say(statistics: str) -> None:
    """
    Case B33: eight processes claim 1 and 7 of 50,000, with three of the planner's methods switched off.

    After each round the leased rows are those that were returned, each under the token that its claimer has.
    """
    Queue("q").declare()
    returned: dict[int, str] = {}
    with second_session() as admin, crew(8, f"{HERE}:claim_blindly") as claimers:
        admin.execute("ALTER TABLE django_pgqueue_messagequeueitem SET (autovacuum_enabled = off)")
        try:
            if statistics == "wrong":
                make_message("q", due_in=60, lease=60)
                admin.execute("ANALYZE django_pgqueue_messagequeueitem")
                MessageQueueItem.objects.all().delete()
            admin.execute(
                "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, read_after)"
                " SELECT 'q', '{}', CASE WHEN n % 3 = 0 THEN now() - interval '1 hour' END"
                " FROM generate_series(1, 50000) AS n"
            )
            for limit in (1, 7) * 5:
                for claimed in claimers.each(limit):
                    assert len(claimed) == limit
                    tokens = {int(message_id): token for message_id, token in claimed.items()}
                    assert not returned.keys() & tokens.keys()
                    returned.update(tokens)
                leased = MessageQueueItem.objects.leased().values_list("id", "lease_token")
                assert {message_id: str(token) for message_id, token in leased} == returned
        finally:
            admin.execute("ALTER TABLE django_pgqueue_messagequeueitem RESET (autovacuum_enabled)")


# --- B34: deadlocks between statements over many rows ---


def hammer(number: int, seconds: float) -> dict[str, list[int]]:
    """
    Be one of ten processes: four claim and ack, two extend, two publish, one claims what lapsed, one reaps.

    Returns the ids that this member published and those that it acked.
    """
    chance = random.Random(number)
    deadline = time.monotonic() + seconds
    done: dict[str, list[int]] = {"published": [], "acked": []}
    queue = Queue("q", lease=0.3 if number in (4, 5) else 30, max_deliveries=1_000)
    while time.monotonic() < deadline:
        if number < 4:
            messages = queue.claim(50)
            chance.shuffle(messages)
            done["acked"] += settle(queue.ack, messages)
        elif number < 6:
            messages = queue.claim(50)
            for _ in range(5):
                settle(queue.extend, messages[::-1])
            # Every other time its leases lapse, for others to claim.
            if chance.random() < 0.5:
                settle(queue.nack, messages[::-1])
        elif number < 8:
            done["published"] += queue.publish_many([{"member": number}] * 50)
        elif number == 8:
            done["acked"] += settle(queue.ack, queue.claim(50)[::-1])
        else:
            Reaper("default", idle_for=0).run_once()
    return done


def settle(verb: Any, messages: list[Any]) -> list[int]:
    """Settle, and return the ids that still were the caller's."""
    lost: set[int] = set()
    try:
        verb(*messages)
    except LeaseLost as error:
        lost = set(error.ids)
    return [message.id for message in messages if message.id not in lost]


def deadlocks() -> int:
    ((count,),) = fetch("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    return int(count)


@pytest.mark.full
def test_b34_statements_over_many_rows_do_not_deadlock() -> None:
    """
    Case B34: bulk ack in shuffled order, extension in reverse, lapses, a reaper, publishers: no 40P01, nothing lost.

    For a minute and with every other verb: `tests/soak/deadlock_hunt.py`.
    """
    before = deadlocks()
    with crew(10, f"{HERE}:hammer") as members:
        done = members.each(4)
    published = [message_id for each in done for message_id in each["published"]]
    acked = [message_id for each in done for message_id in each["acked"]]
    left = list(MessageQueueItem.objects.values_list("id", flat=True))
    assert len(acked) > 500
    assert sorted(acked + left) == sorted(published)
    assert deadlocks() == before


# --- B36: everybody creates the same queue at once ---


def publish_as_the_first(number: int, name: str, auto_deleted: bool) -> None:
    queue = Queue(name, auto_deleted=auto_deleted)
    if number % 2:
        queue.publish({"n": number})
    else:
        publish_with_other_writes(queue, number)


def publish_with_other_writes(queue: Queue, number: int) -> None:
    with transaction.atomic():
        make_queue(f"{queue.name}.other.{number}")
        queue.publish({"n": number})


@pytest.mark.full
@pytest.mark.parametrize("with_reaper", [False, True], ids=["alone", "beside a reaper"])
def test_b36_fifty_processes_create_the_same_queue_at_once(with_reaper: bool) -> None:
    """
    Case B36: half of them in transactions with other writes, twenty names: no error, one row, all messages.

    Every other name is that of a standing queue.
    """
    with crew(50, f"{HERE}:publish_as_the_first") as publishers, ExitStack() as stack:
        if with_reaper:
            stack.enter_context(reaping(idle_for=0))
        for round_number in range(20):
            name = f"new.{round_number}"
            publishers.each(name, round_number % 2 == 0)
            assert sorted(payload["n"] for payload in payloads(name)) == list(range(50))
            assert MessageQueue.objects.filter(name__startswith=f"{name}.other.").count() == 25
    assert not MessageQueueItem.objects.filter(queue=None).exists()


@pytest.mark.parametrize("with_reaper", [False, True], ids=["alone", "beside a reaper"])
@pytest.mark.parametrize("auto_deleted", [False, True], ids=["standing", "auto-deleted"])
def test_b36_threads_create_the_same_queue_at_once(auto_deleted: bool, with_reaper: bool) -> None:
    """Case B36 in one process, where twenty sessions share what the process believes of its queues."""
    with reaping(idle_for=0) if with_reaper else ExitStack():
        for round_number in range(10):
            queue = Queue(f"new.{round_number}", auto_deleted=auto_deleted)

            def publish(number: int, queue: Queue = queue) -> None:
                publish_as_the_first(number, queue.name, auto_deleted)

            beliefs.forget()
            in_threads(20, publish)
            assert sorted(payload["n"] for payload in payloads(queue.name)) == list(range(20))
            assert MessageQueue.objects.filter(name__startswith=f"{queue.name}.other.").count() == 10
    assert not MessageQueueItem.objects.filter(queue=None).exists()


# --- B38: two workers take the same message ---


def take(number: int) -> dict[str, Any]:
    """Claim 1 to 20 at a time and ack them until all are gone. Returns what was handled, and claims in vain."""
    chance = random.Random(number)
    queue = Queue("work", lease=30)
    done: dict[str, Any] = {"handled": [], "empty": 0}
    while True:
        claimed = queue.claim(chance.randint(1, 20))
        if claimed:
            queue.ack(*claimed)
            done["handled"] += [message.id for message in claimed]
        elif not MessageQueueItem.objects.exists():
            return done
        else:
            done["empty"] += 1


@pytest.mark.full
def test_b38_eight_processes_take_every_message_exactly_once() -> None:
    """Case B38: 20,000 messages, claims of random size, pauses shorter than the lease."""
    total = 20_000
    ids = Queue("work").publish_many([{}] * total)
    with crew(8, f"{HERE}:take") as takers:
        takers.start()
        ended = threading.Event()

        def pause() -> None:
            chance = random.Random(38)
            while not ended.wait(0.1):
                pid = chance.choice(takers.pids)
                os.kill(pid, signal.SIGSTOP)
                ended.wait(0.3)
                os.kill(pid, signal.SIGCONT)

        pauser = threading.Thread(target=pause)
        pauser.start()
        try:
            done = takers.results()
        finally:
            ended.set()
            pauser.join()
    assert sorted(message_id for each in done for message_id in each["handled"]) == ids
    assert sum(each["empty"] for each in done) < total / 2


@pytest.mark.full
def test_b38_workers_handle_every_message_exactly_once() -> None:
    """Case B38 with workers: pauses shorter than half of the lease take nothing away, and nothing is logged."""
    ids = Queue("work").publish_many([{}] * 600)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker("--prefetch", str(prefetch), "--concurrency", "1", settings={"LEASE": 10}))
            for prefetch in (1, 4, 9, 20)
        ]
        while payloads("work") and all(running.is_running for running in workers):
            unlucky = random.choice(workers)
            unlucky.send(signal.SIGSTOP)
            time.sleep(0.3)
            unlucky.send(signal.SIGCONT)
            time.sleep(0.2)
        wait_until(lambda: not payloads("work"), 60)
        assert [running.stop() for running in workers] == [0, 0, 0, 0]
        assert [running.output for running in workers] == ["", "", "", ""]
    assert sorted(Seen.objects.values_list("msg_id", flat=True)) == ids
    assert not Seen.objects.values("msg_id").annotate(times=Count("id")).filter(times__gt=1).exists()
    assert set(Seen.objects.values_list("attempt", flat=True)) == {1}
