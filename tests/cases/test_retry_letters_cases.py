"""
Real failures of other systems over dead letters: B69 (queues that feed each other), B71 (replaying).

The parts of B71 that need no worker are in tests/services/test_redrive.py.
"""

import json
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from django.contrib import admin
from django.http import HttpRequest

from django_pgqueue import Message, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from tests.support.processes import consuming, drain, run, worker
from tests.support.rows import backdate, make_queue, payloads
from tests.support.sessions import connect, in_threads
from tests.support.waiting import busy, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

CYCLES = {"itself": ["a"], "two": ["a", "b"], "three": ["a", "b", "c"]}
cycles = pytest.mark.parametrize("names", CYCLES.values(), ids=CYCLES)


# --- B69: refused where they are configured ---


@cycles
def test_b69_a_cycle_is_refused_where_it_is_declared(names: list[str]) -> None:
    """Case B69: in one process, the declaration that closes the circle raises and names the way round."""
    kept = [Queue(name, dead_letter=target) for name, target in pairwise(names)]
    with pytest.raises(ValueError, match="own dead-letter queue" if len(names) == 1 else " -> ".join([names[-1], "a"])):
        Queue(names[-1], dead_letter=names[0])
    # Another declaration of that name is not hindered by the refused one.
    Queue(names[-1], dead_letter="elsewhere").declare()
    assert len(kept) == len(names) - 1


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c"]], ids=["two", "three"])
def test_b69_a_cycle_over_several_processes_is_refused_where_it_is_made(names: list[str]) -> None:
    """Case B69: what others declared is looked up, through all hops, and nothing is written."""
    for name, target in pairwise(names):
        make_queue(name, dead_letter=target)
    make_queue(names[-1], dead_letter="elsewhere")
    queue = Queue(names[-1], dead_letter="a")
    with pytest.raises(ValueError, match=f"must not form a cycle: {' -> '.join([names[-1], *names])}"):
        queue.declare()
    assert MessageQueue.objects.get(name=names[-1]).dead_letter == "elsewhere"


def test_b69_the_admin_edits_no_queue() -> None:
    """Case B69: there is no form in which somebody could close a circle."""
    editor, request = admin.site.get_model_admin(MessageQueue), HttpRequest()
    assert not editor.has_add_permission(request)
    assert not editor.has_change_permission(request)


# --- B69: by SQL all the same ---


@cycles
@pytest.mark.parametrize("wait", [False, True], ids=["at once", "retried"])
def test_b69_a_cycle_made_by_sql_is_left_after_one_round(names: list[str], wait: bool, settings: Any) -> None:
    """Case B69: ten messages, a failing consumer on each queue: each queue is visited once, then they are parked."""
    settings.PGQUEUE = {"BACKOFF": {"base": 0.01, "jitter": 0}, "POLL_INTERVAL": 0.2}
    visits: list[tuple[Any, str]] = []

    def fail(message: Message) -> None:
        if message.delivery_count == (2 if wait else 1):
            visits.append((message.payload, message.queue))
        raise ValueError("bad") if wait else Reject("bad")

    queues = [Queue(name, max_deliveries=2) for name in names]
    with ExitStack() as stack:
        for queue in queues:
            stack.enter_context(consuming(Consumer([make_handler(queue, fail)])))
        wait_until(lambda: MessageQueue.objects.filter(name__in=names).count() == len(names))
        with connect() as session:
            for name, target in pairwise([*names, names[0]]):
                session.execute(
                    "UPDATE django_pgqueue_messagequeue SET dead_letter = %s WHERE name = %s", [target, name]
                )
        queues[0].publish_many(range(10))
        wait_until(lambda: MessageQueueItem.objects.dead().filter(read_after__year__gte=8999).count() == 10)
        # Longer than a consumer sleeps: nobody takes them up again.
        time.sleep(0.5)
    assert sorted(visits) == sorted((number, name) for number in range(10) for name in names)
    assert MessageQueueItem.objects.count() == 10
    for item in MessageQueueItem.objects.all():
        assert item.queue_id == names[-1]
        assert item.failures is not None
        assert item.failures[-1]["reason"].startswith("cycle: ")
        assert [
            failure["queue"] for failure in item.failures if failure["delivery_count"] == (2 if wait else 1)
        ] == names


@cycles
def test_b69_what_was_parked_for_a_cycle_can_be_redriven(names: list[str]) -> None:
    """Case B69: once the circle is mended, where it was parked or one step back."""
    for name, target in pairwise([*names, names[0]]):
        make_queue(name, dead_letter=target)
    last = Queue(names[-1])
    Queue("a").publish(1)
    for name in names:
        Queue(name).reject(*Queue(name).claim())
    (item,) = MessageQueueItem.objects.all()
    assert (item.queue_id, item.dead_letter_path) == (names[-1], names[:-1] or ["a"])
    MessageQueue.objects.update(dead_letter=None)
    assert last.redrive() == 1
    assert drain(last) == [1]


# --- B71 ---


@pytest.fixture
def dead() -> list[int]:
    """Twenty dead letters of the queue "work": their ids."""
    queue = Queue("work", max_deliveries=1)
    queue.declare()
    ids = queue.publish_many([{"n": number} for number in range(20)], headers={"tenant": "a"})
    for _ in range(20):
        queue.nack(*queue.claim(), reason="ConnectionError: away")
    assert MessageQueueItem.objects.filter(queue="work.dead").count() == 20
    return ids


def replay_by_api() -> None:
    assert Queue("work").redrive() == 20


def replay_by_command() -> None:
    assert run("redrive_queue", "work").stdout == "redriven 20 messages\n"


def replay_filtered() -> None:
    assert run("redrive_queue", "work", "--reason", "Connection", "--header", "tenant=a").stdout.startswith(
        "redriven 20"
    )


def replay_twice_quickly() -> None:
    assert [Queue("work").redrive() for _ in range(2)] == [20, 0]


def replay_by_two_operators() -> None:
    assert sum(in_threads(2, lambda _: Queue("work").redrive())) == 20


def replay_after_the_queue_was_reaped() -> None:
    MessageQueue.objects.filter(name="work").update(auto_deleted=True)
    backdate("work", 7200)
    assert Reaper("default").run_once().queues == ["work"]
    assert Queue("work").redrive() == 20


@pytest.mark.parametrize(
    "replay",
    [
        replay_by_api,
        replay_by_command,
        replay_filtered,
        replay_twice_quickly,
        replay_by_two_operators,
        replay_after_the_queue_was_reaped,
    ],
)
def test_b71_each_letter_is_handled_once_as_a_first_delivery(dead: list[int], replay: Any) -> None:
    """Case B71: whoever asks and however often; the queue comes back if it is gone, and a worker has them soon."""
    with worker() as running:
        if replay is replay_after_the_queue_was_reaped:
            # The worker would keep it.
            assert running.stop() == 0
        replay()
        began = time.monotonic()
        with worker() if not running.is_running else ExitStack():
            wait_until(lambda: not MessageQueueItem.objects.exists())
    assert time.monotonic() - began < (5 + 5) * busy()  # Five more for a worker that starts on a busy machine.
    assert sorted(Seen.objects.values_list("msg_id", "attempt")) == [(message_id, 1) for message_id in dead]


def test_b71_what_fails_again_is_dead_with_both_reasons(dead: list[int]) -> None:
    """Case B71: the payload's format has changed meanwhile: new reason beside the old, and it can be replayed again."""
    queue = Queue("work", max_deliveries=2)

    def handle(message: Message) -> None:
        assert message.delivery_count <= 2
        json.loads(message.payload["order"])

    queue.redrive()
    consumer = Consumer([make_handler(Queue("work", max_deliveries=2, backoff={"base": 0}), handle)], drain=True)
    assert consumer.run() == 40
    assert len(payloads("work.dead")) == 20
    for item in MessageQueueItem.objects.all():
        assert item.failures is not None
        reasons = [failure["reason"] for failure in item.failures]
        assert reasons == ["ConnectionError: away", *["builtins.KeyError: 'order'"] * 2]
    assert queue.redrive() == 20
    assert len(drain(queue)) == 20
