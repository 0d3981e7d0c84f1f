"""What OpenTelemetry is told: by this process, kept in memory, and by others, written to a file."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_pgqueue import Message
from django_pgqueue.monitoring import opentelemetry


class Told:
    """The spans and metrics of this process."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self.exporter))
        self._reader = InMemoryMetricReader()
        self._meters = MeterProvider([self._reader])
        self.tracer = self.traces.get_tracer("tests")
        opentelemetry.install(tracer_provider=self.traces, meter_provider=self._meters, **options)

    def end(self) -> None:
        opentelemetry.uninstall()
        self.traces.shutdown()
        self._meters.shutdown()

    def spans(self, name: str) -> list[ReadableSpan]:
        """Return the spans that ended, in the order of their ends."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        """Return the one span of a name."""
        (span,) = self.spans(name)
        return span

    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]

    def metrics(self) -> dict[str, Metric]:
        """Collect once, and return what has values."""
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Return the attributes and the points of an instrument."""
        metric = self.metrics().get(name)
        return [(dict(point.attributes or {}), point) for point in metric.data.data_points] if metric else []

    def value(self, name: str, **attributes: Any) -> Any:
        """Return the value of the one point that has these attributes, given with `_` for `.`."""
        wanted = attributes.items()
        (point,) = [
            point
            for found, point in self.points(name)
            if wanted <= {key.replace(".", "_"): value for key, value in found.items()}.items()
        ]
        return point.count if hasattr(point, "count") else point.value


@contextmanager
def telling(**options: Any) -> Iterator[Told]:
    """Tell OpenTelemetry, until the end of the block."""
    told = Told(**options)
    try:
        yield told
    finally:
        told.end()


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def id_of(span: ReadableSpan) -> tuple[int, int]:
    """Return what a link to a span has."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


# --- Another process ---


class FileExporter(SpanExporter):
    """One JSON object a line for each span."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            for span in spans:
                file.write(json.dumps(json.loads(span.to_json())) + "\n")
        return SpanExportResult.SUCCESS


def write_to(path: str) -> None:
    """Let this process write its spans to a file, by the global provider, which is set after the installation."""
    opentelemetry.install()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter(path)))
    trace.set_tracer_provider(provider)


def work(message: Message) -> None:
    """Handle a message with a span of one's own."""
    with trace.get_tracer("tests").start_as_current_span("own"):
        time.sleep(0.001)
