"""
Traces and metrics for OpenTelemetry. Needs the extra: ``pip install django-pg-messagequeue[opentelemetry]``.

``install()`` enables it for this process. A publish is a span whose context is stored in the messages' headers. Claims
and runs of handlers are spans with links to it. Names follow the semantic conventions for messaging.
docs/opentelemetry.md lists all spans, attributes and instruments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, TracerProvider

from django_pgqueue import instrumentation, signals
from django_pgqueue.conf import database_alias
from django_pgqueue.consumer.outcomes import text_of
from django_pgqueue.exceptions import LeaseLost
from django_pgqueue.instrumentation import Handling, Publication, Target, Traced
from django_pgqueue.monitoring import gauges as gauges_module
from django_pgqueue.monitoring.gauges import COUNTS, GAUGES, Gauge

SCOPE = "django_pgqueue"
PREFIX = "pgqueue."
_UID = "django_pgqueue.opentelemetry"

SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
TEMPLATE = "messaging.destination.template"
TEMPORARY = "messaging.destination.temporary"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
MESSAGE_ID = "messaging.message.id"
MESSAGE_COUNT = "messaging.batch.message_count"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"
OUTCOME = "pgqueue.outcome"
DELIVERY_COUNT = "pgqueue.delivery_count"
COPIES = "pgqueue.copies"

# The operations that have spans, and their types in the conventions.
PUBLISH, CLAIM, PROCESS = "publish", "claim", "process"
TYPES = {PUBLISH: "send", CLAIM: "receive", PROCESS: "process"}

# Limits for one span. The SDK's own limit for links is 128, too.
MAX_LINKS = 128
MAX_EXCEPTIONS = 10

# Histogram buckets in seconds. DURATIONS are those of the conventions. Waits can be much longer.
DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)

Attributes = dict[str, str | bool | int]


class Telemetry:
    """The ``instrumentation.Instrument`` that reports to OpenTelemetry."""

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self._tracer = tracer
        self._duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of publishes, and of claims that returned messages.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages published, including those rolled back later."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages claimed, or passed to a live subscriber."
        )
        self._processing = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of handlers and of subscribers' callbacks.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )
        self._wait = meter.create_histogram(
            "pgqueue.message.wait",
            "s",
            "Time from when a message was due to the start of its handler.",
            explicit_bucket_boundaries_advisory=WAITS,
        )
        self._counters = {
            signal: meter.create_counter(f"{PREFIX}{count.name}", count.unit, count.text)
            for signal, count in COUNTS.items()
        }

    # --- Spans ---

    @contextmanager
    def publishing(self, target: Target, publication: Publication) -> Iterator[None]:
        """Record a publish as a span. Its context is put into the headers, unless the caller passed one there."""
        given = creation_of(publication.headers)
        labels = labels_of(PUBLISH, target)
        count, began = 1, time.perf_counter()
        try:
            with self._tracer.start_as_current_span(
                span_name(PUBLISH, target),
                kind=SpanKind.PRODUCER if given is None else SpanKind.CLIENT,
                attributes=attributes_of(PUBLISH, target),
                links=[] if given is None else [Link(given)],
            ) as span:
                if given is None:
                    inject(publication)
                try:
                    yield
                except BaseException as error:
                    labels[ERROR_TYPE] = class_name(type(error))
                    span.set_attribute(ERROR_TYPE, labels[ERROR_TYPE])
                    raise
                count = tell_ids(span, target, publication)
        finally:
            self._duration.record(time.perf_counter() - began, labels)
            self._sent.add(count, labels)

    def claimed(self, target: Target, messages: Sequence[Traced], began: float) -> None:
        """Record a finished claim as a span. ``began`` is its start by ``time.monotonic()``."""
        # All spans use this host's clock.
        now, elapsed = time.time_ns(), time.monotonic() - began
        attributes = attributes_of(CLAIM, target)
        attributes[MESSAGE_COUNT] = len(messages)
        span = self._tracer.start_span(
            span_name(CLAIM, target),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=links_to(*messages),
            start_time=now - int(elapsed * 1e9),
        )
        span.end(now)
        labels = labels_of(CLAIM, target)
        self._duration.record(elapsed, labels)
        self._consumed.add(len(messages), labels)

    @contextmanager
    def handling(self, target: Target, handling: Handling) -> Iterator[None]:
        """Record a run of a handler as a span, which is current while the handler runs."""
        labels = labels_of(PROCESS, target)
        for wait in handling.waits:
            self._wait.record(max(wait, 0.0), labels)
        attributes = attributes_of(PROCESS, target)
        attributes.update(about(handling))
        began = time.perf_counter()
        try:
            with self._tracer.start_as_current_span(
                span_name(PROCESS, target),
                kind=SpanKind.CONSUMER,
                attributes=attributes,
                links=links_to(*handling.messages),
            ) as span:
                yield
                if failure := tell_end(span, handling):
                    labels[ERROR_TYPE] = failure
        finally:
            self._processing.record(time.perf_counter() - began, labels)
            if target.is_topic:
                # Live messages are never claimed, so ``claimed()`` does not count them.
                self._consumed.add(len(handling.messages), labels)

    # --- Counters and gauges ---

    def count(self, sender: Any, signal: Any, **kwargs: Any) -> None:
        """Count what a signal reports."""
        labels, amount = COUNTS[signal].of(sender, kwargs)
        self._counters[signal].add(amount, dict(zip(COUNTS[signal].labels, labels, strict=True)))

    def note_heal(self, sender: str, cause: str, **kwargs: Any) -> None:
        """Add an event to the span of the publish (in a transaction: the span at commit) that recreated a queue."""
        trace.get_current_span().add_event("queue healed", {DESTINATION: sender, "cause": cause})


class Readings:
    """One reading of the tables for all gauges, because OpenTelemetry asks for each gauge separately."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._lock = threading.Lock()
        self._left: gauges_module.Reading = {}

    def observe(self, gauge: Gauge) -> list[Observation]:
        """Return a gauge's values. Reads the tables again if the gauge was already observed since the last reading."""
        with self._lock:
            if gauge not in self._left:
                self._left = gauges_module.read(self.using)
            values = self._left.pop(gauge)
        return [Observation(value, dict(zip(gauge.labels, labels, strict=True))) for labels, value in values]


def install(
    using: str | None = None,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    gauges: bool = False,
) -> None:
    """
    Start tracing and counting. Only the first call has an effect; further calls are harmless.

    Without providers, the global ones are used, even if they are set later. With ``gauges``, this process reads the
    tables each time that metrics are collected, from the database with the alias ``using`` (None: ``DATABASE``). One
    process is enough, because all processes would report the same numbers.
    """
    if isinstance(instrumentation.installed(), Telemetry):
        return
    meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
    telemetry = Telemetry(trace.get_tracer(SCOPE, tracer_provider=tracer_provider), meter)
    if gauges:
        readings = Readings(database_alias(using))
        for gauge in GAUGES:
            _create_gauge(meter, gauge, readings, telemetry)
    for signal in COUNTS:
        signal.connect(telemetry.count, weak=False, dispatch_uid=_UID)
    signals.queue_healed.connect(telemetry.note_heal, weak=False, dispatch_uid=f"{_UID}.heal")
    instrumentation.install(telemetry)


def uninstall() -> None:
    """Stop tracing and counting."""
    instrumentation.uninstall()
    for signal in COUNTS:
        signal.disconnect(dispatch_uid=_UID)
    signals.queue_healed.disconnect(dispatch_uid=f"{_UID}.heal")


def _create_gauge(meter: Meter, gauge: Gauge, readings: Readings, owner: Telemetry) -> None:
    def observe(options: CallbackOptions) -> list[Observation]:
        # A meter never drops its instruments, so this is still called after ``uninstall()``.
        return readings.observe(gauge) if instrumentation.installed() is owner else []

    meter.create_observable_gauge(f"{PREFIX}{gauge.name}", [observe], gauge.unit, gauge.text)


# --- Context in headers ---


class _Headers(Getter[Mapping[str, Any]]):
    """Reads a message's headers, whose values can be any JSON."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        value = carrier.get(key)
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_headers = _Headers()


def creation_of(headers: Mapping[str, Any]) -> SpanContext | None:
    """Return the context of the span in which a message was published. None: its headers name no span."""
    try:
        context = propagate.extract(headers, Context(), _headers)
    except Exception as error:
        # Any publisher can write the headers, and the propagator can be the project's own.
        instrumentation.note_failure("extract", error)
        return None
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def inject(publication: Publication) -> None:
    """Put the current context into the messages' headers, except for keys that the caller passed."""
    carrier: dict[str, str] = {}
    try:
        propagate.inject(carrier)
    except Exception as error:
        instrumentation.note_failure("inject", error)
    publication.context = {key: value for key, value in carrier.items() if key not in publication.headers}


def links_to(*messages: Traced) -> list[Link]:
    """
    Return links to the spans in which messages were published, at most ``MAX_LINKS``.

    Your own spans can use it for messages without a handler: after a manual claim, and in ``async for`` over a topic.
    """
    created = [(message, creation_of(message.headers)) for message in messages[:MAX_LINKS]]
    return [Link(span, {MESSAGE_ID: str(message.id)}) for message, span in created if span is not None]


# --- Names and attributes ---


def span_name(operation: str, target: Target) -> str:
    """Return the operation and the destination. Auto-deleted queues share one name, so there are not too many names."""
    return f"{operation} {gauges_module.AUTO_DELETED if target.auto_deleted else target.name}"


def attributes_of(operation: str, target: Target) -> Attributes:
    """Return a span's attributes for its operation and destination."""
    attributes = _base(operation, target)
    attributes[DESTINATION] = target.name
    if target.auto_deleted:
        attributes[TEMPORARY] = True
        attributes[TEMPLATE] = gauges_module.AUTO_DELETED
    return attributes


def labels_of(operation: str, target: Target) -> Attributes:
    """Return an instrument's attributes for its operation and destination, with a limited number of names."""
    labels = _base(operation, target)
    if target.auto_deleted:
        labels[TEMPLATE] = gauges_module.AUTO_DELETED
    else:
        labels[DESTINATION] = gauges_module.label_of(target.name)
    return labels


def _base(operation: str, target: Target) -> Attributes:
    base: Attributes = {SYSTEM: SCOPE, OPERATION: operation, OPERATION_TYPE: TYPES[operation]}
    server = connections.settings[target.using]
    if server["HOST"]:
        base[SERVER_ADDRESS] = str(server["HOST"])
    # A list of ports, one for each host, is not a number.
    if str(server["PORT"]).isdecimal():
        base[SERVER_PORT] = int(server["PORT"])
    return base


def tell_ids(span: Span, target: Target, publication: Publication) -> int:
    """Record on the span what a successful publish inserted. Returns the number of messages sent."""
    ids = publication.ids or []
    if publication.is_batch:
        span.set_attribute(MESSAGE_COUNT, len(ids))
        return len(ids)
    if target.is_topic:
        span.set_attribute(COPIES, len(ids))
    elif ids:
        span.set_attribute(MESSAGE_ID, str(ids[0]))
    return 1


def about(handling: Handling) -> Attributes:
    """Return a span's attributes for messages that are about to be handled."""
    if handling.is_batch:
        return {MESSAGE_COUNT: len(handling.messages)}
    (message,) = handling.messages
    known: Attributes = {MESSAGE_ID: str(message.id)}
    if delivery_count := getattr(message, "delivery_count", None):
        known[DELIVERY_COUNT] = delivery_count
    return known


def tell_end(span: Span, handling: Handling) -> str | None:
    """Record outcomes and exceptions on the span. Returns the ``error.type``, or None if all messages were handled."""
    outcomes = set(handling.outcomes)
    if outcomes:
        span.set_attribute(OUTCOME, outcomes.pop() if len(outcomes) == 1 else "mixed")
    # By id(): one exception can belong to a whole batch, and its class can define __eq__.
    errors = {id(error): (message_id, error) for message_id, error in handling.errors.items()}
    if errors:
        _, first = next(iter(errors.values()))
        failure, text = class_name(type(first)), text_of(first)
    elif set(handling.outcomes) <= {"ack"}:
        return None
    else:
        failure = text = class_name(LeaseLost)
    span.set_attribute(ERROR_TYPE, failure)
    span.set_status(Status(StatusCode.ERROR, text))
    for message_id, error in list(errors.values())[:MAX_EXCEPTIONS]:
        span.record_exception(error, {MESSAGE_ID: str(message_id)})
    return failure


def class_name(kind: type[BaseException]) -> str:
    """Return the name of an exception's class, with its module unless it is a builtin."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
