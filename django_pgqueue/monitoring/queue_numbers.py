"""The numbers shown for each queue. They are read for all queues at once, and the reads are bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from django_pgqueue.conf import settings
from django_pgqueue.services import counting
from django_pgqueue.services import minutes as minutes_services
from django_pgqueue.services.counting import Depth, Orphans
from django_pgqueue.services.declaring import Declaration
from django_pgqueue.services.minutes import Minute, Newest

# Messages of a queue in each of three walks, its dead letters, and its orphans.
SAMPLE_SIZE = 1_000
# The newest messages of a queue, whose times of publishing are read: for several queues, and for a single queue.
NEWEST, NEWEST_OF_ONE = 300, 5_000

# Minutes in a chart, and minutes over which a rate is computed.
MINUTES = 60
RATE_MINUTES = 5
# Seconds. Over a shorter time, the rate of publishing would be that of a burst.
SHORTEST_SPAN = 10.0


class Rate(NamedTuple):
    """Messages per second."""

    per_second: float
    is_at_least: bool = False

    def __str__(self) -> str:
        if not self.per_second:
            return "-"
        more = "+" if self.is_at_least else ""
        return f"{self.per_second:,.1f}{more}/s" if self.per_second >= 0.05 else f"<0.1{more}/s"


@dataclass(frozen=True)
class Numbers:
    """The numbers of one queue. ``depth`` is None if it has no row: it was just deleted, or only orphans name it."""

    name: str
    depth: Depth | None = None
    #: Dead letters from this queue, wherever they are stored. At most ``SAMPLE_SIZE`` are counted.
    dead_letters: int = 0
    orphans: Orphans = Orphans()
    minutes: Sequence[Minute] = ()
    newest: Newest = Newest()
    #: Events of the last day, by kind: reaped, revived, vanished.
    events: dict[str, int] = field(default_factory=dict)

    @property
    def is_more(self) -> bool:
        """Whether there are messages that were not counted."""
        return self.depth is not None and self.depth.more

    @property
    def dead_letter_queue(self) -> str | None:
        """The name of the queue that gets its dead letters. None: they are parked."""
        configured = None if self.depth is None else self.depth.dead_letter
        return Declaration(self.name, dead_letter=configured).dead_letter_target

    @property
    def reapable_in(self) -> float | None:
        """Seconds until the reaper may delete it, 0 for now. None: it is in use, paused or not auto-deleted."""
        depth = self.depth
        if depth is None or not depth.auto_deleted or depth.paused or self.holds_messages:
            return None
        left = max(settings.REAP_IDLE_AFTER - depth.last_active_age, 0.0)
        return left if math.isfinite(left) else None

    @property
    def holds_messages(self) -> bool:
        """Whether it has messages, in any state."""
        depth = self.depth
        counts = () if depth is None else (depth.ready, depth.delayed, depth.leased, depth.dead, depth.expired)
        return any(counts) or bool(self.orphans.messages)

    # --- The last hour ---

    @cached_property
    def published(self) -> dict[int, int]:
        """Messages published, by minutes ago. Includes messages that have been settled since."""
        found = {each.ago: each.published for each in self.minutes if each.published}
        for ago, count in self.newest.by_minute.items():
            if ago < MINUTES:
                found[ago] = found.get(ago, 0) + count
        return found

    @property
    def exact_minutes(self) -> int:
        """The number of minutes, including this one, that are counted completely. Earlier counts are lower bounds."""
        return max(self.newest.by_minute, default=0) if self.newest.more else MINUTES

    @property
    def handle_rate(self) -> Rate:
        """The rate of handling in the last ``RATE_MINUTES`` full minutes, as consumers reported it."""
        handled = sum(each.handled for each in self.minutes if 1 <= each.ago <= RATE_MINUTES)
        return Rate(handled / (RATE_MINUTES * 60))

    @property
    def publish_rate(self) -> Rate:
        """
        The rate of publishing in the last ``RATE_MINUTES`` minutes that consumers have reported.

        If the newest messages do not reach back that far, it is a lower bound: the larger of the counted messages over
        these minutes and the newest messages over the time that they span.
        """
        first = told_minutes()
        last = first + RATE_MINUTES
        rate = sum(count for ago, count in self.published.items() if first <= ago < last) / (RATE_MINUTES * 60)
        if self.exact_minutes >= last:
            return Rate(rate)
        seen = sum(self.newest.by_minute.values())
        return Rate(max(rate, seen / max(self.newest.span, SHORTEST_SPAN)), is_at_least=True)


def told_minutes() -> int:
    """Return how many minutes ago the last minute was that all consumers reported. They do so at each heartbeat."""
    return 1 + math.ceil(settings.HEARTBEAT_INTERVAL / 60)


def at_least(count: int, *, more: bool) -> str:
    """Return a count as text, with a plus sign if there may be more."""
    return f"{count:,}+" if more and count else f"{count:,}"


def is_cut(count: int) -> bool:
    """Return whether a count stopped at ``SAMPLE_SIZE``, so that there may be more."""
    return count >= SAMPLE_SIZE


def numbers_of(names: Sequence[str] | None, using: str) -> dict[str, Numbers]:
    """Return the numbers of queues by name (None: of all queues, including those that only orphans name)."""
    depths = {depth.name: depth for depth in counting.depths(SAMPLE_SIZE, using, names)}
    if names is None:
        names = sorted({*depths, *counting.orphans(SAMPLE_SIZE, using)})
    letters = counting.dead_letters(names, SAMPLE_SIZE, using)
    orphans = counting.orphans_of(names, SAMPLE_SIZE, using)
    minutes = minutes_services.minutes(names, MINUTES, using)
    newest = minutes_services.newest(names, NEWEST_OF_ONE if len(names) == 1 else NEWEST, MINUTES, using)
    events: dict[str, dict[str, int]] = {}
    for (queue, kind), count in counting.events_per_day(using).items():
        events.setdefault(queue, {})[kind] = count
    return {
        name: Numbers(
            name,
            depths.get(name),
            letters.get(name, 0),
            orphans.get(name, Orphans()),
            minutes[name],
            newest[name],
            events.get(name, {}),
        )
        for name in names
    }
