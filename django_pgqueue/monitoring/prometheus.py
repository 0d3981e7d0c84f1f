"""
Metrics for Prometheus. Needs the extra: ``pip install django-pg-messagequeue[prometheus]``.

Gauges are read from the tables at each scrape. Scrape any one process for them: they all report the same numbers.
Counters belong to the process and are fed by signals. Scrape every process that publishes, consumes or reaps.
docs/metrics.md lists all metrics.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any
from wsgiref.simple_server import WSGIServer

from django.db import transaction
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    generate_latest,
    multiprocess,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from django_pgqueue.monitoring import gauges
from django_pgqueue.monitoring.gauges import COUNTS, Count, Gauge


class QueueCollector(Collector):
    """The gauges, read at each scrape. ``using`` is the alias of the queues' database (None: ``DATABASE``)."""

    def __init__(self, using: str | None = None) -> None:
        self.using = using

    def describe(self) -> list[GaugeMetricFamily]:
        """Return an empty list, so that registering the collector runs no query."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges that have values."""
        for gauge, values in gauges.read(self.using).items():
            if values:
                family = GaugeMetricFamily(name_of(gauge), gauge.text, labels=gauge.labels)
                for labels, value in values:
                    family.add_metric(labels, value)
                yield family


def name_of(measure: Gauge | Count) -> str:
    """Return the name in Prometheus."""
    return f"pgqueue_{measure.name}_seconds" if measure.unit == "s" else f"pgqueue_{measure.name}"


@cache
def counter_of(count: Count) -> Counter:
    """Return the counter, which is in the default registry."""
    return Counter(name_of(count), count.text, count.labels)


def _count(sender: Any, signal: Signal, **kwargs: Any) -> None:
    labels, amount = COUNTS[signal].of(sender, kwargs)
    counter_of(COUNTS[signal]).labels(*labels).inc(amount)


def install(using: str | None = None) -> None:
    """
    Start counting, and let the default registry read the tables at each scrape. Calling it again is harmless.

    ``using`` is the alias of the queues' database (None: ``DATABASE``).
    """
    for signal in COUNTS:
        signal.connect(_count, dispatch_uid="django_pgqueue.metrics")
    global _collector
    if _collector is None:
        _collector = QueueCollector(using)
        REGISTRY.register(_collector)


_collector: QueueCollector | None = None


def registry() -> CollectorRegistry:
    """Return the registry for scrapes. In prometheus-client's multiprocess mode it covers all processes."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    shared = CollectorRegistry()
    multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
    shared.register(_collector or QueueCollector())
    return shared


@transaction.non_atomic_requests
def metrics(request: HttpRequest) -> HttpResponse:
    """
    Answer a scrape. This is a view for the project's URLconf.

    It does not require a login, so do not expose it to the public.
    """
    return HttpResponse(generate_latest(registry()), content_type=CONTENT_TYPE_LATEST)


def serve(port: int, host: str, using: str) -> WSGIServer:
    """
    Start counting, and answer scrapes at ``/metrics`` in separate threads.

    Raises ``OSError`` if the port is in use.
    """
    install(using)
    server, _ = start_http_server(port, addr=host, registry=registry())
    return server
