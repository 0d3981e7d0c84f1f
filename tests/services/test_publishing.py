"""Publishing: one insert that waits for no other publisher, and joins the caller's transaction."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from django_pgqueue import Queue, message
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.services import declaring, notifying
from django_pgqueue.services.beliefs import beliefs
from tests.support.locks import lock_waits
from tests.support.rows import backdate, payloads, version
from tests.support.sessions import Session, connect, fetch, run_async, second_session, sessions
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def heard(listener: psycopg.Connection, timeout: float) -> list[psycopg.Notify]:
    """Return the notifications that arrive within `timeout` seconds."""
    return list(listener.notifies(timeout=timeout))


@pytest.fixture
def listener(request: pytest.FixtureRequest):
    """A session that listens for the queue named as the test."""
    with second_session() as session:
        session.execute(f'LISTEN "{notifying.channel(request.node.name)}"')
        yield session


# --- The hot path ---


@pytest.mark.parametrize("in_transaction", [False, True], ids=["autocommit", "atomic"])
def test_a_publish_does_not_rewrite_the_queue_row(in_transaction):
    """With the declare cache fresh, a backdated last_active and the row's xmin survive a publish."""
    queue = Queue("orders")
    queue.publish({"n": 1})
    backdate("orders", 1800)
    before = version("orders")
    if in_transaction:
        with transaction.atomic():
            queue.publish({"n": 2})
    else:
        queue.publish({"n": 2})
    queue.publish_many([{"n": 3}, {"n": 4}])
    assert version("orders") == before
    assert payloads("orders") == [{"n": n} for n in (1, 2, 3, 4)]


def test_a_publish_in_autocommit_is_one_insert_and_at_most_one_notify():
    """The hot path asks nothing before it inserts."""
    queue = Queue("one.insert")
    queue.publish({"n": 1})
    with CaptureQueriesContext(
        connection,
    ) as queries:
        queue.publish({"n": 2})
    statements = [query["sql"].split()[0:2] for query in queries]
    assert statements[0] == ["INSERT", "INTO"]
    assert len(statements) <= 2 and all(words[0] == "SELECT" for words in statements[1:])


def test_a_publish_returns_the_id_and_stores_what_was_asked_for():
    """Payload, headers, due time and expiry, the latter counted from the due time."""
    queue = Queue("orders")
    message_id = queue.publish({"order": 42}, headers={"trace": "abc"}, delay=60, ttl=30)
    ((payload, headers, due, ttl),) = fetch(
        "SELECT payload::text, headers::text, extract(epoch FROM read_after - published_at)::float8,"
        " extract(epoch FROM expires_at - read_after)::float8 FROM django_pgqueue_messagequeueitem WHERE id = %s",
        [message_id],
    )
    assert (payload, headers) == ('{"order": 42}', '{"trace": "abc"}')
    assert (due, ttl) == (60, 30)


def test_a_message_without_delay_and_ttl_has_neither_due_time_nor_expiry():
    """It stands on the index where the ready walk looks, and it never expires on a standing queue."""
    item = MessageQueueItem.objects.get(pk=Queue("orders").publish(1))
    assert (item.read_after, item.expires_at) == (None, None)


def test_only_auto_deleted_queues_have_a_ttl_by_default():
    """EPHEMERAL_TTL is theirs; DEFAULT_TTL is for standing queues and is not set."""
    item = MessageQueueItem.objects.get(pk=Queue("replies", auto_deleted=True).publish(1))
    assert (item.expires_at - item.published_at).total_seconds() == pytest.approx(300, abs=1)
    forever = MessageQueueItem.objects.get(pk=Queue("replies", auto_deleted=True, ttl=float("inf")).publish(1))
    assert forever.expires_at is None
    with override_settings(PGQUEUE={"DEFAULT_TTL": 7}):
        item = MessageQueueItem.objects.get(pk=Queue("orders").publish(1))
    assert (item.expires_at - item.published_at).total_seconds() == pytest.approx(7, abs=1)


@pytest.mark.parametrize("count", [1, 100, 12_000])
def test_publish_many_returns_ids_in_the_order_of_the_payloads(count):
    """Also when the payloads need more than one statement."""
    ids = Queue("bulk").publish_many({"n": n} for n in range(count))
    assert ids == sorted(ids) and len(set(ids)) == count
    stored = MessageQueueItem.objects.in_bulk(ids)
    assert [stored[message_id].payload["n"] for message_id in ids] == list(range(count))


def test_publish_many_is_all_or_nothing_across_its_statements(monkeypatch):
    """A failure in the last of several statements takes the first ones back."""
    queue = Queue("bulk")
    queue.declare()
    monkeypatch.setattr(message, "CHUNK_ROWS", 10)
    monkeypatch.setattr(message, "PIECE_ROWS", 3)
    fetch("ALTER TABLE django_pgqueue_messagequeueitem ADD CONSTRAINT tmp CHECK (payload <> '29'::jsonb)")
    try:
        with pytest.raises(DatabaseError):
            queue.publish_many(range(30))
        assert payloads("bulk") == []
        queue.publish_many(range(29))
        assert payloads("bulk") == list(range(29))
    finally:
        fetch("ALTER TABLE django_pgqueue_messagequeueitem DROP CONSTRAINT tmp")


def test_publish_many_of_nothing_does_nothing():
    """No SQL, no queue."""
    with CaptureQueriesContext(connection) as queries:
        assert Queue("bulk").publish_many([]) == []
    assert not len(queries)


def test_async_publishing_is_publishing():
    """apublish and apublish_many return what the others return and store the same."""
    queue = Queue("async")

    async def publish() -> list[int]:
        return [await queue.apublish({"n": 1}, headers={"h": 1}), *await queue.apublish_many([{"n": 2}, {"n": 3}])]

    ids = run_async(publish())
    assert ids == sorted(ids)
    wait_until(lambda: len(payloads("async")) == 3)
    assert payloads("async") == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_bare_insert_is_a_valid_publish():
    """SQL from psql or a trigger names queue and payload, and a consumer handles the message."""
    queue = Queue("raw")
    queue.declare()
    with second_session() as psql:
        psql.execute("INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('raw', '{\"n\": 1}')")
    (message,) = queue.claim(10)
    assert (message.payload, message.headers, message.delivery_count) == ({"n": 1}, {}, 1)
    queue.ack(message)
    assert payloads("raw") == []


# --- The caller's transaction ---


def test_a_rolled_back_publish_leaves_nothing_and_notifies_nobody(listener, request):
    """Neither message nor queue row nor wake-up, and the declare cache does not believe in the queue."""
    queue = Queue(request.node.name)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        queue.publish({"n": 1})
        queue.publish_many([{"n": 2}])
        raise ZeroDivisionError
    assert not MessageQueueItem.objects.exists()
    assert not MessageQueue.objects.filter(name=queue.name).exists()
    assert heard(listener, 0.3) == []
    # A standing queue that the process believed in would now be QueueNotFound.
    queue.publish({"n": 3})
    assert payloads(queue.name) == [{"n": 3}]
    # Nor did the rolled-back one swallow this one's wake-up.
    assert len(heard(listener, 0.3)) == 1


def test_the_wake_up_comes_after_commit_in_no_transaction_of_the_callers(listener, request):
    """While the transaction is open nobody hears; its statements hold no NOTIFY."""
    queue = Queue(request.node.name)
    queue.declare()
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        for n in range(5):
            queue.publish(n)
        assert heard(listener, 0.2) == []
        inside = len(queries)
    assert len(heard(listener, 0.5)) == 1
    statements = [query["sql"] for query in queries]
    assert not any("pg_notify" in statement for statement in statements[:inside])
    assert sum("pg_notify" in statement for statement in statements[inside:]) == 1
    commit = next(index for index, statement in enumerate(statements) if statement == "COMMIT")
    assert next(index for index, statement in enumerate(statements) if "pg_notify" in statement) > commit


def test_wake_ups_are_throttled_to_one_per_interval(listener, request):
    """A process sends one NOTIFY per NOTIFY_INTERVAL and queue, however much it publishes."""
    queue = Queue(request.node.name)
    with override_settings(PGQUEUE={"NOTIFY_INTERVAL": 3600}):
        for n in range(20):
            queue.publish(n)
        assert len(heard(listener, 0.3)) == 1
    with override_settings(PGQUEUE={"NOTIFY_INTERVAL": 0}):
        for n in range(20):
            queue.publish(n)
        assert len(heard(listener, 0.3)) == 20


def test_a_failed_wake_up_does_not_silence_the_next(listener, request, monkeypatch, caplog):
    """The throttle is stamped before sending and cleared when sending failed; the caller sees nothing."""
    queue = Queue(request.node.name)
    queue.declare()
    with override_settings(PGQUEUE={"NOTIFY_INTERVAL": 3600}), caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(notifying, "NOTIFY", "SELECT no_such_function(%(channel)s)")
            queue.publish({"n": 1})
            with transaction.atomic():
                queue.publish({"n": 2})
        assert "consumers not notified" in caplog.text
        queue.publish({"n": 3})
    assert len(heard(listener, 0.3)) == 1
    assert payloads(queue.name) == [{"n": n} for n in (1, 2, 3)]


def test_no_error_after_the_commit_reaches_the_caller(monkeypatch, caplog):
    """The refresh's failure is logged, and the caller's own hooks still run."""
    queue = Queue("orders")
    queue.declare()
    beliefs.forget()
    ran = []
    monkeypatch.setattr(declaring, "REFRESH_QUEUE", "SELECT 1/0")
    with transaction.atomic():
        queue.publish({"n": 1})
        transaction.on_commit(lambda: ran.append(True))
    assert "queue not refreshed" in caplog.text
    assert ran == [True]
    assert payloads("orders") == [{"n": 1}]


def test_a_connection_lost_after_the_commit_does_not_reach_the_caller(caplog):
    """The hooks after commit find the connection dead: the data is committed, so that is only logged."""
    queue = Queue("orders")
    queue.declare()

    def kill() -> None:
        with connect() as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])

    beliefs.forget()
    with transaction.atomic():
        transaction.on_commit(kill)
        queue.publish({"n": 1})
    connection.close()
    assert payloads("orders") == [{"n": 1}]
    assert "queue not refreshed" in caplog.text


def test_the_hook_runs_once_per_transaction_and_again_after_a_savepoint_rollback(listener, request):
    """A savepoint that rolls back takes its hook along; the next publish registers a new one."""
    queue = Queue(request.node.name)
    queue.declare()
    with override_settings(PGQUEUE={"NOTIFY_INTERVAL": 0}):
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                queue.publish({"n": 1})
                raise ZeroDivisionError
            queue.publish({"n": 2})
            queue.publish({"n": 3})
            with transaction.atomic():
                queue.publish({"n": 4})
        assert len(heard(listener, 0.3)) == 1
        with transaction.atomic():
            queue.publish({"n": 5})
        assert len(heard(listener, 0.3)) == 1
        # The whole of it rolled back: nothing is left over for the next transaction.
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            queue.publish({"n": 6})
            raise ZeroDivisionError
        with transaction.atomic():
            queue.publish({"n": 7})
        assert len(heard(listener, 0.3)) == 1
    assert payloads(queue.name) == [{"n": n} for n in (2, 3, 4, 5, 7)]


def test_publishing_in_manual_transaction_mode_joins_the_open_transaction():
    """set_autocommit(False): no hooks, no error, and the message stands or falls with the caller's commit."""
    queue = Queue("manual")
    queue.declare()
    transaction.set_autocommit(False)
    try:
        queue.publish({"n": 1})
        transaction.rollback()
        queue.publish({"n": 2})
        queue.publish_many([{"n": 3}])
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert payloads("manual") == [{"n": 2}, {"n": 3}]


# --- Publishers beside each other ---


@pytest.mark.parametrize("cache", ["fresh", "stale"])
def test_sixteen_open_publishers_wait_for_no_lock(cache, monkeypatch):
    """
    Each holds its transaction open after publishing; none waits, neither then nor at commit.

    With a stale declare cache, and a row to refresh, each of them refreshes after its commit.
    """
    queue = Queue("busy")
    queue.declare()
    if cache == "stale":
        # As in sixteen processes: what one of them has seen fresh, the others have not.
        monkeypatch.setattr(beliefs, "is_fresh", lambda key: False)
        backdate("busy", 1800)

    with sessions(16) as publishers, lock_waits() as waits:
        for number, publisher in enumerate(publishers):
            publisher.begin()
            publisher.run(queue.publish, {"n": number})
            publisher.run(queue.publish_many, [{"n": number}] * 2)
        assert fetch("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'")[0][0] >= 16
        # They hold KEY SHARE and nothing more: whoever refreshes or heals now gets the row at once.
        assert fetch("SELECT name FROM django_pgqueue_messagequeue WHERE name = 'busy' FOR NO KEY UPDATE NOWAIT")
        # All at once, so that the refreshes meet.
        for done in [publisher.start(publisher._leave, None) for publisher in publishers]:
            done.result(DEADLINE)
    assert waits == []
    assert len(payloads("busy")) == 48


def test_publishers_in_autocommit_with_stale_caches_wait_for_no_lock():
    """The refresh skips a row that another session holds, and the publish goes on."""
    queue = Queue("busy")
    queue.declare()
    backdate("busy", 1800)
    beliefs.forget()
    with second_session() as holder, lock_waits() as waits, Session() as publisher, holder.transaction():
        holder.execute("SELECT FROM django_pgqueue_messagequeue WHERE name = 'busy' FOR NO KEY UPDATE")
        publisher.run(queue.publish, {"n": 1})
        publisher.begin()
        publisher.run(queue.publish, {"n": 2})
        publisher.commit()
    assert waits == []
    assert payloads("busy") == [{"n": 1}, {"n": 2}]


def test_publishers_race_without_waiting_on_each_other():
    """Eight threads at full speed on one queue, in autocommit and in transactions: no wait for a row."""
    queue = Queue("busy")
    queue.publish(0)
    stop = threading.Event()

    def publish(number: int) -> int:
        count = 0
        with Session() as session:
            while not stop.is_set():
                if number % 2:
                    session.begin()
                session.run(queue.publish, count)
                if number % 2:
                    session.commit()
                count += 1
        return count

    with lock_waits() as waits, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(publish, number) for number in range(8)]
        wait_until(lambda: len(payloads("busy")) > 500)
        stop.set()
        counts = [future.result(DEADLINE) for future in futures]
    assert len(payloads("busy")) == sum(counts) + 1
    # Growing a table's file takes a moment's lock of its own; no row, no other transaction is waited for.
    assert [wait for wait in waits if wait[1] not in ("extend", None)] == []
