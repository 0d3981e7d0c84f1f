"""Claiming: what is taken, in which order, how much, and what is set aside on the way."""

from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.services.claiming import claim
from tests.support.rows import make_message
from tests.support.sessions import fetch, in_threads, second_session

pytestmark = pytest.mark.django_db(transaction=True)

# A document that PostgreSQL stores and that the json module cannot read: deeper than its recursion.
DEEP = "(repeat('[', 12000) || repeat(']', 12000))::jsonb"
# More digits than int() converts.
LONG_INTEGER = "('[' || repeat('7', 5000) || ']')::jsonb"


def insert_raw(name: str, payload: str, headers: str = "'{}'") -> int:
    """Insert a message whose payload is a piece of SQL, as another program might."""
    ((message_id,),) = fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers)"
        f" VALUES (%s, {payload}, {headers}) RETURNING id",
        [name],
    )
    return int(message_id)


def state(message_id: int) -> dict[str, Any]:
    return MessageQueueItem.objects.filter(pk=message_id).values().get()


# --- What is taken ---


def test_a_claim_leases_the_message_and_counts_the_delivery() -> None:
    """The lease's deadline, token and count are in the row, and nothing else changed."""
    queue = Queue("q", lease=30)
    message_id = queue.publish({"n": 1}, headers={"trace": "x"})
    before = state(message_id)

    (message,) = queue.claim(5)

    assert (message.id, message.payload, message.headers) == (message_id, {"n": 1}, {"trace": "x"})
    assert (message.delivery_count, message.queue, message.suspect) == (1, "q", False)
    after = state(message_id)
    assert after["lease_token"] == message.token
    assert after["lease_expires_at"] == message.lease_expires_at
    assert after["delivery_count"] == 1
    changed = {"lease_token", "lease_expires_at", "leased_by", "delivery_count"}
    assert {key for key in after if after[key] != before[key]} == changed
    ((left,),) = fetch("SELECT extract(epoch FROM %s - statement_timestamp())", [message.lease_expires_at])
    assert 25 < left <= 30


def test_a_leased_message_is_not_claimed_again_while_the_lease_lasts() -> None:
    """A live lease hides the message, a lapsed one does not."""
    queue = Queue("q")
    queue.publish(1)
    assert len(queue.claim(5)) == 1
    assert queue.claim(5) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
def test_a_claim_never_takes_more_than_its_limit(limit: int) -> None:
    """With both walks full, returned and leased rows are at most the limit."""
    queue = Queue("q")
    queue.publish_many(list(range(30)))
    for number in range(30):
        make_message("q", number, due_in=-10)

    messages = queue.claim(limit)

    assert len(messages) == limit
    assert MessageQueueItem.objects.leased().count() == limit


def test_the_oldest_ready_messages_are_claimed_first() -> None:
    """Without delays the order is that of publishing."""
    queue = Queue("q")
    ids = queue.publish_many(list(range(10)))
    assert [message.id for message in queue.claim(4)] == ids[:4]
    assert [message.id for message in queue.claim(4)] == ids[4:8]


def test_delayed_messages_are_claimed_by_their_due_time() -> None:
    """What was due first is taken first, in whatever order it was published."""
    queue = Queue("q")
    queue.declare()
    by_due = {due: make_message("q", due_in=due).pk for due in (-10, -30, -20, 60)}
    claimed = [queue.claim()[0].id for _ in range(3)]
    assert claimed == [by_due[-30], by_due[-20], by_due[-10]]
    assert queue.claim() == []


def test_due_and_ready_messages_both_get_their_share_of_a_claim() -> None:
    """A hundred retries don't hide a fresh message, a hundred fresh ones don't hide a retry."""
    queue = Queue("q")
    fresh = set(queue.publish_many(list(range(100))))
    for _ in range(100):
        make_message("q", due_in=-10)
    for _ in range(5):
        ids = {message.id for message in queue.claim(10)}
        assert len(ids & fresh) == 5
        assert len(ids - fresh) == 5


def test_claims_of_one_message_take_from_both_walks_in_turn() -> None:
    """A consumer without prefetch starves neither retries nor fresh messages."""
    queue = Queue("q")
    fresh = set(queue.publish_many(list(range(40))))
    for _ in range(40):
        make_message("q", due_in=-10)
    taken = [queue.claim()[0].id in fresh for _ in range(40)]
    # The odds against it with a fair choice: one in 10**9.
    assert 5 <= sum(taken) <= 35


@pytest.mark.parametrize("due_in", [None, -10.0])
def test_expired_messages_are_passed_over(due_in: float | None) -> None:
    """An expired message is not delivered and not touched; one behind it is."""
    queue = Queue("q")
    queue.declare()
    expired = make_message("q", due_in=due_in, expires_in=-1)
    good = make_message("q", due_in=due_in, expires_in=60)
    assert [message.id for message in queue.claim(5)] == [good.pk]
    assert state(expired.pk)["delivery_count"] == 0


def test_a_paused_queue_gives_nothing() -> None:
    """With paused_at set nothing is claimed and nothing is set aside; cleared, all is as before."""
    queue = Queue("q")
    queue.publish(1)
    make_message("q", lease=-1, delivery_count=5)
    MessageQueue.objects.filter(name="q").update(paused_at="2026-01-01T00:00:00Z")
    assert queue.claim(5) == []
    assert MessageQueueItem.objects.filter(queue="q").count() == 2
    MessageQueue.objects.filter(name="q").update(paused_at=None)
    assert len(queue.claim(5)) == 1


def test_other_queues_messages_are_left_alone() -> None:
    """A claim is for one queue."""
    Queue("other").publish(1)
    queue = Queue("q")
    queue.declare()
    assert queue.claim(5) == []


def test_a_claim_waits_for_nobody() -> None:
    """A row that another session holds is skipped, the others are taken at once."""
    queue = Queue("q")
    first, second = queue.publish_many([1, 2])
    with second_session(autocommit=False) as other:
        other.execute("SELECT FROM django_pgqueue_messagequeueitem WHERE id = %s FOR UPDATE", [first])
        fetch("SET lock_timeout = '2s'")
        assert [message.id for message in queue.claim(5)] == [second]


def test_concurrent_claims_never_take_the_same_message() -> None:
    """Eight sessions empty a queue: each message is handed out once."""
    queue = Queue("q")
    ids = queue.publish_many(list(range(400)))

    def take(number: int) -> list[int]:
        taken: list[int] = []
        while messages := queue.claim(number % 4 * 3 + 1):
            taken += [message.id for message in messages]
        return taken

    taken = [message_id for part in in_threads(8, take) for message_id in part]
    assert sorted(taken) == ids


# --- Refused ---


def test_a_claim_inside_atomic_is_refused() -> None:
    """A lease that can roll back counts nothing; the caller's transaction stays usable."""
    queue = Queue("q")
    queue.publish(1)
    with transaction.atomic():
        with pytest.raises(RuntimeError, match="inside a transaction"):
            queue.claim()
        assert MessageQueueItem.objects.leased().count() == 0
    assert len(queue.claim()) == 1


def test_a_claim_in_manual_transaction_mode_is_refused() -> None:
    """Without autocommit the lease would be uncommitted just the same."""
    queue = Queue("q")
    queue.publish(1)
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="inside a transaction"):
            queue.claim()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", None])
def test_a_limit_that_is_no_count_is_refused(limit: Any) -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match="limit"):
        Queue("q").claim(limit)


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_claims_are_read_committed_whatever_the_default_is(isolation: str) -> None:
    """Concurrent claims under a stricter default don't fail with serialization errors."""
    queue = Queue("q")
    ids = queue.publish_many(list(range(200)))

    def take(_: int) -> list[int]:
        fetch(f"SET default_transaction_isolation = '{isolation}'")
        taken: list[int] = []
        while messages := queue.claim(3):
            taken += [message.id for message in messages]
            queue.ack(*messages)
        return taken

    taken = [message_id for part in in_threads(6, take) for message_id in part]
    assert sorted(taken) == ids
    assert MessageQueueItem.objects.count() == 0


# --- Suspects ---


def test_a_lapsed_message_is_a_suspect_and_is_claimed_alone() -> None:
    """Its neighbours wait: if it kills this worker too, they are not taken along."""
    queue = Queue("q")
    queue.publish_many([1, 2])
    suspect = make_message("q", lease=-1)
    queue.publish_many([3, 4])

    (message,) = queue.claim(10)
    assert message.id == suspect.pk
    assert message.suspect
    assert message.delivery_count == 2
    assert [other.payload for other in queue.claim(10)] == [1, 2, 3, 4]


def test_each_suspect_comes_alone() -> None:
    """Three lapsed messages are three claims."""
    queue = Queue("q")
    queue.declare()
    suspects = [make_message("q", lease=-1, due_in=due).pk for due in (None, -5, None)]
    claims = [[message.id for message in queue.claim(10)] for _ in range(3)]
    assert all(len(one) == 1 for one in claims)
    assert sorted(one[0] for one in claims) == sorted(suspects)


def test_a_caller_who_wants_no_suspects_is_told_of_one() -> None:
    """The others are claimed, the suspect stays, and the answer says that it was met."""
    queue = Queue("q")
    queue.publish(1)
    suspect = make_message("q", lease=-1)
    found = claim(declaration_of(queue), "default", limit=10, lease=60, consumer=uuid4(), suspects=False)
    assert [message.payload for message in found.messages] == [1]
    assert found.suspect_met
    assert state(suspect.pk)["delivery_count"] == 1


def test_a_message_that_was_given_back_is_no_suspect() -> None:
    """After a nack it comes with the others."""
    queue = Queue("q")
    queue.publish(1)
    queue.nack(*queue.claim(), delay=0)
    queue.publish(2)
    messages = queue.claim(10)
    assert [message.payload for message in messages] == [1, 2]
    assert not any(message.suspect for message in messages)


def test_a_message_whose_last_delivery_lapsed_goes_to_the_dead_letter_queue() -> None:
    """Deliveries are counted at the claim: the worker that died never said so. Its neighbours are claimed."""
    queue = Queue("q", max_deliveries=3)
    queue.declare()
    lost = make_message("q", {"bad": True}, lease=-1, delivery_count=3, expires_in=3600)
    queue.publish({"good": True})

    assert [message.payload for message in queue.claim(10)] == [{"good": True}]

    row = state(lost.pk)
    assert (row["queue_id"], row["dead_lettered_from"], row["delivery_count"]) == ("q.dead", "q", 0)
    assert (row["expires_at"], row["lease_expires_at"], row["lease_token"]) == (None, None, None)
    assert row["payload"] == {"bad": True}
    (failure,) = row["failures"]
    assert "worker lost" in failure["reason"]
    assert (failure["queue"], failure["delivery_count"]) == ("q", 3)
    assert failure["expires_at"] is not None


def test_a_run_of_exhausted_messages_hides_nothing_behind_it() -> None:
    """A claim that only set messages aside looks again by itself."""
    queue = Queue("q", max_deliveries=1)
    queue.declare()
    for _ in range(25):
        make_message("q", lease=-1, delivery_count=1)
    queue.publish("good")
    assert [message.payload for message in queue.claim(10)] == ["good"]
    assert MessageQueueItem.objects.filter(queue="q.dead").count() == 25


# --- Undecodable ---


@pytest.mark.parametrize("payload", [DEEP, LONG_INTEGER], ids=["deep", "long-integer"])
def test_an_undecodable_message_is_set_aside_and_hurts_nobody(payload: str) -> None:
    """What PostgreSQL stores and Python cannot read goes to the dead-letter queue; its neighbours are delivered."""
    queue = Queue("q")
    queue.publish(1)
    poison = insert_raw("q", payload)
    queue.publish(2)

    assert [message.payload for message in queue.claim(10)] == [1, 2]

    row = MessageQueueItem.objects.filter(pk=poison).values("queue_id", "dead_lettered_from", "failures").get()
    assert (row["queue_id"], row["dead_lettered_from"]) == ("q.dead", "q")
    assert "undecodable" in row["failures"][0]["reason"]
    ((kept,),) = fetch(f"SELECT payload = {payload} FROM django_pgqueue_messagequeueitem WHERE id = %s", [poison])
    assert kept


def test_undecodable_headers_are_set_aside_too() -> None:
    """The headers are decoded as carefully as the payload."""
    queue = Queue("q")
    queue.declare()
    poison = insert_raw("q", "'1'", f"jsonb_build_object('deep', {DEEP})")
    queue.publish("good")
    assert [message.payload for message in queue.claim(10)] == ["good"]
    assert MessageQueueItem.objects.filter(queue="q.dead").values_list("pk", flat=True).get() == poison


def test_an_undecodable_message_is_parked_on_the_dead_letter_queue() -> None:
    """Whoever consumes the dead letters meets it once; then it is out of the way for good."""
    queue = Queue("q")
    queue.declare()
    poison = insert_raw("q", LONG_INTEGER)
    assert queue.claim(10) == []
    letters = Queue("q.dead")
    assert letters.claim(10) == []
    assert letters.claim(10) == []
    row = MessageQueueItem.objects.filter(pk=poison).values("queue_id", "read_after").get()
    assert row["queue_id"] == "q.dead"
    assert row["read_after"].year == 9000


def test_a_missing_dead_letter_queue_is_made() -> None:
    """Nothing is dropped because somebody deleted the queue for what is set aside."""
    queue = Queue("q", dead_letter="letters", max_deliveries=1)
    queue.declare()
    lost = make_message("q", lease=-1, delivery_count=1)
    MessageQueue.objects.filter(name="letters").delete()
    assert queue.claim(10) == []
    assert state(lost.pk)["queue_id"] == "letters"
