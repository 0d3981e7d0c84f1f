"""
The ledger of the demo. Nothing happens there but that queues are deleted and reaped and a consumer is killed, so
more is promised than that no message is lost; and a run that did not exercise what it is for proves nothing.
"""

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import Any

from example_project.demo.ledger import Ledger, Remains, Verdict, sample

TALLIED = ("queues_deleted", "orphans_made", "adopted", "queues_reaped", "healed", "healed_by_publishers")


class StrictLedger(Ledger):
    """``auto_deleted``: the names of the auto-deleted queues. ``lease``: its length in seconds."""

    def __init__(self, auto_deleted: Collection[str], lease: float) -> None:
        super().__init__()
        self.auto_deleted = auto_deleted
        self.lease = lease
        #: When deliveries of each message failed, and ids of messages whose lease was lost.
        self.failed: dict[int, list[float]] = {}
        self.lease_lost: set[int] = set()
        #: Consumers ended by SIGKILL, by the name of their notes.
        self.killed: set[str] = set()
        #: How often what happened, by the name of the figure.
        self.tally = Counter[str]()
        self.standing_made: set[str] = set()
        #: Seconds, while everything runs and after it has come to rest.
        self.busy_wake_ups: list[float] = []
        self.wake_ups: list[float] = []
        self.is_quiet = False
        self.first_publish = float("inf")
        self.last_end = 0.0
        self.handled_under_load = 0

    def rest(self) -> None:
        """Take what comes from now on as not part of the load."""
        self.is_quiet = True
        self.handled_under_load = len(self.handled)

    def _read_committed(self, source: str, note: dict[str, Any]) -> None:
        super()._read_committed(source, note)
        self.first_publish = min(self.first_publish, note["at"])

    def _read_handled(self, source: str, note: dict[str, Any]) -> None:
        super()._read_handled(source, note)
        if not self.is_quiet:
            self.last_end = max(self.last_end, note["at"])

    def _read_woken(self, source: str, note: dict[str, Any]) -> None:
        (self.wake_ups if self.is_quiet else self.busy_wake_ups).append(note["seconds"])

    def _read_failed(self, source: str, note: dict[str, Any]) -> None:
        self.failed.setdefault(note["id"], []).append(note["at"])

    def _read_lease_lost(self, source: str, note: dict[str, Any]) -> None:
        self.lease_lost.update(note["ids"])

    def _read_adopted(self, source: str, note: dict[str, Any]) -> None:
        self.tally["adopted"] += note["count"]

    def _read_deleted(self, source: str, note: dict[str, Any]) -> None:
        self.tally.update(queues_deleted=1, orphans_made=note["orphans"])

    def _read_reaped(self, source: str, note: dict[str, Any]) -> None:
        # Dead-letter queues of auto-deleted queues come and go as well; they are not counted.
        self.tally["queues_reaped"] += note["queue"] in self.auto_deleted

    def _read_made(self, source: str, note: dict[str, Any]) -> None:
        # All of the run's queues were there before its processes started: made is made again.
        if note["queue"] in self.auto_deleted:
            self.tally.update(healed=1, healed_by_publishers=source.startswith("publisher"))
        else:
            self.standing_made.add(note["queue"])

    # --- The answer ---

    def close(self, remains: Remains) -> Verdict:
        verdict = super().close(remains)
        figures = {
            **verdict.figures,
            "redelivered": sum(len(starts) > 1 for starts in self.started.values()),
            "handled_twice": sum(len(ends) > 1 for ends in self.handled.values()),
            "rolled_back": self.undone,
            **{name: self.tally[name] for name in TALLIED},
            "consumers_killed": len(self.killed),
            "leases_lost": len(self.lease_lost),
            **self._speed(),
        }
        ends = ("handled", "expired", "dead", "orphaned", "waiting", "lost")
        adds_up = figures["published"] == sum(figures[end] for end in ends)
        return Verdict(
            figures,
            [
                *verdict.problems,
                *([] if adds_up else ["the outcomes of the messages do not add up"]),
                *self._not_promised(remains),
                *self._not_exercised(),
            ],
        )

    def _not_promised(self, remains: Remains) -> list[str]:
        dead = {item.key for item in remains.items if item.is_dead}
        deliveries = Counter((one.id, one.number) for ends in self.handled.values() for one in ends)
        healed, removed = self.tally["healed"], self.tally["queues_deleted"] + self.tally["queues_reaped"]
        # Messages that were handled and perhaps not acked can expire, too.
        overdue = [key for key in self.published if self.time_was_up(key, remains.at)]
        due = sum(self._may_lack_ack(key) if key in self.handled else key not in dead for key in overdue)
        checks = {
            # Handled and then not acked, a message may expire to a dead-letter queue.
            "handled messages are still there": [
                key for key in dead & self.handled.keys() if not self._may_lack_ack(key)
            ],
            "messages were delivered again under a live lease": [key for key in self.started if self._is_again(key)],
            "one delivery was handled twice": [key for key, count in deliveries.items() if count > 1],
            "handled twice without a lost lease": [
                key for key, ends in self.handled.items() if len(ends) > 1 and not self._may_lack_ack(key)
            ],
            "publishes were refused": self.refused > 0,
            "standing queues vanished": self.standing_made,
            # A consumer that is killed may have made a queue and not noted it.
            f"queues removed: {removed}, created again: {healed}, missing: {remains.missing_queues}": (
                abs(removed - healed - remains.missing_queues) > len(self.killed)
            ),
            f"the reaper expired {self.reaped_messages} messages, only {due} had reached their TTL": (
                self.reaped_messages > due
            ),
        }
        return [text if found is True else f"{text}: {sample(found)}" for text, found in checks.items() if found]

    def _may_lack_ack(self, key: str) -> bool:
        """Tell whether the consumer may have died, or lost its lease, before the ack."""
        ids = {one.id for one in self.started.get(key, ())}
        sources = {one.source for one in self.handled.get(key, ())}
        return bool(ids & (self.failed.keys() | self.lease_lost) or sources & self.killed)

    def _is_again(self, key: str) -> bool:
        """
        Tell whether a delivery began while the one before it had a lease.

        Nothing starts in the second half of a lease, so what was not given back comes again after half a
        lease at the soonest.
        """
        return any(
            later.at - earlier.at < self.lease / 2
            and not any(earlier.at <= at <= later.at for at in self.failed.get(later.id, ()))
            for earlier, later in pairwise(sorted(self.started[key], key=lambda one: one.at))
        )

    def _not_exercised(self) -> list[str]:
        checks = {
            "no queue was deleted by hand": self.tally["queues_deleted"],
            "no queue was reaped": self.tally["queues_reaped"],
            "no publisher healed a queue": self.tally["healed_by_publishers"],
            "no orphan was adopted": self.tally["adopted"],
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


def percentile(seconds: list[float], share: float) -> float | None:
    """Return a percentile in milliseconds. None: nothing was measured."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)
