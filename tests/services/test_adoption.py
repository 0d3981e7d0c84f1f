"""Orphans as people see them, and a hundred thousand of them that come back."""

import json
import math
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from django_pgqueue import Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from tests.support.locks import lock_waits
from tests.support.processes import consuming
from tests.support.rows import delete_queue, make_message, make_queue
from tests.support.sessions import connect, fetch
from tests.support.waiting import busy, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


# --- In inspect_queues ---


def orphan(name: str, *expiries: float | None) -> None:
    """Make orphans that expire in so many seconds (None: never)."""
    make_queue(name)
    for expires_in in expiries:
        make_message(name, expires_in=expires_in)
    delete_queue(name)


def test_orphans_are_shown_where_they_belonged_and_until_when(capsys: pytest.CaptureFixture[str]) -> None:
    """By the queue's name, also where it has no row; "never" where one of them stays until it is handled."""
    orphan("short", 60, 600)
    orphan("forever", 60, None)
    call_command("inspect_queues", "short", "forever", "--format", "json")
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (found["short"]["exists"], found["short"]["orphaned"]) == (False, 2)
    assert 590 < found["short"]["orphans_expire_in"] <= 600
    assert (found["forever"]["orphaned"], found["forever"]["orphans_expire_in"]) == (2, "never")

    call_command("inspect_queues", "short", "forever")
    header, *rows = capsys.readouterr().out.splitlines()
    assert "orphans until" in header
    assert [row.split()[0] for row in rows] == ["forever", "short"]
    assert "no row" in rows[0]
    assert "never" in rows[0]
    assert "10.0m" in rows[1] or "9.9m" in rows[1]


def test_orphans_of_a_queue_that_is_back_are_shown_until_they_are_adopted() -> None:
    """Beside its own messages, and no more afterwards."""
    queue = Queue("tmp")
    orphan("tmp", None, None)
    queue.publish(1)
    stats = queue.stats()
    assert (stats.exists, stats.ready, stats.orphaned, stats.orphans_expire_in) == (True, 1, 2, math.inf)
    Reaper("default").run_once()
    stats = queue.stats()
    assert (stats.ready, stats.orphaned, stats.orphans_expire_in) == (3, 0, None)


def test_expired_orphans_go_at_the_next_reap_and_live_no_longer() -> None:
    """What is shown is kept: until then and not after."""
    orphan("tmp", 0.05, 600)
    wait_until(lambda: MessageQueueItem.objects.filter(expires_at__lt=timezone.now() - timedelta(seconds=0.1)).exists())
    assert Reaper("default").run_once().expired == 1
    assert Queue("tmp").stats().orphaned == 1


# --- A hundred thousand ---

OLDEST = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE '%orphan AS MATERIALIZED%'
"""


class Watch:
    """Watch how old the adopting transactions become, from beside."""

    def __enter__(self) -> "Watch":
        self.oldest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        with connect() as admin:
            while not self._stop.wait(0.005):
                row = admin.execute(OLDEST).fetchone()
                assert row is not None
                self.oldest = max(self.oldest, row[0])

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def orphans() -> int:
    """A hundred thousand orphans of the queue "tmp"."""
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (orphaned_from, payload)"
        " SELECT 'tmp', to_jsonb(n) FROM generate_series(1, 100000) AS n"
    )
    return 100_000


def left() -> int:
    return MessageQueueItem.objects.filter(orphaned_from="tmp").count()


@pytest.mark.full
def test_a_hundred_thousand_adopted_by_the_reaper_hold_nobody_up(orphans: int) -> None:
    """The publish that heals does not touch one of them; those beside the reaper never wait, no lock is held long."""
    queue = Queue("tmp", auto_deleted=True, ttl=math.inf)
    queue.publish("heals")
    assert left() == orphans
    longest = 0.0
    with lock_waits() as waits, Watch() as watch:
        adopted: list[Any] = []
        reaper = threading.Thread(target=run_reaper, args=(adopted,))
        reaper.start()
        while reaper.is_alive():
            began = time.monotonic()
            queue.publish("beside")
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.005)
        reaper.join()
    assert adopted == [orphans]
    assert waits == []
    # Generous: the machine may be busy. All of it at once takes longer than that.
    assert longest < 2
    assert watch.oldest < 2
    assert left() == 0


def run_reaper(adopted: list[Any]) -> None:
    from django.db import connections

    try:
        adopted.append(Reaper("default").run_once().adopted)
    finally:
        connections.close_all()


@pytest.mark.full
def test_a_consumer_adopts_them_while_it_handles_and_is_published_to(orphans: int) -> None:
    """Batch by batch between its claims: what comes in meanwhile is handled at once."""
    queue = Queue("tmp")
    queue.declare()
    seen: set[Any] = set()

    def handle(messages: list[Any]) -> None:
        seen.update(message.payload for message in messages)

    with lock_waits() as waits, consuming(Consumer([make_handler(queue, handle, batch=100)], prefetch=400)):
        wait_until(lambda: len(seen) > 0)
        began = time.monotonic()
        queue.publish("beside")
        wait_until(lambda: "beside" in seen)
        assert time.monotonic() - began < 10 * busy()
    assert waits == []
