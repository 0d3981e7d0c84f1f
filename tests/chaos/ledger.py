"""
The ledger: what became of each message, by the publishers' notes and by what the tables hold at the end.

A message whose commit was confirmed has to be found: handled, dead-lettered, or expired where it had a
TTL. One whose outcome is unknown may be found or not, but all of its transaction or nothing. Of what is
published to the topic, each copy whose id was returned has to be found; live subscribers hear a message
once at the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Publish:
    """
    One attempt to publish. Its messages are stored together or not at all.

    To the topic (``copies``): one message; ``keys`` are those of the copies that there may be.
    """

    keys: list[str]
    delay: float
    fates: list[str]
    is_brief: bool
    copies: bool = False
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
    """A message that is still stored: published to ``origin``, now on ``queue`` (None: cut loose), set aside or not."""

    message_id: int
    key: str
    origin: str
    queue: str | None
    is_dead: bool


@dataclass(frozen=True)
class Verdict:
    """The counts, and in words what is wrong with them."""

    counts: dict[str, int]
    problems: list[str]


class Ledger:
    """
    ``read`` takes the notes one by one, ``close`` balances. ``atomic``: queues whose handlers' rows
    commit with the ack. ``expired``: the dead-letter queue of what had a TTL. ``bound``: queues that
    get a copy of what is published to the topic; the first of them is standing, so never left out.
    """

    def __init__(self, *, atomic: Collection[str], expired: str, bound: Collection[str]) -> None:
        self.atomic = atomic
        self.expired = expired
        self.bound = bound
        self.publishes: list[Publish] = []
        self.by_key: dict[str, Publish] = {}
        self.refused = 0

    def read(self, note: dict[str, Any]) -> None:
        """Take one note."""
        if note["note"] == "trying":
            self._try(note)
            return
        publish = self.by_key[note["keys"][0]]
        publish.outcome = note["note"]
        publish.ids = note.get("ids", [])
        self.refused += len(note["keys"]) if note.get("refused") else 0

    def _try(self, note: dict[str, Any]) -> None:
        keys, fates = note["keys"], note["fates"]
        if note["topic"]:
            (key,) = keys
            keys, fates = [copy_key(key, queue) for queue in self.bound], fates * len(self.bound)
        publish = Publish(keys, note["delay"], fates, note["brief"], note["topic"])
        self.publishes.append(publish)
        self.by_key.update(dict.fromkeys([*note["keys"], *keys], publish))

    def close(
        self, handled: Sequence[Handled], items: Sequence[Item], heard: Sequence[tuple[int, str]] = ()
    ) -> Verdict:
        """Balance the ledger with what the tables hold. ``heard``: process and key of each live message."""
        rows = Counter(self._key(row) for row in handled)
        dead = {self._key(item): item for item in items if item.is_dead}
        waiting = {self._key(item) for item in items if not item.is_dead}
        found = rows.keys() | dead.keys() | waiting
        set_aside = {key: item for key, item in dead.items() if key not in rows}
        asked = {key for key in set_aside if self._asked(key)}
        expired = {key for key, item in set_aside.items() if item.queue == self.expired} - asked
        atomic = Counter(row.key for row in handled if row.queue in self.atomic)
        confirmed, unknown = self._keys("committed"), self._keys("unknown")
        copies = {one for publish in self.publishes if publish.copies for one in publish.ids}
        lost_copies = {f"copy {one}" for one in copies - {one.message_id for one in [*handled, *items]}}
        no_copies = {one.keys[0] for one in self.publishes if one.copies and one.outcome == "committed" and not one.ids}
        wrong: dict[str, Collection[str]] = {
            "lost": (confirmed - found) | lost_copies | no_copies,
            "stuck": waiting,
            "phantom": {key for key in [*found, *(key for _, key in heard)] if not self._may_be(key)},
            "duplicates_atomic": [
                *(atomic - Counter(atomic.keys())).elements(),
                *(atomic.keys() & (dead.keys() | waiting)),
            ],
            "torn": {key for publish in self.publishes for key in self._torn(publish, found)},
            "early": {row.key for row in handled if row.handled < row.sent + self._delay(row.key)},
            "mistaken": {one.key for one in [*handled, *items] if self._is_mistaken(one)},
            "heard_twice": {key for (_, key), count in Counter(heard).items() if count > 1},
        }
        counts = {
            "published": len(confirmed | (unknown & found)) + len(copies),
            "handled": len(rows),
            "dead_as_asked": len(asked),
            "dead_otherwise": len(set_aside) - len(asked) - len(expired),
            "expired": len(expired),
            "duplicates": rows.total() - len(rows) - (atomic.total() - len(atomic)),
            "topic": sum(publish.copies and publish.outcome == "committed" for publish in self.publishes),
            "heard": len({key for _, key in heard}),
            "unknown": len(unknown),
            "unknown_committed": len(unknown & found),
            "undone": len(self._keys("undone")),
            "refused": self.refused,
            **{name: len(keys) for name, keys in wrong.items()},
        }
        problems = [f"{name}: {sample(keys)}" for name, keys in wrong.items() if keys]
        return Verdict(counts, problems if confirmed else [*problems, "nothing was published"])

    def _key(self, one: Handled | Item) -> str:
        origin = one.queue if isinstance(one, Handled) else one.origin
        return copy_key(one.key, origin) if origin in self.bound else one.key

    def _keys(self, outcome: str) -> set[str]:
        """Return the messages of this outcome; of the topic's confirmed ones, it is the ids that are known."""
        return {
            key
            for publish in self.publishes
            if publish.outcome == outcome and not (publish.copies and outcome == "committed")
            for key in publish.keys
        }

    def _may_be(self, key: str) -> bool:
        """Tell whether there may be such a message."""
        return key in self.by_key and self.by_key[key].outcome != "undone"

    def _asked(self, key: str) -> bool:
        """Tell whether the publisher asked for the message to be given up."""
        publish = self.by_key.get(key)
        return publish is not None and publish.fates[publish.keys.index(key)] == "reject"

    def _delay(self, key: str) -> float:
        return self.by_key[key].delay if key in self.by_key else 0.0

    def _torn(self, publish: Publish, found: Collection[str]) -> list[str]:
        """Return the messages that are missing of a publish whose outcome is unknown."""
        if publish.outcome != "unknown":
            return []
        # An auto-deleted bound queue that nobody could use for a while is left out.
        missing = [key for key in (publish.keys[:1] if publish.copies else publish.keys) if key not in found]
        return missing if any(key in found for key in publish.keys) else []

    def _is_mistaken(self, one: Handled | Item) -> bool:
        """Tell whether a message goes by another id than ``publish`` returned."""
        publish = self.by_key.get(self._key(one))
        if publish is None or publish.outcome != "committed":
            return False
        if publish.copies:
            return one.message_id not in publish.ids
        return one.message_id != publish.ids[publish.keys.index(one.key)]


def copy_key(key: str, queue: str) -> str:
    """Return the key of the copy that a bound queue got."""
    return f"{key}@{queue}"


def sample(keys: Collection[str]) -> str:
    """Return how many there are, and the first few."""
    return f"{len(keys)} ({', '.join(sorted(keys)[:5])})"
