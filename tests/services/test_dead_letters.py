"""What becomes of a message that is given up: where it goes, and what its history tells a person later."""

import socket
from typing import Any

import pytest

from django_pgqueue import Message, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import consumers
from django_pgqueue.services.dead_letters import MAX_REASON_LENGTH
from tests.support.processes import worker
from tests.support.rows import make_message, make_queue, payloads
from tests.support.sessions import fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def history() -> list[dict[str, Any]]:
    """Return the history of the only message."""
    (item,) = MessageQueueItem.objects.all()
    assert item.failures is not None
    return list(item.failures)


# --- Expired ones ---


def test_what_expires_goes_to_a_dead_letter_queue_that_was_configured() -> None:
    """With "expired" as reason and the time at which it did; there it expires no more."""
    make_queue("q", dead_letter="late")
    item = make_message("q", 1, expires_in=-5, due_in=-20)
    assert Reaper("default").run_once().dead_lettered == 1
    row = MessageQueueItem.objects.get(pk=item.pk)
    assert (row.queue_id, row.dead_lettered_from, row.expires_at) == ("late", "q", None)
    (failure,) = history()
    assert (failure["reason"], failure["queue"], failure["delivery_count"]) == ("expired", "q", 0)
    assert fetch("SELECT %s::timestamptz = %s", [failure["expires_at"], item.expires_at]) == [(True,)]
    assert Reaper("default").run_once().expired == 0


def test_what_expires_without_one_is_deleted_and_counted() -> None:
    """The default dead-letter queue takes what failed, not what nobody wanted in time."""
    Queue("q").declare()
    make_message("q", 1, expires_in=-5)
    reaped = Reaper("default").run_once()
    assert (reaped.expired, reaped.dead_lettered) == (1, 0)
    assert payloads("q.dead") == []


def test_an_expired_letter_can_be_redriven_and_lives_on() -> None:
    """It has no expiry any more: a redrive is for messages that somebody wants after all."""
    make_queue("q", dead_letter="late")
    make_message("q", 1, expires_in=-5)
    Reaper("default").run_once()
    assert Queue("q", dead_letter="late").redrive() == 1
    (message,) = Queue("q", dead_letter="late").claim()
    assert message.payload == 1


def test_nothing_expires_while_somebody_holds_it() -> None:
    """A handler that takes longer than the TTL ends normally; if it dies the message is expired."""
    make_queue("q", dead_letter="late")
    item = make_message("q", 1, expires_in=-5, lease=60)
    Reaper("default").run_once()
    assert payloads("q") == [1]
    MessageQueueItem.objects.filter(pk=item.pk).update(lease_expires_at="2026-01-01T00:00:00Z")
    Reaper("default").run_once()
    assert payloads("late") == [1]


def test_what_expires_on_a_paused_queue_goes_the_same_way() -> None:
    """Pausing stops claims, not time."""
    make_queue("q", dead_letter="late", paused_at="2026-01-01T00:00:00Z")
    make_message("q", 1, expires_in=-5)
    Reaper("default").run_once()
    assert payloads("late") == [1]


# --- The history ---


def test_a_letter_tells_from_where_when_and_how_often(settings: Any) -> None:
    """Each failure and the end, with the consumer and its process, found by a person the next morning."""
    # At once: a drain does not wait for what is delayed.
    settings.PGQUEUE = {"BACKOFF": {"base": 0}}
    queue = Queue("q", max_deliveries=2)
    ((before,),) = fetch("SELECT statement_timestamp()")

    def fail(message: Message) -> None:
        raise ConnectionResetError("peer is gone")

    queue.publish(1)
    consumer = Consumer([make_handler(queue, fail)], drain=True)
    assert consumer.run() == 2
    first, last = history()
    for failure, count in ((first, 1), (last, 2)):
        assert failure["reason"] == "builtins.ConnectionResetError: peer is gone"
        assert (failure["queue"], failure["delivery_count"]) == ("q", count)
        assert failure["consumer"] == str(consumer.id)
        assert fetch("SELECT %s::timestamptz BETWEEN %s AND statement_timestamp()", [failure["at"], before]) == [
            (True,)
        ]
    assert first["at"] < last["at"]
    row = MessageQueueItem.objects.get()
    assert (row.queue_id, row.dead_lettered_from, row.dead_letter_path) == ("q.dead", "q", ["q"])
    assert row.delivery_count == 0


def test_the_process_is_told_by_host_and_pid() -> None:
    """A real worker: which machine's log to read."""
    Queue("work").publish({"reject": "unknown customer"})
    with worker() as running:
        wait_until(lambda: payloads("work.dead"))
        (failure,) = history()
        assert failure["process"] == f"{socket.gethostname()}:{running.pid}"
        assert failure["reason"] == "unknown customer"


def test_who_claims_by_hand_is_told_too() -> None:
    """The claimer's id; it writes no heartbeat, so that its process is not known."""
    queue = Queue("q")
    queue.publish(1)
    queue.reject(*queue.claim())
    (failure,) = history()
    (item,) = MessageQueueItem.objects.all()
    assert failure["consumer"] == str(item.leased_by)
    assert failure["process"] is None
    assert failure["reason"] == "rejected"


class Local(Exception):
    """An exception with a path."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("order_id"), "builtins.KeyError: 'order_id'"),
        (Local("x"), f"{__name__}.Local: x"),
        (ValueError(), "builtins.ValueError: "),
        (ValueError("\0"), "builtins.ValueError: \\0"),
        (ValueError("half \ud83d"), "builtins.ValueError: half \\ud83d"),
        (ValueError("two\nlines"), "builtins.ValueError: two\nlines"),
        (Reject(), "rejected"),
        (Reject(Local("x")), f"{__name__}.Local: x"),
        (ValueError("ü" * 9_999), f"builtins.ValueError: {'ü' * (MAX_REASON_LENGTH - 21)}…"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_the_reason_is_the_path_of_the_exception_and_its_text(error: Exception, reason: str) -> None:
    """Made storable, and capped: a driver may quote the whole payload."""
    queue = Queue("q", max_deliveries=1)
    queue.publish(1)

    def fail(message: Message) -> None:
        raise error

    Consumer([make_handler(queue, fail)], drain=True).run()
    (failure,) = history()
    assert failure["reason"] == reason


def test_a_worker_that_died_is_named_by_the_reaper() -> None:
    """Nobody was left to say what happened: the last holder is told, and that its lease lapsed."""
    make_queue("q")
    holder = "00000000-0000-0000-0000-0000000000aa"
    consumers.beat(holder, "web-7", 4711, ["q"], "default")  # type: ignore[arg-type]
    fetch("UPDATE django_pgqueue_queueconsumer SET last_heartbeat = statement_timestamp() - interval '1 hour'")
    make_message("q", 1, lease=-1, delivery_count=5, leased_by=holder)
    assert Reaper("default").run_once().dead_lettered == 1
    (failure,) = history()
    assert failure["reason"] == "worker lost: the lease lapsed on the last delivery"
    assert (failure["consumer"], failure["process"], failure["delivery_count"]) == (holder, "web-7:4711", 5)


def test_the_history_is_capped_and_keeps_the_latest() -> None:
    """Ten failures, over several lives: redriving for ever does not let a row grow for ever."""
    queue = Queue("q", max_deliveries=1)
    queue.publish(1)
    for life in range(14):
        queue.reject(*queue.claim(), reason=f"life {life}")
        queue.redrive()
    assert [failure["reason"] for failure in history()] == [f"life {life}" for life in range(4, 14)]


def test_nothing_else_of_the_message_is_changed_by_dying() -> None:
    """Payload, headers, the time of publishing and its id."""
    queue = Queue("q")
    message_id = queue.publish({"n": 1}, headers={"tenant": "a"})
    before = MessageQueueItem.objects.values("id", "payload", "headers", "published_at").get()
    queue.reject(*queue.claim())
    assert MessageQueueItem.objects.values("id", "payload", "headers", "published_at").get() == before
    assert before["id"] == message_id
    assert MessageQueue.objects.filter(name="q.dead").exists()
