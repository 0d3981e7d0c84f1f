"""
What is measured, whoever asks for it: gauges read from the tables, and counts of what this process did.

``metrics`` and ``telemetry`` give both their exporters' names: ``pgqueue_messages``, ``pgqueue.messages``.
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

# Seconds that each statement of a reading gets: those that give up must not pile up in the server.
STATEMENT_TIMEOUT = 5.0
# So many messages of each queue are looked at in a reading, in each of three walks.
SAMPLE_SIZE = 10_000
# So many queues have a label of their own in a count: one that never saw a name again would grow for ever.
MAX_NAMES = 500
OTHERS = "(others)"
# Auto-deleted queues come and go, often under names of their own: together they are one.
AUTO_DELETED = "(auto-deleted)"


# --- Gauges: what the tables hold ---


@dataclass(frozen=True)
class Gauge:
    """One gauge: its name, what it tells, its labels and its unit."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    unit: str = ""


UP = Gauge("up", "Whether the queues' database answered this scrape.")
MESSAGES = Gauge(
    "messages",
    f"Messages by state, of a queue that has more at least so many ({SAMPLE_SIZE} are looked at).",
    ("queue", "state"),
    "{message}",
)
UNCOUNTED = Gauge("messages_uncounted", "Whether there are messages that were not looked at.", ("queue",))
OLDEST = Gauge("oldest_due_age", "Age of the oldest due message, 0 if none is due.", ("queue",), "s")
CONSUMERS = Gauge("consumers", "Living consumer processes that name the queue.", ("queue",), "{process}")
PAUSED = Gauge("paused", "Whether the queue is paused.", ("queue",))
ORPHANS = Gauge("orphans", f"Messages whose queue is gone; at most {SAMPLE_SIZE} are looked at.", (), "{message}")
EVENTS = Gauge("queue_events_per_day", "Queues reaped, revived and vanished within a day.", ("kind",), "{event}")
LAST_RUN = Gauge("reaper_last_run_age", "Since a run of the reaper ended.", (), "s")

GAUGES = (UP, MESSAGES, UNCOUNTED, OLDEST, CONSUMERS, PAUSED, ORPHANS, EVENTS, LAST_RUN)

Reading = dict[Gauge, list[tuple[tuple[str, ...], float]]]


def read(using: str | None = None) -> Reading:
    """
    Return the values of all gauges, each with its labels' values.

    Takes a connection of its own, and reads no more than ``SAMPLE_SIZE`` messages of a queue. Where the database does
    not answer, ``UP`` is 0 and the others have no values.
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
    """One count, and how a signal's arguments make it grow."""

    name: str
    text: str
    #: The argument that tells how many, a number or a list. None: one at a time.
    amount: str | None = None
    #: An argument that is a label beside the queue.
    label: str | None = None
    unit: str = "{message}"

    @property
    def labels(self) -> tuple[str, ...]:
        return ("queue",) if self.label is None else ("queue", self.label)

    def of(self, sender: Any, arguments: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        """Return the values of the labels, and how much it grows, of a signal that was sent."""
        name = label_of(str(sender))
        amount = 1 if self.amount is None else arguments[self.amount]
        labels = (name,) if self.label is None else (name, str(arguments[self.label]))
        return labels, amount if isinstance(amount, int) else len(amount)


COUNTS: dict[Signal, Count] = {
    signals.messages_published: Count("messages_published", "Messages published, once committed.", "count"),
    signals.messages_handled: Count("messages_handled", "Messages whose handlers ended, settled.", "count"),
    signals.message_failed: Count("messages_failed", "Deliveries that failed and are retried."),
    signals.messages_dead_lettered: Count("messages_dead_lettered", "Messages given up.", "ids"),
    signals.messages_expired: Count("messages_expired", "Messages deleted as their TTL passed.", "count"),
    signals.messages_redriven: Count("messages_redriven", "Dead letters sent back.", "count"),
    signals.messages_purged: Count("messages_purged", "Messages purged.", "count"),
    signals.orphans_adopted: Count("orphans_adopted", "Orphans given back to their queue.", "count"),
    signals.lease_lost: Count("leases_lost", "Messages whose lease was lost before they were settled.", "ids"),
    signals.queue_reaped: Count("queues_reaped", "Idle queues deleted by the reaper.", unit="{queue}"),
    signals.queue_healed: Count(
        "queues_healed", "Queues made again, by why they were gone.", label="cause", unit="{queue}"
    ),
    signals.subscription_lagged: Count(
        "subscriptions_lagged", "Times that a live subscriber missed messages.", label="reason", unit="{time}"
    ),
}

# Names that have a label.
_names: set[str] = set()
_names_lock = threading.Lock()


def label_of(name: str) -> str:
    """Return the label of a queue or topic: its name, or ``OTHERS`` where ``MAX_NAMES`` have one already."""
    if name in _names:
        return name
    with _names_lock:
        if len(_names) >= MAX_NAMES:
            return OTHERS
        _names.add(name)
    return name
