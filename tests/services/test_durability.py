"""
What a queue that is not durable spares and risks: its publishes do not wait for the disk, nothing else changes.

On a server of its own, whose WAL writer sleeps for ten seconds and which has nothing else to do.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction

from django_pgqueue import Queue
from django_pgqueue.devdb import DevCluster, throwaway
from django_pgqueue.models import MessageQueueItem
from tests.support.databases import alias, migrate
from tests.support.sessions import fetch

pytestmark = pytest.mark.django_db(transaction=True)

# Of how many publishes most must be seen to flush, or not to: now and then the server flushes of itself.
ROUNDS, MIN_COUNT = 10, 7

QUIET = {"wal_writer_delay": "10s", "wal_writer_flush_after": "100MB", "autovacuum": "off", "checkpoint_timeout": "1h"}


def on(server: DevCluster) -> AbstractContextManager[str]:
    """Give an alias for the server's database."""
    return alias("quiet", NAME="postgres", HOST=str(server.socket_dir), PORT="5432", USER="postgres", PASSWORD="")


@pytest.fixture(scope="module")
def server(django_db_blocker: Any) -> Iterator[DevCluster]:
    with throwaway(options=QUIET) as server:
        with django_db_blocker.unblock(), on(server) as using:
            migrate(using)
        yield server


@pytest.fixture
def using(server: DevCluster) -> Iterator[str]:
    with on(server) as using:
        yield using
        MessageQueueItem.objects.using(using).all().delete()


@pytest.fixture
def relaxed(using: str) -> Queue:
    queue = Queue("relaxed", durable=False, using=using)
    queue.declare()
    return queue


@pytest.fixture
def durable(using: str) -> Queue:
    queue = Queue("durable", using=using)
    queue.declare()
    return queue


def flushes(server: DevCluster, publish: Callable[[], object]) -> int:
    """Return how many of ten publishes let the server flush its log, each of which wrote to it."""
    flushed = 0
    with psycopg.connect(server.url, autocommit=True) as admin:
        for _ in range(ROUNDS):
            before = lsn(admin, "flush")
            written = lsn(admin, "insert")
            publish()
            assert lsn(admin, "insert") > written
            flushed += lsn(admin, "flush") > before
    return flushed


def lsn(admin: psycopg.Connection[Any], which: str) -> int:
    row = admin.execute(f"SELECT (pg_current_wal_{which}_lsn() - '0/0')::int8").fetchone()
    assert row is not None
    return int(row[0])


def in_atomic(queue: Queue) -> Callable[[], None]:
    def publish() -> None:
        with transaction.atomic(using=queue.using):
            queue.publish(1)

    return publish


PUBLISH: dict[str, Callable[[Queue], Callable[[], object]]] = {
    "publish": lambda queue: lambda: queue.publish(1),
    "publish_many": lambda queue: lambda: queue.publish_many([1, 2, 3]),
    "publish_many, several statements": lambda queue: lambda: queue.publish_many(["x" * 2_100_000] * 2),
}


# --- Waiting for the disk ---


@pytest.mark.parametrize("publish", PUBLISH.values(), ids=PUBLISH)
def test_only_a_durable_queue_waits_for_the_disk(
    server: DevCluster, relaxed: Queue, durable: Queue, publish: Callable[[Queue], Callable[[], object]]
) -> None:
    """The log is flushed by each of its publishes; those to the other one only write to it, their wake-up included."""
    assert flushes(server, publish(relaxed)) <= ROUNDS - MIN_COUNT
    assert flushes(server, publish(durable)) == ROUNDS


def test_inside_a_transaction_the_callers_commit_decides(server: DevCluster, relaxed: Queue, durable: Queue) -> None:
    """What else is in it may not be lost: its commit waits."""
    assert flushes(server, in_atomic(relaxed)) == ROUNDS
    assert flushes(server, in_atomic(durable)) == ROUNDS


# --- Nobody else's setting ---


def setting(using: str) -> str:
    return str(fetch("SHOW synchronous_commit", using=using)[0][0])


@pytest.mark.parametrize("publish", PUBLISH.values(), ids=PUBLISH)
@pytest.mark.parametrize("chosen", ["on", "local", "off", "remote_apply"])
def test_the_setting_of_the_session_is_left_as_it_is(
    relaxed: Queue, chosen: str, publish: Callable[[Queue], Callable[[], object]]
) -> None:
    """Before, inside a transaction and after; whether the project chose another or not."""
    using = relaxed.using
    fetch(f"SET synchronous_commit = {chosen}", using=using)
    publish(relaxed)()
    assert setting(using) == chosen
    with transaction.atomic(using=using):
        publish(relaxed)()
        assert setting(using) == chosen
        with transaction.atomic(using=using):
            publish(relaxed)()
        assert setting(using) == chosen
    publish(relaxed)()
    assert setting(using) == chosen


def test_what_a_transaction_chose_for_itself_is_left_too(relaxed: Queue) -> None:
    """With SET LOCAL, for its own commit."""
    with transaction.atomic(using=relaxed.using):
        fetch("SET LOCAL synchronous_commit = local", using=relaxed.using)
        relaxed.publish(1)
        relaxed.publish_many([1, 2])
        assert setting(relaxed.using) == "local"
    assert setting(relaxed.using) == "on"


def test_a_publish_that_fails_or_heals_leaves_the_setting(relaxed: Queue) -> None:
    """The queue was removed under it, or its payload is refused by the server."""
    using = relaxed.using
    healing = Queue("healing", durable=False, auto_deleted=True, using=using)
    for publish in (lambda: healing.publish(1), lambda: healing.publish_many([1, 2])):
        healing.declare()
        fetch("DELETE FROM django_pgqueue_messagequeue WHERE name = 'healing'", using=using)
        publish()
        assert setting(using) == "on"
    # A number that JSON has and jsonb does not.
    for publish in (lambda: relaxed.publish(10**140_000), lambda: relaxed.publish_many([1, 10**140_000])):
        with pytest.raises(Exception, match=r"overflow|digits|limit"):
            publish()
        assert setting(using) == "on"


def test_manual_transaction_mode_is_the_callers_transaction(server: DevCluster, relaxed: Queue) -> None:
    """Its commit waits, and its setting stays."""
    connection = connections[relaxed.using]

    def publish() -> None:
        connection.set_autocommit(False)
        try:
            relaxed.publish(1)
            assert setting(relaxed.using) == "on"
            connection.commit()
        finally:
            connection.set_autocommit(True)

    assert flushes(server, publish) == ROUNDS


# --- A crash of the server ---


@pytest.mark.full
def test_a_server_that_is_stopped_at_once_loses_nothing_but_those(
    server: DevCluster, relaxed: Queue, durable: Queue
) -> None:
    """Of the relaxed ones the last may be gone; the durable ones and what a transaction committed are there."""
    using = relaxed.using
    ids = [durable.publish(1), *durable.publish_many([2, 3])]
    with transaction.atomic(using=using):
        ids.append(durable.publish(4))
        kept = relaxed.publish("in a transaction")
    risked = [relaxed.publish(number) for number in range(20)] + relaxed.publish_many(range(20, 30))
    connections[using].close()
    server.restart("immediate")
    there = set(MessageQueueItem.objects.using(using).values_list("id", flat=True))
    assert there >= {*ids, kept}
    assert there - {*ids, kept} == set(risked[: len(there) - len(ids) - 1])
    # And all goes on.
    assert durable.publish(5) > max(there)
    assert relaxed.publish(6) > max(there)
