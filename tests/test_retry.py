"""When a failed message comes back: back-off, its bounds, and what a handler asks for."""

import random
from typing import Any

import pytest

from django_pgqueue import Nack, Queue, Reject
from django_pgqueue.backoff import backoff_delay, check_backoff
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.outcomes import FALLBACK_DELAY
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services.dead_letters import MAX_REASON_LENGTH
from tests.support import fetch, payloads

EXACT = {"base": 1, "factor": 2, "max": 3600, "jitter": 0}


@pytest.fixture
def queue(db: None) -> Queue:
    return Queue("q", backoff={**EXACT, "base": 10}, max_deliveries=3)


def due_in() -> float:
    """Return the seconds until the only message is due."""
    ((seconds,),) = fetch(
        "SELECT extract(epoch FROM read_after - statement_timestamp())::float8 FROM django_pgqueue_messagequeueitem"
    )
    return float(seconds)


def consume(queue: Queue, function: Any) -> None:
    Consumer([make_handler(queue, function)], max_messages=1).run()


# --- The delay ---


@pytest.mark.parametrize(
    ("deliveries", "delay"), [(1, 1), (2, 2), (3, 4), (8, 128), (12, 2048), (13, 3600), (99, 3600)]
)
def test_the_delay_doubles_up_to_its_maximum(deliveries: int, delay: float) -> None:
    """base * factor ** (deliveries - 1), at most max."""
    assert backoff_delay(EXACT, deliveries) == delay


def test_the_delay_of_a_huge_delivery_count_does_not_overflow() -> None:
    """A float power that overflows is the maximum."""
    assert backoff_delay(EXACT, 1_000_000) == 3600


def test_jitter_spreads_the_delay_both_ways() -> None:
    """What failed together comes back apart, and never far from where it should."""
    random.seed(1)
    delays = [backoff_delay({**EXACT, "base": 100, "jitter": 0.2}, 1) for _ in range(500)]
    assert 80 <= min(delays) < 85
    assert 115 < max(delays) <= 120


def test_a_partial_backoff_is_completed() -> None:
    """What is left out is the default."""
    assert check_backoff({"base": 5}) == {"base": 5, "factor": 2.0, "max": 3600.0, "jitter": 0.1}


@pytest.mark.parametrize(
    ("backoff", "message"),
    [
        ({"bases": 1}, "bases"),
        ({"base": -1}, r"backoff\['base'\]"),
        ({"max": float("inf")}, r"backoff\['max'\]"),
        ({"factor": 0.5}, "factor"),
        ({"jitter": 1.5}, "jitter"),
        ({"base": "1"}, r"backoff\['base'\]"),
    ],
)
def test_a_wrong_backoff_is_refused_where_it_is_declared(backoff: Any, message: str) -> None:
    """The error names the key."""
    with pytest.raises(ValueError, match=message):
        Queue("q", backoff=backoff)


def test_the_settings_backoff_is_the_default(settings: Any, db: None) -> None:
    """It is read when a message fails, not when the queue is declared."""
    queue = Queue("q")
    queue.publish(1)
    settings.PGQUEUE = {"BACKOFF": {"base": 70, "jitter": 0}}
    queue.nack(*queue.claim())
    assert 68 < due_in() <= 70


# --- Through the consumer ---


@pytest.mark.django_db(transaction=True)
class TestFailures:
    def test_a_message_that_failed_is_delayed_by_the_backoff(self, queue: Queue) -> None:
        """Through read_after: until then nobody claims it."""

        def fail(message: Any) -> None:
            raise ValueError("no such customer")

        queue.publish(1)
        consume(queue, fail)
        assert 8 < due_in() <= 10
        assert queue.claim() == []
        fetch("UPDATE django_pgqueue_messagequeueitem SET read_after = statement_timestamp()")
        consume(queue, fail)
        assert 18 < due_in() <= 20
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert [failure["reason"] for failure in failures] == ["builtins.ValueError: no such customer"] * 2

    def test_the_last_failure_sets_the_message_aside(self, queue: Queue) -> None:
        """After max_deliveries it is in the dead-letter queue, and the queue is empty."""

        def fail(message: Any) -> None:
            raise ValueError(f"attempt {message.delivery_count}")

        queue.publish(1)
        for _ in range(3):
            consume(queue, fail)
            fetch("UPDATE django_pgqueue_messagequeueitem SET read_after = statement_timestamp()")
        assert payloads("q") == []
        assert payloads("q.dead") == [1]
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert [failure["reason"][-9:] for failure in failures] == ["attempt 1", "attempt 2", "attempt 3"]

    def test_a_callable_backoff_is_given_the_delivery_count(self) -> None:
        """Seconds by whatever rule the project has."""
        queue = Queue("q", backoff=lambda deliveries: deliveries * 100, max_deliveries=3)
        queue.publish(1)
        queue.nack(*queue.claim())
        assert 98 < due_in() <= 100

    def test_nack_chooses_its_delay(self, queue: Queue) -> None:
        """Raised by a handler, it wins over the back-off."""

        def later(message: Any) -> None:
            raise Nack("rate limited", delay=77)

        queue.publish(1)
        consume(queue, later)
        assert 75 < due_in() <= 77
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert failures[0]["reason"] == "rate limited"

    def test_nack_without_a_delay_takes_the_backoff(self, queue: Queue) -> None:
        """Giving back is a failure like any other."""

        def later(message: Any) -> None:
            raise Nack

        queue.publish(1)
        consume(queue, later)
        assert 8 < due_in() <= 10

    def test_reject_sets_the_message_aside_at_once(self, queue: Queue) -> None:
        """Without a retry, with its reason."""

        def refuse(message: Any) -> None:
            raise Reject("unknown customer")

        queue.publish(1)
        consume(queue, refuse)
        assert payloads("q.dead") == [1]
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert [failure["reason"] for failure in failures] == ["unknown customer"]

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), RecursionError()], ids=repr)
    def test_whatever_a_handler_raises_fails_the_message_and_not_the_worker(
        self, queue: Queue, error: BaseException
    ) -> None:
        """Also what is no Exception: sys.exit() in a handler must not leave a worker less."""
        handled: list[Any] = []

        def fail_first(message: Any) -> None:
            handled.append(message.payload)
            if message.payload == 1:
                raise error

        queue.publish_many([1, 2])
        Consumer([make_handler(queue, fail_first)], max_messages=2).run()
        assert handled == [1, 2]
        assert payloads("q") == [1]

    def test_a_wrong_delay_of_a_handler_costs_no_worker(self, queue: Queue) -> None:
        """Nack(delay=-1) is a bug of the handler: the message comes back in a minute, and the worker goes on."""
        handled: list[Any] = []

        def fail_first(message: Any) -> None:
            handled.append(message.payload)
            if message.payload == 1:
                raise Nack(delay=-1)

        queue.publish_many([1, 2])
        Consumer([make_handler(queue, fail_first)], max_messages=2).run()
        assert handled == [1, 2]
        assert 58 < due_in() <= FALLBACK_DELAY

    def test_a_callable_backoff_that_raises_costs_no_worker(self) -> None:
        """The message comes back in a minute, and the worker goes on."""

        def wrong(deliveries: int) -> float:
            raise ZeroDivisionError

        handled: list[Any] = []

        def fail_first(message: Any) -> None:
            handled.append(message.payload)
            if message.payload == 1:
                raise ValueError("bad")

        queue = Queue("q", backoff=wrong)
        queue.publish_many([1, 2])
        Consumer([make_handler(queue, fail_first)], max_messages=2).run()
        assert handled == [1, 2]
        assert 58 < due_in() <= FALLBACK_DELAY
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert failures[0]["reason"] == "builtins.ValueError: bad"

    def test_an_error_that_has_no_text_is_told_by_its_class(self, queue: Queue) -> None:
        """An exception whose __str__ fails does not take the worker down."""

        class Mute(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        def fail(message: Any) -> None:
            raise Mute

        queue.publish(1)
        consume(queue, fail)
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert "Mute" in failures[0]["reason"]

    def test_the_text_of_an_error_is_made_storable_and_capped(self, queue: Queue) -> None:
        """An error that quotes binary data does not keep its message from being given back."""

        def fail(message: Any) -> None:
            raise ValueError("\0\ud800" + "x" * 100_000)

        queue.publish(1)
        consume(queue, fail)
        (failures,) = MessageQueueItem.objects.values_list("failures", flat=True)
        assert failures[0]["reason"].startswith("builtins.ValueError: \\0\\ud800xxx")
        assert len(failures[0]["reason"]) < MAX_REASON_LENGTH + 20
