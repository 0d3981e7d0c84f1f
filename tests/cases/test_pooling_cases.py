"""
Case B20: all of it through a real PgBouncer that pools transactions.

The pool has three sessions for many more clients, and each is emptied (DISCARD ALL) after every
transaction: what relied on its session fails.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import transaction

from django_pgqueue import LeaseLost, Queue
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.reaper import Reaper
from tests.support.databases import alias
from tests.support.pgbouncer import PgBouncer, pgbouncer
from tests.support.processes import Worker, command, database_url, run, worker
from tests.support.rows import backdate, delete_queue, payloads
from tests.support.sessions import connect
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

POOL_SIZE = 3
# Polling every minute is too slow to hide that nothing is heard.
NO_POLLING = {"POLL_INTERVAL": 60, "PREFETCH": 50, "LEASE": 10}
QUEUES = [
    {"name": "late"},
    {"name": "atomic", "handler": {"ack": "atomic"}},
    {"name": "async", "function": "handle_async", "handler": {"concurrency": 2}},
]


@pytest.fixture
def bouncer() -> Iterator[PgBouncer]:
    with pgbouncer(pool_size=POOL_SIZE) as running:
        yield running
        assert "prepared statement" not in running.output


@pytest.fixture
def pooled(bouncer: PgBouncer) -> Iterator[str]:
    """An alias of this process that goes through it."""
    with alias("pooled", HOST=str(bouncer.folder), PORT="5432") as name:
        yield name


def test_every_verb_works_through_it(pooled: str) -> None:
    """Publish, claim, extend, ack, nack, reject, settling what was lost, healing and reaping."""
    queue = Queue("q", using=pooled, auto_deleted=True, max_deliveries=3)
    first = queue.publish("a")
    ids = queue.publish_many(["b", "c", "d"])
    with transaction.atomic(using=pooled):
        last = queue.publish("e")
        queue.publish_many(["f"])
    assert payloads("q") == ["a", "b", "c", "d", "e", "f"]

    held = {message.id: message for message in queue.claim(limit=10)}
    queue.extend(*held.values(), seconds=30)
    queue.ack(held[first], held[last])
    queue.nack(held[ids[0]], delay=0)
    queue.reject(held[ids[1]], reason="no")
    queue.nack(held[ids[2]], delay=3600)
    with pytest.raises(LeaseLost):
        queue.ack(held[ids[2]])
    assert sorted(payloads("q")) == ["b", "d", "f"]
    assert payloads("q.dead") == ["c"]
    assert [message.payload for message in queue.claim(limit=10)] == ["b"]

    delete_queue("q")
    queue.publish("healed")
    assert MessageQueue.objects.filter(name="q").exists()
    MessageQueueItem.objects.all().delete()
    backdate("q", 7200)
    run("reap_queues", url=database_url())
    assert not MessageQueue.objects.filter(name="q").exists()


@pytest.mark.full
@pytest.mark.parametrize("direct", [True, False], ids=["direct alias for LISTEN", "no direct alias"])
def test_four_workers_handle_two_thousand_messages(
    bouncer: PgBouncer, pooled: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Four workers with sync, atomic and async handlers, their heartbeats, and a reaper: the ledger balances.

    With LISTEN_DATABASE they are woken as ever; without, each says once that it polls, and polls every second.
    """
    settings: dict[str, Any] = dict(NO_POLLING)
    if direct:
        monkeypatch.setenv("PGQUEUE_TEST_DIRECT_URL", database_url())
        settings["LISTEN_DATABASE"] = "direct"
    options: dict[str, Any] = {"queues": QUEUES, "settings": settings, "url": bouncer.url()}
    queues = [Queue(spec["name"], using=pooled) for spec in QUEUES]
    failing: dict[str, Any] = {"fail": "once", "times": 1}
    with ExitStack() as stack:
        workers: list[Worker] = [
            stack.enter_context(command("consume_queues", "--concurrency", "2", **options)) for _ in range(4)
        ]
        for number, queue in enumerate(queues):
            queue.publish_many([{}] * 600)
            for _ in range(20):
                queue.publish({})
            for _ in range(5):
                with transaction.atomic(using=pooled):
                    queue.publish_many([{}] * 8)
            queue.publish_many([failing] * 5)
            queue.publish_many([{"reject": "never"}] * (2 if number else 1))
        published = set(MessageQueueItem.objects.values_list("id", flat=True)) | set(
            Seen.objects.values_list("msg_id", flat=True)
        )
        assert len(published) == 2000
        wait_until(lambda: all(one.is_beating() for one in workers), 120)
        reaper = Reaper(pooled)
        wait_until(lambda: reaper.run_once() and is_all_settled(), 120)
        assert_heard_or_polled(workers, queues[0], direct=direct)
        for one in workers:
            # The proof takes its time; the messages may have been handled by then.
            wait_until(lambda one=one: one.output.count("polling only") == (0 if direct else 1))
            assert one.stop() == 0
            # Nor was an error taken for the server's absence and tried again.
            assert "Traceback" not in one.output
            assert "database lost" not in one.output
    assert_ledger(published)


def is_all_settled() -> bool:
    return not MessageQueueItem.objects.exclude(queue__name__endswith=".dead").exists()


def assert_heard_or_polled(workers: list[Worker], queue: Queue, *, direct: bool) -> None:
    """When all are asleep, one more message is handled soon: polled, or heard."""
    with connect() as admin:
        listeners = admin.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'django_pgqueue listener'"
        ).fetchone()
    assert listeners == (len(workers) if direct else 0,)
    extra = queue.publish({})
    wait_until(lambda: Seen.objects.filter(msg_id=extra).exists(), 10)
    wait_until(lambda: not payloads(queue.name))
    Seen.objects.filter(msg_id=extra).delete()


def assert_ledger(published: set[int]) -> None:
    """Each was started once, but those that failed once: twice. Rejected ones are dead, the rest is gone."""
    dead = set(MessageQueueItem.objects.values_list("id", flat=True))
    starts = Counter(Seen.objects.values_list("msg_id", flat=True))
    assert len(dead) == 5
    # A handler that failed in the ack's transaction left no row of its own.
    assert published - starts.keys() <= dead
    assert Counter(starts.values()).keys() <= {1, 2}
    assert sum(count - 1 for count in starts.values()) == 10
    assert starts.keys() <= published


def test_a_pooler_that_pools_sessions_is_listened_through() -> None:
    """There LISTEN works: the worker finds out, says nothing, and is woken."""
    queue = Queue("work")
    with (
        pgbouncer(pool_size=20, mode="session") as bouncer,
        worker(settings=NO_POLLING, url=bouncer.url()) as running,
    ):
        wait_until(is_anybody_listening)
        queue.publish({})
        wait_until(lambda: Seen.objects.exists(), 5)
        assert running.stop() == 0
        assert running.output == ""


def is_anybody_listening() -> bool:
    with connect() as admin:
        row = admin.execute(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        ).fetchone()
    return row is not None
