"""Handlers: how they are registered, how each ack mode settles, sync and async."""

import asyncio
import functools
import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_pgqueue import Message, Nack, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.registry import registered_handlers
from tests.support.processes import consuming, run
from tests.support.rows import payloads
from tests.support.sessions import fetch, second_session
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

each_mode = pytest.mark.parametrize("ack", ["late", "early", "atomic"])


def see(message: Message) -> None:
    Seen.objects.create(msg_id=message.id, worker=0, attempt=message.delivery_count)


def drain(queue: Queue, function: Any, **options: Any) -> int:
    """Handle all that is ready. Returns how many messages were handled."""
    return Consumer([make_handler(queue, function, **options)], drain=True).run()


def steal(message: Message) -> None:
    """Let another session be the owner, as after a lapsed lease and a second claim."""
    with second_session() as other:
        other.execute(
            "UPDATE django_pgqueue_messagequeueitem SET lease_token = gen_random_uuid() WHERE id = %s", [message.id]
        )


# --- Registration ---


def test_a_handler_is_registered_with_and_without_arguments() -> None:
    """Both forms leave the function as it was."""
    plain, configured = Queue("plain"), Queue("configured")

    @plain.handler
    def first(message: Message) -> str:
        return "first"

    @configured.handler(concurrency=4, ack="atomic", timeout=60)
    def second(message: Message) -> str:
        return "second"

    found = {handler.queue.name: handler for handler in registered_handlers(["plain", "configured"])}
    assert (found["plain"].function, found["configured"].function) == (first, second)
    assert (found["plain"].concurrency, found["plain"].ack) == (1, "late")
    assert (found["configured"].concurrency, found["configured"].ack, found["configured"].timeout) == (4, "atomic", 60)


def test_a_second_handler_for_one_queue_is_refused() -> None:
    """Also through another object of the same name; the message names the first."""
    Queue("q").handler(see)
    with pytest.raises(ValueError, match="'q' already has a handler.*see"):
        Queue("q").handler(lambda message: None)


def test_registering_the_same_function_again_is_fine() -> None:
    """A module may be imported twice under one name."""
    queue = Queue("q")
    queue.handler(see)
    queue.handler(concurrency=3)(see)
    (handler,) = registered_handlers(["q"])
    assert handler.concurrency == 3


def test_an_unknown_queue_is_named_beside_those_that_there_are() -> None:
    """The error helps with a typing mistake."""
    Queue("orders").handler(see)
    with pytest.raises(LookupError, match="no handler is registered for order; registered:.*orders"):
        registered_handlers(["order"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ack": "sometimes"}, "late, early, atomic"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_wrong_options_are_refused_where_the_handler_is_declared(options: Any, message: str) -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match=message):
        Queue("q").handler(**options)(see)


def test_what_cannot_be_called_is_no_handler() -> None:
    """Else each message would fail, and end in the dead-letter queue."""
    with pytest.raises(ValueError, match="'text' is not callable"):
        make_handler(Queue("q"), "text")  # type: ignore[arg-type]


def test_handlers_are_found_in_the_queues_modules_of_apps() -> None:
    """Without any import by the project: the app's queues.py is found, as its admin.py is."""
    Queue("work").publish(1)
    done = run("consume_queues", "--drain", queues=["work"])
    assert (done.returncode, done.stderr) == (0, "")
    assert Seen.objects.count() == 1
    assert payloads("work") == []


def test_async_with_atomic_is_refused_with_the_reason() -> None:
    """Before the first message."""

    async def handle(message: Message) -> None: ...

    with pytest.raises(ValueError, match="ack='atomic' needs a transaction.*use a sync handler, or ack='late'"):
        Queue("q").handler(ack="atomic")(handle)


# --- Ack modes ---


@each_mode
def test_a_handler_that_returns_acks(ack: str) -> None:
    """In every mode the message is gone and its effect is there."""
    queue = Queue("q")
    queue.publish_many([1, 2, 3])
    assert drain(queue, see, ack=ack) == 3
    assert payloads("q") == []
    assert Seen.objects.count() == 3


@each_mode
def test_when_the_message_is_gone(ack: str) -> None:
    """Early: before the handler. Late and atomic: after it."""
    queue = Queue("q")
    queue.publish(1)
    there: list[bool] = []

    def look(message: Message) -> None:
        with second_session() as other:
            row = other.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchone()
        there.append(bool(row and row[0]))

    drain(queue, look, ack=ack)
    assert there == [ack != "early"]
    assert payloads("q") == []


@pytest.mark.parametrize(("ack", "left"), [("late", [1]), ("early", []), ("atomic", [1])])
def test_a_handler_that_raises(ack: str, left: list[int]) -> None:
    """Late and atomic give the message back; early has let it go: at most once."""
    queue = Queue("q")
    queue.publish(1)

    def fail(message: Message) -> None:
        see(message)
        raise ValueError("bad")

    drain(queue, fail, ack=ack)
    assert payloads("q") == left
    # Only atomic takes the handler's writes back.
    assert Seen.objects.count() == (0 if ack == "atomic" else 1)


def test_atomic_commits_the_handlers_writes_and_the_ack_together() -> None:
    """While the handler's transaction is open, others see neither its writes nor the message gone."""
    queue = Queue("q")
    queue.publish(1)
    inside: list[Any] = []

    def handle(message: Message) -> None:
        see(message)
        inside.append(connection.in_atomic_block)
        transaction.on_commit(lambda: inside.append((Seen.objects.count(), payloads("q"))))

    drain(queue, handle, ack="atomic")
    assert inside == [True, (1, [])]


def test_atomic_rolls_back_the_writes_of_a_handler_whose_lease_was_lost() -> None:
    """Somebody else is handling the message: this effect must not be there twice."""
    queue = Queue("q")
    queue.publish(1)
    committed: list[int] = []

    def handle(message: Message) -> None:
        see(message)
        transaction.on_commit(lambda: committed.append(1))
        steal(message)

    drain(queue, handle, ack="atomic")
    assert Seen.objects.count() == 0
    assert committed == []
    assert payloads("q") == [1]
    (row,) = MessageQueueItem.objects.values("failures", "lease_token")
    assert row["failures"] is None
    assert row["lease_token"] is not None


def test_atomic_outlives_an_extension_of_its_lease_whatever_the_default_isolation() -> None:
    """Under a stricter default too: the extension changes the row after the handler's transaction began."""
    queue = Queue("q", lease=0.6)
    message_id = queue.publish(1)
    name = connection.settings_dict["NAME"]

    def handle(message: Message) -> None:
        see(message)
        with second_session() as other:
            read = "SELECT lease_expires_at FROM django_pgqueue_messagequeueitem WHERE id = %s"
            wait_until(lambda: other.execute(read, [message.id]).fetchone() != (message.lease_expires_at,))

    fetch(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    try:
        assert drain(queue, handle, ack="atomic") == 1
    finally:
        fetch(f"ALTER DATABASE {name} RESET default_transaction_isolation")
    assert list(Seen.objects.values_list("msg_id", "attempt")) == [(message_id, 1)]
    assert not MessageQueueItem.objects.exists()


def test_atomic_gives_the_message_back_when_the_transaction_is_already_lost() -> None:
    """A handler that swallowed a database error has done nothing; it is not acked for it."""
    queue = Queue("q")
    queue.publish(1)

    def swallow(message: Message) -> None:
        see(message)
        try:
            fetch("SELECT 1 / 0")
        except Exception:
            return

    drain(queue, swallow, ack="atomic")
    assert Seen.objects.count() == 0
    assert payloads("q") == [1]
    assert MessageQueueItem.objects.get().failures


@pytest.mark.parametrize("ack", ["late", "atomic"])
def test_a_late_ack_of_a_stolen_message_leaves_it_to_its_new_owner(ack: str) -> None:
    """The worker goes on with the next message."""
    queue = Queue("q")
    queue.publish_many([1, 2])

    def handle(message: Message) -> None:
        if message.payload == 1:
            steal(message)

    drain(queue, handle, ack=ack)
    assert payloads("q") == [1]
    assert MessageQueueItem.objects.get().lease_expires_at is not None


def test_early_does_not_start_what_is_no_longer_its_own() -> None:
    """The early ack is fenced too: else the message would be handled by two."""
    queue = Queue("q", lease=30)
    queue.publish_many([1, 2])
    handled: list[Any] = []

    def handle(message: Message) -> None:
        handled.append(message.payload)
        with second_session() as other:
            other.execute("UPDATE django_pgqueue_messagequeueitem SET lease_token = gen_random_uuid()")

    drain(queue, handle, ack="early")
    assert handled == [1]
    assert payloads("q") == [2]


@each_mode
def test_a_connection_that_the_handler_broke_hurts_no_other_message(ack: str) -> None:
    """Closed, killed, or left in manual transaction mode: the next message finds a good one."""
    queue = Queue("q", max_deliveries=1)
    queue.publish_many(["close", "good", "kill", "good", "manual", "good", "aborted", "good"])
    seen: list[int] = []

    def handle(message: Message) -> None:
        if message.payload == "good":
            see(message)
            seen.append(fetch("SELECT count(*) FROM django_pgqueue_messagequeueitem")[0][0])
        elif message.payload == "close":
            connection.close()
        elif message.payload == "kill":
            ((pid,),) = fetch("SELECT pg_backend_pid()")
            with second_session() as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            fetch("SELECT 1")
        elif ack != "atomic":
            connection.set_autocommit(False)
            Seen.objects.create(msg_id=0, worker=0, attempt=0)
            if message.payload == "aborted":
                fetch("SELECT 1 / 0")

    drain(queue, handle, ack=ack)
    assert len(seen) == 4
    assert Seen.objects.filter(msg_id__gt=0).count() == 4
    assert Seen.objects.filter(msg_id=0).count() == 0


# --- Async ---


@pytest.mark.parametrize("ack", ["late", "early"])
def test_async_handlers_run_at_once_on_one_event_loop(ack: str) -> None:
    """Ten of them wait for each other in one thread."""
    queue = Queue("q")
    queue.publish_many(list(range(10)))
    loops: set[int] = set()
    together = asyncio.Barrier(10)

    async def handle(message: Message) -> None:
        loops.add(id(asyncio.get_running_loop()))
        loops.add(threading.get_ident())
        await asyncio.wait_for(together.wait(), 10)
        await sync_to_async(see)(message)

    drain(queue, handle, ack=ack, concurrency=10)
    assert len(loops) == 2
    assert payloads("q") == []
    assert Seen.objects.count() == 10


@pytest.mark.parametrize(
    ("error", "left", "dead"),
    [
        (ValueError("bad"), [1], []),
        (Nack(delay=60), [1], []),
        (Reject("no"), [], [1]),
        (asyncio.CancelledError(), [1], []),
    ],
    ids=repr,
)
def test_async_handlers_fail_as_sync_ones_do(error: BaseException, left: list[int], dead: list[int]) -> None:
    """Give back, delay, or set aside; the loop goes on with the next message."""
    queue = Queue("q")
    queue.publish_many([1, 2])

    async def handle(message: Message) -> None:
        if message.payload == 1:
            raise error

    assert drain(queue, handle) == 2
    assert payloads("q") == left
    assert payloads("q.dead") == dead


def test_an_async_handler_is_woken() -> None:
    """A message published while the loop waits is handled without a poll."""
    queue = Queue("q")
    seen: list[Any] = []

    async def handle(message: Message) -> None:
        seen.append(message.payload)

    with consuming(Consumer([make_handler(queue, handle, concurrency=3)])):
        for number in range(5):
            queue.publish(number)
            wait_until(lambda number=number: len(seen) == number + 1, 10)  # type: ignore[misc]
    assert seen == [0, 1, 2, 3, 4]


class Callable:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    async def __call__(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.seen.append(message.payload)


def test_what_is_async_is_awaited_whatever_its_form() -> None:
    """A partial of an async function, and an object whose __call__ is async."""
    seen: list[Any] = []

    async def handle(extra: str, message: Message) -> None:
        await asyncio.sleep(0)
        seen.append(message.payload)

    for form in (functools.partial(handle, "x"), Callable(seen)):
        queue = Queue("q")
        queue.publish(1)
        drain(queue, form)
    assert seen == [1, 1]
    assert payloads("q") == []


@each_mode
def test_a_sync_handler_that_hands_out_a_coroutine_is_not_acked(ack: str) -> None:
    """A decorator that hides an async function would else lose every message."""

    async def handle(message: Message) -> None:
        raise AssertionError("never awaited")

    queue = Queue("q")
    queue.publish(1)
    drain(queue, lambda message: handle(message), ack=ack)
    if ack != "early":
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert "returned a coroutine" in failures[0]["reason"]


# --- What a handler leaves behind ---


def begin_by_hand() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")


@pytest.mark.parametrize(
    "leave",
    [
        lambda: transaction.set_autocommit(False),
        lambda: transaction.atomic().__enter__(),
        begin_by_hand,
    ],
    ids=["autocommit-off", "atomic-entered", "begin-by-hand"],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_handler_that_leaves_a_transaction_open_has_failed(leave: Any, *, is_async: bool) -> None:
    """What it wrote is rolled back, so there is no ack; its neighbours' writes and acks are not touched."""
    queue = Queue("q", max_deliveries=1)
    bad, *good = queue.publish_many(["bad", 1, 2, 3])

    def work(message: Message) -> None:
        if message.payload == "bad":
            leave()
        see(message)

    async def work_async(message: Message) -> None:
        await sync_to_async(work)(message)

    drain(queue, work_async if is_async else work)
    assert sorted(Seen.objects.values_list("msg_id", flat=True)) == good
    (row,) = MessageQueueItem.objects.values("pk", "queue_id", "failures")
    assert (row["pk"], row["queue_id"]) == (bad, "q.dead")
    assert "left a transaction open" in row["failures"][0]["reason"]


def test_atomic_with_an_inner_block_left_entered_has_failed() -> None:
    """Neither the handler's writes nor the ack are there, and the history says why."""
    queue = Queue("q", max_deliveries=1)
    queue.publish(1)

    def handle(message: Message) -> None:
        see(message)
        transaction.atomic().__enter__()

    drain(queue, handle, ack="atomic")
    assert not Seen.objects.exists()
    (row,) = MessageQueueItem.objects.values("queue_id", "failures")
    assert row["queue_id"] == "q.dead"
    assert "left a transaction open" in row["failures"][0]["reason"]


@pytest.mark.parametrize("word", [Reject, Nack])
def test_the_exception_itself_may_be_the_reason(word: Any) -> None:
    """Its class and text are stored, and the worker goes on."""
    queue = Queue("q", max_deliveries=1)
    queue.publish_many([1, 2])

    def handle(message: Message) -> None:
        if message.payload == 1:
            raise word(ValueError("no such order"))

    assert drain(queue, handle) == 2
    (row,) = MessageQueueItem.objects.values("queue_id", "failures")
    assert (row["queue_id"], row["failures"][0]["reason"]) == ("q.dead", "builtins.ValueError: no such order")


def test_a_generator_is_refused_as_a_handler() -> None:
    """Calling it runs nothing; hidden in a wrapper it fails when it is called."""

    def generate(message: Message) -> Any:
        yield message

    with pytest.raises(ValueError, match="generator"):
        make_handler(Queue("q"), generate)
    queue = Queue("q", max_deliveries=1)
    queue.publish(1)
    drain(queue, lambda message: generate(message))
    (row,) = MessageQueueItem.objects.values("failures")
    assert "returned a generator" in row["failures"][0]["reason"]
