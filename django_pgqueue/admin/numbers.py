"""What the pages of queues show of each: counted for all queues of a page at once, and within bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from django_pgqueue import services
from django_pgqueue.admin.charts import MINUTES
from django_pgqueue.conf import settings
from django_pgqueue.services import Depth, Minute

# So many messages of each queue are looked at, in each of three walks, and so many dead letters and orphans.
MOST = 1_000


@dataclass(frozen=True)
class Numbers:
    """One queue, as its pages show it. ``depth`` is None for a queue that has just gone."""

    depth: Depth | None
    #: Of this queue, in whichever queue they wait; no more than ``MOST`` are counted.
    dead_letters: int = 0
    orphans: int = 0
    minutes: list[Minute] = field(default_factory=list)
    #: By kind: reaped, revived, vanished; of the last day.
    events: dict[str, int] = field(default_factory=dict)

    def at_least(self, count: int, *, more: bool | None = None) -> str:
        """Return a count as text, with a plus sign where there may be more."""
        is_more = (self.depth is not None and self.depth.more) if more is None else more
        return f"{count:,}+" if is_more and count else f"{count:,}"


def numbers_of(names: Sequence[str], using: str) -> dict[str, Numbers]:
    """Return the numbers of queues by name."""
    depths = {depth.name: depth for depth in services.depths(MOST, using, names)}
    letters = services.dead_letters(names, MOST, using)
    orphans = services.orphans(MOST, using)
    minutes = services.minutes(names, MINUTES, using)
    events: dict[str, dict[str, int]] = {}
    for (queue, kind), count in services.events_per_day(using).items():
        events.setdefault(queue, {})[kind] = count
    return {
        name: Numbers(depths.get(name), letters.get(name, 0), orphans.get(name, 0), minutes[name], events.get(name, {}))
        for name in names
    }


def reapable_in(last_active_age: float) -> float:
    """Return the seconds until an idle auto-deleted queue may be reaped, 0 for now."""
    return max(settings.REAP_IDLE_AFTER - last_active_age, 0.0)
