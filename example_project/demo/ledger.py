"""
The ledger: what became of each message, by the notes of the processes and what the tables hold at the end.

A message whose commit was confirmed has to be found: handled, dead-lettered, or expired where it had a TTL. One
whose outcome is unknown may be found or not, but all of its transaction or nothing. Of what is published to a
topic, each copy whose id was returned has to be found; live subscribers hear a message at most once.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any


@dataclass
class Publish:
    """
    One attempt to publish. Its messages are stored together or not at all.

    To a topic (``copies``): one message; ``keys`` are those of the copies that there may be.
    """

    keys: list[str]
    at: float
    delay: float
    fates: list[str]
    copies: bool = False
    outcome: str = "unknown"
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Delivery:
    """A delivery that a handler has noted."""

    id: int
    key: str
    queue: str
    number: int
    source: str
    at: float


@dataclass(frozen=True)
class Item:
    """A message that is still stored: published to ``queue``, now on ``place`` (None: an orphan), set aside or not."""

    id: int
    key: str
    queue: str
    place: str | None
    is_dead: bool


@dataclass(frozen=True)
class Remains:
    """What the tables hold at the end. ``at``: when that was; ``marks``: ids, and what was written beside them."""

    items: Collection[Item] = ()
    marks: Collection[tuple[int, str]] = ()
    at: float = 0.0
    missing_queues: int = 0


@dataclass(frozen=True)
class Verdict:
    """The figures, and in words what is wrong with them."""

    figures: dict[str, Any]
    problems: list[str]


@dataclass(frozen=True)
class Ends:
    """
    What became of the messages, by name: handled (and how often), set aside, waiting, or orphaned.

    ``ids``: all of them by id.
    """

    atomic: Counter[str]
    late: Counter[str]
    dead: dict[str, Item]
    waiting: set[str]
    orphaned: set[str]
    ids: set[int]

    @cached_property
    def handled(self) -> set[str]:
        return self.atomic.keys() | self.late.keys()

    @cached_property
    def all(self) -> set[str]:
        return self.handled | self.dead.keys() | self.waiting | self.orphaned


class Ledger:
    """
    ``read`` takes the notes one by one, ``close`` balances.

    ``expired``: the dead-letter queue of what had a TTL. ``bound``: queues that get a copy of what is published to
    the topic; the first of them is standing, so never left out.
    """

    def __init__(self, *, expired: str = "", bound: Collection[str] = ()) -> None:
        self.expired = expired
        self.bound = bound
        self.publishes: list[Publish] = []
        self.by_key: dict[str, Publish] = {}
        #: The messages whose commit was confirmed, and when each of them expires and is deleted (None: never).
        self.published: dict[str, float | None] = {}
        #: Ids of those that were published beside a write.
        self.marked: set[int] = set()
        self.undone = 0
        self.refused = 0
        #: The deliveries that began and those that ended well, by message.
        self.started: dict[str, list[Delivery]] = {}
        self.handled: dict[str, list[Delivery]] = {}
        #: Messages of atomic handlers: they are handled if the handler's write is there, whatever it noted.
        self.atomic: set[str] = set()
        #: Process and key of each message that a live subscriber heard.
        self.heard: list[tuple[str, str]] = []
        #: Messages that the reaper says it expired.
        self.reaped_messages = 0

    def read(self, source: str, note: dict[str, Any]) -> None:
        """Take one note of the process ``source``."""
        if read := getattr(self, f"_read_{note['note']}", None):
            read(source, note)

    def _read_trying(self, source: str, note: dict[str, Any]) -> None:
        keys, fates = note["keys"], note["fates"]
        if note["topic"]:
            (key,) = keys
            keys, fates = [copy_key(key, queue) for queue in self.bound], fates * len(self.bound)
        publish = Publish(keys, note["at"], note["delay"], fates, note["topic"])
        self.publishes.append(publish)
        self.by_key.update(dict.fromkeys([*note["keys"], *keys], publish))

    def _read_committed(self, source: str, note: dict[str, Any]) -> None:
        publish = self.by_key[note["keys"][0]]
        publish.outcome, publish.ids = "committed", note["ids"]
        if not publish.copies:
            self.published.update(zip(note["keys"], note["expires"], strict=True))
        if note["marked"]:
            self.marked.update(note["ids"])

    def _read_undone(self, source: str, note: dict[str, Any]) -> None:
        publish = self.by_key[note["keys"][0]]
        publish.outcome = "undone"
        self.undone += len(publish.keys)
        self.refused += len(note["keys"]) if note["refused"] else 0

    def _read_started(self, source: str, note: dict[str, Any]) -> None:
        name = self._take(self.started, source, note)
        if note["atomic"]:
            self.atomic.add(name)

    def _read_handled(self, source: str, note: dict[str, Any]) -> None:
        self._take(self.handled, source, note)

    def _take(self, ledger: dict[str, list[Delivery]], source: str, note: dict[str, Any]) -> str:
        one = Delivery(note["id"], note["key"], note["queue"], note["delivery"], source, note["at"])
        name = self._name(one)
        ledger.setdefault(name, []).append(one)
        return name

    def _read_heard(self, source: str, note: dict[str, Any]) -> None:
        self.heard.append((source, note["key"]))

    def _read_expired(self, source: str, note: dict[str, Any]) -> None:
        self.reaped_messages += note["count"]

    # --- The answer ---

    def close(self, remains: Remains) -> Verdict:
        """Balance the ledger with what the tables hold."""
        ends = self._ends(remains)
        found = ends.all | self.started.keys()
        unknown = {key for one in self.publishes if one.outcome == "unknown" for key in one.keys}
        published = self.published.keys() | (unknown & found)
        copies = {one for publish in self.publishes if publish.copies for one in publish.ids}
        no_copies = {one.keys[0] for one in self.publishes if one.copies and one.outcome == "committed" and not one.ids}
        # Nobody tells the ids of messages that expired. They are among those that are gone and whose time was up;
        # how many they may be is the reaper's word.
        overdue = sorted(key for key in published - ends.all if self.time_was_up(key, remains.at))
        expired = set(overdue[: self.reaped_messages])
        wrong: dict[str, Collection[Any]] = {
            "lost": (published - ends.all - expired) | {f"copy {one}" for one in copies - ends.ids} | no_copies,
            **self._not_possible(ends, found, remains),
        }
        figures = {
            "published": len(published) + len(copies),
            **self._counts(ends),
            "unknown": len(unknown),
            "unknown_committed": len(unknown & found),
            **{name: len(keys) for name, keys in wrong.items()},
        }
        figures["expired"] += len(expired)
        wrong["a publish and the write beside it did not commit together"] = self._halves(remains)
        problems = [f"{name}: {sample(keys)}" for name, keys in wrong.items() if keys]
        return Verdict(figures, problems if self.published else [*problems, "nothing was published"])

    def _ends(self, remains: Remains) -> Ends:
        """Return what became of the messages."""
        names = {one.id: name for name in self.atomic for one in self.started[name]}
        marks = Counter(one for one, what in remains.marks if what == "handled" and one in names)
        late = [one for name, ones in self.handled.items() if name not in self.atomic for one in ones]
        left = [item for item in remains.items if not item.is_dead]
        return Ends(
            atomic=Counter({names[one]: count for one, count in marks.items()}),
            late=Counter(self._name(one) for one in late),
            dead={self._name(item): item for item in remains.items if item.is_dead},
            waiting={self._name(item) for item in left if item.place is not None},
            orphaned={self._name(item) for item in left if item.place is None},
            ids={one.id for one in [*late, *remains.items]} | marks.keys(),
        )

    def _counts(self, ends: Ends) -> dict[str, int]:
        aside = {key: item for key, item in ends.dead.items() if key not in ends.handled}
        asked = {key for key in aside if self._asked(key)}
        expired = {key for key, item in aside.items() if item.place == self.expired} - asked
        return {
            "handled": len(ends.handled),
            "dead": len(aside) - len(expired),
            "dead_as_asked": len(asked),
            "dead_otherwise": len(aside) - len(asked) - len(expired),
            "expired": len(expired),
            "orphaned": len(ends.orphaned - ends.handled),
            "waiting": len(ends.waiting - ends.handled),
            "duplicates": ends.late.total() - len(ends.late),
            "topic": sum(publish.copies and publish.outcome == "committed" for publish in self.publishes),
            "heard": len({key for _, key in self.heard}),
            "undone": self.undone,
            "refused": self.refused,
        }

    def _not_possible(self, ends: Ends, found: Collection[str], remains: Remains) -> dict[str, Collection[str]]:
        """Return by name what must not happen, and the messages to which it did."""
        left = ends.waiting | ends.orphaned
        deliveries = list(self._deliveries())
        return {
            "stuck": left,
            "phantom": {key for key in [*found, *(key for _, key in self.heard)] if not self._may_be(key)},
            "duplicates_atomic": [
                *(ends.atomic - Counter(ends.atomic.keys())).elements(),
                *(ends.atomic.keys() & (ends.dead.keys() | left)),
            ],
            "torn": {key for publish in self.publishes for key in _torn(publish, found)},
            "early": {one.key for one in deliveries if self._is_early(one)},
            "mistaken": {one.key for one in [*deliveries, *remains.items] if self._is_mistaken(one)},
            "heard_twice": [key for (_, key), count in Counter(self.heard).items() if count > 1],
        }

    def time_was_up(self, key: str, at: float) -> bool:
        """Tell whether a message may have been deleted as expired."""
        expires_at = self.published.get(key)
        # One second more: the publisher noted it after the database had fixed it.
        return expires_at is not None and expires_at <= at + 1

    def _name(self, one: Delivery | Item) -> str:
        return copy_key(one.key, one.queue) if one.queue in self.bound else one.key

    def _deliveries(self) -> Iterator[Delivery]:
        return chain.from_iterable(self.started.values())

    def _may_be(self, key: str) -> bool:
        """Tell whether there may be such a message."""
        return key in self.by_key and self.by_key[key].outcome != "undone"

    def _asked(self, key: str) -> bool:
        """Tell whether the publisher asked for the message to be rejected."""
        publish = self.by_key.get(key)
        return publish is not None and publish.fates[publish.keys.index(key)] == "reject"

    def _is_early(self, one: Delivery) -> bool:
        publish = self.by_key.get(one.key)
        return publish is not None and one.at < publish.at + publish.delay

    def _is_mistaken(self, one: Delivery | Item) -> bool:
        """Tell whether a message has another id than ``publish`` returned."""
        name = self._name(one)
        publish = self.by_key.get(name)
        if publish is None or publish.outcome != "committed":
            return False
        return one.id not in publish.ids if publish.copies else one.id != publish.ids[publish.keys.index(name)]

    def _halves(self, remains: Remains) -> list[int]:
        """Return ids of which either the publish or the write beside it was committed, and not both."""
        written = {one for one, what in remains.marks if what == "published"}
        names = {one.id: self._name(one) for one in [*self._deliveries(), *remains.items]}
        return [one for one in written ^ self.marked if self._outcome(names.get(one)) != "unknown"]

    def _outcome(self, key: str | None) -> str:
        return self.by_key[key].outcome if key in self.by_key else ""


def _torn(publish: Publish, found: Collection[str]) -> list[str]:
    """Return the messages that are missing of a publish whose outcome is unknown."""
    if publish.outcome != "unknown" or not any(key in found for key in publish.keys):
        return []
    # An auto-deleted bound queue that nobody could use for a while is left out.
    return [key for key in (publish.keys[:1] if publish.copies else publish.keys) if key not in found]


def copy_key(key: str, queue: str) -> str:
    """Return the key of the copy that a bound queue got."""
    return f"{key}@{queue}"


def sample(found: Collection[Any]) -> str:
    """Return how many there are, and the first few."""
    return f"{len(found)} ({', '.join(str(one) for one in sorted(found)[:5])})"
