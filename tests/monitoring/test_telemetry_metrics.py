"""Instruments of OpenTelemetry: what they count and measure, and that the docs list them."""

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.db.models.functions import Now
from django.db.utils import OperationalError

from django_pgqueue import Message, Queue, QueueNotFound, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.monitoring import gauges as gauges_module
from django_pgqueue.monitoring import opentelemetry
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import counting as counting_services
from tests.monitoring.test_metrics import exported
from tests.support.processes import drain
from tests.support.rows import delete_queue, make_message, make_queue
from tests.support.spans import Told, telling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "opentelemetry.md"
SENT, CONSUMED = "messaging.client.sent.messages", "messaging.client.consumed.messages"
OPERATIONS, PROCESSING = "messaging.client.operation.duration", "messaging.process.duration"


@pytest.fixture
def told() -> Iterator[Told]:
    gauges_module._names.clear()
    with telling(gauges=True) as told:
        yield told
    gauges_module._names.clear()


# --- What is measured as it happens ---


def test_publishes_claims_and_handlers_are_counted_and_timed(told: Told) -> None:
    """By operation and destination."""
    queue = Queue("orders")
    queue.publish(1)
    queue.publish_many(range(4))
    assert len(drain(queue)) == 5
    names = {"messaging_system": "django_pgqueue", "messaging_destination_name": "orders"}
    assert told.value(SENT, **names, messaging_operation_name="publish", messaging_operation_type="send") == 5
    assert told.value(CONSUMED, **names, messaging_operation_name="claim", messaging_operation_type="receive") == 5
    assert told.value(OPERATIONS, **names, messaging_operation_name="publish") == 2
    assert told.value(OPERATIONS, **names, messaging_operation_name="claim") == len(told.spans("claim orders"))
    assert told.value(PROCESSING, **names, messaging_operation_name="process") == 5
    assert (told.metrics()[SENT].unit, told.metrics()[PROCESSING].unit) == ("{message}", "s")


def test_durations_are_those_of_the_spans(told: Told) -> None:
    """In seconds, with the buckets that the conventions advise."""
    queue = Queue("orders")
    queue.publish(1)
    Consumer([make_handler(queue, lambda message: None)], drain=True).run()
    for name, span in ((PROCESSING, "process orders"), (OPERATIONS, "claim orders")):
        (point,) = [
            point for labels, point in told.points(name) if labels["messaging.operation.name"] == span.split()[0]
        ]
        found = told.span(span)
        assert found.start_time and found.end_time
        assert point.sum == pytest.approx((found.end_time - found.start_time) / 1e9, abs=0.005)
        assert tuple(point.explicit_bounds) == opentelemetry.DURATIONS


def test_failures_have_a_type(told: Told) -> None:
    """A publish that failed is one message that was tried; a topic's message is one, whatever copies it has."""
    queue = Queue("orders", max_deliveries=1)
    queue.declare()
    delete_queue("orders")
    with pytest.raises(QueueNotFound):
        queue.publish(1)
    failed = {"error_type": "django_pgqueue.exceptions.QueueNotFound"}
    assert told.value(SENT, **failed) == told.value(OPERATIONS, **failed) == 1
    queue.declare()
    for name in ("a", "b"):
        Topic("prices").bind(Queue(name))
    Topic("prices").publish(1)
    assert told.value(SENT, messaging_destination_name="prices") == 1

    def fail(message: Message) -> None:
        raise ValueError

    queue.publish(1)
    Consumer([make_handler(queue, fail)], drain=True).run()
    assert told.value(PROCESSING, error_type="ValueError") == 1


def test_a_live_subscriber_consumes(told: Told) -> None:
    """Nobody claims what it gets."""
    with Topic("prices").subscribe(lambda message: None):
        Topic("prices").publish(1)
        wait_until(lambda: told.points(PROCESSING))
        wait_until(lambda: told.points(CONSUMED))
    assert told.value(CONSUMED, messaging_destination_name="prices", messaging_operation_name="process") == 1


WAIT = "pgqueue.message.wait"


@pytest.mark.parametrize("due_in", [None, -60.0], ids=["published then", "due then"])
def test_the_wait_is_from_when_a_message_was_due(told: Told, due_in: float | None) -> None:
    """By the database's clock: published two minutes ago, and perhaps delayed by one."""
    make_queue("orders")
    item = make_message("orders", due_in=due_in)
    MessageQueueItem.objects.filter(pk=item.pk).update(published_at=Now() - timedelta(seconds=120))
    Consumer([make_handler(Queue("orders"), lambda message: None)], drain=True).run()
    ((labels, point),) = told.points(WAIT)
    assert labels["messaging.destination.name"] == "orders"
    assert (120 if due_in is None else 60) <= point.sum < (140 if due_in is None else 80)


def test_the_wait_is_until_the_handler_starts(told: Told) -> None:
    """What is held and waits for a worker waits on."""
    queue = Queue("orders")
    queue.publish_many(range(3))
    Consumer([make_handler(queue, lambda message: time.sleep(0.2))], drain=True).run()
    ((_, point),) = told.points(WAIT)
    assert tuple(point.explicit_bounds) == opentelemetry.WAITS
    assert point.count == 3 and 0.6 <= point.sum < 5 and point.max >= 0.4 > point.min


# --- What signals tell, and what the tables hold ---


def test_signals_are_counted_as_for_prometheus(told: Told) -> None:
    """Committed publishes, handled, failed, given up, healed."""
    queue = Queue("orders", max_deliveries=1)
    with transaction.atomic():
        queue.publish_many(range(3))
        assert not told.points("pgqueue.messages_published")
    assert told.value("pgqueue.messages_published", queue="orders") == 3
    with transaction.atomic():
        queue.publish(1)
        transaction.set_rollback(True)
    assert told.value("pgqueue.messages_published", queue="orders") == 3
    queue.reject(*queue.claim(1))
    assert told.value("pgqueue.messages_dead_lettered", queue="orders") == 1
    assert len(drain(queue)) == 2
    assert told.value("pgqueue.messages_handled", queue="orders") == 2
    replies = Queue("replies", auto_deleted=True)
    replies.publish(1)
    delete_queue("replies")
    replies.publish(1)
    assert told.value("pgqueue.queues_healed", queue="replies", cause="vanished") == 1


def test_gauges_are_what_the_tables_hold(told: Told) -> None:
    """Read once for all of them at each collection."""
    make_queue("orders")
    make_message("orders", due_in=-120)
    make_message("orders", lease=60)
    Reaper("default").run_once()
    found = told.metrics()
    values = {
        (name, *sorted((point.attributes or {}).values())): point.value
        for name, metric in found.items()
        if name.removeprefix(opentelemetry.PREFIX) in {gauge.name for gauge in gauges_module.GAUGES}
        for point in metric.data.data_points
    }
    assert values["pgqueue.up",] == 1
    assert values["pgqueue.messages", "orders", "ready"] == values["pgqueue.messages", "leased", "orders"] == 1
    assert 115 < values["pgqueue.oldest_due_age", "orders"] < 140
    assert values["pgqueue.reaper_last_run_age",] < 20
    assert found["pgqueue.oldest_due_age"].unit == "s"


def test_one_collection_reads_the_tables_once(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one anew."""
    readings: list[int] = []
    depths = counting_services.depths

    def counting(most: int, using: str) -> Any:
        readings.append(most)
        return depths(most, using)

    monkeypatch.setattr(counting_services, "depths", counting)
    make_queue("orders")
    for number in range(1, 4):
        make_message("orders")
        assert told.value("pgqueue.messages", queue="orders", state="ready") == number
        assert len(readings) == number


def test_a_database_that_does_not_answer_is_a_value(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have none, and it is asked once."""
    asked: list[int] = []

    def fail(*arguments: Any) -> Any:
        asked.append(1)
        raise OperationalError("away")

    monkeypatch.setattr(counting_services, "depths", fail)
    assert told.value("pgqueue.up") == 0
    assert asked == [1] and not told.points("pgqueue.messages")


def test_a_process_reads_no_tables_unless_it_is_told_to() -> None:
    """All would tell the same. And none does when it has ended."""
    make_queue("orders")
    with telling() as told:
        assert not [name for name in told.metrics() if name == "pgqueue.messages"]
    with telling(gauges=True) as told:
        assert told.points("pgqueue.messages")
        opentelemetry.uninstall()
        assert not told.points("pgqueue.messages")


def test_names_without_end_are_one(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standing queues beyond so many, and all that are auto-deleted."""
    monkeypatch.setattr(gauges_module, "MAX_NAMES", 2)
    for number in range(5):
        Queue(f"q{number}").publish(1)
    for number in range(5):
        Queue(f"reply {number}", auto_deleted=True).publish(1)
    assert told.value(SENT, messaging_destination_name=gauges_module.OTHERS) == 3
    assert told.value(SENT, messaging_destination_template=gauges_module.AUTO_DELETED) == 5
    assert len(told.points(SENT)) == 4
    assert {name for name in told.names() if "reply" in name} == set()


# --- Docs ---


def test_the_instruments_have_prometheus_s_names_when_an_exporter_translates_them(told: Told) -> None:
    """So that one set of alerts and dashboards does for both."""
    counts = {f"{count.name}_total" for count in gauges_module.COUNTS.values()}
    gauges = {f"{gauge.name}_seconds" if gauge.unit == "s" else gauge.name for gauge in gauges_module.GAUGES}
    assert {f"pgqueue_{name}" for name in counts | gauges} == exported()
    # An exporter appends other units than seconds, but for those in braces.
    assert {gauge.unit[:1] for gauge in gauges_module.GAUGES} | {
        count.unit[0] for count in gauges_module.COUNTS.values()
    } <= {
        "",
        "s",
        "{",
    }


def created() -> set[str]:
    """Return the names of all instruments, also of those without values."""
    names: set[str] = set()

    class Noting:
        def __getattr__(self, method: str) -> Any:
            return lambda name, *arguments, **options: names.add(name)

    meter: Any = Noting()
    owner = opentelemetry.Telemetry(meter, meter)
    for gauge in gauges_module.GAUGES:
        opentelemetry._create_gauge(meter, gauge, opentelemetry.Readings("default"), owner)
    return names


def test_the_page_lists_all_instruments_and_no_other() -> None:
    """Those of the conventions and our own."""
    text = PAGE.read_text()
    instruments = text[text.index("## Instruments") :]
    assert set(re.findall(r"^\| `([a-z_.]+)`", instruments, re.MULTILINE)) == created()


def test_the_page_lists_all_spans_and_attributes_and_no_other() -> None:
    """As the code names them."""
    text = PAGE.read_text()
    spans = text[text.index("## Spans") : text.index("## Attributes")]
    assert re.findall(r"^\| `(\w+) ", spans, re.MULTILINE) == list(opentelemetry.TYPES)
    names = {
        value
        for value in vars(opentelemetry).values()
        if isinstance(value, str) and re.fullmatch(r"(messaging|server|error|pgqueue)(\.[a-z_]+)+", value)
    }
    attributes = text[text.index("## Attributes") : text.index("## Instruments")]
    assert set(re.findall(r"^\| `([a-z_.]+)`", attributes, re.MULTILINE)) == names
