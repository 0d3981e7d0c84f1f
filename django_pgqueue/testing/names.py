"""The name and the database of a queue."""

from __future__ import annotations

from django_pgqueue.conf import database_alias
from django_pgqueue.queues import Queue
from django_pgqueue.registry import find_queue


def name_of(queue: Queue | str) -> str:
    """Return the name of a queue, which is given as a ``Queue`` or by name."""
    return queue.name if isinstance(queue, Queue) else queue


def alias_of(queue: Queue | str | None, using: str | None) -> str:
    """Return the database alias: ``using`` if given, else that of the queue, else that of the settings."""
    if using is None and isinstance(queue, str):
        queue = find_queue(queue)
    if using is None and isinstance(queue, Queue):
        return queue.using
    return database_alias(using)
