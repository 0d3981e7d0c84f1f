"""Remove what expired or fell idle, and bring back what was cut loose. Several may run at once."""

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

# Seconds after which the row of a consumer that stopped beating is removed: a day, so that people
# can still see what died last night.
CONSUMER_AGE = 86_400.0

# Seconds for which tombstones, and what became of them, are kept: a week.
EVENT_AGE = 7 * 86_400.0

# Nobody waits for the reaper, but everybody who commits waits for what is in the log by then. So it takes small
# batches, and rests after each for twice as long as that took, up to so many seconds.
EXPIRED_AT_ONCE = 100
LONGEST_REST = 0.1

# How many messages at the head of each queue are looked at for lapsed leases.
SCAN_LIMIT = 1_000


@dataclass
class Reaped:
    """What one run did."""

    expired: int = 0
    dead_lettered: int = 0
    adopted: int = 0
    bodies: int = 0
    events: int = 0
    queues: list[str] = field(default_factory=list)


class Reaper:
    """
    ``idle_for``: seconds after which an auto-deleted queue may go. ``batch_size``: how many
    messages one statement takes. ``progress`` is called after each step with what was done so far.
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
        """Do all there is to do, in batches, each its own short transaction."""
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
            # Not migrated yet, or without the rights: what has to be done is done.
            logger.warning("reaper's run not noted error=%s", describe(error))
        return reaped

    def preview(self) -> Reaped:
        """Return what ``run_once`` would find now, and change nothing."""
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
    """Sleep for twice as long as it took since ``began``, up to ``LONGEST_REST``."""
    time.sleep(min(2 * (time.monotonic() - began), LONGEST_REST))
