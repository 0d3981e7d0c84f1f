"""Settling: ack, nack, reject and extend, fenced by the lease's token."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pgqueue import LeaseLost, Message, Queue, signals
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.services.dead_letters import MAX_REASON_LENGTH
from django_pgqueue.services.settling import release
from tests.support.rows import payloads
from tests.support.sessions import Session, fetch, second_session
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

VERBS: dict[str, Callable[..., None]] = {
    "ack": Queue.ack,
    "nack": Queue.nack,
    "reject": Queue.reject,
    "extend": Queue.extend,
}
each_verb = pytest.mark.parametrize("verb", VERBS)


def lapse(*messages: Message) -> None:
    """Let leases end now."""
    fetch(
        "UPDATE django_pgqueue_messagequeueitem SET lease_expires_at = statement_timestamp() WHERE id = ANY (%s)",
        [[message.id for message in messages]],
    )


def rows() -> list[dict[str, Any]]:
    return list(MessageQueueItem.objects.order_by("id").values())


# --- Fencing ---


@each_verb
def test_settling_after_the_lease_was_given_away_raises_and_changes_nothing(verb: str) -> None:
    """The stalled owner is told, and the new owner's claim stays as it is, to the last column."""
    queue = Queue("q")
    queue.publish(1)
    (late,) = queue.claim()
    lapse(late)
    (current,) = queue.claim()
    before = rows()

    with pytest.raises(LeaseLost) as raised:
        VERBS[verb](queue, late)

    assert raised.value.ids == [late.id]
    assert raised.value.queue == "q"
    assert rows() == before
    queue.ack(current)
    assert rows() == []


@each_verb
def test_settling_twice_raises(verb: str) -> None:
    """What is acked is gone; no verb finds it again."""
    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    queue.ack(message)
    with pytest.raises(LeaseLost):
        VERBS[verb](queue, message)
    assert rows() == []


@each_verb
def test_a_message_that_was_given_back_is_no_longer_the_callers(verb: str) -> None:
    """After a nack the token is void even while nobody else has claimed it."""
    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    queue.nack(message, delay=60)
    before = rows()
    with pytest.raises(LeaseLost):
        VERBS[verb](queue, message)
    assert rows() == before


@each_verb
def test_of_many_the_lost_are_listed_and_the_others_are_settled(verb: str) -> None:
    """One lost lease takes nothing from its neighbours."""
    queue = Queue("q", lease=30)
    queue.publish_many([1, 2, 3, 4])
    messages = queue.claim(4)
    lost = [messages[0], messages[2]]
    fetch(
        "UPDATE django_pgqueue_messagequeueitem SET lease_token = gen_random_uuid() WHERE id = ANY (%s)",
        [[message.id for message in lost]],
    )
    before = {row["id"]: row for row in rows()}

    with pytest.raises(LeaseLost) as raised:
        VERBS[verb](queue, *reversed(messages))

    assert raised.value.ids == [message.id for message in lost]
    after = {row["id"]: row for row in rows()}
    for message in messages:
        unchanged = after.get(message.id) == before[message.id]
        assert unchanged == (message in lost)


@pytest.mark.parametrize("verb", ["ack", "nack", "reject"])
def test_losing_a_lease_is_signalled(verb: str) -> None:
    """Operators can count lost leases."""
    told: list[tuple[str, list[int]]] = []

    def receive(sender: str, *, ids: list[int], **_: Any) -> None:
        told.append((sender, ids))

    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    queue.ack(message)
    signals.lease_lost.connect(receive)
    try:
        with pytest.raises(LeaseLost):
            VERBS[verb](queue, message)
    finally:
        signals.lease_lost.disconnect(receive)
    assert told == [("q", [message.id])]


def test_a_lapsed_lease_that_nobody_took_is_still_the_owners() -> None:
    """Late but not replaced: the ack counts, since no second delivery has begun."""
    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    lapse(message)
    queue.ack(message)
    assert rows() == []


@each_verb
def test_settling_nothing_does_nothing(verb: str) -> None:
    """An empty call is fine, and sends no SQL that could fail."""
    VERBS[verb](Queue("never.declared"))
    assert not MessageQueue.objects.filter(name="never.declared").exists()


# --- Ack, extend ---


def test_an_ack_deletes_the_message() -> None:
    """Done is gone; the neighbour stays."""
    queue = Queue("q")
    queue.publish_many([1, 2])
    first, _ = queue.claim(2)
    queue.ack(first)
    assert payloads("q") == [2]


def test_an_ack_inside_a_transaction_is_part_of_it() -> None:
    """Rolled back, the message is there and still leased; committed, it is gone."""
    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    with transaction.atomic():
        queue.ack(message)
        assert payloads("q") == []
        transaction.set_rollback(True)
    assert payloads("q") == [1]
    assert MessageQueueItem.objects.leased().count() == 1
    with transaction.atomic():
        queue.ack(message)
    assert payloads("q") == []


def test_extending_moves_the_deadline_and_nothing_else() -> None:
    """The lease ends so many seconds from now, by the database's clock; the delivery is not counted again."""
    queue = Queue("q", lease=5)
    queue.publish(1)
    (message,) = queue.claim()
    (before,) = rows()
    queue.extend(message, seconds=100)
    (after,) = rows()
    assert {key for key in after if after[key] != before[key]} == {"lease_expires_at"}
    moved = (after["lease_expires_at"] - message.lease_expires_at).total_seconds()
    assert 94 < moved < 96 + 5
    queue.extend(message)
    ((left,),) = fetch(
        "SELECT extract(epoch FROM lease_expires_at - statement_timestamp())::float8"
        " FROM django_pgqueue_messagequeueitem"
    )
    assert 4 < left <= 5


def test_extending_skips_a_row_that_is_being_settled() -> None:
    """An ack in an open transaction does not block the extension of its neighbours."""
    queue = Queue("q", lease=5)
    queue.publish_many([1, 2, 3])
    messages = queue.claim(3)
    with Session() as session:
        session.begin()
        session.run(queue.ack, messages[1])
        with pytest.raises(LeaseLost) as raised:
            queue.extend(*messages, seconds=100)
        assert raised.value.ids == [messages[1].id]
        session.rollback()
    assert MessageQueueItem.objects.filter(lease_expires_at__gt=messages[0].lease_expires_at).count() == 2


def test_two_settlers_in_opposite_orders_do_not_deadlock() -> None:
    """Every statement that settles locks in id order, whatever order it was given."""
    queue = Queue("q")
    queue.publish_many(list(range(40)))
    messages = queue.claim(40)
    with Session() as other:
        other.begin()
        other.run(queue.ack, messages[0])
        with Session() as second:
            waiting = second.start(queue.nack, *reversed(messages), delay=0)
            wait_until(lambda: _is_blocked(second.pid))
            # Had the second locked from the other end, this would be a deadlock.
            other.run(queue.ack, *messages[1:])
            other.commit()
            with pytest.raises(LeaseLost) as raised:
                waiting.result(10)
            assert len(raised.value.ids) == 40
    assert rows() == []


def _is_blocked(pid: int) -> bool:
    with second_session() as admin:
        row = admin.execute("SELECT cardinality(pg_blocking_pids(%s))", [pid]).fetchone()
    return bool(row and row[0])


# --- Nack, release ---


def test_a_nack_gives_the_message_back_after_its_delay() -> None:
    """Not before: it is delayed until then, and comes with one more delivery."""
    queue = Queue("q")
    message_id = queue.publish(1)
    queue.nack(*queue.claim(), delay=0.3, reason="not now")
    assert MessageQueueItem.objects.delayed().count() == 1
    assert queue.claim() == []
    (message,) = wait_until(queue.claim, 5)
    assert (message.id, message.delivery_count) == (message_id, 2)
    (row,) = rows()
    (failure,) = row["failures"]
    assert (failure["reason"], failure["queue"], failure["delivery_count"]) == ("not now", "q", 1)


def test_a_nack_of_the_last_delivery_goes_to_the_dead_letter_queue() -> None:
    """With the whole history: from where, when, how often, and each reason."""
    queue = Queue("q", max_deliveries=3)
    queue.publish({"n": 1}, headers={"trace": "x"}, ttl=3600)
    for number in (1, 2, 3):
        queue.nack(*queue.claim(), delay=0, reason=f"failure {number}")

    assert payloads("q") == []
    (row,) = rows()
    assert (row["queue_id"], row["dead_lettered_from"], row["delivery_count"]) == ("q.dead", "q", 0)
    assert row["dead_lettered_at"] is not None
    assert (row["payload"], row["headers"]) == ({"n": 1}, {"trace": "x"})
    assert (row["expires_at"], row["lease_token"], row["lease_expires_at"]) == (None, None, None)
    assert [failure["reason"] for failure in row["failures"]] == ["failure 1", "failure 2", "failure 3"]
    assert [failure["delivery_count"] for failure in row["failures"]] == [1, 2, 3]
    assert all(failure["at"] and failure["queue"] == "q" for failure in row["failures"])
    (letter,) = Queue("q.dead").claim()
    assert letter.payload == {"n": 1}


@pytest.mark.parametrize("verb", ["ack", "nack", "reject"])
def test_an_old_and_a_new_claim_of_one_message_may_be_settled_together(verb: str) -> None:
    """Who claimed a message again after its lease lapsed, and settles both, is told of no loss; it is settled."""
    queue = Queue("q", max_deliveries=2)
    queue.declare()
    queue.publish("x")
    (old,) = queue.claim(1)
    MessageQueueItem.objects.update(lease_expires_at=Now())
    (new,) = queue.claim(1)
    getattr(queue, verb)(new, old)
    assert payloads("q") == []
    assert payloads("q.dead") == ([] if verb == "ack" else ["x"])


def test_the_history_keeps_the_last_ten_failures() -> None:
    """A message that is retried for weeks does not grow without end."""
    queue = Queue("q", max_deliveries=100)
    queue.publish(1)
    for number in range(14):
        queue.nack(*queue.claim(), delay=0, reason=str(number))
    (row,) = rows()
    assert [failure["reason"] for failure in row["failures"]] == [str(number) for number in range(4, 14)]


def test_max_deliveries_of_the_queues_row_decides() -> None:
    """What an older version of the code declared does not dead-letter early."""
    Queue("q", max_deliveries=9).declare()
    old = Queue("q", max_deliveries=1)
    old.publish(1)
    old.nack(*old.claim(), delay=0)
    assert payloads("q") == [1]


def test_releasing_takes_the_delivery_back() -> None:
    """What was never started is given back at once, uncounted and without a line in the history."""
    queue = Queue("q")
    queue.publish(1)
    messages = queue.claim()
    assert release(messages, "default") == set()
    (row,) = rows()
    assert (row["delivery_count"], row["lease_token"], row["failures"]) == (0, None, None)
    assert release(messages, "default") == {messages[0].id}
    (again,) = queue.claim()
    assert again.delivery_count == 1
    assert not again.suspect


# --- Reject, dead letters ---


def test_a_rejected_message_goes_to_the_dead_letter_queue_at_once() -> None:
    """Whatever its delivery count, with the reason."""
    queue = Queue("q")
    queue.publish(1)
    queue.reject(*queue.claim(), reason="unknown customer")
    (row,) = rows()
    assert (row["queue_id"], row["dead_lettered_from"]) == ("q.dead", "q")
    assert row["failures"][0]["reason"] == "unknown customer"
    assert MessageQueueItem.objects.dead().count() == 1


def test_a_configured_dead_letter_queue_is_used() -> None:
    """And made, standing, when it is not there."""
    queue = Queue("q", dead_letter="letters", auto_deleted=True)
    queue.publish(1)
    MessageQueue.objects.filter(name="letters").delete()
    queue.reject(*queue.claim())
    assert payloads("letters") == [1]
    assert not MessageQueue.objects.get(name="letters").auto_deleted
    assert not MessageQueue.objects.filter(name="q.dead").exists()


def test_the_default_dead_letter_queue_is_auto_deleted_if_the_queue_is() -> None:
    """A queue for one process leaves no dead-letter queue behind for ever."""
    Queue("q", auto_deleted=True).publish(1)
    assert MessageQueue.objects.get(name="q.dead").auto_deleted
    Queue("standing").publish(1)
    assert not MessageQueue.objects.get(name="standing.dead").auto_deleted


def test_what_fails_on_a_dead_letter_queue_is_parked_there() -> None:
    """NAME.dead has no dead-letter queue of its own: what is given up there stays, out of the way."""
    queue = Queue("q")
    queue.publish(1)
    queue.reject(*queue.claim(), reason="first")
    letters = Queue("q.dead")
    letters.reject(*letters.claim(), reason="second")
    (row,) = rows()
    assert row["queue_id"] == "q.dead"
    assert row["read_after"].year == 9000
    assert [failure["reason"] for failure in row["failures"]] == ["first", "second"]
    assert letters.claim() == []
    assert not MessageQueue.objects.filter(name="q.dead.dead").exists()


def test_rejecting_inside_a_transaction_is_part_of_it() -> None:
    """Rolled back, the message is where it was, and still the caller's."""
    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    with transaction.atomic():
        queue.reject(message, reason="no")
        transaction.set_rollback(True)
    assert payloads("q") == [1]
    queue.ack(message)


@pytest.mark.parametrize("verb", ["nack", "reject"])
def test_failure_text_is_stored_whatever_it_holds(verb: str) -> None:
    """NUL and lone surrogates are written out, and the length is capped; the message is not stuck for its reason."""
    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    VERBS[verb](queue, message, reason="bad\0half\ud800" + "x" * 10_000)
    (row,) = rows()
    reason = row["failures"][0]["reason"]
    assert reason.startswith("bad\\0half\\ud800xxx")
    assert reason.endswith("…")
    assert len(reason) < MAX_REASON_LENGTH + 20
