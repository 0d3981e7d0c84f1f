"""
A small model of queues and messages, in plain Python: what the statements of `services/` should come to.

It has a clock of its own that stands still until `now` is changed. What is due, over or idle at exactly
this time counts as such: in the database a moment has always passed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from uuid import UUID

from django_pgqueue.services.declaring import Declaration

IDLE_AFTER = 200
EPHEMERAL_TTL = 300
DEAD_LETTER_DELIVERIES = 5

STATES = ("ready", "delayed", "leased", "dead", "expired", "orphaned")

#: A due time: when, and which of those that are due at the same time comes first.
Due = tuple[float, int]
PARKED: Due = (float("inf"), 0)


@dataclass(eq=False)
class QueueRow:
    auto_deleted: bool
    dead_letter: str | None
    max_deliveries: int
    last_active: float
    paused: bool = False


@dataclass(eq=False)
class MessageRow:
    id: int
    name: str
    payload: object
    due: Due | None
    expires_at: float | None
    is_orphan: bool = False
    delivery_count: int = 0
    lease_ends: float | None = None
    token: UUID | None = None
    #: The queues that gave it up. It is dead when there are any.
    path: list[str] = field(default_factory=list)


class Model:
    """The database, and what this process believes of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queues: dict[str, QueueRow] = {}
        self.messages: dict[int, MessageRow] = {}
        # Of this process: queues that it need not look at again, and queues that were ever there.
        self.believed: set[str] = set()
        self.known: set[str] = set()
        # What the reaper and the healers wrote down, oldest first.
        self.events: dict[str, list[str]] = {}
        self._places = count(1)

    # --- States ---

    def is_held(self, message: MessageRow) -> bool:
        return message.lease_ends is not None and message.lease_ends > self.now

    def is_over(self, message: MessageRow) -> bool:
        return message.expires_at is not None and message.expires_at <= self.now

    def is_due(self, message: MessageRow) -> bool:
        return message.due is None or message.due[0] <= self.now

    def is_spent(self, message: MessageRow) -> bool:
        return message.delivery_count >= self.queues[message.name].max_deliveries

    def state(self, message: MessageRow) -> str:
        if self.is_held(message):
            return "leased"
        if message.is_orphan:
            return "orphaned"
        if message.path:
            return "dead"
        if self.is_over(message):
            return "expired"
        return "ready" if self.is_due(message) else "delayed"

    def depth(self, name: str) -> Counter[str]:
        return Counter(self.state(message) for message in self.messages.values() if message.name == name)

    def claimable(self, name: str) -> list[MessageRow]:
        """Return what a claim may find on a queue, spent or not, dead letters too."""
        if name not in self.queues or self.queues[name].paused:
            return []
        return [
            message
            for message in self.messages.values()
            if message.name == name
            and not message.is_orphan
            and not self.is_held(message)
            and not self.is_over(message)
            and self.is_due(message)
        ]

    def in_order(self, messages: list[MessageRow]) -> tuple[list[int], list[int]]:
        """Return ids in the order of the two walks: what has a due time, and what was never delayed."""
        due = sorted((message.due, message.id) for message in messages if message.due is not None)
        return [message_id for _, message_id in due], sorted(message.id for message in messages if message.due is None)

    # --- Queues ---

    def declare(self, declaration: Declaration) -> str | None:
        """Make or refresh the queue. Returns why it was gone, if it was."""
        cause = self._make(declaration)
        self.queues[declaration.name].last_active = self.now
        self._make_dead_letter_queue(declaration)
        self.remember(declaration.name)
        return cause

    def refresh(self, declaration: Declaration) -> str | None:
        """What a publish does before or after its insert, unless the process believes in the queue."""
        if declaration.name in self.believed:
            return None
        if declaration.name not in self.queues:
            return self.declare(declaration)
        self.queues[declaration.name].last_active = self.now
        self.remember(declaration.name)
        return None

    def heal(self, declaration: Declaration) -> str | None:
        """Make the queue alone."""
        self.believed.discard(declaration.name)
        return self._make(declaration)

    def _make(self, declaration: Declaration) -> str | None:
        name = declaration.name
        if name in self.queues:
            return None
        self.queues[name] = QueueRow(
            declaration.auto_deleted, declaration.dead_letter, declaration.max_deliveries, self.now
        )
        events = self.events.setdefault(name, [])
        if events[-1:] == ["reaped"]:
            events.append("revived")
        elif name in self.known:
            events.append("vanished")
        else:
            return None
        return events[-1]

    def _make_dead_letter_queue(self, declaration: Declaration) -> None:
        target = declaration.dead_letter_target
        if target is not None and target not in self.queues:
            origin = self.queues.get(declaration.name)
            auto_deleted = origin is not None and origin.auto_deleted and origin.dead_letter is None
            self.queues[target] = QueueRow(auto_deleted, None, DEAD_LETTER_DELIVERIES, self.now)

    def remember(self, name: str) -> None:
        self.believed.add(name)
        self.known.add(name)

    def touch(self, declarations: list[Declaration]) -> list[str | None]:
        """Refresh those that are there, then make the others, in name order."""
        missing = [one for one in declarations if one.name not in self.queues]
        for declaration in declarations:
            if declaration not in missing:
                self.queues[declaration.name].last_active = self.now
        return [self.declare(declaration) for declaration in sorted(missing, key=lambda one: one.name)]

    def delete_queue(self, name: str) -> None:
        if self.queues.pop(name, None) is not None:
            for message in self.messages.values():
                message.is_orphan = message.is_orphan or message.name == name

    # --- Messages ---

    def add(self, message_id: int, name: str, payload: object, delay: float, ttl: float | None) -> None:
        due = (self.now + delay, next(self._places)) if delay else None
        expires_at = None if ttl is None else self.now + delay + ttl
        self.messages[message_id] = MessageRow(message_id, name, payload, due, expires_at)

    def claim(self, message_id: int, token: UUID, lease: float) -> None:
        message = self.messages[message_id]
        message.delivery_count += 1
        message.token, message.lease_ends = token, self.now + lease

    def owned(self, fence: dict[int, set[UUID]]) -> list[MessageRow]:
        """Return the messages that still are the caller's: whether the lease lapsed does not matter."""
        return [message for message in self.messages.values() if message.token in fence.get(message.id, ())]

    def extend(self, messages: list[MessageRow], seconds: float) -> None:
        for message in messages:
            message.lease_ends = self.now + seconds

    def ack(self, messages: list[MessageRow]) -> None:
        for message in messages:
            del self.messages[message.id]

    def release(self, messages: list[MessageRow]) -> None:
        place = next(self._places)
        for message in messages:
            message.due = message.due or (self.now, place)
            message.delivery_count -= 1
            message.token = message.lease_ends = None

    def nack(self, declaration: Declaration, messages: list[MessageRow], delay: float) -> None:
        place = next(self._places)
        for message in messages:
            row = self.queues.get(message.name)
            most = declaration.max_deliveries if message.is_orphan or row is None else row.max_deliveries
            if message.delivery_count >= most:
                self.dead_letter(declaration, [message])
            else:
                message.due = self.now + delay, place
                message.token = message.lease_ends = None

    def dead_letter(self, declaration: Declaration, messages: list[MessageRow]) -> None:
        place = next(self._places)
        for message in messages:
            target = self._target(declaration, message)
            if target is None or target == message.name or target in message.path:
                message.path = message.path or [message.name]
                message.due = PARKED
            else:
                if target not in self.queues:
                    self._make_dead_letter_queue(Declaration(declaration.name, dead_letter=target))
                message.path = [*message.path, message.name]
                message.name, message.is_orphan, message.due = target, False, (self.now, place)
            message.expires_at = message.token = message.lease_ends = None
            message.delivery_count = 0

    def _target(self, declaration: Declaration, message: MessageRow) -> str | None:
        row = self.queues.get(message.name)
        configured = declaration.dead_letter if row is None else row.dead_letter
        return configured or Declaration(message.name).dead_letter_target

    def redrive(self, declaration: Declaration, limit: int | None) -> tuple[int, str | None]:
        """Returns how many went back, and why the queue was gone, if it was."""
        name = declaration.name
        free = [message for message in self.messages.values() if not self.is_held(message)]
        back = [message for message in free if message.path[-1:] == [name]][:limit]
        parked = [
            message for message in free if message.name == name and not message.is_orphan and message.due == PARKED
        ]
        # The queue is made for what comes back to it, and only for that.
        cause = self.declare(declaration) if back and name not in self.queues else None
        sent = (back + parked)[:limit]
        for message in sent:
            if message in back:
                message.name, message.is_orphan, message.path = name, False, message.path[:-1]
            message.due = self.now, next(self._places)
            message.token = message.lease_ends = None
            message.delivery_count = 0
        return len(sent), cause

    def purge(self, name: str, limit: int | None) -> int:
        waiting = [
            message
            for message in self.messages.values()
            if message.name == name and not message.is_orphan and not self.is_held(message)
        ]
        waiting.sort(key=lambda message: (message.due is None, message.due, message.id))
        self.ack(waiting[:limit])
        return len(waiting[:limit])

    # --- Reaping ---

    def adopt(self, name: str) -> int:
        place = next(self._places)
        orphans = [one for one in self.messages.values() if one.name == name and one.is_orphan]
        for message in orphans if name in self.queues else []:
            message.is_orphan = False
            message.due = message.due or (self.now, place)
        return len(orphans) if name in self.queues else 0

    def expire(self) -> tuple[int, int]:
        """Returns how many were deleted, and how many were set aside."""
        over = [message for message in self.messages.values() if self.is_over(message) and not self.is_held(message)]
        kept = [message for message in over if not message.is_orphan and self.queues[message.name].dead_letter]
        for name in sorted({message.name for message in kept}):
            self.dead_letter(Declaration(name), [message for message in kept if message.name == name])
        self.ack([message for message in over if message not in kept])
        return len(over) - len(kept), len(kept)

    def reapable(self, name: str) -> bool:
        row = self.queues[name]
        # Orphans count: the reaper adopts them first.
        is_empty = all(message.name != name for message in self.messages.values())
        return row.auto_deleted and not row.paused and row.last_active + IDLE_AFTER <= self.now and is_empty

    def reap_queues(self) -> list[str]:
        idle = sorted(name for name in self.queues if self.reapable(name))
        for name in idle:
            del self.queues[name]
            self.events.setdefault(name, []).append("reaped")
        return idle

    def set_spent_aside(self) -> int:
        """What lapsed on its last delivery, paused queues included."""
        spent = [
            message
            for message in self.messages.values()
            if not message.is_orphan
            and message.lease_ends is not None
            and not self.is_held(message)
            and self.is_due(message)
            and self.is_spent(message)
        ]
        for name in sorted({message.name for message in spent}):
            self.dead_letter(Declaration(name), [message for message in spent if message.name == name])
        return len(spent)
