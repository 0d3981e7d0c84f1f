"""
Case B102 where the database holds a worker up: in a claim, while it is away, and when it does not answer.

``tests/processes/test_signals.py`` has the rest of the case.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.db import connection

from django_pgqueue import Queue
from django_pgqueue.devdb import DevCluster
from django_pgqueue.models import MessageQueueItem
from tests.support.processes import Worker, worker
from tests.support.rows import payloads
from tests.support.sessions import connect
from tests.support.waiting import busy, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

# Claims alone: they give a token to a row that has none.
SLOW_CLAIM = """
CREATE FUNCTION slow_claim() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.2); RETURN NEW; END $$;
CREATE TRIGGER slow_claim BEFORE UPDATE ON django_pgqueue_messagequeueitem FOR EACH ROW
    WHEN (OLD.lease_token IS NULL AND NEW.lease_token IS NOT NULL) EXECUTE FUNCTION slow_claim();
"""
QUIET = [{"name": "work", "function": "handle_without_database", "handler": {"concurrency": 2}}]


@pytest.fixture
def slow_claims() -> Iterator[None]:
    with connect() as admin:
        admin.execute(SLOW_CLAIM)
        try:
            yield
        finally:
            admin.execute("DROP FUNCTION slow_claim() CASCADE")


def test_a_signal_during_a_claim_starts_nothing(slow_claims: None) -> None:
    """What that claim brings is given back at once and uncounted, and another worker has it."""
    queue = Queue("work")
    with worker() as running:
        queue.publish_many([{}] * 10)
        wait_until(is_claiming)
        running.send(signal.SIGTERM)
        assert running.wait() == 0
        assert "Traceback" not in running.output
    assert not Seen.objects.exists()
    assert MessageQueueItem.objects.ready().filter(delivery_count=0).count() == 10


def is_claiming() -> bool:
    with connect() as admin:
        row = admin.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
        ).fetchone()
    return row is not None


def test_what_waits_is_free_for_another_worker_before_the_grace_ends() -> None:
    """Four handlers outlive the grace and are delivered again; the others were never theirs."""
    queue = Queue("work")
    queue.publish_many([{"sleep": 30, "times": 1}] * 4)
    with worker("--concurrency", "4", "--grace", "3", settings={"LEASE": 4}) as running:
        wait_until(lambda: Seen.objects.count() == 4)
        ids = queue.publish_many([{}] * 16)
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 20)
        with worker() as other:
            running.send(signal.SIGTERM)
            wait_until(lambda: Seen.objects.filter(msg_id__in=ids, worker=other.pid, attempt=1).count() == 16)
            # Not for want of the first: it still waits for its handlers.
            assert running.is_running
            assert running.wait() == 0
            wait_until(lambda: Seen.objects.filter(worker=other.pid, attempt=2).count() == 4)
            wait_until(lambda: not payloads("work"))
    assert Seen.objects.count() == 4 + 16 + 4


def test_a_signal_while_the_server_is_away_waits_for_it_within_the_grace(server: DevCluster, tmp_path: Path) -> None:
    """The handlers end while it is away: what they did is acked when it is back in time, and the worker ends."""
    with held(tmp_path) as (running, ids):
        server.stop("fast")
        connection.close()
        (tmp_path / "hold").touch()
        wait_until(lambda: "database lost loop=consumer" in running.output)
        running.send(signal.SIGTERM)
        time.sleep(0.5)  # It must not give up before its grace ends.
        server.start()
        assert running.wait() == 0
        assert "Traceback" not in running.output
    assert payloads("work") == []
    assert sorted((tmp_path / "log").read_text().split()) == sorted(f"{one}/1" for one in ids)


def test_a_signal_while_the_server_stays_away_ends_with_the_grace(server: DevCluster, tmp_path: Path) -> None:
    """Nothing can be acked: the worker ends all the same, and the messages are delivered again."""
    with held(tmp_path, grace="1") as (running, ids):
        server.stop("fast")
        connection.close()
        (tmp_path / "hold").touch()
        wait_until(lambda: "database lost loop=consumer" in running.output)
        began = time.monotonic()
        running.send(signal.SIGTERM)
        assert running.wait() == 0
        assert time.monotonic() - began < 10 * busy()
        assert "Traceback" not in running.output
    server.start()
    with worker(queues=QUIET):
        wait_until(lambda: not payloads("work"))
    log = (tmp_path / "log").read_text().split()
    assert sorted(log) == sorted(f"{one}/{attempt}" for one in ids for attempt in (1, 2))


@contextmanager
def held(tmp_path: Path, grace: str = "30") -> Iterator[tuple[Worker, list[int]]]:
    """Give a worker with two messages in its handlers, which touch no database."""
    with worker("--grace", grace, queues=QUIET) as running:
        ids = Queue("work").publish_many([{"log": str(tmp_path / "log"), "hold": str(tmp_path / "hold")}] * 2)
        wait_until(lambda: (tmp_path / "log").exists() and len((tmp_path / "log").read_text().split()) == 2)
        yield running, ids


@pytest.mark.parametrize(("grace", "signals"), [("60", 2), ("1", 1)])
def test_a_worker_that_waits_for_the_database_ends_all_the_same(grace: str, signals: int) -> None:
    """Its claim waits for a lock, as behind a migration: the end of the grace ends it, or a second signal does."""
    with worker("--grace", grace) as running, connect(autocommit=False) as admin:
        admin.execute("LOCK TABLE django_pgqueue_messagequeueitem")
        wait_until(is_locked_out)
        for _ in range(signals):
            running.send(signal.SIGTERM)
            time.sleep(0.3)  # Two at once would be one.
        assert running.wait() == 1
        assert "the database delays the shutdown" in running.output
        assert "Traceback" not in running.output
        admin.rollback()


def is_locked_out() -> bool:
    with connect() as admin:
        row = admin.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            " AND application_name = 'django_pgqueue consumer'"
        ).fetchone()
    return row is not None
