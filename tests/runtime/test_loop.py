"""What every loop stands on: it goes on whatever its work raises, and keeps nothing."""

import threading

import pytest
from django.db import OperationalError, connection

from django_pgqueue import Queue
from django_pgqueue.runtime.loop import run_every
from django_pgqueue.services.beliefs import beliefs

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("error", [OperationalError("gone"), ValueError("of the project's code")])
def test_a_loop_outlives_what_its_work_raises(error: Exception) -> None:
    """A database fault or any other error: the work is done again, until the loop is stopped."""
    stop = threading.Event()
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 3:
            stop.set()
        raise error

    run_every(lambda: 0.01, work, stop, alias="default", loop="test")
    assert len(calls) == 3


def test_a_loop_keeps_no_queries_under_debug(settings) -> None:
    """Django logs each query under DEBUG; a loop that runs for months drops them."""
    settings.DEBUG = True
    stop = threading.Event()

    def work() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        assert len(connection.queries) == 1
        stop.set()

    run_every(lambda: 0.01, work, stop, alias="default", loop="test")
    assert connection.queries == []


def test_what_a_process_believes_of_queues_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that publishes to ever new queues remembers only so many."""
    monkeypatch.setattr("django_pgqueue.services.beliefs.MAX_REMEMBERED", 5)
    for number in range(12):
        Queue(f"replies.{number}", auto_deleted=True).publish(number)
    assert max(len(beliefs.declared), len(beliefs.known), len(beliefs.notified)) <= 5
