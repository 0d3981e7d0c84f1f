"""The broker for Celery, with real Celery workers (prefork)."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kombu
import pytest
from django.db import connection, transaction
from kombu import pools
from kombu.exceptions import OperationalError

from django_pgqueue import Queue
from django_pgqueue.devdb import DevCluster
from django_pgqueue.models import MessageQueue, MessageQueueItem
from tests.celery_transport import celery_app
from tests.support.databases import empty_database
from tests.support.processes import ROOT, Worker, database_url, environment
from tests.support.rows import payloads
from tests.support.sessions import fetch
from tests.support.waiting import DEADLINE, busy, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

# Seconds: the lease of the workers, and how long a task takes that outlives some.
LEASE = 3
LONG = 8


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that tasks write to. What this process published by is closed at the end."""
    path = tmp_path / "notes"
    monkeypatch.setenv("CELERY_NOTES", str(path))
    yield path
    pools.reset()
    # Celery's own way to forget them.
    celery_app.app._after_fork()


def noted(notes: Path, *words: object) -> list[str]:
    """Return the notes that begin with these words."""
    start = [str(word) for word in words]
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [line for line in lines if line.split()[: len(start)] == start]


def count(queue: str = "celery", **conditions: Any) -> int:
    return MessageQueueItem.objects.filter(queue=queue, **conditions).count()


def kill(worker: Worker) -> None:
    """SIGKILL a worker and the processes of its pool."""
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


@contextmanager
def celery_worker(
    name: str, *arguments: str, lease: float = LEASE, concurrency: int = 2, url: str | None = None, **variables: str
) -> Iterator[Worker]:
    """Start a Celery worker that is ready, and kill it at the end with all of its processes."""
    log = Path(os.environ["CELERY_NOTES"]).with_name(f"{name}.log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "tests.celery_transport.celery_app", "worker", "-l", "INFO"]
            + ["-c", str(concurrency), "-n", f"{name}@test", *arguments],
            cwd=ROOT,
            # Celery warns of what it will change, and Python of threads beside a fork.
            env={**environment(settings={"LEASE": lease}, url=url), "PYTHONWARNINGS": "default", **variables},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    worker = Worker(process, log)
    try:
        wait_until(lambda: not worker.is_running or "ready." in worker.output, timeout=40)
        assert worker.is_running, worker.output
        yield worker
    finally:
        if worker.is_running:
            kill(worker)


# --- Publishing -----------------------------------------------------------------------------------


def test_a_task_is_part_of_the_transaction() -> None:
    with pytest.raises(KeyError), transaction.atomic():
        celery_app.quick.delay(1)
        assert count() == 1
        raise KeyError
    assert count() == 0
    with transaction.atomic():
        celery_app.quick.delay(2)
    (payload,) = payloads("celery")
    assert payload["headers"]["task"] == "tests.celery_transport.celery_app.quick"
    assert payload["body"].startswith("[[2], {}")


def test_publishing_runs_no_statement_but_the_publish(django_assert_num_queries: Any) -> None:
    celery_app.quick.delay(1)
    with transaction.atomic(), django_assert_num_queries(1):
        celery_app.quick.delay(2)


def test_an_eta_is_a_delay_of_the_message() -> None:
    celery_app.quick.apply_async((1,), countdown=60)
    celery_app.quick.apply_async((2,), eta=datetime.now(UTC) - timedelta(seconds=60))
    due = fetch(
        "SELECT coalesce(extract(epoch FROM read_after - statement_timestamp()), 0)::float8"
        " FROM django_pgqueue_messagequeueitem ORDER BY id"
    )
    assert 55 < due[0][0] <= 60
    assert due[1][0] <= 0


def test_a_task_that_would_reach_nobody_is_refused() -> None:
    with pytest.raises(OperationalError, match="no queue is known for"):
        celery_app.quick.apply_async((1,), exchange="nowhere", routing_key="x")
    assert MessageQueueItem.objects.count() == 0


def test_a_transient_task_has_a_row_too() -> None:
    routed = kombu.Queue("routed", kombu.Exchange("routes"), routing_key="here")
    celery_app.quick.apply_async((1,), queue=routed, exchange="routes", routing_key="here", delivery_mode="transient")
    assert count("routed") == 1


def test_bytes_and_text_arrive_as_they_were() -> None:
    with celery_app.app.connection() as broker, broker.channel() as channel:
        for body in ("text", b"\x00\xff"):
            message = channel.prepare_message(body)
            channel.basic_publish(message, "", "celery")
    stored = payloads("celery")
    assert [channel.decode_body(each["body"], each["properties"]["body_encoding"]) for each in stored] == [
        "text",
        b"\x00\xff",
    ]


def test_a_queue_that_the_project_declares_keeps_its_attributes() -> None:
    declared = Queue("celery", max_deliveries=2, dead_letter="celery.lost")
    celery_app.quick.delay(1)
    row = MessageQueue.objects.get(name=declared.name)
    assert (row.max_deliveries, row.dead_letter) == (2, "celery.lost")


# --- Working --------------------------------------------------------------------------------------


def test_tasks_run_when_they_are_due_and_are_retried(notes: Path) -> None:
    with celery_worker("one"):
        began = time.monotonic()
        celery_app.quick.delay(1)
        wait_until(lambda: noted(notes, "quick", 1))
        # Woken: no poll was waited for.
        assert time.monotonic() - began < 1 * busy()
        began = time.monotonic()
        celery_app.quick.apply_async((2,), countdown=2)
        wait_until(lambda: count(lease_expires_at=None) == 1)
        wait_until(lambda: noted(notes, "quick", 2))
        assert 2 <= time.monotonic() - began < 3 * busy()
        celery_app.again.delay(1)
        wait_until(lambda: noted(notes, "try", 2))
        wait_until(lambda: count() == 0)
        assert noted(notes, "try") == ["try 0", "try 1", "try 2"]


@pytest.mark.full
def test_the_task_of_a_killed_worker_runs_again_once(notes: Path) -> None:
    with celery_worker("one") as one:
        celery_app.slow.delay(1, 2)
        wait_until(lambda: noted(notes, "start"))
        kill(one)
    with celery_worker("two"):
        wait_until(lambda: noted(notes, "end"))
        wait_until(lambda: count() == 0)
        time.sleep(LEASE + 1)
    assert noted(notes) == ["start 1", "start 1", "end 1"]


@pytest.mark.full
def test_what_takes_longer_than_a_lease_runs_once(notes: Path) -> None:
    celery_app.quick.delay(1)
    (held,) = payloads("celery")
    Queue("celery").purge()
    with celery_worker("one"), celery_worker("two"):
        celery_app.slow.delay(1, LONG)
        # As a worker gets it whose clock is behind: it waits with the task in its hands.
        held["headers"]["eta"] = (datetime.now(UTC) + timedelta(seconds=LONG)).isoformat()
        Queue("celery").publish(held)
        wait_until(lambda: count(lease_expires_at__isnull=False) == 2)
        wait_until(lambda: noted(notes, "end") and noted(notes, "quick"))
        wait_until(lambda: count() == 0)
        time.sleep(LEASE + 1)
    assert Counter(noted(notes)) == {"start 1": 1, "end 1": 1, "quick 1": 1}


@pytest.mark.full
def test_a_worker_holds_what_its_prefetch_allows_and_gives_it_back(notes: Path) -> None:
    for number in range(7):
        celery_app.slow.delay(number, 3)
    with celery_worker("one", "--prefetch-multiplier=2") as one:
        wait_until(lambda: len(noted(notes, "start")) == 2)
        assert count(lease_expires_at__isnull=False) == 4
        assert one.stop() == 0
    # Those that ran have ended; the others are as before, and their delivery does not count.
    assert len(noted(notes, "end")) == 2
    assert count() == count(lease_expires_at=None, delivery_count=0) == 5
    with celery_worker("two", concurrency=5):
        wait_until(lambda: len(noted(notes, "end")) == 7)
        wait_until(lambda: count() == 0)
    assert len(noted(notes, "start")) == 7


@pytest.mark.full
def test_many_tasks_and_workers_that_are_killed(notes: Path) -> None:
    many = 2_000
    with transaction.atomic():
        for number in range(many):
            celery_app.late.delay(number)
    with celery_worker("one", "--prefetch-multiplier=20"), celery_worker("two", "--prefetch-multiplier=20") as two:
        wait_until(lambda: len(noted(notes)) > many // 4, timeout=60)
        kill(two)
        wait_until(lambda: len(set(noted(notes))) == many, timeout=60)
        wait_until(lambda: count() == 0, timeout=60)
    # What the killed one had done, and could not ack any more.
    assert len(noted(notes)) - many <= 40
    assert count("celery.dead") == 0


@pytest.mark.full
def test_a_task_that_kills_its_process_and_one_that_is_refused_are_dead_letters(notes: Path) -> None:
    Queue("celery").publish({"not": "from Celery"})
    with celery_worker("one"):
        celery_app.deadly.delay()
        celery_app.refused.delay()
        celery_app.late.delay(1)
        wait_until(lambda: count("celery.dead") == 3, timeout=40)
        wait_until(lambda: noted(notes, "late") and count() == 0)
    assert len(noted(notes, "deadly")) == 5


@pytest.mark.full
def test_remote_control_and_events(notes: Path) -> None:
    control = celery_app.app.control
    with celery_worker("one", "-E"), celery_worker("two", "-E"):
        replies = control.ping(timeout=3)
        assert sorted(name for reply in replies for name in reply) == ["one@test", "two@test"]
        assert control.inspect(destination=["two@test"], timeout=3).active() == {"two@test": []}
        events: list[str] = []
        with celery_app.app.connection() as broker:
            receiver = celery_app.app.events.Receiver(
                broker, handlers={"*": lambda event: events.append(event["type"])}
            )
            threading.Timer(0.5, subprocess.run, [PUBLISH], {"env": environment(), "cwd": ROOT}).start()
            deadline = time.monotonic() + DEADLINE
            for _ in receiver.itercapture(limit=None, timeout=DEADLINE, wakeup=False):
                if "task-succeeded" in events or time.monotonic() > deadline:
                    break
        assert events.count("task-succeeded") == 1
    # None of that leaves a row.
    assert MessageQueueItem.objects.count() == 0
    assert not MessageQueue.objects.filter(name__contains="pidbox").exists()
    assert not MessageQueue.objects.filter(name__startswith="celeryev").exists()


PUBLISH = [
    sys.executable,
    "-W",
    "default",
    "-c",
    "import django; django.setup(); from tests.celery_transport import celery_app; celery_app.quick.delay(1)",
]


@pytest.mark.full
def test_a_broadcast_reaches_each_worker_once(notes: Path) -> None:
    with celery_worker("one", CELERY_NEWS="1"), celery_worker("two", CELERY_NEWS="1"):
        # Its worker declares the exchange; this process does not know it.
        publish = PUBLISH[-1].replace("quick", "news")
        variables = {**environment(), "PYTHONWARNINGS": "default", "CELERY_NEWS": "1"}
        subprocess.run([sys.executable, "-c", publish], env=variables, cwd=ROOT, check=True)
        wait_until(lambda: len(noted(notes, "news", 1)) == 2)
        wait_until(lambda: MessageQueueItem.objects.count() == 0)
    assert len(noted(notes)) == 2


@pytest.mark.full
def test_an_outage_costs_a_worker_nothing(notes: Path, server: DevCluster) -> None:
    with celery_worker("one", lease=30), celery_worker("two", lease=30):
        celery_app.slow.delay(1, 3)
        wait_until(lambda: noted(notes, "start"))
        connection.close()
        server.stop()
        wait_until(lambda: noted(notes, "end"))
        server.start()
        connection.close()
        # Done while the database was away: the ack waited for it.
        wait_until(lambda: count() == 0)
        celery_app.late.delay(2)
        wait_until(lambda: noted(notes, "late", 2))
        wait_until(lambda: len(celery_app.app.control.ping(timeout=2)) == 2)
    assert noted(notes) == ["start 1", "end 1", "late 2"]


@pytest.mark.full
def test_a_worker_without_the_tables_ends(notes: Path) -> None:
    with empty_database() as name, celery_worker("one", url=database_url(path=f"/{name}")) as worker:
        assert worker.wait() != 0
        assert "UndefinedTable" in worker.output or "does not exist" in worker.output
