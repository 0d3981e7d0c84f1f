"""Real failures of other systems over retries: B72 (a delay that overflows, or that is nothing)."""

import math
import time
from typing import Any

import pytest
from django.test import override_settings

from django_pgqueue import Message, Queue, checks
from django_pgqueue.backoff import backoff_delay
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import consuming
from tests.support.rows import make_message, payloads
from tests.support.sessions import fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

MAX_COUNT = 2**31 - 1
ITEM = MessageQueueItem._meta.db_table


def fail(message: Message) -> None:
    raise ValueError


def delays() -> list[float]:
    """Return the seconds from each message's last failure until it is due, in the order of publishing."""
    rows = fetch(
        "SELECT extract(epoch FROM read_after - (failures -> -1 ->> 'at')::timestamptz)::float8"
        f" FROM {ITEM} ORDER BY id"
    )
    return [delay for (delay,) in rows]


def test_b72_two_hundred_failures_wait_longer_each_time_and_never_longer_than_an_hour() -> None:
    """Through a claim, a nack and the database; nothing overflows, and 200 deliveries are no dead letter."""
    queue = Queue("q", max_deliveries=201, backoff={"base": 1, "jitter": 0})
    queue.publish({})
    waited = []
    for _ in range(200):
        fetch(f"UPDATE {ITEM} SET read_after = statement_timestamp()")
        (message,) = queue.claim()
        queue.nack(message)
        waited += delays()
    assert waited == [min(2**attempt, 3600) for attempt in range(200)]
    assert waited == sorted(waited)


@pytest.mark.parametrize("deliveries", [1_000, 10**6, MAX_COUNT - 1])
@pytest.mark.parametrize(
    "backoff", [{}, {"base": 1, "factor": 2}, {"base": 100 * 365 * 86_400, "factor": 1e9}], ids=repr
)
def test_b72_a_delivery_count_of_any_size_can_be_given_back(backoff: dict[str, float], deliveries: int) -> None:
    """At once: 2 to the two-billionth is not computed."""
    queue = Queue("q", max_deliveries=MAX_COUNT, backoff=backoff)
    queue.declare()
    make_message("q", delivery_count=deliveries - 1)
    (message,) = queue.claim()
    assert message.delivery_count == deliveries
    before = time.thread_time()
    queue.nack(message)
    assert time.thread_time() - before < 2
    (delay,) = delays()
    assert 3600 * 0.9 <= delay <= 3600 * 1.1


def test_b72_the_last_delivery_that_can_be_counted_is_the_last() -> None:
    """The counter does not overflow: the message is set aside."""
    queue = Queue("q", max_deliveries=MAX_COUNT)
    queue.declare()
    make_message("q", "x", delivery_count=MAX_COUNT - 1)
    (message,) = queue.claim()
    queue.nack(message)
    assert payloads("q") == []
    assert payloads("q.dead") == ["x"]


@pytest.mark.parametrize("base", [0.001, 1, 60])
def test_b72_a_delay_is_never_far_below_its_base(base: float) -> None:
    """Jitter takes away a tenth of it at the most."""
    backoff = {"base": base, "factor": 2, "max": 3600, "jitter": 0.1}
    for deliveries in range(1, 200):
        for _ in range(20):
            assert base * 0.9 <= backoff_delay(backoff, deliveries) <= 3600 * 1.1


WRONG = [
    {"base": -1},
    {"base": 1e300},
    {"base": math.inf},
    {"base": math.nan},
    {"base": 10**400},
    {"base": True},
    {"base": "1"},
    {"factor": 0},
    {"factor": 1e300},
    {"max": -1},
    {"max": 1e300},
    {"jitter": -0.1},
    {"jitter": 2},
]


@pytest.mark.parametrize("backoff", WRONG, ids=lambda backoff: f"{backoff!r:.30}")
def test_b72_a_back_off_out_of_range_is_refused(backoff: dict[str, Any]) -> None:
    """Where the queue is declared, and by `manage.py check` in the settings."""
    with pytest.raises(ValueError, match="backoff"):
        Queue("q", backoff=backoff)
    with override_settings(PGQUEUE={"BACKOFF": backoff}):
        assert [message.id for message in checks.check_settings(None)] == ["django_pgqueue.E003"]


def test_b72_what_failed_together_comes_back_apart() -> None:
    """Jitter is on by default."""
    queue = Queue("q", backoff={"base": 1_000})
    queue.publish_many(range(50))
    queue.nack(*queue.claim(50))
    waited = delays()
    assert 900 <= min(waited) < max(waited) <= 1_100
    assert max(waited) - min(waited) > 50
    assert len({round(delay, 2) for delay in waited}) > 40


def test_b72_a_base_of_nothing_burns_the_deliveries_of_its_own_message_only() -> None:
    """It was asked for: the failing message is a dead letter soon, and the others are handled."""
    queue = Queue("q", max_deliveries=20, backoff={"base": 0})
    queue.publish_many(["bad", *range(20)])
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == "bad":
            raise ValueError

    with consuming(Consumer([make_handler(queue, handle)])):
        wait_until(lambda: not payloads("q"))
    assert seen.count("bad") == 20
    assert sorted(number for number in seen if number != "bad") == list(range(20))
    assert payloads("q.dead") == ["bad"]


def test_b72_by_default_a_failing_message_takes_its_time() -> None:
    """Its five deliveries are spread over fifteen seconds: the second comes a second after the first."""
    queue = Queue("q")
    queue.publish({})
    Consumer([make_handler(queue, fail)], max_messages=1).run()
    (delay,) = delays()
    assert 0.9 <= delay <= 1.1
