"""
The metrics, independent of an exporter: gauges read from the tables, and counts of what this process did.

``prometheus`` and ``opentelemetry`` export both under their own names: ``pgqueue_messages``, ``pgqueue.messages``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.dispatch import Signal

from django_pgqueue import signals
from django_pgqueue.conf import database_alias
from django_pgqueue.runtime.connections import own_connection
from django_pgqueue.runtime.loop import describe
from django_pgqueue.services import counting, reaping, session
from django_pgqueue.services.counting import DEPTH_STATES

logger = logging.getLogger("django_pgqueue")

# Seconds for each statement. Without a limit, statements whose scrape has given up pile up in the server.
STATEMENT_TIMEOUT = 5.0
# Messages of a queue, in each of three walks.
SAMPLE_SIZE = 10_000
# Queues with a label of their own. Without a limit, queues with ever new names would add labels without end.
MAX_NAMES = 500
OTHERS = "(others)"
# Auto-deleted queues come and go, often with unique names, so they share one label.
AUTO_DELETED = "(auto-deleted)"


# --- Gauges: what the tables hold ---


@dataclass(frozen=True)
class Gauge:
    """A gauge: its name, its meaning, its labels and its unit."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    unit: str = ""


UP = Gauge("up", "Whether the database of the queues answered in time.")
MESSAGES = Gauge(
    "messages",
    f"Messages by state. A lower bound if the queue has more messages than are read ({SAMPLE_SIZE} in each walk).",
    ("queue", "state"),
    "{message}",
)
UNCOUNTED = Gauge("messages_uncounted", "Whether the queue has messages that were not read.", ("queue",))
OLDEST = Gauge("oldest_due_age", "How long the oldest due message has waited. 0 if none is due.", ("queue",), "s")
CONSUMERS = Gauge("consumers", "Living consumer processes of the queue.", ("queue",), "{process}")
PAUSED = Gauge("paused", "Whether the queue is paused.", ("queue",))
ORPHANS = Gauge("orphans", f"Messages whose queue was deleted. At most {SAMPLE_SIZE} are counted.", (), "{message}")
EVENTS = Gauge(
    "queue_events_per_day",
    "Queues that were reaped, revived or vanished in the last 24 hours.",
    ("kind",),
    "{event}",
)
LAST_RUN = Gauge("reaper_last_run_age", "Time since the last run of the reaper ended.", (), "s")

GAUGES = (UP, MESSAGES, UNCOUNTED, OLDEST, CONSUMERS, PAUSED, ORPHANS, EVENTS, LAST_RUN)

Reading = dict[Gauge, list[tuple[tuple[str, ...], float]]]


def read(using: str | None = None) -> Reading:
    """
    Return the values of all gauges, each with the values of its labels.

    Opens its own connection, and reads at most ``SAMPLE_SIZE`` messages of a queue in each of three walks. If the
    database does not answer, ``UP`` is 0 and the other gauges have no values.
    """
    using = database_alias(using)
    reading: Reading = {gauge: [] for gauge in GAUGES}
    try:
        with own_connection(using, "metrics"), session.bounded(STATEMENT_TIMEOUT, using):
            found = [*_read_queues(using), *_read_rest(using)]
    except (DatabaseError, InterfaceError) as error:
        logger.warning("metrics not read error=%s", describe(error))
        found = [(UP, (), 0)]
    for gauge, labels, value in found:
        reading[gauge].append((labels, value))
    return reading


def _read_queues(using: str) -> Iterator[tuple[Gauge, tuple[str, ...], float]]:
    yield UP, (), 1
    for name, depths in _by_label(using).items():
        for state in DEPTH_STATES:
            yield MESSAGES, (name, state), sum(getattr(depth, state) for depth in depths)
        yield UNCOUNTED, (name,), any(depth.more for depth in depths)
        yield OLDEST, (name,), max(depth.oldest_due_age or 0.0 for depth in depths)
        yield CONSUMERS, (name,), sum(depth.consumers for depth in depths)
        yield PAUSED, (name,), any(depth.paused for depth in depths)


def _by_label(using: str) -> dict[str, list[counting.Depth]]:
    by_label: dict[str, list[counting.Depth]] = {}
    for depth in counting.depths(SAMPLE_SIZE, using):
        by_label.setdefault(AUTO_DELETED if depth.auto_deleted else depth.name, []).append(depth)
    return by_label


def _read_rest(using: str) -> Iterator[tuple[Gauge, tuple[str, ...], float]]:
    yield ORPHANS, (), sum(counting.orphans(SAMPLE_SIZE, using).values())
    by_kind = dict.fromkeys(("reaped", "revived", "vanished"), 0)
    for (_, kind), count in counting.events_per_day(using).items():
        by_kind[kind] = by_kind.get(kind, 0) + count
    for kind, count in by_kind.items():
        yield EVENTS, (kind,), count
    age = reaping.last_run_age(using)
    if age is not None:
        yield LAST_RUN, (), age


# --- Counts: what this process did ---


@dataclass(frozen=True)
class Count:
    """A count, and how the arguments of a signal increase it."""

    name: str
    text: str
    #: The argument with the amount: a number, or a list whose length counts. None: always 1.
    amount: str | None = None
    #: An argument that is a second label, after the queue.
    label: str | None = None
    unit: str = "{message}"

    @property
    def labels(self) -> tuple[str, ...]:
        return ("queue",) if self.label is None else ("queue", self.label)

    def of(self, sender: Any, arguments: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        """Return the values of the labels and the amount for a signal that was sent."""
        name = label_of(str(sender))
        amount = 1 if self.amount is None else arguments[self.amount]
        labels = (name,) if self.label is None else (name, str(arguments[self.label]))
        return labels, amount if isinstance(amount, int) else len(amount)


COUNTS: dict[Signal, Count] = {
    signals.messages_published: Count("messages_published", "Messages published, counted on commit.", "count"),
    signals.messages_handled: Count(
        "messages_handled", "Messages whose handler succeeded and whose ack has been written.", "count"
    ),
    signals.message_failed: Count("messages_failed", "Deliveries that failed, the last one of a message included."),
    signals.messages_dead_lettered: Count("messages_dead_lettered", "Messages that were dead-lettered.", "ids"),
    signals.messages_expired: Count("messages_expired", "Messages deleted because their TTL had passed.", "count"),
    signals.messages_redriven: Count("messages_redriven", "Dead letters sent back to their queue.", "count"),
    signals.messages_purged: Count("messages_purged", "Messages purged.", "count"),
    signals.orphans_adopted: Count("orphans_adopted", "Orphans that were returned to their queue.", "count"),
    signals.lease_lost: Count("leases_lost", "Messages whose lease was lost before they were settled.", "ids"),
    signals.queue_reaped: Count("queues_reaped", "Idle queues deleted by the reaper.", unit="{queue}"),
    signals.queue_healed: Count(
        "queues_healed", "Queues that were recreated, by the cause of their absence.", label="cause", unit="{queue}"
    ),
    signals.subscription_lagged: Count(
        "subscriptions_lagged", "How often a live subscriber missed messages.", label="reason", unit="{time}"
    ),
}

# Names with a label of their own.
_names: set[str] = set()
_names_lock = threading.Lock()


def label_of(name: str) -> str:
    """Return the label of a queue or topic: its name, or ``OTHERS`` if ``MAX_NAMES`` other names have labels."""
    if name in _names:
        return name
    with _names_lock:
        if len(_names) >= MAX_NAMES:
            return OTHERS
        _names.add(name)
    return name
