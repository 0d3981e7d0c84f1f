"""
Cases B21, B23 and B25: the server's limits on sessions, a server that turns read-only, a pool that is too small.

B21 ``test_limits_*``, B23 ``test_read_only_*``, B25 ``test_small_pool_*``.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from django.db import connection
from psycopg import sql

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem, QueueConsumer
from tests.support import cluster
from tests.support.processes import Worker, database_url, worker
from tests.support.rows import payloads
from tests.support.sessions import connect
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.full]

# A third of the case's, so that the tests take a third of the time.
IDLE_LIMIT, STATEMENT_LIMIT, LOCK_LIMIT, WORK = "700ms", "1s", "400ms", 2.5


@pytest.fixture
def limited_url() -> Iterator[str]:
    """The test database's URL for a role whose sessions the server limits."""
    role, password = f"limited_{uuid4().hex[:8]}", uuid4().hex
    with connect() as admin:
        name = sql.Identifier(role)
        admin.execute(sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(name, password))
        for setting, value in {
            "idle_in_transaction_session_timeout": IDLE_LIMIT,
            "statement_timeout": STATEMENT_LIMIT,
            "lock_timeout": LOCK_LIMIT,
        }.items():
            admin.execute(sql.SQL("ALTER ROLE {} SET {} = {}").format(name, sql.Identifier(setting), value))
        host = urlsplit(database_url()).netloc.rpartition("@")[2]
        yield database_url(netloc=f"{role}:{password}@{host}")
        wait_until(lambda: not admin.execute("SELECT FROM pg_stat_activity WHERE usename = %s", [role]).fetchall())
        admin.execute(sql.SQL("DROP ROLE {}").format(name))


@contextmanager
def idle_transactions(longer_than: float) -> Iterator[list[Any]]:
    """Watch for sessions that are idle in a transaction for so many seconds, and collect them."""
    found: list[Any] = []
    ended = threading.Event()

    def watch() -> None:
        with connect() as admin:
            while not ended.wait(0.1):
                found.extend(
                    admin.execute(
                        "SELECT application_name, query FROM pg_stat_activity WHERE datname = current_database()"
                        " AND state LIKE 'idle in transaction%%'"
                        " AND clock_timestamp() - state_change > make_interval(secs => %s)",
                        [longer_than],
                    ).fetchall()
                )

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


# --- B21 ------------------------------------------------------------------------------------------


def test_limits_on_idle_transactions_and_statements_do_not_touch_a_handler_that_works(limited_url: str) -> None:
    """A handler works for longer than all limits without SQL: one start, acked, no transaction open meanwhile."""
    queues = [
        {"name": "late"},
        {"name": "early", "handler": {"ack": "early"}},
        {"name": "async", "function": "handle_async"},
    ]
    with worker(queues=queues, url=limited_url) as running, idle_transactions(0.5) as idle:
        for spec in queues:
            Queue(spec["name"]).publish({"sleep": WORK})
        wait_until(lambda: Seen.objects.count() == 3)
        wait_until(lambda: not MessageQueueItem.objects.exists())
        Queue("late").publish({})
        wait_until(lambda: Seen.objects.count() == 4)
        assert set(Seen.objects.values_list("worker", "attempt")) == {(running.pid, 1)}
        assert idle == []
        assert running.stop() == 0
        assert "Traceback" not in running.output
        assert "database lost" not in running.output


def test_limits_end_an_atomic_handler_and_not_its_worker(limited_url: str) -> None:
    """
    Its transaction is open while it works, and the server ends it: that is a failure of the handler.

    It is recorded, the message comes back and then is dead, and the worker goes on.
    """
    queue = Queue("work", max_deliveries=2)
    specs = [{"name": "work", "queue": {"max_deliveries": 2}, "handler": {"ack": "atomic"}}]
    with worker(queues=specs, url=limited_url) as running:
        queue.publish({"sleep": WORK})
        queue.publish({"nack": "again", "times": 1, "delay": 0})
        wait_until(lambda: payloads("work.dead") == [{"sleep": WORK}])
        wait_until(lambda: not payloads("work"))
        assert [seen.attempt for seen in Seen.objects.all()] == [2]
        assert running.is_running
        assert running.stop() == 0
        assert "Traceback" not in running.output
    (reason,) = MessageQueueItem.objects.values_list("failures", flat=True)
    assert "idle-in-transaction timeout" in json.dumps(reason)


# --- B23 ------------------------------------------------------------------------------------------


@pytest.fixture
def read_only() -> Iterator[Any]:
    """Turn the whole server read-only, for sessions that are open too, as a switch-over does; and back."""
    if cluster.cluster is None:
        pytest.skip("the server that DATABASE_URL names is not ours to change")
    with connect() as admin:
        admin.execute("SET default_transaction_read_only = off")

        def switch(value: str) -> None:
            admin.execute(sql.SQL("ALTER SYSTEM SET default_transaction_read_only = {}").format(sql.SQL(value)))
            admin.execute("SELECT pg_reload_conf()")
            # The sessions read it before their next statement.
            with connect() as other:
                wait_until(lambda: other.execute("SHOW default_transaction_read_only").fetchone() == (value,))

        try:
            yield switch
        finally:
            switch("off")
            admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
            admin.execute("SELECT pg_reload_conf()")
    connection.close()


@contextmanager
def quiet_worker(lease: float) -> Iterator[Worker]:
    specs = [{"name": "work", "function": "handle_without_database", "handler": {"concurrency": 2}}]
    with worker(queues=specs, settings={"LEASE": lease}) as running:
        yield running


def starts(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def test_read_only_while_idle_is_an_outage_that_passes(read_only: Any, tmp_path: Path) -> None:
    """The worker drops its connections, waits without spinning, and handles at the first delivery what comes then."""
    queue, log = Queue("work"), tmp_path / "log"
    with quiet_worker(lease=3) as running:
        before = backends()
        first = queue.publish({"log": str(log)})
        wait_until(lambda: not payloads("work"))
        read_only("on")
        wait_until(lambda: "database lost loop=consumer" in running.output)
        wait_until(lambda: "database lost loop=heartbeat" in running.output)
        read_only("off")
        second = queue.publish({"log": str(log)})
        wait_until(lambda: not payloads("work"), 10)
        assert starts(log) == [f"{first}/1", f"{second}/1"]
        assert "[25006]" in running.output
        assert not backends("consumer") & before
        assert running.is_running
        assert running.output.count("database lost loop=consumer") == 1
        assert running.stop() == 0
        assert "Traceback" not in running.output
    assert not QueueConsumer.objects.exists()


@pytest.mark.parametrize("lease", [60, 1.5], ids=["lease held", "lease lapsed meanwhile"])
def test_read_only_during_a_handler_costs_no_attempt(read_only: Any, tmp_path: Path, lease: float) -> None:
    """
    What was handled meanwhile is acked when the server takes writes again: nobody else took it.

    Its lease may have lapsed by then; what waited then is handled too, each at its first delivery.
    """
    queue, log, hold = Queue("work"), tmp_path / "log", tmp_path / "hold"
    with quiet_worker(lease) as running:
        ids = queue.publish_many([{"log": str(log), "hold": str(hold)}] * 2)
        wait_until(lambda: len(starts(log)) == 2)
        read_only("on")
        hold.touch()
        wait_until(lambda: "database lost loop=consumer" in running.output)
        if lease < 5:
            wait_until(lambda: MessageQueueItem.objects.ready().count() == 2)
        read_only("off")
        later = queue.publish({"log": str(log)})
        wait_until(lambda: not payloads("work"), 10)
        assert Counter(starts(log)) == Counter(f"{message_id}/1" for message_id in (*ids, later))
        assert payloads("work.dead") == []
        assert running.stop() == 0
        assert "Traceback" not in running.output


def backends(loop: str | None = None) -> set[int]:
    """Return the backends of the worker's own loops."""
    with connect() as admin:
        rows = admin.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'django_pgqueue ' || %s",
            [loop or "%"],
        ).fetchall()
    return {pid for (pid,) in rows}


# --- B25 ------------------------------------------------------------------------------------------


def test_small_pool_starves_neither_heartbeat_nor_leases_nor_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Four handlers on a pool of two, each holding a connection for longer than a lease.

    The loops' connections come from no pool: heartbeats and leases are in time. The handlers take turns:
    each message is handled once.
    """
    pool = {"min_size": 1, "max_size": 2, "timeout": 15}
    monkeypatch.setenv("PGQUEUE_TEST_OPTIONS", json.dumps({"pool": pool}))
    queue = Queue("work")
    specs = [{"name": "work", "handler": {"concurrency": 4}, "function": "handle_in_transaction"}]
    with worker(queues=specs, settings={"LEASE": 1.5, "HEARTBEAT_INTERVAL": 0.5}) as running:
        ids = queue.publish_many([{"sleep": 2}] * 4)
        oldest = 0.0
        deadline = time.monotonic() + 60
        while payloads("work"):
            assert time.monotonic() < deadline
            oldest = max(oldest, heartbeat_age())
            time.sleep(0.05)
        assert Counter(Seen.objects.values_list("msg_id", "attempt")) == Counter((one, 1) for one in ids)
        assert oldest < 5
        # And the pool's connections go round: many short messages, more workers than connections.
        queue.publish_many([{}] * 100)
        wait_until(lambda: Seen.objects.count() == 104, 30)
        assert running.stop() == 0
        assert "Traceback" not in running.output
    assert payloads("work.dead") == []


def heartbeat_age() -> float:
    with connect() as admin:
        row = admin.execute(
            "SELECT extract(epoch FROM clock_timestamp() - max(last_heartbeat))::float8"
            " FROM django_pgqueue_queueconsumer"
        ).fetchone()
    assert row
    return float(row[0])


def test_small_pool_that_has_no_connection_in_time_fails_the_handler_that_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    The pool's timeout is shorter than the others hold their connections: the handler gets an error.

    That is its failure like any other. Nothing of it was done, it comes back, and it is handled.
    """
    pool = {"min_size": 1, "max_size": 1, "timeout": 0.5}
    monkeypatch.setenv("PGQUEUE_TEST_OPTIONS", json.dumps({"pool": pool}))
    queue = Queue("work")
    specs = [{"name": "work", "handler": {"concurrency": 2}, "function": "handle_in_transaction"}]
    with worker(queues=specs) as running:
        ids = queue.publish_many([{"sleep": 2}] * 2)
        wait_until(lambda: not payloads("work"), 30)
        assert sorted(Seen.objects.values_list("msg_id", flat=True)) == ids
        assert Seen.objects.filter(attempt__gt=1).exists()
        assert running.stop() == 0
        assert "Traceback" not in running.output
