"""Remove expired messages and idle queues, and adopt orphans. Several reapers may run at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from django.db import ProgrammingError

from django_pgqueue.conf import settings
from django_pgqueue.runtime.loop import describe
from django_pgqueue.services import consumers, minutes, reaping, tasks

logger = logging.getLogger("django_pgqueue")

# In seconds. The row of a dead consumer is kept for a day, so that people can see which consumers died last night.
CONSUMER_AGE = 86_400.0

# In seconds. Events are kept for a week.
EVENT_AGE = 7 * 86_400.0

# Every commit waits until the reaper's earlier log records are flushed. The reaper therefore takes small batches, and
# sleeps after each batch for twice as long as it took, at most LONGEST_REST seconds.
EXPIRED_AT_ONCE = 100
LONGEST_REST = 0.1

# How many messages at the head of each queue are checked for expired leases.
SCAN_LIMIT = 1_000


@dataclass
class Reaped:
    """The result of one run."""

    expired: int = 0
    dead_lettered: int = 0
    adopted: int = 0
    bodies: int = 0
    events: int = 0
    queues: list[str] = field(default_factory=list)


class Reaper:
    """
    Runs the reaper on one database.

    ``idle_for``: seconds after which an idle auto-deleted queue may be deleted (None: ``REAP_IDLE_AFTER``).
    ``batch_size``: how many messages one statement takes. ``progress`` is called with the result so far, after each
    step.
    """

    def __init__(
        self,
        using: str,
        *,
        idle_for: float | None = None,
        batch_size: int = 1_000,
        progress: Callable[[Reaped], None] = lambda _: None,
    ) -> None:
        self.using = using
        self.idle_for = settings.REAP_IDLE_AFTER if idle_for is None else idle_for
        self.batch_size = batch_size
        self.progress = progress

    def run_once(self) -> Reaped:
        """Do everything that is due, in batches that are short separate transactions. Returns what was done."""
        began = time.monotonic()
        reaped = Reaped()
        self._expire(reaped)
        self._adopt(reaped)
        self._reap_queues(reaped)
        reaped.dead_lettered += reaping.dead_letter_exhausted(SCAN_LIMIT, self.using)
        consumers.forget_consumers(CONSUMER_AGE, self.using)
        while forgotten := reaping.forget_bodies(self.batch_size, self.using):
            reaped.bodies += forgotten
        while forgotten := reaping.forget_events(EVENT_AGE, self.batch_size, self.using):
            reaped.events += forgotten
        self.progress(reaped)
        try:
            while minutes.forget_minutes(self.batch_size, self.using):
                pass
            report = {**asdict(reaped), "queues": len(reaped.queues)}
            reaping.record_run(time.monotonic() - began, report, self.using)
            self._forget_runs()
        except ProgrammingError as error:
            # The table or the permission is missing. The necessary work is already done.
            logger.warning("reaper run not recorded error=%s", describe(error))
        return reaped

    def preview(self) -> Reaped:
        """Return what ``run_once()`` would do now, without changing anything."""
        expired, dead_lettered, adopted = reaping.reapable(self.using)
        idle = [name for name, _ in reaping.idle_queues(self.idle_for, self.using)]
        return Reaped(expired, dead_lettered, adopted, queues=idle)

    def _expire(self, reaped: Reaped) -> None:
        while True:
            began = time.monotonic()
            deleted, moved = reaping.expire(min(self.batch_size, EXPIRED_AT_ONCE), self.using)
            reaped.expired += deleted
            reaped.dead_lettered += moved
            self.progress(reaped)
            if not deleted and not moved:
                return
            _rest(began)

    def _adopt(self, reaped: Reaped) -> None:
        for name in reaping.orphaned_names(self.using):
            while adopted := reaping.adopt(name, self.batch_size, self.using):
                reaped.adopted += adopted
                self.progress(reaped)

    def _forget_runs(self) -> None:
        if settings.TASK_RESULT_TTL is None:
            return
        began = time.monotonic()
        while tasks.forget_runs(settings.TASK_RESULT_TTL, self.batch_size, self.using):
            _rest(began)
            began = time.monotonic()

    def _reap_queues(self, reaped: Reaped) -> None:
        for name, _ in reaping.idle_queues(self.idle_for, self.using):
            began = time.monotonic()
            if reaping.reap_queue(name, self.idle_for, self.using):
                reaped.queues.append(name)
                self.progress(reaped)
            _rest(began)


def _rest(began: float) -> None:
    """Sleep for twice the time since ``began``, at most ``LONGEST_REST`` seconds."""
    time.sleep(min(2 * (time.monotonic() - began), LONGEST_REST))
