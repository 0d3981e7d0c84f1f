"""Faults that happen in production, to test how a project's code handles them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

from django.db.models.functions import Now

from django_pgqueue.conf import settings
from django_pgqueue.exceptions import QueueNotFound
from django_pgqueue.models import MessageQueue
from django_pgqueue.queues import Queue
from django_pgqueue.services import notifying, reaping, topics
from django_pgqueue.testing.names import alias_of, name_of


@contextmanager
def lose_notifications() -> Iterator[list[str]]:
    """
    Suppress the notifications of this process inside the block, and yield the names of the queues and topics affected.

    Messages are still committed, and consumers find them when they poll. Live subscribers of a topic miss them.
    """
    lost: list[str] = []

    def lose_queues(connection: Any, name: str, key: Any) -> None:
        lost.append(name)

    def lose_topics(topic: str, notification: str, using: str) -> None:
        lost.append(topic)

    with (
        mock.patch.object(notifying, "wake", lose_queues),
        mock.patch.object(topics, "_notify_topic", lose_topics),
    ):
        yield lost


def vanish(queue: Queue | str, *, using: str | None = None) -> None:
    """
    Delete a queue's row, as if somebody had deleted it by hand. Its messages become orphans.

    The cached declarations of the process remain. Outside a ``TestCase``, publishing to a standing queue then raises
    ``QueueNotFound`` if the process has seen the queue within ``DECLARE_TTL``. Inside a ``TestCase``, where nothing
    is committed and so nothing is cached, publishing recreates the queue. An auto-deleted queue heals. Raises
    ``QueueNotFound`` if there is no row.
    """
    name = name_of(queue)
    deleted, _ = MessageQueue.objects.using(alias_of(queue, using)).filter(name=name).delete()
    if not deleted:
        raise QueueNotFound(name)


def reap(queue: Queue | str, *, using: str | None = None) -> None:
    """
    Let the reaper delete an auto-deleted queue, as if it had been idle for ``REAP_IDLE_AFTER``.

    Raises ``ValueError`` if the reaper would not delete the queue, because it is standing or paused, holds messages, or
    has no row.
    """
    name, alias, idle_for = name_of(queue), alias_of(queue, using), settings.REAP_IDLE_AFTER
    idle_since = Now() - timedelta(seconds=idle_for + 1)
    MessageQueue.objects.using(alias).filter(name=name).update(last_active=idle_since)
    if not reaping.reap_queue(name, idle_for, alias):
        raise ValueError(f"queue {name!r} is not reaped: it is standing or paused, holds messages, or has no row")
