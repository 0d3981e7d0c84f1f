"""Handlers that take a batch: what they are given, and what becomes of each message of it."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from django_pgqueue import Message, Nack, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import consuming, worker
from tests.support.rows import make_message, payloads
from tests.support.sessions import second_session
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

each_mode = pytest.mark.parametrize("ack", ["late", "early", "atomic"])


@pytest.fixture
def queue() -> Queue:
    return Queue("q", max_deliveries=2, backoff={"base": 100, "jitter": 0})


class Batches:
    """A batch handler that notes the payloads of each batch, and returns or raises what it is told to."""

    def __init__(self, answer: Any = None) -> None:
        self.seen: list[list[Any]] = []
        self.answer = answer

    def __call__(self, messages: list[Message]) -> Any:
        self.seen.append([message.payload for message in messages])
        for message in messages:
            Seen.objects.create(msg_id=message.id, worker=0, attempt=message.delivery_count)
        answer = self.answer(messages) if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


class AsyncBatches(Batches):
    async def __call__(self, messages: list[Message]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self.note, messages)

    def note(self, messages: list[Message]) -> Any:
        self.seen.append([message.payload for message in messages])
        return self.answer(messages) if callable(self.answer) else self.answer


def drain(queue: Queue, function: Any, *, consumer: dict[str, Any] | None = None, **options: Any) -> int:
    """Handle all that is ready, in a thread, so that one that never ends fails the test."""
    options.setdefault("batch", 10)
    return Consumer([make_handler(queue, function, **options)], drain=True, **(consumer or {})).run()


def reasons(message_id: int) -> list[str]:
    failures = MessageQueueItem.objects.get(pk=message_id).failures
    return [failure["reason"] for failure in failures or []]


# --- What they are given ---


@each_mode
def test_a_batch_holds_what_is_there_up_to_its_size(queue: Queue, ack: str) -> None:
    """In order, never more, and the rest at once without waiting for more to come."""
    queue.publish_many(range(25))
    handler = Batches()
    assert drain(queue, handler, ack=ack) == 25
    assert [number for batch in handler.seen for number in batch] == list(range(25))
    assert max(map(len, handler.seen)) == 10
    assert payloads("q") == []


def test_one_message_is_a_batch_of_one(queue: Queue) -> None:
    """A list all the same; nobody waits for a second."""
    queue.publish("only")
    handler = Batches()
    assert drain(queue, handler, batch=1000) == 1
    assert handler.seen == [["only"]]


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "10"])
def test_a_size_that_is_no_count_is_refused_where_it_is_declared(queue: Queue, batch: Any) -> None:
    """Naming the argument."""
    with pytest.raises(ValueError, match="batch"):
        queue.handler(batch=batch)(print)


def test_a_batch_larger_than_the_prefetch_is_filled_all_the_same(queue: Queue, settings: Any) -> None:
    """The consumer holds at least one batch for each of its workers."""
    settings.PGQUEUE = {"PREFETCH": 5}
    queue.publish_many(range(60))
    handler = Batches()
    assert drain(queue, handler, batch=30) == 60
    assert max(map(len, handler.seen)) > 5


def test_each_worker_has_a_batch_of_its_own(queue: Queue) -> None:
    """Two at once, of different messages."""
    queue.publish_many(range(20))
    both = threading.Barrier(2)
    seen: list[list[Any]] = []

    def handle(messages: list[Message]) -> None:
        seen.append([message.payload for message in messages])
        both.wait(20)

    assert drain(queue, handle, concurrency=2) == 20
    assert sorted(number for batch in seen for number in batch) == list(range(20))


def test_max_messages_counts_messages(queue: Queue) -> None:
    """Not batches."""
    queue.publish_many(range(30))
    handler = Batches()
    consumer = Consumer([make_handler(queue, handler, batch=10)], max_messages=15)
    assert consumer.run() == 15
    assert len(payloads("q")) == 15


# --- How all of them end ---


@each_mode
@pytest.mark.parametrize("answer", [None, "done", {}, [1, 2]], ids=repr)
def test_what_a_handler_returns_is_for_all_of_them(queue: Queue, ack: str, answer: Any) -> None:
    """Anything but a mapping is "done"; what it wrote is there."""
    queue.publish_many(range(5))
    assert drain(queue, Batches(answer), ack=ack) == 5
    assert payloads("q") == []
    assert Seen.objects.count() == 5


@pytest.mark.parametrize(("ack", "left", "written"), [("late", 5, 5), ("early", 0, 5), ("atomic", 5, 0)])
def test_what_a_handler_raises_is_for_all_of_them(queue: Queue, ack: str, left: int, written: int) -> None:
    """Each is given back with the back-off and the reason; atomic leaves nothing of what was written."""
    ids = queue.publish_many(range(5))
    drain(queue, Batches(ValueError("no")), ack=ack)
    assert len(payloads("q")) == left
    assert Seen.objects.count() == written
    if left:
        assert [reasons(message_id) for message_id in ids] == [["builtins.ValueError: no"]] * 5
        assert MessageQueueItem.objects.delayed().count() == 5


@pytest.mark.parametrize("ack", ["late", "atomic"])
def test_reject_and_nack_are_for_all_of_them(queue: Queue, ack: str) -> None:
    """As for a single message."""
    queue.publish_many(range(3))
    drain(queue, Batches(Reject("not ours")), ack=ack)
    assert payloads("q.dead") == [0, 1, 2]
    queue.publish_many(range(3))
    drain(queue, Batches(Nack("busy", delay=50)), ack=ack)
    assert MessageQueueItem.objects.delayed().count() == 3


# --- Errors by id ---


def by_payload(errors: dict[Any, BaseException]) -> Any:
    """Return what answers with these errors, by payload."""
    return lambda messages: {message.id: errors[message.payload] for message in messages if message.payload in errors}


ERRORS: dict[Any, BaseException] = {1: ValueError("one"), 2: Reject("two"), 3: Nack("three", delay=50)}


@pytest.mark.parametrize("ack", ["late", "atomic"])
@pytest.mark.parametrize("handler", [Batches, AsyncBatches], ids=["sync", "async"])
def test_a_mapping_names_those_that_failed(queue: Queue, ack: str, handler: Any) -> None:
    """Retried, given up, given back: each as its exception says. The others are done."""
    if handler is AsyncBatches and ack == "atomic":
        return
    ids = queue.publish_many(range(6))
    assert drain(queue, handler(by_payload(ERRORS)), ack=ack) == 6
    assert payloads("q") == [1, 3]
    assert payloads("q.dead") == [2]
    assert [reasons(ids[number]) for number in (1, 2, 3)] == [["builtins.ValueError: one"], ["two"], ["three"]]


def test_in_atomic_mode_the_batch_is_one_transaction(queue: Queue) -> None:
    """What was written for those that failed is committed with the others: a handler that minds uses savepoints."""
    queue.publish_many(range(4))
    drain(queue, Batches(by_payload({1: ValueError("one")})), ack="atomic")
    assert payloads("q") == [1]
    assert Seen.objects.count() == 4


def test_all_of_them_may_be_named(queue: Queue) -> None:
    """Then none is acked."""
    queue.publish_many(range(3))
    drain(queue, Batches(lambda messages: dict.fromkeys((message.id for message in messages), ValueError("all"))))
    assert payloads("q") == [0, 1, 2]


@pytest.mark.parametrize("handler", [Batches, AsyncBatches], ids=["sync", "async"])
def test_after_an_early_ack_errors_are_logged(queue: Queue, handler: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is left that could be retried, so that the log is all there is: which message, and why."""
    ids = queue.publish_many(range(6))
    drain(queue, handler(by_payload(ERRORS)), ack="early")
    assert MessageQueueItem.objects.count() == 0
    told = [record for record in caplog.records if "after an early ack" in record.message]
    assert sorted(record.message.partition("ids=")[2] for record in told) == [
        f"[{ids[number]}]" for number in (1, 2, 3)
    ]
    assert {record.exc_info[1] for record in told if record.exc_info} == set(ERRORS.values())


WRONG: dict[str, Any] = {
    "id of another message": lambda messages: {messages[0].id + 10_000: ValueError("x")},
    "a text for the id": lambda messages: {str(messages[0].id): ValueError("x")},
    "a class": lambda messages: {messages[0].id: ValueError},
    "a text for the exception": lambda messages: {messages[0].id: "failed"},
    "ids to success": lambda messages: {message.id: True for message in messages},
    "messages": lambda messages: dict.fromkeys(messages[:0], ValueError("x")) | {None: ValueError("x")},
}


@pytest.mark.parametrize("ack", ["late", "atomic"])
@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_a_mapping_that_means_something_else_fails_them_all(queue: Queue, ack: str, answer: Any) -> None:
    """Acking them would lose what the handler wanted to say; the reason tells what was wrong."""
    ids = queue.publish_many(range(3))
    drain(queue, Batches(answer), ack=ack)
    assert payloads("q") == [0, 1, 2]
    assert all("TypeError" in reasons(message_id)[0] for message_id in ids)
    assert "does not map its messages' ids to exceptions" in reasons(ids[0])[0]
    assert Seen.objects.count() == (3 if ack == "late" else 0)


def test_a_handler_of_single_messages_may_return_a_mapping(queue: Queue) -> None:
    """There it means nothing."""
    queue.publish(1)
    assert drain(queue, lambda message: {message.id: ValueError("x")}, batch=None) == 1
    assert payloads("q") == []


@each_mode
def test_a_batch_handler_that_hands_out_a_coroutine_has_not_done_its_work(queue: Queue, ack: str) -> None:
    """As for a single message: no ack for it."""

    async def work(messages: list[Message]) -> None:
        pass

    queue.publish_many(range(2))
    drain(queue, lambda messages: work(messages), ack=ack)
    assert len(payloads("q")) == (0 if ack == "early" else 2)


# --- Suspects and leases ---


@each_mode
def test_a_suspect_comes_alone(queue: Queue, ack: str) -> None:
    """In a batch of one, with nothing else in hand: what it may do to its worker hurts no neighbour."""
    patient = Queue("q", max_deliveries=9)
    patient.declare()
    patient.publish_many(range(5))
    for number in range(2):
        make_message("q", f"suspect {number}", lease=-1)
    patient.publish_many(range(5, 10))
    held: dict[str, int] = {}

    def answer(messages: list[Message]) -> None:
        if str(messages[0].payload).startswith("suspect"):
            held[messages[0].payload] = MessageQueueItem.objects.leased().count()

    handler = Batches(answer)
    assert drain(patient, handler, ack=ack) == 12
    alone = [batch for batch in handler.seen if any(str(payload).startswith("suspect") for payload in batch)]
    assert sorted(alone) == [["suspect 0"], ["suspect 1"]]
    assert set(held.values()) <= {0, 1}
    assert len(held) == 2


def steal(*ids: int) -> None:
    """Let another session be the owner, as after a lapsed lease and a second claim."""
    with second_session() as other:
        other.execute(
            "UPDATE django_pgqueue_messagequeueitem SET lease_token = gen_random_uuid() WHERE id = ANY (%s)",
            [list(ids)],
        )


def test_a_lease_lost_within_an_atomic_batch_rolls_all_of_it_back(queue: Queue) -> None:
    """Its new owner will do its part: that the others' effects are there once, they are handled again."""
    ids = queue.publish_many(range(4))
    rounds: list[list[int]] = []

    def handle(messages: list[Message]) -> None:
        rounds.append([message.id for message in messages])
        for message in messages:
            Seen.objects.create(msg_id=message.id, worker=len(rounds), attempt=message.delivery_count)
        if len(rounds) == 1:
            steal(ids[1])

    drain(queue, handle, ack="atomic")
    others = [ids[0], ids[2], ids[3]]
    assert rounds[0] == ids
    assert sorted(message_id for batch in rounds[1:] for message_id in batch) == others
    assert sorted(Seen.objects.values_list("msg_id", flat=True)) == others
    assert list(MessageQueueItem.objects.values_list("id", flat=True)) == [ids[1]]


def test_a_lease_lost_within_a_late_batch_costs_the_others_nothing(queue: Queue) -> None:
    """Each is settled by its own token."""
    ids = queue.publish_many(range(4))
    drain(queue, Batches(lambda messages: steal(ids[1])))
    assert list(MessageQueueItem.objects.values_list("id", flat=True)) == [ids[1]]


def test_an_early_batch_starts_only_with_what_is_its_own(queue: Queue) -> None:
    """One was taken away while it waited: the handler gets the others."""
    go = threading.Event()
    seen: list[list[Any]] = []

    def handle(messages: list[Message]) -> None:
        seen.append([message.payload for message in messages])
        go.wait(20)

    with consuming(Consumer([make_handler(queue, handle, batch=10, ack="early")])):
        queue.publish("first")
        wait_until(lambda: seen)
        ids = queue.publish_many(range(4))
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 4)
        steal(ids[1])
        go.set()
        wait_until(lambda: MessageQueueItem.objects.count() == 1)
    assert seen == [["first"], [0, 2, 3]]


# --- Real processes ---


def batch_queues(**handler: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": "work",
            "queue": {"max_deliveries": 2},
            "function": "handle_batch",
            "handler": {"batch": 20, **handler},
        }
    ]


@pytest.mark.full
@pytest.mark.parametrize("ack", ["late", "atomic"])
def test_of_a_batch_that_kills_its_worker_only_the_poison_dies(ack: str) -> None:
    """Twenty in a batch, one ends the process: it is dead after two workers, nineteen are handled."""
    queue = Queue("work", max_deliveries=2)
    ids = queue.publish_many([{"exit": 1} if number == 7 else {} for number in range(20)])
    deaths = 0
    for _ in range(6):
        with worker(queues=batch_queues(ack=ack), settings={"LEASE": 1}) as running:
            wait_until(lambda running=running: not running.is_running or not payloads("work"), 30)
            if running.is_running:
                assert running.stop() == 0
                break
            deaths += 1
    assert deaths == 2
    assert [item.id for item in MessageQueueItem.objects.all()] == [ids[7]]
    (dead,) = MessageQueueItem.objects.all()
    assert (dead.queue_id, dead.dead_lettered_from) == ("work.dead", "work")
    done = Seen.objects.exclude(msg_id=ids[7]).order_by("msg_id").distinct().values_list("msg_id", flat=True)
    assert list(done) == ids[:7] + ids[8:]


def test_sigterm_lets_the_running_batch_end_and_gives_the_others_back(tmp_path: Path) -> None:
    """Twenty run, of which each is acked; those that waited count no delivery."""
    queue = Queue("work", max_deliveries=3)
    with worker(queues=batch_queues(), settings={"LEASE": 60}) as running:
        ids = queue.publish_many([{"hold": str(tmp_path / "go")}] + [{}] * 59)
        wait_until(Seen.objects.exists)
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 60)
        running.send(signal.SIGTERM)
        wait_until(lambda: MessageQueueItem.objects.leased().count() <= 20)
        (tmp_path / "go").touch()
        assert running.wait() == 0
    done = list(Seen.objects.order_by("msg_id").values_list("msg_id", flat=True))
    assert done == ids[: len(done)]
    assert len(done) <= 20
    left = MessageQueueItem.objects.filter(queue="work")
    assert sorted(left.values_list("id", flat=True)) == ids[len(done) :]
    assert set(left.values_list("delivery_count", "lease_token")) == {(0, None)}


def test_a_batch_consumer_is_woken(queue: Queue, settings: Any) -> None:
    """And takes what came in while it was busy as one batch."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60}
    go = threading.Event()
    seen: list[list[Any]] = []

    def handle(messages: list[Message]) -> None:
        seen.append([message.payload for message in messages])
        go.wait(20)

    with consuming(Consumer([make_handler(queue, handle, batch=50)])) as consumer:
        wait_until(consumer._channels.listening.is_set)
        queue.publish(0)
        wait_until(lambda: seen)
        queue.publish_many(range(1, 31))
        wait_until(lambda: MessageQueueItem.objects.leased().count() == 31)
        go.set()
        wait_until(lambda: not payloads("q"))
    assert seen == [[0], list(range(1, 31))]
