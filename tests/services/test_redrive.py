"""Dead letters go back to the queue that gave them up: which ones, how many, when, and with what history."""

import time
from typing import Any

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pgqueue import Message, PayloadError, Queue, Reject, signals
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from tests.support.locks import lock_waits
from tests.support.processes import consuming, drain
from tests.support.rows import backdate, delete_queue, make_message, payloads
from tests.support.sessions import Session, connect, in_threads
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue() -> Queue:
    return Queue("q", max_deliveries=1)


def kill(queue: Queue, *payloads: Any, reason: str = "bad", **options: Any) -> list[int]:
    """Publish messages and reject them. Returns their ids."""
    ids = queue.publish_many(payloads, **options)
    while messages := queue.claim(100):
        queue.reject(*messages, reason=reason)
    return ids


def item(message_id: int) -> MessageQueueItem:
    return MessageQueueItem.objects.get(pk=message_id)


# --- Which ones ---


def test_all_dead_letters_go_back_with_a_fresh_count(queue: Queue) -> None:
    """Due now, in no order but handled again; those that were not dead are left alone."""
    ids = kill(queue, 1, 2, 3)
    queue.publish(4)
    assert queue.redrive() == 3
    assert payloads("q.dead") == []
    for message_id in ids:
        row = item(message_id)
        assert (row.queue_id, row.delivery_count, row.lease_token) == ("q", 0, None)
        assert (row.dead_lettered_from, row.dead_lettered_at, row.dead_letter_path) == (None, None, None)
    assert sorted(drain(queue)) == [1, 2, 3, 4]
    assert queue.redrive() == 0


def test_deliveries_on_the_dead_letter_queue_do_not_count_either(queue: Queue) -> None:
    """Somebody looked at it there and gave it back."""
    (message_id,) = kill(queue, 1)
    dead = Queue("q.dead")
    dead.nack(*dead.claim(), delay=60)
    assert item(message_id).delivery_count == 1
    queue.redrive()
    assert item(message_id).delivery_count == 0


def test_ids_choose(queue: Queue) -> None:
    """Only those, and no others of this or of another queue."""
    ids = kill(queue, 1, 2, 3)
    (foreign,) = kill(Queue("other"), 4)
    assert queue.redrive(ids=[ids[1], foreign, 2**62]) == 1
    assert payloads("q") == [2]
    assert payloads("other.dead") == [4]
    assert queue.redrive(ids=[]) == 0


def test_a_part_of_the_reason_chooses(queue: Queue) -> None:
    """The text stands in the last failure, taken as it is: neither a pattern nor a regular expression."""
    kill(queue, 1, reason="timeout: 100% busy")
    kill(queue, 2, reason="timeout: 100x busy")
    assert queue.redrive(reason="100% b") == 1
    assert payloads("q") == [1]
    assert queue.redrive(reason=".*") == 0


def test_only_the_last_reason_counts(queue: Queue) -> None:
    """A message that failed of something else before is not chosen by that."""
    kill(queue, 1, reason="first")
    queue.redrive()
    queue.reject(*queue.claim(), reason="second")
    assert queue.redrive(reason="first") == 0
    assert queue.redrive(reason="second") == 1


def test_headers_choose(queue: Queue) -> None:
    """All of those given must be there with these values, of whatever kind."""
    kill(queue, 1, headers={"tenant": "a", "try": 1})
    kill(queue, 2, headers={"tenant": "a", "try": 2})
    kill(queue, 3, headers={"tenant": "b", "try": 1})
    assert queue.redrive(headers={"tenant": "a", "try": 1}) == 1
    assert payloads("q") == [1]
    assert queue.redrive(headers={"tenant": "a"}) == 1
    assert payloads("q") == [1, 2]


def test_choices_add_up(queue: Queue) -> None:
    """Ids, reason, headers and limit together."""
    ids = kill(queue, 1, 2, 3, 4, reason="timeout", headers={"tenant": "a"})
    ids += kill(queue, 5, reason="timeout", headers={"tenant": "b"})
    assert queue.redrive(2, ids=ids[1:], reason="time", headers={"tenant": "a"}) == 2
    assert payloads("q") == [2, 3]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"limit": 0}, ValueError),
        ({"limit": True}, ValueError),
        ({"ids": [0]}, ValueError),
        ({"ids": ["1"]}, ValueError),
        ({"ids": [2**63]}, ValueError),
        pytest.param({"headers": {"a": object()}}, PayloadError, id="headers"),
        ({"headers": ["a"]}, PayloadError),
        ({"rate": 0}, ValueError),
        ({"rate": float("nan")}, ValueError),
        ({"canary": 0}, ValueError),
        ({"canary": 1, "canary_timeout": 0}, ValueError),
    ],
    ids=str,
)
def test_wrong_choices_are_refused_before_anything_is_sent(
    queue: Queue, options: dict[str, Any], error: type[Exception]
) -> None:
    """And nothing is redriven."""
    kill(queue, 1)
    with pytest.raises(error):
        queue.redrive(**options)
    assert payloads("q.dead") == [1]


def test_what_somebody_holds_is_left(queue: Queue) -> None:
    """A handler of the dead-letter queue has it, or another session has the row locked: neither is waited for."""
    ids = kill(queue, 1, 2, 3)
    dead = Queue("q.dead")
    (held,) = dead.claim()
    locked = next(message_id for message_id in ids if message_id != held.id)
    with connect(autocommit=False) as other, lock_waits() as waits:
        other.execute("SELECT FROM django_pgqueue_messagequeueitem WHERE id = %s FOR UPDATE", [locked])
        assert queue.redrive() == 1
    assert waits == []
    dead.ack(held)
    assert queue.redrive() == 1
    assert len(payloads("q")) == 2


def test_a_lapsed_lease_holds_nothing(queue: Queue) -> None:
    """Whose handler died: its letter goes back, and its late ack changes nothing."""
    kill(queue, 1)
    dead = Queue("q.dead", lease=0.1)
    stale = dead.claim()
    wait_until(lambda: queue.redrive() == 1)
    with pytest.raises(Exception, match="lease lost"):
        dead.ack(*stale)
    assert drain(queue) == [1]


# --- Chains and parking ---


def test_a_letter_of_a_chain_goes_one_step_back() -> None:
    """From c to b, from b to a: each queue redrives what it gave up itself, and the path says which."""
    a, b = Queue("a", dead_letter="b"), Queue("b", dead_letter="c")
    a.declare()
    b.declare()
    (message_id,) = kill(a, 1, reason="of a")
    b.reject(*b.claim(), reason="of b")
    row = item(message_id)
    assert (row.queue_id, row.dead_lettered_from, row.dead_letter_path) == ("c", "b", ["a", "b"])
    assert a.redrive() == 0

    assert b.redrive() == 1
    row = item(message_id)
    assert (row.queue_id, row.dead_lettered_from, row.dead_letter_path) == ("b", "a", ["a"])
    assert row.dead_lettered_at is not None
    assert a.redrive() == 1
    row = item(message_id)
    assert (row.queue_id, row.dead_lettered_from, row.dead_letter_path) == ("a", None, None)
    assert drain(a) == [1]


def test_what_a_queue_has_parked_is_handled_again_where_it_is(queue: Queue) -> None:
    """q.dead has no dead-letter queue: its failures wait there, due in the year 9000, until it is redriven."""
    (message_id,) = kill(queue, 1, reason="of q")
    dead = Queue("q.dead")
    dead.reject(*dead.claim(), reason="of q.dead")
    assert dead.claim() == []
    assert dead.redrive(reason="of q.dead") == 1
    row = item(message_id)
    assert (row.queue_id, row.dead_lettered_from, row.delivery_count) == ("q.dead", "q", 0)
    dead.reject(*dead.claim(), reason="again")
    # Parked or not, the queue that gave it up first may have it back.
    assert queue.redrive() == 1
    assert drain(queue) == [1]


def test_what_dies_where_it_was_published_is_parked_there() -> None:
    """A message published to q.dead itself: redriven, it is due again there."""
    dead = Queue("q.dead")
    (message_id,) = kill(dead, 1)
    assert (item(message_id).queue_id, item(message_id).dead_lettered_from) == ("q.dead", "q.dead")
    assert Queue("q").redrive() == 0
    assert dead.redrive() == 1
    assert drain(dead) == [1]


def test_the_history_keeps_both_reasons(queue: Queue) -> None:
    """What a redriven message died of before stands beside what it dies of now."""
    (message_id,) = kill(queue, 1, reason="first")
    queue.redrive()
    queue.reject(*queue.claim(), reason="second")
    row = item(message_id)
    assert row.failures is not None
    assert [failure["reason"] for failure in row.failures] == ["first", "second"]
    assert [failure["delivery_count"] for failure in row.failures] == [1, 1]
    assert payloads("q.dead") == [1]


def test_rows_from_before_there_was_a_path_go_back(queue: Queue) -> None:
    """An earlier version noted only where a letter came from; that is enough, also to die again."""
    (message_id,) = kill(queue, 1)
    MessageQueueItem.objects.update(dead_letter_path=None)
    dead = Queue("q.dead", dead_letter="last")
    dead.declare()
    dead.reject(*dead.claim())
    assert item(message_id).dead_letter_path == ["q", "q.dead"]
    MessageQueueItem.objects.update(dead_letter_path=None, dead_lettered_from="q")
    assert queue.redrive() == 1
    row = item(message_id)
    assert (row.queue_id, row.dead_lettered_from, row.dead_lettered_at, row.dead_letter_path) == ("q", None, None, None)
    assert drain(queue) == [1]


# --- The queue is gone ---


def test_a_reaped_queue_is_made_again() -> None:
    """With its declared attributes, in the same call; its dead letters had kept only their own queue alive."""
    queue = Queue("tmp", auto_deleted=True, max_deliveries=1)
    kill(queue, 1, 2)
    for name in ("tmp", "tmp.dead"):
        backdate(name, 7200)
    assert Reaper("default").run_once().queues == ["tmp"]
    assert queue.redrive() == 2
    row = MessageQueue.objects.get(name="tmp")
    assert (row.auto_deleted, row.max_deliveries) == (True, 1)
    assert sorted(drain(queue)) == [1, 2]


@pytest.mark.parametrize("deleted", [["q"], ["q.dead"], ["q", "q.dead"]], ids=str)
def test_queues_that_were_deleted_by_hand_keep_nothing_back(queue: Queue, deleted: list[str]) -> None:
    """Neither the queue nor the dead-letter queue: letters that were cut loose know where they came from."""
    kill(queue, 1, 2)
    for name in deleted:
        delete_queue(name)
    assert queue.redrive() == 2
    assert sorted(drain(queue)) == [1, 2]


def test_where_there_is_nothing_to_send_back_no_queue_is_made() -> None:
    """A name that nobody has used is not brought into being by asking for its dead letters."""
    assert Queue("nobody").redrive() == 0
    assert not MessageQueue.objects.filter(name="nobody").exists()


# --- In a transaction, and beside others ---


def test_inside_a_transaction_all_of_it_is_part_of_that(queue: Queue) -> None:
    """Rolled back, nothing has moved and nobody is told; committed, the signal comes once for each batch."""
    kill(queue, 1, 2)
    told: list[tuple[Any, Any]] = []

    def receive(sender: str, *, count: int, **kwargs: Any) -> None:
        told.append((sender, count))

    signals.messages_redriven.connect(receive)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert queue.redrive() == 2
        raise ZeroDivisionError
    assert (payloads("q"), told) == ([], [])
    with transaction.atomic():
        queue.redrive()
        assert told == []
    assert (payloads("q"), told) == ([1, 2], [("q", 2)])


@pytest.mark.parametrize("options", [{"rate": 5}, {"canary": 1}], ids=str)
def test_what_waits_is_refused_inside_a_transaction(queue: Queue, options: dict[str, Any]) -> None:
    """Nobody would see the first messages while the transaction is open."""
    kill(queue, 1)
    with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
        queue.redrive(**options)
    assert payloads("q.dead") == [1]


def test_two_operators_at_once_take_different_letters(queue: Queue) -> None:
    """One has his transaction open: the other takes the rest and does not wait."""
    ids = kill(queue, *range(20))
    with Session() as other, lock_waits() as waits:
        other.begin()
        assert other.run(queue.redrive, 5) == 5
        assert queue.redrive() == 15
        other.commit()
    assert waits == []
    assert MessageQueueItem.objects.filter(queue="q", id__in=ids).count() == 20


def test_a_click_on_all_sides_at_once_sends_each_letter_once(queue: Queue) -> None:
    """Eight redrives that start together add up to the letters that there are; each is handled once."""
    kill(queue, *range(200))
    counts = in_threads(8, lambda _: queue.redrive())
    assert sum(counts) == 200
    assert sorted(drain(queue)) == list(range(200))


def test_a_double_click_does_not_send_again_what_is_being_handled(queue: Queue) -> None:
    """The second finds nothing: what went back is no dead letter any more."""
    kill(queue, 1, 2)
    assert queue.redrive() == 2
    held = queue.claim(2)
    assert queue.redrive() == 0
    queue.ack(*held)
    assert MessageQueueItem.objects.count() == 0


def test_what_dies_again_meanwhile_is_for_the_next_redrive(queue: Queue) -> None:
    """A redrive beside a handler that still fails ends; it does not send the same letters round and round."""
    kill(queue, *range(30))
    deliveries: list[Any] = []

    def fail(message: Message) -> None:
        deliveries.append(message.payload)
        raise Reject("still bad")

    with consuming(Consumer([make_handler(queue, fail)])):
        assert queue.redrive(rate=60) == 30
        wait_until(lambda: len(payloads("q.dead")) == 30)
    assert sorted(deliveries) == list(range(30))


def test_what_dies_meanwhile_for_the_first_time_is_for_the_next_redrive(queue: Queue) -> None:
    """A redrive beside a stream of failures ends: it takes what was dead when it began."""
    kill(queue, *range(3))
    other = MessageQueueItem.objects.filter(queue="q.dead")

    def progress(count: int) -> None:
        # As DEAD_LETTER leaves it, without a claim of what was just sent back.
        make_message("q.dead", "fresh", dead_lettered_from="q", dead_letter_path=["q"], dead_lettered_at=Now())

    assert queue.redrive(20, rate=50, progress=progress) == 3
    assert set(other.values_list("payload", flat=True)) == {"fresh"}


def test_a_redrive_wakes_the_consumers(queue: Queue, settings: Any) -> None:
    """They would look again in a minute."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60}
    kill(queue, 1)
    handled: list[Any] = []
    consumer = Consumer([make_handler(queue, lambda message: handled.append(message.payload))])
    with consuming(consumer):
        wait_until(consumer._channels.listening.is_set)
        # Its last look is over.
        wait_until(lambda: consumer.lanes[0].next_look > time.monotonic() + 30)
        queue.redrive()
        wait_until(lambda: handled == [1], 10)


# --- Limit, rate, canary ---


def test_a_limit_sends_so_many(queue: Queue) -> None:
    """The oldest first; the others stay dead."""
    kill(queue, 1, 2, 3)
    assert queue.redrive(2) == 2
    assert (payloads("q"), payloads("q.dead")) == ([1, 2], [3])
    assert queue.redrive(5) == 1


def test_a_rate_spreads_them(queue: Queue) -> None:
    """Never more than so many a second: at each moment, as many as the time allows and one."""
    kill(queue, *range(20))
    seen: list[tuple[float, int]] = []
    began = time.monotonic()
    assert queue.redrive(rate=20, progress=lambda count: seen.append((time.monotonic() - began, count))) == 20
    assert seen[-1][0] > 0.9
    assert all(count <= elapsed * 20 + 1 for elapsed, count in seen)


def test_progress_counts_up_and_the_canary_with_it(queue: Queue) -> None:
    """One number after each batch, the last of them the whole."""
    kill(queue, *range(10))
    counts: list[int] = []
    with consuming(Consumer([make_handler(queue, lambda message: None)])):
        queue.redrive(canary=3, progress=counts.append)
    assert counts[0] == 3
    assert counts == sorted(counts)
    assert counts[-1] == 10


@pytest.mark.parametrize(
    "choice", [{"reason": 5}, {"reason": b"x"}, {"reason": "\0"}, {"reason": "\ud800"}, {"ids": 5}, {"rate": 1e-300}]
)
def test_a_choice_that_sql_could_not_take_leaves_the_callers_transaction_usable(choice: dict[str, Any]) -> None:
    """Refused before anything is sent."""
    queue = Queue("q")
    with transaction.atomic():
        queue.publish("before")
        with pytest.raises(ValueError):
            queue.redrive(**choice)
        queue.publish("after")
    assert payloads("q") == ["before", "after"]
