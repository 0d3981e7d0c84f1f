"""The heartbeat: queues in use are touched, the consumer's row is fresh, and nobody waits."""

import logging
import os
import socket
import time
from typing import Any
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pgqueue import Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.models import MessageQueue, QueueConsumer
from django_pgqueue.queue_internals import declaration_of, make_handler
from django_pgqueue.reaper import Reaper
from tests.support.processes import consuming
from tests.support.rows import locker, make_queue, seconds, version
from tests.support.sessions import connect, fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def idle(name: str) -> float:
    ((age,),) = fetch(
        "SELECT extract(epoch FROM statement_timestamp() - last_active)::float8"
        " FROM django_pgqueue_messagequeue WHERE name = %s",
        [name],
    )
    return float(age)


def test_a_beat_touches_queues_that_were_idle_for_a_while() -> None:
    """All that it was given, and no other."""
    for name in ("a", "b", "other"):
        make_queue(name, idle=500)
    assert Heartbeat("default", names=["a", "b"]).run_once() == set()
    assert idle("a") < 5 > idle("b")
    assert idle("other") > 400


def test_a_beat_leaves_a_fresh_queue_unlocked() -> None:
    """However many processes beat, the row is written once per DECLARE_TTL."""
    make_queue("a")
    before, locked = version("a"), locker("a")
    Heartbeat("default", names=["a"]).run_once()
    assert (version("a"), locker("a")) == (before, locked)


def test_a_beat_never_waits_for_a_lock() -> None:
    """A queue that somebody holds is skipped; the next beat comes."""
    make_queue("held", idle=500)
    make_queue("free", idle=500)
    with connect(autocommit=False) as other:
        other.execute("SELECT FROM django_pgqueue_messagequeue WHERE name = 'held' FOR UPDATE")
        fetch("SET lock_timeout = '1s'")
        assert Heartbeat("default", names=["held", "free"]).run_once() == set()
    assert idle("free") < 5
    assert idle("held") > 400


def test_a_declared_queue_that_is_gone_is_made_again() -> None:
    """With its attributes."""
    queue = Queue("tmp", auto_deleted=True, max_deliveries=7)
    assert Heartbeat("default", declared=[declaration_of(queue)]).run_once() == {"tmp"}
    row = MessageQueue.objects.get(name="tmp")
    assert (row.auto_deleted, row.max_deliveries) == (True, 7)


def test_an_unknown_queue_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """And again when it was there in between."""
    heartbeat = Heartbeat("default", names=["a"])
    with caplog.at_level(logging.WARNING, "django_pgqueue"):
        assert heartbeat.run_once() == {"a"}
        assert heartbeat.run_once() == {"a"}
        assert len(caplog.records) == 1
        assert "queue=a" in caplog.text
        queue = make_queue("a")
        assert heartbeat.run_once() == set()
        queue.delete()
        heartbeat.run_once()
        assert len(caplog.records) == 2


def test_a_beat_writes_the_consumers_row() -> None:
    """Who, where, since when, and the last beat."""
    make_queue("a")
    consumer = uuid4()
    heartbeat = Heartbeat("default", names=["a"], consumer=consumer)
    heartbeat.run_once()
    row = QueueConsumer.objects.get()
    assert (row.pk, row.host, row.pid, row.queues) == (consumer, socket.gethostname(), os.getpid(), ["a"])
    QueueConsumer.objects.update(last_heartbeat=Now() - seconds(100), started_at=Now() - seconds(100))
    row.refresh_from_db()
    heartbeat.run_once()
    after = QueueConsumer.objects.get()
    assert after.started_at == row.started_at
    assert (after.last_heartbeat - row.last_heartbeat).total_seconds() > 90


def test_a_running_consumer_keeps_its_queue_and_its_row_fresh(settings: Any) -> None:
    """An idle auto-deleted queue with a consumer is not reaped; once that has ended, it is."""
    settings.PGQUEUE = {"HEARTBEAT_INTERVAL": 0.2, "DECLARE_TTL": 0.2}
    queue = Queue("tmp", auto_deleted=True)
    reaper = Reaper("default", idle_for=1.5)
    with consuming(Consumer([make_handler(queue, print)])) as consumer:
        wait_until(lambda: QueueConsumer.objects.filter(pk=consumer.id).exists())
        first = QueueConsumer.objects.get().last_heartbeat
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            assert "tmp" not in reaper.run_once().queues
            time.sleep(0.1)
        assert QueueConsumer.objects.get().last_heartbeat > first
    assert not QueueConsumer.objects.exists()
    wait_until(lambda: "tmp" in reaper.run_once().queues)
