"""Real failures of other systems over fan-out: B78 (large messages), B80 (subscribers gone), B82 (joins and leaves)."""

import io
import json
import signal
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

from django_pgqueue import Message, Queue, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem, TopicBinding, TopicBody
from django_pgqueue.queue_internals import make_handler
from tests.soak import topic_subscribers
from tests.support.locks import is_waiting
from tests.support.processes import consuming, worker
from tests.support.rows import payloads
from tests.support.sessions import fetch, sessions
from tests.support.subscriber import digest, hearing, subscribers
from tests.support.waiting import DEADLINE, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = Topic("t")


# --- B78: large messages reach one subscriber only ---


def sizes(count: int) -> list[dict[str, Any]]:
    """Return payloads of 100 bytes to a megabyte, mixed: every other one does not fit into a notification."""
    return [{"number": number, "x": "x" * size} for number in range(count) for size in (100, 8_010, 7_900, 1_000_000)]


class Reading:
    """A consumer of one bound queue, and the digests of what it handled."""

    def __init__(self, queue: Queue, seconds: float) -> None:
        self.handled: list[str] = []
        self.seconds = seconds
        self.consumer = Consumer([make_handler(queue, self.handle)])

    def handle(self, message: Message) -> None:
        time.sleep(self.seconds)
        self.handled.append(digest(message.payload))


@pytest.mark.full
def test_b78_every_bound_queue_gets_every_message_of_every_size() -> None:
    """
    Five consumers, one of them slow, one a process that is stopped: all get all 80, acks of one are its own.

    The stopped one finds its messages when it goes on.
    """
    names = ["one", "two", "three", "slow", "stopped"]
    sent = sizes(20)
    with worker("stopped", queues=[{"name": "stopped", "topics": ["t"]}]) as stopped, ExitStack() as stack:
        stopped.send(signal.SIGSTOP)
        queues = {name: Queue(name) for name in names}
        for queue in queues.values():
            TOPIC.bind(queue)
        readers = [Reading(queues[name], 0.02 if name == "slow" else 0) for name in names[:-1]]
        for reader in readers:
            stack.enter_context(consuming(reader.consumer))
        ids = []
        for payload in sent:
            copies = TOPIC.publish(payload)
            assert len(copies) == len(names)
            # In the order of the names.
            ids.append(copies[sorted(names).index("stopped")])
        expected = sorted(map(digest, sent))
        wait_until(lambda: all(len(reader.handled) >= len(sent) for reader in readers), 60)
        for reader in readers:
            assert sorted(reader.handled) == expected
        wait_until(lambda: not MessageQueueItem.objects.exclude(queue="stopped").exists())
        assert sorted(map(digest, payloads("stopped"))) == expected
        stopped.send(signal.SIGCONT)
        wait_until(lambda: payloads("stopped") == [], 60)
        assert sorted(Seen.objects.values_list("msg_id", flat=True)) == sorted(ids)
        assert stopped.stop() == 0


@pytest.mark.full
def test_b78_every_live_subscriber_gets_every_message_of_every_size(tmp_path: Path) -> None:
    """Three quick ones, one slow one, and a process that is stopped meanwhile: all get all 80, in order."""
    sent = sizes(20)
    with (
        hearing(TOPIC) as one,
        hearing(TOPIC) as two,
        hearing(TOPIC) as three,
        subscribers("t", tmp_path, delays=[0.02, 0]) as (slow, stopped),
    ):
        stopped.process.send(signal.SIGSTOP)
        for payload in sent:
            TOPIC.publish(payload)
        wait_until(lambda: len(one) == len(two) == len(three) == len(slow.heard) == len(sent), 60)
        assert one == two == three == sent
        stopped.process.send(signal.SIGCONT)
        wait_until(lambda: len(stopped.heard) == len(sent), 60)
        assert slow.heard == stopped.heard == [digest(payload) for payload in sent]
    # Reading a body takes nothing away: the reaper does.
    assert TopicBody.objects.count() == len(sent) / 2


# --- B80: a subscriber went away, and its backlog grows ---

IDLE = 3
SHORT_LIVED = {"REAP_IDLE_AFTER": IDLE, "EPHEMERAL_TTL": 1.5, "DECLARE_TTL": 0.5, "HEARTBEAT_INTERVAL": 0.5}


def reap() -> dict[str, Any]:
    out = io.StringIO()
    call_command("reap_queues", format="json", stdout=out)
    reaped: dict[str, Any] = json.loads(out.getvalue())
    return reaped


@pytest.mark.full
def test_b80_an_auto_deleted_subscriber_that_was_killed_leaves_nothing(settings: Any) -> None:
    """
    Three, one is killed, and the topic is published to for three times the idle limit.

    Publishing keeps its queue not alive; its messages expire, which is counted; it is reaped with its
    binding, and gets no copies from the limit on. The other two have everything.
    """
    settings.PGQUEUE = SHORT_LIVED
    names = ["sub.0", "sub.1", "sub.2"]
    specs = [{"name": name, "queue": {"auto_deleted": True}, "topics": ["t"]} for name in names]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker(name, queues=[spec], settings=SHORT_LIVED))
            for name, spec in zip(names, specs, strict=True)
        ]
        assert len(TOPIC.publish({})) == 3
        wait_until(lambda: not MessageQueueItem.objects.exists())
        workers[2].kill()
        killed = time.monotonic()
        published = to_the_dead = expired = 0
        reaped: list[str] = []
        most = 0
        gone_after = None
        while time.monotonic() - killed < 3 * IDLE or gone_after is None:
            assert time.monotonic() - killed < DEADLINE
            for _ in range(10):
                copies = len(TOPIC.publish({}))
                published += 1
                to_the_dead += copies - 2
                time.sleep(0.02)
            most = max(most, MessageQueueItem.objects.filter(queue="sub.2").count())
            figures = reap()
            expired += figures["expired"]
            reaped += figures["queues"]
            if gone_after is None and "sub.2" in reaped:
                gone_after = time.monotonic() - killed
        assert [name for name in reaped if name in names] == ["sub.2"]
        assert expired == to_the_dead < published
        # At the limit at the earliest; after it the last message expires and the reaper comes.
        assert gone_after > IDLE - 1
        assert most > 0
        assert list(TopicBinding.objects.values_list("queue", flat=True)) == names[:2]
        wait_until(lambda: not MessageQueueItem.objects.exists())
        # And the one before the kill, three times.
        wait_until(lambda: Seen.objects.count() == 2 * published + 3)


def test_b80_a_standing_subscriber_keeps_its_messages_and_is_seen(settings: Any) -> None:
    """However long it is away: nothing is reaped, and `inspect_queues` shows how much waits and since when."""
    settings.PGQUEUE = SHORT_LIVED
    with worker("sub", queues=[{"name": "sub", "topics": ["t"]}], settings=SHORT_LIVED) as running:
        assert len(TOPIC.publish({})) == 1
        wait_until(lambda: not MessageQueueItem.objects.exists())
        running.kill()
    for _ in range(10):
        TOPIC.publish({})
    fetch("UPDATE django_pgqueue_messagequeue SET last_active = last_active - interval '1 day'")
    fetch("UPDATE django_pgqueue_messagequeueitem SET published_at = published_at - interval '1 day'")
    figures = reap()
    assert (figures["expired"], "sub" in figures["queues"]) == (0, False)
    assert len(TOPIC.publish({})) == 1
    out = io.StringIO()
    call_command("inspect_queues", "sub", format="json", stdout=out)
    (row,) = json.loads(out.getvalue())
    assert row["ready"] == 11
    assert row["oldest_due_age"] > 86_000


# --- B82: a subscriber joins or leaves during a publish ---


@pytest.mark.full
def test_b82_subscribers_that_join_and_leave_have_no_gap() -> None:
    """The soak of that name, for as long as 4 publishers need for 100 messages each."""
    figures = topic_subscribers.run(0, messages=100, seed=1)
    assert figures["copies"]
    assert figures["reaped"]


def test_b82_a_transaction_that_spans_joins_serves_those_that_are_there() -> None:
    """Each publish has the queues that are bound when it runs; who leaves waits for the end of the transaction."""
    early, late = Queue("early"), Queue("late")
    TOPIC.bind(early)
    with sessions(2) as (publisher, other):
        publisher.begin()
        publisher.run(TOPIC.publish, 1)
        other.run(TOPIC.bind, late)
        publisher.run(TOPIC.publish, 2)
        left = other.start(TOPIC.unbind, early)
        wait_until(lambda: is_waiting(other.pid))
        publisher.run(TOPIC.publish, 3)
        publisher.commit()
        assert left.result(DEADLINE) is True
    TOPIC.publish(4)
    assert payloads("early") == [1, 2, 3]
    assert payloads("late") == [2, 3, 4]


def test_b82_a_topic_without_subscribers_is_no_error() -> None:
    """Nor one whose last one has left."""
    assert TOPIC.publish(1) == []
    queue = Queue("q")
    TOPIC.bind(queue)
    TOPIC.unbind(queue)
    with transaction.atomic():
        assert TOPIC.publish(1) == []


def milliseconds() -> float:
    """Return what a publish takes, the median of some."""
    taken = []
    for number in range(15):
        began = time.perf_counter()
        assert len(TOPIC.publish(number)) == 3
        taken.append(time.perf_counter() - began)
    return 1_000 * statistics.median(taken)


DEAD_QUEUES = """
INSERT INTO django_pgqueue_messagequeue (name, auto_deleted, last_active)
SELECT 'dead.' || number, true, statement_timestamp() - interval '2 hours' FROM generate_series(1, 5000) AS number
"""
DEAD_BINDINGS = """
INSERT INTO django_pgqueue_topicbinding (topic, queue)
SELECT 't', 'dead.' || number FROM generate_series(1, 5000) AS number
"""


@pytest.mark.full
def test_b82_five_thousand_dead_subscribers_do_not_slow_down_a_publish() -> None:
    """
    Not at all once they are reaped, and until then little: they are looked at and left.

    The reaper's deletion of each is what leaves dead rows in both tables.
    """
    for name in ("a", "b", "c"):
        TOPIC.bind(Queue(name))
    alone = milliseconds()
    fetch(DEAD_QUEUES)
    fetch(DEAD_BINDINGS)
    idle = milliseconds()
    assert reap()["queues"]
    assert MessageQueue.objects.filter(name__startswith="dead.").count() == 0
    assert TopicBinding.objects.count() == 3
    reaped = milliseconds()
    # With room for a busy machine.
    assert idle < 20 * alone + 50, (alone, idle, reaped)
    assert reaped < 5 * alone + 10, (alone, idle, reaped)
