"""
The ledger: what became of each message, by the publishers' notes and by what the tables hold at the end.

A message whose commit was confirmed has to be found: handled, dead-lettered, or expired where it had a
TTL. One whose outcome is unknown may be found or not, but all of its transaction or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Publish:
    """One attempt to publish. Its messages are stored together or not at all."""

    keys: list[str]
    delay: float
    fates: list[str]
    is_brief: bool
    outcome: str = "unknown"
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Handled:
    """A row that a handler committed."""

    message_id: int
    key: str
    queue: str
    sent: float
    handled: float


@dataclass(frozen=True)
class Item:
    """A message that is still stored: on ``queue`` (None: cut loose), set aside or not."""

    message_id: int
    key: str
    queue: str | None
    is_dead: bool


@dataclass(frozen=True)
class Verdict:
    """The counts, and in words what is wrong with them."""

    counts: dict[str, int]
    problems: list[str]


class Ledger:
    """
    ``read`` takes the notes one by one, ``close`` balances. ``atomic``: queues whose handlers' rows commit with the
    ack. ``expired``: the dead-letter queue of what had a TTL.
    """

    def __init__(self, *, atomic: Collection[str], expired: str) -> None:
        self.atomic = atomic
        self.expired = expired
        self.publishes: list[Publish] = []
        self.by_key: dict[str, Publish] = {}
        self.refused = 0

    def read(self, note: dict[str, Any]) -> None:
        """Take one note."""
        keys = note["keys"]
        if note["note"] == "trying":
            publish = Publish(keys, note["delay"], note["fates"], note["brief"])
            self.publishes.append(publish)
            self.by_key.update(dict.fromkeys(keys, publish))
            return
        publish = self.by_key[keys[0]]
        publish.outcome = note["note"]
        publish.ids = note.get("ids", [])
        self.refused += len(keys) if note.get("refused") else 0

    def close(self, handled: Sequence[Handled], items: Sequence[Item]) -> Verdict:
        """Balance the ledger with what the tables hold."""
        rows = Counter(row.key for row in handled)
        dead = {item.key: item for item in items if item.is_dead}
        waiting = {item.key for item in items if not item.is_dead}
        found = rows.keys() | dead.keys() | waiting
        confirmed = self._keys("committed")
        unknown = self._keys("unknown")
        set_aside = {key: item for key, item in dead.items() if key not in rows}
        expired = {key for key, item in set_aside.items() if item.queue == self.expired and not self._asked(key)}
        asked = {key for key in set_aside if self._asked(key)}
        atomic = Counter(row.key for row in handled if row.queue in self.atomic)
        once = sum(count - 1 for count in atomic.values()) + sum(key in dead or key in waiting for key in atomic)
        wrong = {
            "lost": confirmed - found,
            "stuck": waiting,
            "phantom": {key for key in found if key not in self.by_key or self.by_key[key].outcome == "undone"},
            "torn": {key for publish in self.publishes for key in self._torn(publish, found)},
            "early": {row.key for row in handled if row.handled < row.sent + self._delay(row.key)},
            "mistaken": self._mistaken(handled, items),
        }
        counts = {
            "published": len(confirmed | (unknown & found)),
            "handled": len(rows),
            "dead_as_asked": len(asked),
            "dead_otherwise": len(set_aside) - len(asked) - len(expired),
            "expired": len(expired),
            "lost": len(wrong["lost"]),
            "stuck": len(waiting),
            "phantom": len(wrong["phantom"]),
            "duplicates": sum(count - 1 for count in rows.values()) - sum(count - 1 for count in atomic.values()),
            "duplicates_atomic": once,
            "torn": len(wrong["torn"]),
            "early": len(wrong["early"]),
            "mistaken": len(wrong["mistaken"]),
            "unknown": len(unknown),
            "unknown_committed": len(unknown & found),
            "undone": len(self._keys("undone")),
            "refused": self.refused,
        }
        problems = [f"{name}: {sample(keys)}" for name, keys in wrong.items() if keys]
        if once:
            problems.append(f"an atomic handler's message had another effect or end as well: {once} times")
        if not confirmed:
            problems.append("nothing was published")
        return Verdict(counts, problems)

    def _keys(self, outcome: str) -> set[str]:
        return {key for publish in self.publishes if publish.outcome == outcome for key in publish.keys}

    def _asked(self, key: str) -> bool:
        """Tell whether the publisher asked for the message to be given up."""
        publish = self.by_key.get(key)
        return publish is not None and publish.fates[publish.keys.index(key)] == "reject"

    def _delay(self, key: str) -> float:
        return self.by_key[key].delay if key in self.by_key else 0.0

    def _torn(self, publish: Publish, found: Collection[str]) -> list[str]:
        """Return the messages that are missing of a publish whose outcome is unknown."""
        missing = [key for key in publish.keys if key not in found]
        return missing if publish.outcome == "unknown" and len(missing) < len(publish.keys) else []

    def _mistaken(self, handled: Sequence[Handled], items: Sequence[Item]) -> set[str]:
        """Return the messages that go by another id than ``publish`` returned."""
        ids = {key: id_ for publish in self.publishes for key, id_ in zip(publish.keys, publish.ids, strict=False)}
        return {one.key for one in [*handled, *items] if ids.get(one.key, one.message_id) != one.message_id}


def sample(keys: Collection[str]) -> str:
    """Return how many there are, and the first few."""
    return f"{len(keys)} ({', '.join(sorted(keys)[:5])})"
