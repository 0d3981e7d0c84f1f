"""
Metrics for Prometheus. Needs the extra: ``pip install django-pg-messagequeue[prometheus]``.

Gauges are read from the tables when they are scraped: scrape one process for them (any, they all tell the same).
Counters are of the process that is scraped, fed by signals: scrape every process that publishes, consumes or reaps.
docs/metrics.md lists them all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from wsgiref.simple_server import WSGIServer

from django.db import DatabaseError, InterfaceError, transaction
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

from django_pgqueue import services, signals
from django_pgqueue.conf import database_alias
from django_pgqueue.loop import describe, own_connection

logger = logging.getLogger("django_pgqueue")

# Seconds that each statement of a scrape gets: those that give up must not pile up in the server.
PATIENCE = 5.0
# So many messages of each queue are looked at in a scrape, in each of three walks.
MOST = 10_000
# So many queues have a label of their own in a counter: one that never saw a name again would grow for ever.
MOST_NAMES = 500
OTHERS = "(others)"
# Auto-deleted queues come and go, often under names of their own: together they are one.
AUTO_DELETED = "(auto-deleted)"

STATES = ("ready", "delayed", "leased", "dead", "expired")


class QueueCollector(Collector):
    """
    The gauges: what the tables hold. ``using``: alias of the queues' database (None: ``DATABASE``).

    A scrape takes a connection of its own, and reads no more than ``MOST`` messages of a queue. Where the
    database does not answer, ``pgqueue_up`` is 0 and the others are missing.
    """

    def __init__(self, using: str | None = None) -> None:
        self.using = using

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing, so that registering it asks no database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        using = database_alias(self.using)
        up = GaugeMetricFamily("pgqueue_up", "Whether the queues' database answered this scrape.")
        try:
            with own_connection(using, "metrics"), services.bounded(PATIENCE, using):
                found = list(self._read(using))
        except (DatabaseError, InterfaceError) as error:
            logger.warning("metrics not read error=%s", describe(error))
            found = []
        up.add_metric([], bool(found))
        yield up
        yield from found

    def _read(self, using: str) -> Iterator[GaugeMetricFamily]:
        messages = GaugeMetricFamily(
            "pgqueue_messages",
            f"Messages by state; at least so many where pgqueue_messages_uncounted is 1 ({MOST} are looked at).",
            labels=["queue", "state"],
        )
        more = GaugeMetricFamily(
            "pgqueue_messages_uncounted", "Whether there are messages that were not looked at.", labels=["queue"]
        )
        oldest = GaugeMetricFamily(
            "pgqueue_oldest_due_age_seconds", "Age of the oldest due message, 0 if none is due.", labels=["queue"]
        )
        consumers = GaugeMetricFamily(
            "pgqueue_consumers", "Living consumer processes that name the queue.", labels=["queue"]
        )
        paused = GaugeMetricFamily("pgqueue_paused", "Whether the queue is paused.", labels=["queue"])
        for name, depths in self._by_label(using).items():
            for state in STATES:
                messages.add_metric([name, state], sum(getattr(depth, state) for depth in depths))
            more.add_metric([name], any(depth.more for depth in depths))
            oldest.add_metric([name], max(depth.oldest_due_age or 0.0 for depth in depths))
            consumers.add_metric([name], sum(depth.consumers for depth in depths))
            paused.add_metric([name], any(depth.paused for depth in depths))
        yield from (messages, more, oldest, consumers, paused)
        yield from self._rest(using)

    def _by_label(self, using: str) -> dict[str, list[services.Depth]]:
        by_label: dict[str, list[services.Depth]] = {}
        for depth in services.depths(MOST, using):
            by_label.setdefault(AUTO_DELETED if depth.auto_deleted else depth.name, []).append(depth)
        return by_label

    def _rest(self, using: str) -> Iterator[GaugeMetricFamily]:
        orphans = GaugeMetricFamily("pgqueue_orphans", f"Messages whose queue is gone; at most {MOST} are looked at.")
        orphans.add_metric([], sum(services.orphans(MOST, using).values()))
        yield orphans
        events = GaugeMetricFamily(
            "pgqueue_queue_events_per_day", "Queues reaped, revived and vanished within a day.", labels=["kind"]
        )
        by_kind = dict.fromkeys(("reaped", "revived", "vanished"), 0)
        for (_, kind), count in services.events_per_day(using).items():
            by_kind[kind] = by_kind.get(kind, 0) + count
        for kind, count in by_kind.items():
            events.add_metric([kind], count)
        yield events
        age = services.last_run_age(using)
        if age is not None:
            reaper = GaugeMetricFamily("pgqueue_reaper_last_run_age_seconds", "Since a run of the reaper ended.")
            reaper.add_metric([], age)
            yield reaper


# --- Counters: what this process did ---


@dataclass(frozen=True)
class Count:
    """One counter, and how a signal's arguments make it grow."""

    name: str
    text: str
    #: The argument that tells how many, a number or a list. None: one at a time.
    amount: str | None = None
    #: An argument that is a label beside the queue.
    label: str | None = None

    @cached_property
    def counter(self) -> Counter:
        return Counter(self.name, self.text, ["queue", *filter(None, [self.label])])


COUNTS: dict[Signal, Count] = {
    signals.messages_published: Count("pgqueue_messages_published", "Messages published, once committed.", "count"),
    signals.messages_handled: Count("pgqueue_messages_handled", "Messages whose handlers ended, settled.", "count"),
    signals.message_failed: Count("pgqueue_messages_failed", "Deliveries that failed and are retried."),
    signals.messages_dead_lettered: Count("pgqueue_messages_dead_lettered", "Messages given up.", "ids"),
    signals.messages_expired: Count("pgqueue_messages_expired", "Messages deleted as their TTL passed.", "count"),
    signals.messages_redriven: Count("pgqueue_messages_redriven", "Dead letters sent back.", "count"),
    signals.messages_purged: Count("pgqueue_messages_purged", "Messages purged.", "count"),
    signals.orphans_adopted: Count("pgqueue_orphans_adopted", "Orphans given back to their queue.", "count"),
    signals.lease_lost: Count("pgqueue_leases_lost", "Messages whose lease was lost before they were settled.", "ids"),
    signals.queue_reaped: Count("pgqueue_queues_reaped", "Idle queues deleted by the reaper."),
    signals.queue_healed: Count("pgqueue_queues_healed", "Queues made again, by why they were gone.", label="cause"),
    signals.subscription_lagged: Count(
        "pgqueue_subscriptions_lagged", "Times that a live subscriber missed messages.", label="reason"
    ),
}

# Names that have a label.
_names: set[str] = set()


def _count(sender: Any, signal: Signal, **kwargs: Any) -> None:
    count, name = COUNTS[signal], str(sender)
    if name not in _names:
        if len(_names) >= MOST_NAMES:
            name = OTHERS
        else:
            _names.add(name)
    labels = [name] if count.label is None else [name, kwargs[count.label]]
    amount = 1 if count.amount is None else kwargs[count.amount]
    count.counter.labels(*labels).inc(amount if isinstance(amount, int) else len(amount))


def install(using: str | None = None) -> None:
    """Count from now on, and let the default registry read the tables at each scrape. More than once is no harm."""
    for signal in COUNTS:
        signal.connect(_count, dispatch_uid="django_pgqueue.metrics")
    global _collector
    if _collector is None:
        _collector = QueueCollector(using)
        REGISTRY.register(_collector)


_collector: QueueCollector | None = None


def registry() -> CollectorRegistry:
    """Return what a scrape is answered from: in prometheus-client's multiprocess mode, all processes' counters."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    shared = CollectorRegistry()
    multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
    shared.register(_collector or QueueCollector())
    return shared


@transaction.non_atomic_requests
def metrics(request: HttpRequest) -> HttpResponse:
    """
    Answer a scrape: a view for the project's urls.

    It asks for no login: keep it from the public, as every endpoint of this kind.
    """
    return HttpResponse(generate_latest(registry()), content_type=CONTENT_TYPE_LATEST)


def serve(port: int, host: str, using: str) -> WSGIServer:
    """Count, and answer scrapes at ``/metrics`` in threads of their own. Raises ``OSError`` where the port is taken."""
    install(using)
    server, _ = start_http_server(port, addr=host, registry=registry())
    return server
