"""A project with AUTOCOMMIT off: its handlers commit by themselves, the library's own connections do not notice."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.runtime import guard
from tests.support.processes import consuming
from tests.support.rows import payloads
from tests.support.sessions import fetch
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that connect from now on are in manual mode; this one is connected already."""
    fetch("SELECT 1")
    monkeypatch.setitem(connections.settings["default"], "AUTOCOMMIT", False)
    # Each message finds its connection tested, as after a pause.
    monkeypatch.setattr(guard, "CONNECTION_IDLE", 0.0)
    yield
    monkeypatch.undo()
    connection.close()


def commit(message: Message) -> None:
    Seen.objects.create(msg_id=message.id, worker=0, attempt=message.delivery_count)
    transaction.commit()


def leave_open(message: Message) -> None:
    Seen.objects.create(msg_id=message.id, worker=0, attempt=message.delivery_count)


def do_without(message: Message) -> None:
    pass


def publish(count: int) -> Queue:
    """Publish from this thread, which commits each by itself."""
    queue = Queue("q", max_deliveries=1)
    for number in range(count):
        queue.publish(number)
    return queue


def consume(queue: Queue, function: Any) -> None:
    with consuming(Consumer([make_handler(queue, function)])):
        wait_until(lambda: not payloads("q"))


def test_a_handler_that_commits_is_done() -> None:
    """It is acked, its changes stay, and so it is for those after it on the same connection."""
    consume(publish(3), commit)
    assert Seen.objects.count() == 3
    assert payloads("q.dead") == []


def test_a_handler_that_leaves_its_changes_uncommitted_has_failed() -> None:
    """They are rolled back, and the message is not acked as if they were there."""
    consume(publish(2), leave_open)
    assert Seen.objects.count() == 0
    assert payloads("q.dead") == [0, 1]


def test_a_handler_without_sql_is_done() -> None:
    """Also where its connection, opened by the message before, had to be tested first."""
    queue = publish(4)
    consume(queue, lambda message: commit(message) if message.payload % 2 == 0 else do_without(message))
    assert Seen.objects.count() == 2
    assert payloads("q.dead") == []


@pytest.mark.parametrize("ack", ["early", "atomic"])
def test_acks_that_commit_for_the_handler_are_refused(ack: str) -> None:
    """At the start, not by messages that are handled twice."""
    with pytest.raises(ValueError, match="AUTOCOMMIT"):
        Consumer([make_handler(Queue("q"), do_without, ack=ack)])
