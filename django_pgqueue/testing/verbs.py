"""All functions in one object, for the fixture ``pgqueue``."""

from __future__ import annotations

from typing import Any

from django_pgqueue.queues import Queue
from django_pgqueue.testing.assertions import assert_published
from django_pgqueue.testing.clock import advance, lapse_lease
from django_pgqueue.testing.draining import drain
from django_pgqueue.testing.faults import lose_notifications, reap, vanish
from django_pgqueue.testing.immediately import immediate
from django_pgqueue.testing.journal import Published, capture_published, mark, published


class Verbs:
    """The functions of ``django_pgqueue.testing``. Only messages published after its creation are considered."""

    capture_published = staticmethod(capture_published)
    drain = staticmethod(drain)
    immediate = staticmethod(immediate)
    advance = staticmethod(advance)
    lapse_lease = staticmethod(lapse_lease)
    lose_notifications = staticmethod(lose_notifications)
    vanish = staticmethod(vanish)
    reap = staticmethod(reap)
    mark = staticmethod(mark)

    def __init__(self, using: str | None = None) -> None:
        self.using = using
        self.since = mark(using)

    def published(self, queue: Queue | str | None = None) -> list[Published]:
        """See ``published()``."""
        return published(queue, since=self.since, using=self.using)

    def assert_published(self, queue: Queue | str, *args: Any, **options: Any) -> list[Published]:
        """See ``assert_published()``."""
        __tracebackhide__ = True
        return assert_published(queue, *args, **{"since": self.since, "using": self.using, **options})
