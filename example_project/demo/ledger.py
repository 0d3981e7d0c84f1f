"""
The ledger: what became of each message, by the notes of the processes and what the tables still hold.

It asks three questions. Is every published message accounted for, once? Did only that happen which is
promised? Did the run exercise what it is for?
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from example_project.demo.run import SETTINGS


@dataclass(frozen=True)
class Remains:
    """What the tables hold at the end: ids by state, marks as (id, what), queues without a row."""

    waiting: frozenset[int] = frozenset()
    orphaned: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    marks: tuple[tuple[int, str], ...] = ()
    missing_queues: int = 0


@dataclass
class Ledger:
    """
    ``auto_deleted``: the names of the run's auto-deleted queues. ``read`` takes the notes one by one,
    ``close`` answers.
    """

    auto_deleted: Collection[str]
    #: When each published message expires (epoch seconds, None: never).
    published: dict[int, float | None] = field(default_factory=dict)
    marked: set[int] = field(default_factory=set)
    rolled_back: set[int] = field(default_factory=set)
    #: When each message's deliveries began, when one failed, and who noted that one ended well.
    started: dict[int, list[float]] = field(default_factory=dict)
    handled: dict[int, list[str]] = field(default_factory=dict)
    deliveries: Counter[tuple[int, int]] = field(default_factory=Counter)
    #: Messages of atomic handlers: what these noted holds only if their write is there.
    atomic: set[int] = field(default_factory=set)
    failed: dict[int, list[float]] = field(default_factory=dict)
    lease_lost: set[int] = field(default_factory=set)
    #: Messages that the reaper says it expired.
    reaped_messages: int = 0
    queues_deleted: int = 0
    queues_reaped: int = 0
    orphans_made: int = 0
    adopted: int = 0
    healed: int = 0
    healed_by_publishers: int = 0
    standing_made: set[str] = field(default_factory=set)
    #: Seconds, while everything runs and after it has come to rest.
    busy_wake_ups: list[float] = field(default_factory=list)
    wake_ups: list[float] = field(default_factory=list)
    is_quiet: bool = False
    #: Consumers ended by SIGKILL, by the name of their notes.
    killed: set[str] = field(default_factory=set)
    first_publish: float = float("inf")
    last_end: float = 0.0
    handled_under_load: int = 0

    def read(self, source: str, note: dict[str, Any]) -> None:
        """Take one note of the process ``source``."""
        getattr(self, f"_read_{note['note']}")(source, note)

    def rest(self) -> None:
        """Take what comes from now on as not part of the load."""
        self.is_quiet = True
        self.handled_under_load = len(self.handled)

    def _read_published(self, source: str, note: dict[str, Any]) -> None:
        self.first_publish = min(self.first_publish, note["at"])
        self.published.update(dict.fromkeys(note["ids"], note["expires_at"]))
        if note["marked"]:
            self.marked.update(note["ids"])

    def _read_rolled_back(self, source: str, note: dict[str, Any]) -> None:
        self.rolled_back.update(note["ids"])

    def _read_started(self, source: str, note: dict[str, Any]) -> None:
        self.started.setdefault(note["id"], []).append(note["at"])

    def _read_handled(self, source: str, note: dict[str, Any]) -> None:
        self.handled.setdefault(note["id"], []).append(source)
        self.deliveries[note["id"], note["delivery"]] += 1
        if note["atomic"]:
            self.atomic.add(note["id"])
        if not self.is_quiet:
            self.last_end = max(self.last_end, note["at"])

    def _read_woken(self, source: str, note: dict[str, Any]) -> None:
        (self.wake_ups if self.is_quiet else self.busy_wake_ups).append(note["seconds"])

    def _read_failed(self, source: str, note: dict[str, Any]) -> None:
        self.failed.setdefault(note["id"], []).append(note["at"])

    def _read_lease_lost(self, source: str, note: dict[str, Any]) -> None:
        self.lease_lost.update(note["ids"])

    def _read_expired(self, source: str, note: dict[str, Any]) -> None:
        self.reaped_messages += note["count"]

    def _read_adopted(self, source: str, note: dict[str, Any]) -> None:
        self.adopted += note["count"]

    def _read_deleted(self, source: str, note: dict[str, Any]) -> None:
        self.queues_deleted += 1
        self.orphans_made += note["orphans"]

    def _read_reaped(self, source: str, note: dict[str, Any]) -> None:
        # Dead-letter queues of auto-deleted queues come and go as well; they are not counted.
        self.queues_reaped += note["queue"] in self.auto_deleted

    def _read_made(self, source: str, note: dict[str, Any]) -> None:
        # All of the run's queues were there before its processes started: made is made again.
        if note["queue"] in self.auto_deleted:
            self.healed += 1
            self.healed_by_publishers += source.startswith("publisher")
        else:
            self.standing_made.add(note["queue"])

    # --- The answer ---

    def close(self, remains: Remains, now: float) -> "Verdict":
        """Balance the ledger. ``now``: epoch seconds at which the tables were read."""
        published = set(self.published)
        written = {message_id for message_id, what in remains.marks if what == "handled"}
        handled = {message_id for message_id in self.handled if message_id in written or message_id not in self.atomic}
        dead = remains.dead & published
        gone = published - handled - dead - remains.waiting - remains.orphaned
        # Nobody tells the ids of expired messages. They are those that are gone and whose time was up;
        # how many they may be is the reaper's word.
        may_have_expired = {message_id for message_id in gone if self._time_was_up(message_id, now)}
        # Handled, but the consumer may have died or lost its lease before the ack: these can expire too.
        unsettled = {message_id for message_id in handled if self._may_lack_ack(message_id)}
        most = len(may_have_expired) + sum(self._time_was_up(message_id, now) for message_id in unsettled)
        expired = min(len(may_have_expired), self.reaped_messages)
        lost = len(gone) - expired
        figures: dict[str, Any] = {
            "published": len(published),
            "handled": len(handled),
            "redelivered": sum(len(starts) > 1 for starts in self.started.values()),
            "handled_twice": sum(len(ends) > 1 for ends in self.handled.values()),
            "expired": expired,
            "dead": len(dead - handled),
            "orphaned": len((remains.orphaned & published) - handled),
            "waiting": len((remains.waiting & published) - handled),
            "lost": lost,
            "rolled_back": len(self.rolled_back),
            "queues_deleted": self.queues_deleted,
            "queues_reaped": self.queues_reaped,
            "healed": self.healed,
            "healed_by_publishers": self.healed_by_publishers,
            "orphans_made": self.orphans_made,
            "adopted": self.adopted,
            "consumers_killed": len(self.killed),
            "leases_lost": len(self.lease_lost),
            **self._speed(),
        }
        problems = [
            *self._not_accounted(figures, handled, remains),
            *self._not_promised(remains),
            *self._not_exercised(),
        ]
        if self.reaped_messages > most:
            problems.append(f"the reaper expired {self.reaped_messages} messages, only {most} had reached their TTL")
        return Verdict(figures, problems)

    def _time_was_up(self, message_id: int, now: float) -> bool:
        expires_at = self.published.get(message_id)
        # A second more: the publisher noted it after the database had fixed it.
        return expires_at is not None and expires_at <= now + 1

    def _may_lack_ack(self, message_id: int) -> bool:
        return (
            message_id in self.failed
            or message_id in self.lease_lost
            or not self.killed.isdisjoint(self.handled.get(message_id, ()))
        )

    def _came_too_early(self, message_id: int) -> bool:
        """
        Tell whether a delivery began while the one before it had a lease.

        Nothing starts in the second half of a lease, so what was not given back comes again after half a
        lease at the soonest.
        """
        starts = sorted(self.started[message_id])
        return any(
            later - earlier < SETTINGS["LEASE"] / 2
            and not any(earlier <= at <= later for at in self.failed.get(message_id, ()))
            for earlier, later in pairwise(starts)
        )

    def _not_accounted(self, figures: dict[str, Any], handled: set[int], remains: Remains) -> list[str]:
        # A message that was handled and then not acked may have expired, and lie in a dead-letter queue.
        still_there = remains.waiting | remains.orphaned | {one for one in remains.dead if not self._may_lack_ack(one)}
        ends = ("handled", "expired", "dead", "orphaned", "waiting", "lost")
        checks = {
            f"{figures['lost']} messages are lost": figures["lost"],
            f"{figures['orphaned']} messages are orphaned": figures["orphaned"],
            f"{figures['waiting']} messages are still waiting": figures["waiting"],
            "the outcomes of the messages do not add up": figures["published"] - sum(figures[end] for end in ends),
            "handled messages are still there": len(still_there & handled),
        }
        return [text for text, count in checks.items() if count]

    def _not_promised(self, remains: Remains) -> list[str]:
        unpublished = set(self.started) - set(self.published)
        twice = {message_id for message_id, ends in self.handled.items() if len(ends) > 1}
        marks = Counter(remains.marks)
        marked = {message_id for message_id, what in marks if what == "published"}
        removed = self.queues_deleted + self.queues_reaped
        checks = {
            "messages of a rolled-back transaction were delivered": unpublished & self.rolled_back,
            "messages that nobody published were delivered": unpublished - self.rolled_back,
            "messages were delivered again under a live lease": [
                one for one in self.started if self._came_too_early(one)
            ],
            "one delivery was handled twice": [key for key, count in self.deliveries.items() if count > 1],
            "handled twice without a lost lease": [one for one in twice if not self._may_lack_ack(one)],
            "a handler's own write committed twice": [key for key, count in marks.items() if count > 1],
            "a publish and the write beside it did not commit together": marked ^ self.marked,
            "standing queues vanished": self.standing_made,
            # A consumer that is killed may have made a queue and not noted it.
            f"queues removed: {removed}, created again: {self.healed}, missing: {remains.missing_queues}": (
                abs(removed - self.healed - remains.missing_queues) > len(self.killed)
            ),
        }
        return [text if found is True else f"{text}: {sample(found)}" for text, found in checks.items() if found]

    def _not_exercised(self) -> list[str]:
        checks = {
            "no message was published": len(self.published),
            "no queue was deleted by hand": self.queues_deleted,
            "no queue was reaped": self.queues_reaped,
            "no publisher healed a queue": self.healed_by_publishers,
            "no orphan was adopted": self.adopted,
        }
        return [f"not exercised: {text}" for text, count in checks.items() if not count]

    def _speed(self) -> dict[str, Any]:
        seconds = max(self.last_end - self.first_publish, 0.0) if self.handled else 0.0
        return {
            "seconds": round(seconds, 2),
            "throughput": round(self.handled_under_load / seconds, 1) if seconds else None,
            "wakeup_p50_ms": percentile(self.wake_ups, 0.50),
            "wakeup_p99_ms": percentile(self.wake_ups, 0.99),
            "busy_wakeup_p50_ms": percentile(self.busy_wake_ups, 0.50),
            "busy_wakeup_p99_ms": percentile(self.busy_wake_ups, 0.99),
        }


@dataclass(frozen=True)
class Verdict:
    """The figures, and in words what is wrong with them."""

    figures: dict[str, Any]
    problems: list[str]


def percentile(seconds: list[float], share: float) -> float | None:
    """Return a percentile in milliseconds. None: nothing was measured."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)


def sample(found: Any) -> str:
    """Return the first few of what was found, and how many there are."""
    return f"{len(found)} ({', '.join(str(one) for one in sorted(found)[:5])})"
