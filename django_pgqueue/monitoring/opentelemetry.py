"""
Traces and metrics for OpenTelemetry. Needs the extra: ``pip install django-pg-messagequeue[opentelemetry]``.

``install()`` switches it on, for this process. A publish is a span, whose context travels in the messages'
headers; claims and runs of handlers are spans with links to it. docs/opentelemetry.md lists spans, attributes
and instruments, which are named by the semantic conventions for messaging.
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

# The names of the operations that are spans, and their types by the conventions.
PUBLISH, CLAIM, PROCESS = "publish", "claim", "process"
TYPES = {PUBLISH: "send", CLAIM: "receive", PROCESS: "process"}

# A span has no more links, nor exceptions, however many messages it is about. As many links as the SDK keeps.
MAX_LINKS = 128
MAX_EXCEPTIONS = 10

# Buckets in seconds: those that the conventions advise, and for waits, which may be long.
DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)

Attributes = dict[str, str | bool | int]


class Telemetry:
    """What is told to OpenTelemetry: see ``instrumentation.Instrument``."""

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self._tracer = tracer
        self._duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of publishes, and of claims that brought something.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages published, also such as are rolled back later."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages claimed, or handed to a live subscriber."
        )
        self._processing = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of runs of handlers and of subscribers' callbacks.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )
        self._wait = meter.create_histogram(
            "pgqueue.message.wait",
            "s",
            "From when a message was due to the start of its handler.",
            explicit_bucket_boundaries_advisory=WAITS,
        )
        self._counters = {
            signal: meter.create_counter(f"{PREFIX}{count.name}", count.unit, count.text)
            for signal, count in COUNTS.items()
        }

    # --- Spans ---

    @contextmanager
    def publishing(self, target: Target, publication: Publication) -> Iterator[None]:
        """Be around a publish, and let its context travel in the messages, unless they bring one of their own."""
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
        """Make a span of a claim that is over."""
        # Spans have this host's time, all of them.
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
        """Be around a run of a handler: what it does belongs to this span."""
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
                # Nobody claimed it.
                self._consumed.add(len(handling.messages), labels)

    # --- Counters and gauges ---

    def count(self, sender: Any, signal: Any, **kwargs: Any) -> None:
        """Count what a signal tells of."""
        labels, amount = COUNTS[signal].of(sender, kwargs)
        self._counters[signal].add(amount, dict(zip(COUNTS[signal].labels, labels, strict=True)))

    def note_heal(self, sender: str, cause: str, **kwargs: Any) -> None:
        """Note it in the span of whoever's publish (in a transaction: whose commit) made the queue again."""
        trace.get_current_span().add_event("queue healed", {DESTINATION: sender, "cause": cause})


class Readings:
    """One reading of the tables for all gauges, each of which is asked for on its own."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._lock = threading.Lock()
        self._left: gauges_module.Reading = {}

    def observe(self, gauge: Gauge) -> list[Observation]:
        """Return a gauge's values. Where it was asked for since the last reading, the tables are read again."""
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
    Trace and count from now on. More than once is no harm: the first call counts.

    Without providers the global ones are taken, also when they are set later. ``gauges``: let this process
    read the tables each time that metrics are collected, from the database ``using`` (None: ``DATABASE``); all
    processes would tell the same, so one is enough.
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
    """End that."""
    instrumentation.uninstall()
    for signal in COUNTS:
        signal.disconnect(dispatch_uid=_UID)
    signals.queue_healed.disconnect(dispatch_uid=f"{_UID}.heal")


def _create_gauge(meter: Meter, gauge: Gauge, readings: Readings, owner: Telemetry) -> None:
    def observe(options: CallbackOptions) -> list[Observation]:
        # A meter keeps its instruments for good.
        return readings.observe(gauge) if instrumentation.installed() is owner else []

    meter.create_observable_gauge(f"{PREFIX}{gauge.name}", [observe], gauge.unit, gauge.text)


# --- Context in headers ---


class _Headers(Getter[Mapping[str, Any]]):
    """Read a message's headers, which may hold any JSON."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        value = carrier.get(key)
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_headers = _Headers()


def creation_of(headers: Mapping[str, Any]) -> SpanContext | None:
    """Return the span in which a message was published, by its headers. None: they tell of none."""
    try:
        context = propagate.extract(headers, Context(), _headers)
    except Exception as error:
        # Headers are anybody's, and a propagator may be the project's.
        instrumentation.note_failure("extract", error)
        return None
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def inject(publication: Publication) -> None:
    """Let the current context travel in the messages, but for what the caller gave."""
    carrier: dict[str, str] = {}
    try:
        propagate.inject(carrier)
    except Exception as error:
        instrumentation.note_failure("inject", error)
    publication.context = {key: value for key, value in carrier.items() if key not in publication.headers}


def links_to(*messages: Traced) -> list[Link]:
    """
    Return links to the spans in which messages were published, ``MAX_LINKS`` at the most.

    For spans of code that no handler runs: what claims by hand, and ``async for`` of a topic.
    """
    created = [(message, creation_of(message.headers)) for message in messages[:MAX_LINKS]]
    return [Link(span, {MESSAGE_ID: str(message.id)}) for message, span in created if span is not None]


# --- Names and attributes ---


def span_name(operation: str, target: Target) -> str:
    """Return the operation and the destination, of which there are not too many."""
    return f"{operation} {gauges_module.AUTO_DELETED if target.auto_deleted else target.name}"


def attributes_of(operation: str, target: Target) -> Attributes:
    """Return what a span tells of its operation and destination."""
    attributes = _base(operation, target)
    attributes[DESTINATION] = target.name
    if target.auto_deleted:
        attributes[TEMPORARY] = True
        attributes[TEMPLATE] = gauges_module.AUTO_DELETED
    return attributes


def labels_of(operation: str, target: Target) -> Attributes:
    """Return what an instrument tells of them: of names there are not too many."""
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
    # Several, for several hosts, are not a number.
    if str(server["PORT"]).isdecimal():
        base[SERVER_PORT] = int(server["PORT"])
    return base


def tell_ids(span: Span, target: Target, publication: Publication) -> int:
    """Tell what a publish that succeeded has inserted. Returns how many messages were sent."""
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
    """Return what is known of messages before they are handled."""
    if handling.is_batch:
        return {MESSAGE_COUNT: len(handling.messages)}
    (message,) = handling.messages
    known: Attributes = {MESSAGE_ID: str(message.id)}
    if delivery_count := getattr(message, "delivery_count", None):
        known[DELIVERY_COUNT] = delivery_count
    return known


def tell_end(span: Span, handling: Handling) -> str | None:
    """Tell how messages ended, and what was raised. Returns the ``error.type``; None: all went well."""
    outcomes = set(handling.outcomes)
    if outcomes:
        span.set_attribute(OUTCOME, outcomes.pop() if len(outcomes) == 1 else "mixed")
    # One exception may stand for a whole batch, and its class may define what equals it.
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
    """Return the name of an exception's class, with its module unless it is Python's own."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
