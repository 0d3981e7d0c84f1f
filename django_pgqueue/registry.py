"""The queues and handlers that are registered in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django_pgqueue.consumer.handler import Handler
from django_pgqueue.queue_internals import dead_letter_of, declaration_of

if TYPE_CHECKING:
    from django_pgqueue.queues import Queue

# The queues declared in this process. Queues in queues.py modules exist as long as the process.
_queues: WeakSet[Queue[Any]] = WeakSet()
# A set must not change during an iteration, and any thread may create queues.
_queues_lock = threading.Lock()
# By the queue's name.
_handlers: dict[str, Handler] = {}


def register_queue(queue: Queue[Any]) -> None:
    """Register a declared queue, by a weak reference."""
    with _queues_lock:
        _queues.add(queue)


def register_handler(handler: Handler) -> None:
    """Register a queue's handler. Raises ``ValueError`` if the queue has another one."""
    name = handler.queue.name
    if name in _handlers and _handlers[name].function is not handler.function:
        raise ValueError(f"queue {name!r} already has a handler: {_handlers[name].function!r}")
    _handlers[name] = handler


def registered_handlers(names: Sequence[str] = ()) -> list[Handler]:
    """Return the handlers of these queues (no names: of all). Raises ``LookupError`` if a queue has no handler."""
    missing = [name for name in names if name not in _handlers]
    if missing:
        raise LookupError(
            f"no handler is registered for {', '.join(missing)}; registered: {', '.join(sorted(_handlers)) or 'none'}"
        )
    return [_handlers[name] for name in names or sorted(_handlers)]


def has_handler(name: str) -> bool:
    """Return whether a handler is registered for the queue of this name."""
    return name in _handlers


def living_queues() -> list[Queue[Any]]:
    """Return the queues that are declared in this process."""
    with _queues_lock:
        return list(_queues)


def refuse_cycle(name: str, dead_letter: str) -> None:
    """Raise ``ValueError`` if the dead-letter queues declared in this process form a cycle with this queue."""
    declared = {queue.name: dead_letter_of(queue) for queue in living_queues()} | {name: dead_letter}
    chain = [name]
    while (target := declared.get(chain[-1])) is not None:
        chain.append(target)
        if target in chain[:-1]:
            raise ValueError(f"dead-letter queues must not form a cycle: {' -> '.join(chain)}")


def find_queue(name: str, using: str | None = None) -> Queue[Any] | None:
    """Return the queue of this name (on this database alias) that is declared in this process, or None."""
    return next((queue for queue in living_queues() if queue.name == name and using in (None, queue.using)), None)


def standing_queues() -> list[Queue[Any]]:
    """Return the standing queues that are declared in this process, ordered by name."""
    return sorted(
        (queue for queue in living_queues() if not declaration_of(queue).auto_deleted),
        key=lambda queue: queue.name,
    )
