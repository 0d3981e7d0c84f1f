"""Who is entitled to an extension of its lease, and what becomes of those that get none."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from django_pgqueue.consumer.lane import Lane
from django_pgqueue.services import settling

logger = logging.getLogger("django_pgqueue")

# Seconds for which an extension tries rows that somebody else has locked; the next one is soon.
EXTEND_TIMEOUT = 0.2
# An extension is due after a third of a lease; past this share of it something holds it up.
LATE = 0.75


class Leases:
    """Extends the leases of what lanes hold: what waits, and what runs within its handler's timeout."""

    def __init__(self, using: str, lanes: Sequence[Lane]) -> None:
        self.using = using
        self.lanes = lanes

    @property
    def interval(self) -> float:
        """Seconds between two extensions."""
        return min(lane.lease for lane in self.lanes) / 3

    def extend(self) -> None:
        """Extend all that are entitled to it, once."""
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
        # A claim beside this locks what it looks at, for a moment.
        timeout = min(EXTEND_TIMEOUT, lane.lease / 10)
        extension = settling.extend([one.message for one in held], lane.lease, self.using, timeout=timeout)
        late = [
            one.message.id
            for one in held
            if one.message.id in extension.extended and now - one.confirmed > lane.lease * LATE
        ]
        if late:
            # In time, but a little more and others would have taken them.
            logger.warning("leases extended late queue=%s ids=%s", lane.queue.name, late[:10])
        for one in held:
            if one.message.id in extension.extended:
                one.confirmed = now
            elif one.message.id in extension.lost and one.message.id in lane.held:
                # Settled meanwhile, or lost: either way a waiting one must not start.
                one.lost = True
