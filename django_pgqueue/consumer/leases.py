"""Extend the leases of held messages, and mark those that are lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from django_pgqueue.consumer.lane import Lane
from django_pgqueue.services import settling

logger = logging.getLogger("django_pgqueue")

# In seconds: how long an extension tries rows that another session has locked. The next extension follows soon.
EXTEND_TIMEOUT = 0.2
# Extensions are sent after a third of a lease. One that is sent after this share of the lease is late.
LATE = 0.75


class Leases:
    """Extends the leases of messages that wait, or whose handler has run for less than its timeout."""

    def __init__(self, using: str, lanes: Sequence[Lane]) -> None:
        self.using = using
        self.lanes = lanes

    @property
    def interval(self) -> float:
        """Seconds between two extensions."""
        return min(lane.lease for lane in self.lanes) / 3

    def extend(self) -> None:
        """Extend these leases once."""
        for lane in self.lanes:
            self._extend(lane)

    def _extend(self, lane: Lane) -> None:
        now = time.monotonic()
        held = [
            held
            for held in list(lane.held.values())
            if not held.lost and (held.started is None or now - held.started < lane.handler.timeout)
        ]
        if not held:
            return
        # A concurrent claim briefly locks the rows that it examines.
        timeout = min(EXTEND_TIMEOUT, lane.lease / 10)
        extension = settling.extend([one.message for one in held], lane.lease, self.using, timeout=timeout)
        late = [
            one.message.id
            for one in held
            if one.message.id in extension.extended and now - one.confirmed > lane.lease * LATE
        ]
        if late:
            # They were extended in time, but another consumer almost took them.
            logger.warning("leases extended late queue=%s ids=%s", lane.queue.name, late[:10])
        for one in held:
            if one.message.id in extension.extended:
                one.confirmed = now
            elif one.message.id in extension.lost and one.message.id in lane.held:
                # Settled meanwhile, or lost. In both cases a waiting message must not start.
                one.lost = True
