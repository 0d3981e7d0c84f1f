"""Spans of publishes, claims and handlers, linked across the queue, as the SDK of OpenTelemetry gets them."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings
from opentelemetry import baggage, context, propagate
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from django_pgqueue import Message, Nack, PayloadError, Queue, QueueNotFound, Reject, Topic, instrumentation
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.monitoring import opentelemetry
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import consuming, drain, environment, worker
from tests.support.rows import delete_queue
from tests.support.sessions import connect, run_async
from tests.support.spans import Told, attributes_of, id_of, links_of, telling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parent.parent.parent
GIVEN = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
QUICK = {"base": 0, "jitter": 0}


@pytest.fixture
def told() -> Iterator[Told]:
    with telling() as told:
        yield told


def handle(queue: Queue, function: Callable[[Any], Any], count: int = 1, **options: Any) -> None:
    """Let a consumer run a handler for so many messages."""
    Consumer([make_handler(queue, function, **options)], drain=True, max_messages=count).run()


def traceparent(span: ReadableSpan) -> str:
    trace_id, span_id = id_of(span)
    assert span.context is not None
    return f"00-{format_trace_id(trace_id)}-{format_span_id(span_id)}-{span.context.trace_flags:02x}"


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent and span.parent.span_id


# --- The way of a message ---


def test_a_message_is_followed_across_the_queue(told: Told) -> None:
    """Publish, claim, handler and what that does: whose child each is, and what links to what."""
    queue = Queue("orders")
    seen: list[dict[str, Any]] = []

    def work(message: Message) -> None:
        seen.append(message.headers)
        with told.tracer.start_as_current_span("own"):
            queue_of_mails.publish(1)

    queue_of_mails = Queue("mails")
    headers = {"tenant": 7}
    with told.tracer.start_as_current_span("request"):
        message_id = queue.publish({"n": 1}, headers=headers)
    handle(queue, work)

    published, claimed, processed, own = map(told.span, ("publish orders", "claim orders", "process orders", "own"))
    assert parent_of(published) == id_of(told.span("request"))[1]
    assert links_of(claimed) == links_of(processed) == [id_of(published)]
    assert claimed.parent is None and processed.parent is None
    assert parent_of(own) == id_of(processed)[1] and parent_of(told.span("publish mails")) == id_of(own)[1]
    assert (published.kind, claimed.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT, SpanKind.CONSUMER)
    assert headers == {"tenant": 7} and seen == [{"tenant": 7, "traceparent": traceparent(published)}]
    common = {"messaging.system": "django_pgqueue", "messaging.destination.name": "orders"}
    assert common.items() <= attributes_of(published).items()
    assert attributes_of(published)["messaging.message.id"] == str(message_id)
    assert attributes_of(published)["messaging.operation.type"] == "send"
    server = connection.settings_dict
    assert attributes_of(published).get("server.address", "") == server["HOST"]
    assert str(attributes_of(published).get("server.port", "")) == str(server["PORT"])
    assert attributes_of(published)["messaging.operation.name"] == "publish"
    assert attributes_of(claimed)["messaging.operation.type"] == "receive"
    assert attributes_of(claimed)["messaging.batch.message_count"] == 1
    about = attributes_of(processed)
    assert common.items() <= about.items() and about["messaging.operation.type"] == "process"
    assert about["messaging.message.id"] == str(message_id) and about["pgqueue.delivery_count"] == 1
    assert about["pgqueue.outcome"] == "ack" and "error.type" not in about
    assert "messaging.batch.message_count" not in about
    assert processed.status.status_code == StatusCode.UNSET


def test_a_consumer_process_links_to_the_publisher_s(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it installs itself when Django starts, before the SDK is set up."""
    path = tmp_path / "spans"
    path.touch()
    monkeypatch.setenv("TESTAPP_SPANS", str(path))
    Queue("work").publish(1)
    published = told.span("publish work")
    with worker("work", "--handler", "tests.support.spans.work") as running:
        wait_until(lambda: "process work" in path.read_text())
        assert running.stop() == 0
    spans = {span["name"]: span for span in map(json.loads, path.read_text().splitlines())}
    link = {
        "trace_id": f"0x{format_trace_id(id_of(published)[0])}",
        "span_id": f"0x{format_span_id(id_of(published)[1])}",
    }
    for name in ("claim work", "process work"):
        (found,) = spans[name]["links"]
        assert link.items() <= found["context"].items()
    assert spans["own"]["parent_id"] == spans["process work"]["context"]["span_id"]


def test_one_span_for_many_messages(told: Told) -> None:
    """`publish_many`: its context in each of them."""
    queue = Queue("orders")
    queue.publish_many(range(3), headers={"a": 1})
    published = told.span("publish orders")
    assert attributes_of(published)["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes_of(published)
    headers = list(MessageQueueItem.objects.values_list("headers", flat=True))
    assert headers == [{"a": 1, "traceparent": traceparent(published)}] * 3
    assert drain(queue) == [0, 1, 2]
    assert [links_of(span) for span in told.spans("process orders")] == [[id_of(published)]] * 3
    queue.publish_many([])
    assert len(told.spans("publish orders")) == 1


def test_a_publish_by_async_code(told: Told) -> None:
    """Is a child of the span that the coroutine is in."""

    async def publish() -> None:
        with told.tracer.start_as_current_span("request"):
            await Queue("orders").apublish(1)

    run_async(publish())
    assert parent_of(told.span("publish orders")) == id_of(told.span("request"))[1]


def test_a_claim_by_hand(told: Told) -> None:
    """Only one that brought something; its code can link to the publish."""
    queue = Queue("orders")
    assert queue.claim() == []
    assert told.names() == []
    queue.publish_many(range(2))
    queue.publish(3)
    with told.tracer.start_as_current_span("mine"):
        messages = queue.claim(10)
    assert [attributes_of(span)["messaging.batch.message_count"] for span in told.spans("claim orders")] == [3]
    claimed = told.span("claim orders")
    assert parent_of(claimed) == id_of(told.span("mine"))[1]
    many, one = map(id_of, told.spans("publish orders"))
    assert links_of(claimed) == [many, many, one]
    assert claimed.start_time and claimed.end_time and claimed.start_time < claimed.end_time
    with told.tracer.start_as_current_span("handle", links=opentelemetry.links_to(*messages)):
        queue.ack(*messages)
    assert links_of(told.span("handle")) == [many, many, one]


def test_a_claim_has_a_bounded_number_of_links(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so has a batch."""
    monkeypatch.setattr(opentelemetry, "MAX_LINKS", 4)
    queue = Queue("orders")
    queue.publish_many(range(9))
    handle(queue, lambda messages: None, 9, batch=9)
    assert len(told.span("claim orders").links) == len(told.span("process orders").links) == 4
    assert attributes_of(told.span("claim orders"))["messaging.batch.message_count"] == 9


# --- Handlers of each kind ---


def test_a_batch_is_one_span_with_a_link_for_each_message(told: Told) -> None:
    """Errors of single messages are told by their ids."""
    queue = Queue("orders")
    ids = [queue.publish(number) for number in range(3)]
    handle(queue, lambda messages: {messages[1].id: ValueError("second")}, 3, batch=10)
    processed = told.span("process orders")
    assert links_of(processed) == [id_of(span) for span in told.spans("publish orders")]
    assert [dict(link.attributes or {}) for link in processed.links] == [
        {"messaging.message.id": str(message_id)} for message_id in ids
    ]
    about = attributes_of(processed)
    assert about["messaging.batch.message_count"] == 3 and "messaging.message.id" not in about
    assert about["pgqueue.outcome"] == "mixed" and about["error.type"] == "ValueError"
    (event,) = processed.events
    assert dict(event.attributes or {})["messaging.message.id"] == str(ids[1])


def test_an_exception_of_a_whole_batch_is_recorded_once(told: Told) -> None:
    """However many messages it is about. Of those of single messages some are."""
    queue = Queue("orders", max_deliveries=1)
    queue.publish_many(range(20))

    def fail(messages: list[Message]) -> None:
        raise ValueError("all")

    handle(queue, fail, 20, batch=20)
    processed = told.span("process orders")
    assert len(processed.events) == 1 and attributes_of(processed)["pgqueue.outcome"] == "nack"
    queue.publish_many(range(20))
    handle(queue, lambda messages: {message.id: ValueError(message.id) for message in messages}, 20, batch=20)
    assert len(told.spans("process orders")[1].events) == opentelemetry.MAX_EXCEPTIONS


def test_async_handlers_that_run_at_once_have_their_own_spans(told: Told) -> None:
    """What each does belongs to its own, also after it waited for the other."""
    queue = Queue("orders")
    ids = [queue.publish(number) for number in range(2)]
    arrived: list[int] = []

    async def work(message: Message) -> None:
        arrived.append(message.id)
        while len(arrived) < 2:
            await asyncio.sleep(0.001)
        with told.tracer.start_as_current_span(f"own {message.id}"):
            pass
        if message.id == ids[1]:
            raise ValueError("second")

    Consumer([make_handler(queue, work, concurrency=2)], drain=True, max_messages=2).run()
    spans = {int(attributes_of(span)["messaging.message.id"]): span for span in told.spans("process orders")}
    for message_id, published in zip(ids, told.spans("publish orders"), strict=True):
        assert links_of(spans[message_id]) == [id_of(published)]
        assert parent_of(told.span(f"own {message_id}")) == id_of(spans[message_id])[1]
    assert attributes_of(spans[ids[0]])["pgqueue.outcome"] == "ack"
    assert attributes_of(spans[ids[1]])["error.type"] == "ValueError"


ENDS: dict[str, tuple[BaseException | None, str, str | None]] = {
    "returns": (None, "ack", None),
    "raises": (ValueError("wrong"), "nack", "ValueError"),
    "gives it back": (Nack(delay=60), "nack", "django_pgqueue.exceptions.Nack"),
    "gives it up": (Reject("no use"), "reject", "django_pgqueue.exceptions.Reject"),
    "exits": (SystemExit(3), "nack", "SystemExit"),
}


@pytest.mark.parametrize("ack", ["late", "atomic"])
@pytest.mark.parametrize("end", ENDS)
def test_how_a_handler_ended(told: Told, end: str, ack: str) -> None:
    """The outcome, the exception and the status."""
    error, outcome, error_type = ENDS[end]
    queue = Queue("orders", max_deliveries=1)
    queue.publish(1)

    def work(message: Message) -> None:
        if error is not None:
            raise error

    handle(queue, work, ack=ack)
    processed = told.span("process orders")
    assert attributes_of(processed)["pgqueue.outcome"] == outcome
    assert attributes_of(processed).get("error.type") == error_type
    assert processed.status.status_code == (StatusCode.UNSET if error is None else StatusCode.ERROR)
    assert [event.name for event in processed.events] == ([] if error is None else ["exception"])


def test_a_failure_after_an_early_ack(told: Told) -> None:
    """The message is gone, and the span tells both."""
    queue = Queue("orders")
    queue.publish(1)

    def fail(message: Message) -> None:
        raise ValueError("late")

    handle(queue, fail, ack="early")
    about = attributes_of(told.span("process orders"))
    assert about["pgqueue.outcome"] == "ack" and about["error.type"] == "ValueError"


def test_a_lease_that_is_lost_meanwhile(told: Told) -> None:
    """The handler's transaction is rolled back: that is no ack, and nothing was handled."""
    queue = Queue("orders")
    queue.publish(1)

    def lose(message: Message) -> None:
        with connect() as other:
            other.execute("DELETE FROM django_pgqueue_messagequeueitem WHERE id = %s", [message.id])

    consumer = Consumer([make_handler(queue, lose, ack="atomic")], max_messages=1)
    assert consumer.run() == 0
    processed = told.span("process orders")
    assert attributes_of(processed)["pgqueue.outcome"] == "lost"
    assert attributes_of(processed)["error.type"] == "django_pgqueue.exceptions.LeaseLost"
    assert processed.status.status_code == StatusCode.ERROR


def test_a_transaction_that_is_left_open_is_a_failure(told: Told) -> None:
    """What the handler changed was rolled back."""
    queue = Queue("orders", max_deliveries=1)
    queue.publish(1)

    def leave_open(message: Message) -> None:
        transaction.set_autocommit(False)
        MessageQueueItem.objects.count()

    handle(queue, leave_open)
    about = attributes_of(told.span("process orders"))
    assert about["pgqueue.outcome"] == "nack" and about["error.type"] == "RuntimeError"


def test_a_payload_that_does_not_fit_its_schema(told: Told) -> None:
    """Is rejected before the handler; its span says why. Of a batch the others are handled."""

    def positive(payload: int) -> int:
        if payload < 0:
            raise ValueError("negative")
        return payload

    Queue("orders").publish_many([1, -2])
    handle(Queue("orders", schema=positive), lambda messages: None, 2, batch=2)
    processed = told.span("process orders")
    assert attributes_of(processed)["pgqueue.outcome"] == "mixed"
    assert attributes_of(processed)["error.type"] == "django_pgqueue.exceptions.PayloadError"
    assert len(processed.links) == 2


def test_each_delivery_links_to_the_same_publish(told: Told) -> None:
    """Retried, dead-lettered and redriven."""
    queue = Queue("orders", max_deliveries=2, backoff=QUICK)
    queue.publish(1)

    def fail(message: Message) -> None:
        raise ValueError

    Consumer([make_handler(queue, fail)], drain=True).run()
    assert queue.redrive() == 1
    assert drain(queue) == [1]
    processed = told.spans("process orders")
    assert [attributes_of(span)["pgqueue.outcome"] for span in processed] == ["nack", "nack", "ack"]
    assert [links_of(span) for span in processed] == [[id_of(told.span("publish orders"))]] * 3


# --- Topics ---


def test_a_topic_s_copies_link_to_its_publish(told: Told) -> None:
    """On each bound queue."""
    queues = [Queue("orders"), Queue("mails")]
    for queue in queues:
        Topic("prices").bind(queue)
    ids = Topic("prices").publish(1, headers={"a": 1})
    published = told.span("publish prices")
    assert published.kind == SpanKind.PRODUCER
    assert attributes_of(published)["pgqueue.copies"] == len(ids) == 2
    assert "messaging.message.id" not in attributes_of(published)
    for queue in queues:
        assert drain(queue) == [1]
        assert links_of(told.span(f"process {queue.name}")) == [id_of(published)]


def test_a_live_subscriber_is_linked_too(told: Told) -> None:
    """What it does belongs to its span, and what it raises is told."""

    def call(message: Any) -> None:
        with told.tracer.start_as_current_span(f"own {message.payload}"):
            pass
        if message.payload == 2:
            raise ValueError("two")

    with Topic("prices").subscribe(call):
        Topic("prices").publish(1)
        Topic("prices").publish(2)
        wait_until(lambda: len(told.spans("process prices")) == 2)
    for number, (published, processed) in enumerate(
        zip(told.spans("publish prices"), told.spans("process prices"), strict=True), 1
    ):
        assert processed.kind == SpanKind.CONSUMER and links_of(processed) == [id_of(published)]
        assert parent_of(told.span(f"own {number}")) == id_of(processed)[1]
        assert "pgqueue.outcome" not in attributes_of(processed)
    assert [attributes_of(span).get("error.type") for span in told.spans("process prices")] == [None, "ValueError"]


# --- Headers ---


def test_a_context_that_the_caller_gave_wins(told: Told) -> None:
    """The message keeps it, its handler links to it, and the publish is no producer but links to it too."""
    queue = Queue("orders")
    given = {"traceparent": GIVEN}
    token = context.attach(baggage.set_baggage("of", "this process"))
    try:
        queue.publish(1, headers=given)
        queue.publish_many([2], headers=given)
    finally:
        context.detach(token)
    assert list(MessageQueueItem.objects.values_list("headers", flat=True)) == [given] * 2
    assert drain(queue) == [1, 2]
    for span in [*told.spans("publish orders"), *told.spans("process orders")]:
        (link,) = span.links
        assert format_span_id(link.context.span_id) == GIVEN.split("-")[2]
    assert {span.kind for span in told.spans("publish orders")} == {SpanKind.CLIENT}


BROKEN = ["", "x", 7, None, [GIVEN], {"a": 1}, f"ff{GIVEN[2:]}", "00-" + "0" * 32 + "-0123456789abcdef-01", "é" * 9_000]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_context_breaks_nothing(told: Told, broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The message is handled, and its spans link to nothing. The caller's header stays as it is."""
    queue = Queue("orders")
    headers = {"traceparent": broken, "tracestate": 1, "baggage": [2]}
    queue.publish(1, headers=headers)
    assert MessageQueueItem.objects.get().headers == headers
    assert drain(queue) == [1]
    assert attributes_of(told.span("process orders"))["pgqueue.outcome"] == "ack"
    assert not told.span("process orders").links and not told.span("claim orders").links
    assert "instrument failed" not in caplog.text


class Raising(TextMapPropagator):
    """A propagator of the project's own, with a defect."""

    def extract(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("extract")

    def inject(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("inject")

    @property
    def fields(self) -> set[str]:
        return set()


def test_a_propagator_that_raises_fails_nothing(
    told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages go without a context, and come without links; their spans are well, and it is logged once."""
    monkeypatch.setattr(propagate, "get_global_textmap", Raising)
    monkeypatch.setattr("django_pgqueue.instrumentation._reported", set())
    queue = Queue("orders")
    queue.publish(1, headers={"a": 1})
    assert MessageQueueItem.objects.get().headers == {"a": 1}
    assert drain(queue) == [1]
    assert not told.span("process orders").links
    assert {span.status.status_code for span in told.exporter.get_finished_spans()} == {StatusCode.UNSET}
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "instrument failed at=extract",
        "instrument failed at=inject",
    ]


def test_the_bounds_are_for_what_the_caller_gives(told: Told) -> None:
    """What is added breaks none of them, and what is refused without it is refused with it, before a span."""
    headers = {"a": "x" * 50}
    queue, topic = Queue("orders"), Topic("prices")
    publishes: list[Callable[[Any], object]] = [
        lambda headers: queue.publish(1, headers=headers),
        lambda headers: queue.publish_many([1], headers=headers),
        lambda headers: topic.publish(1, headers=headers),
    ]
    topic.bind(queue)
    most = len(json.dumps(headers, separators=(",", ":")))
    with override_settings(PGQUEUE={"MAX_PAYLOAD_BYTES": most}):
        for publish in publishes:
            publish(headers)
        stored = list(MessageQueueItem.objects.values_list("headers", flat=True))
        assert [each.keys() for each in stored] == [{"a", "traceparent"}] * 3
        before = told.names()
        for wrong in ({**headers, "b": 1}, [1], {"a": "\0"}):
            for publish in publishes:
                with pytest.raises(PayloadError):
                    publish(wrong)
        assert told.names() == before


# --- Transactions and heals ---


def test_a_publish_that_is_rolled_back_has_a_span_all_the_same(told: Told) -> None:
    """It was published; what became of the transaction it does not know."""
    with transaction.atomic():
        Queue("orders").publish(1)
        transaction.set_rollback(True)
    assert told.span("publish orders").status.status_code == StatusCode.UNSET
    assert not MessageQueueItem.objects.exists()


def test_a_publish_that_fails(told: Told) -> None:
    """Is told as such, and raises as ever."""
    queue = Queue("orders")
    queue.declare()
    delete_queue("orders")
    with pytest.raises(QueueNotFound):
        queue.publish(1)
    published = told.span("publish orders")
    assert published.status.status_code == StatusCode.ERROR
    assert attributes_of(published)["error.type"] == "django_pgqueue.exceptions.QueueNotFound"


def test_a_heal_is_an_event_of_the_publish(told: Told) -> None:
    """With its cause. The span's name has not the queue's: such names are many."""
    queue = Queue("reply.7", auto_deleted=True)
    queue.publish(1)
    delete_queue("reply.7")
    queue.publish(2)
    first, second = told.spans("publish (auto-deleted)")
    assert not first.events
    (event,) = second.events
    assert (event.name, dict(event.attributes or {})["cause"]) == ("queue healed", "vanished")
    about = attributes_of(second)
    assert about["messaging.destination.name"] == "reply.7" and about["messaging.destination.temporary"] is True
    assert about["messaging.destination.template"] == "(auto-deleted)"


# --- Off, and out of order ---


class Quiet:
    """An instrument that does nothing."""

    def around(self, *arguments: Any) -> "contextlib.nullcontext[None]":
        return contextlib.nullcontext()

    publishing = handling = around

    def claimed(self, *arguments: Any) -> None:
        pass


def test_what_is_raised_outside_of_a_handler_is_nobody_s() -> None:
    """A handling that ended gets no more, and what is in it is let go."""
    handling, error = instrumentation.Handling([]), ValueError()
    target = instrumentation.Target("orders", "default")
    instrument = instrumentation.ShieldedInstrument(Quiet())
    with instrument.handling(lambda: (target, handling)):
        instrumentation.failed(1, error)
    instrumentation.failed(2, error)
    assert handling.errors == {1: error}


def test_without_it_headers_are_as_given() -> None:
    """Nothing is added, and `uninstall` ends what `install` began."""
    queue = Queue("orders")
    queue.publish(1)
    with telling() as told:
        opentelemetry.install()
        queue.publish(2)
        assert len(told.names()) == 1, "installed twice"
    queue.publish(3, headers={"a": 1})
    first, second, third = MessageQueueItem.objects.order_by("id").values_list("headers", flat=True)
    assert (first, second.keys(), third) == ({}, {"traceparent"}, {"a": 1})
    assert drain(queue) == [1, 2, 3]
    assert len(told.names()) == 1


UNIMPORTED = """
import django, importlib, pkgutil, sys
django.setup()
import django_pgqueue
for module in pkgutil.walk_packages(django_pgqueue.__path__, "django_pgqueue."):
    if module.name not in ("django_pgqueue.monitoring.opentelemetry", "django_pgqueue.monitoring.prometheus"):
        importlib.import_module(module.name)
from django_pgqueue import Queue
Queue("orders").publish(1)
assert len(Queue("orders").claim()) == 1
found = [name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "prometheus_client")]
assert not found, found
"""


def test_without_the_extras_nothing_of_them_is_imported() -> None:
    """By any other module than the two that are for them."""
    done = subprocess.run(
        [sys.executable, "-c", UNIMPORTED], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Failing:
    """An instrument that raises at each of its ends."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.calls = 0

    def around(self, *arguments: Any) -> "Failing":
        self.calls += 1
        if not self.at_end:
            raise RuntimeError("beginning")
        return self

    publishing = handling = around

    def claimed(self, *arguments: Any) -> None:
        self.calls += 1
        raise RuntimeError("claim")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("end")


@pytest.mark.parametrize("at_end", [False, True])
def test_an_instrument_that_raises_changes_nothing(
    at_end: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages are published, claimed and handled, errors are theirs; it is logged, once at each place."""
    failing = Failing(at_end)
    monkeypatch.setattr("django_pgqueue.instrumentation.instrument", instrumentation.ShieldedInstrument(failing))
    monkeypatch.setattr("django_pgqueue.instrumentation._reported", set())
    queue = Queue("orders", max_deliveries=2, backoff=QUICK)
    ids = [queue.publish(1), *queue.publish_many([2, 3])]
    assert len(ids) == 3 and Topic("prices").publish(1) == []
    heard = threading.Event()
    with Topic("prices").subscribe(lambda message: heard.set()):
        Topic("prices").publish(1)
        assert heard.wait(20)
    deliveries: list[int] = []

    def work(message: Message) -> None:
        deliveries.append(message.payload)
        if message.payload == 2:
            raise ValueError

    Consumer([make_handler(queue, work)], drain=True).run()
    assert sorted(deliveries) == [1, 2, 2, 3]
    assert MessageQueueItem.objects.get().payload == 2
    queue.declare()
    delete_queue("orders")
    with pytest.raises(QueueNotFound):
        queue.publish(1)
    assert failing.calls > 8
    places = [record.message for record in caplog.records if "instrument failed" in record.message]
    assert sorted(places) == [f"instrument failed at={place}" for place in ("claim", "process", "publish")]


class BadProcessor:
    """A span processor, or exporter, that raises."""

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError(name)

        return fail

    def shutdown(self) -> None:
        pass


def test_a_processor_that_raises_changes_nothing(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of a span or at its end."""
    monkeypatch.setattr("django_pgqueue.instrumentation._reported", set())
    bad: Any = BadProcessor()
    told.traces.add_span_processor(bad)
    queue = Queue("orders")
    queue.publish(1)
    queue.publish_many([2])
    assert drain(queue) == [1, 2]
    bad.on_start = lambda *arguments, **options: None
    bad._on_ending = bad.on_start
    queue.publish(3)
    assert drain(queue) == [3]


def test_an_exporter_that_raises_changes_nothing(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the SDK sees to."""
    monkeypatch.setattr(told.exporter, "export", BadProcessor().export)
    queue = Queue("orders")
    queue.publish(1)
    assert drain(queue) == [1]


def test_consuming_goes_on_while_it_is_switched(told: Told) -> None:
    """Installed and uninstalled while a consumer runs."""
    queue = Queue("orders")
    seen: list[int] = []
    with consuming(Consumer([make_handler(queue, lambda message: seen.append(message.payload), concurrency=2)])):
        for number in range(20):
            queue.publish(number)
            if number == 10:
                opentelemetry.uninstall()
        wait_until(lambda: len(seen) == 20)
    assert 0 < len(told.spans("publish orders")) <= 11
