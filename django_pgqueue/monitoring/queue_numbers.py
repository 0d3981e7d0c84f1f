"""What people see of each queue: counted for all of them at once, and within bounds."""

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

# So many messages of each queue are looked at, in each of three walks, and so many dead letters and orphans.
SAMPLE_SIZE = 1_000
# So many of the newest messages of each queue are looked at for when they were published: of many queues, and of one.
NEWEST, NEWEST_OF_ONE = 300, 5_000

# Minutes that a chart shows, and that a rate is taken of.
MINUTES = 60
RATE_MINUTES = 5
# A rate of what was published within fewer seconds would be one of a burst.
SHORTEST_SPAN = 10.0


class Rate(NamedTuple):
    """Messages a second."""

    per_second: float
    is_at_least: bool = False

    def __str__(self) -> str:
        if not self.per_second:
            return "-"
        more = "+" if self.is_at_least else ""
        return f"{self.per_second:,.1f}{more}/s" if self.per_second >= 0.05 else f"<0.1{more}/s"


@dataclass(frozen=True)
class Numbers:
    """One queue. ``depth`` is None for one without a row: it has just gone, or only orphans remember it."""

    name: str
    depth: Depth | None = None
    #: Of this queue, in whichever queue they wait; no more than ``SAMPLE_SIZE`` are counted.
    dead_letters: int = 0
    orphans: Orphans = Orphans()
    minutes: Sequence[Minute] = ()
    newest: Newest = Newest()
    #: By kind: reaped, revived, vanished; of the last day.
    events: dict[str, int] = field(default_factory=dict)

    @property
    def is_more(self) -> bool:
        """Whether there are messages that were not counted."""
        return self.depth is not None and self.depth.more

    @property
    def dead_letter_queue(self) -> str | None:
        """Where its dead letters go. None: they are parked."""
        configured = None if self.depth is None else self.depth.dead_letter
        return Declaration(self.name, dead_letter=configured).dead_letter_target

    @property
    def reapable_in(self) -> float | None:
        """Seconds until the reaper may remove it, 0 for now. None: it may not, as it is used, or of another kind."""
        depth = self.depth
        if depth is None or not depth.auto_deleted or depth.paused or self.holds_messages:
            return None
        left = max(settings.REAP_IDLE_AFTER - depth.last_active_age, 0.0)
        return left if math.isfinite(left) else None

    @property
    def holds_messages(self) -> bool:
        """Whether there are any, in whatever state."""
        depth = self.depth
        counts = () if depth is None else (depth.ready, depth.delayed, depth.leased, depth.dead, depth.expired)
        return any(counts) or bool(self.orphans.messages)

    # --- The last hour ---

    @cached_property
    def published(self) -> dict[int, int]:
        """How many messages were published, by minutes ago: those that were settled since, and those that wait."""
        found = {each.ago: each.published for each in self.minutes if each.published}
        for ago, count in self.newest.by_minute.items():
            if ago < MINUTES:
                found[ago] = found.get(ago, 0) + count
        return found

    @property
    def exact_minutes(self) -> int:
        """So many minutes, the present one included, are counted as a whole: of earlier ones there may be more."""
        return max(self.newest.by_minute, default=0) if self.newest.more else MINUTES

    @property
    def handle_rate(self) -> Rate:
        """In the last full minutes, as consumers told it."""
        handled = sum(each.handled for each in self.minutes if 1 <= each.ago <= RATE_MINUTES)
        return Rate(handled / (RATE_MINUTES * 60))

    @property
    def publish_rate(self) -> Rate:
        """
        In the last minutes of which consumers have told.

        Where the newest messages do not reach back so far it is at least so many, or as many as they are in the
        time that they do reach back.
        """
        first = told_minutes()
        last = first + RATE_MINUTES
        rate = sum(count for ago, count in self.published.items() if first <= ago < last) / (RATE_MINUTES * 60)
        if self.exact_minutes >= last:
            return Rate(rate)
        seen = sum(self.newest.by_minute.values())
        return Rate(max(rate, seen / max(self.newest.span, SHORTEST_SPAN)), is_at_least=True)


def told_minutes() -> int:
    """Return how many minutes ago the last one was of which all consumers have told: they do with each heartbeat."""
    return 1 + math.ceil(settings.HEARTBEAT_INTERVAL / 60)


def at_least(count: int, *, more: bool) -> str:
    """Return a count as text, with a plus sign where there may be more."""
    return f"{count:,}+" if more and count else f"{count:,}"


def is_cut(count: int) -> bool:
    """Tell whether there may be more of what is counted up to ``SAMPLE_SIZE``."""
    return count >= SAMPLE_SIZE


def numbers_of(names: Sequence[str] | None, using: str) -> dict[str, Numbers]:
    """Return the numbers of queues by name (None: of all, also of those that only orphans remember)."""
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
