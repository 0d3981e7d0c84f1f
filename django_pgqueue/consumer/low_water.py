"""
Where a consumer's walk over a queue may start.

A claim walks over the index entries of all that was handled before and not vacuumed yet. While some
session holds vacuum back (a long report, a backup, a replica's feedback), that is ever more, and each
claim takes ever longer. So a consumer whose claims have become slow remembers up to where it found
everything done a moment ago, and starts there.

What it leaves out are messages whose publisher drew their ids and committed later, and lapsed leases. So
the mark trails, and every so often a claim looks at all of the queue again.
"""

from __future__ import annotations

import math
from collections import deque

# A claim was slow if it took more seconds than this, and so many for each message that it brought.
SLOW = 0.003
SLOW_EACH = 0.00005

# The mark is so many seconds old: a publisher that commits within them is never left out.
TRAIL = 0.25

# After so many seconds a claim looks at all of the queue. Where that alone takes long, it is done more
# rarely: it shall take no more than this share of the time.
LOOK_BACK = 1.0
LOOK_BACK_SHARE = 0.1


class LowWaterMark:
    """The id behind which claims of one queue start. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._is_slow = False
        self._mark = 0
        #: Up to which id the walk found everything done, and when.
        self._seen: deque[tuple[float, int]] = deque()
        #: When the next claim has to look at all of the queue. Infinite: each does.
        self.look_back_at = math.inf

    def start(self, now: float) -> int:
        """Return the id behind which a claim may start now. 0: it has to look at all of the queue."""
        if not self._is_slow or now >= self.look_back_at:
            return 0
        while self._seen and self._seen[0][0] <= now - TRAIL:
            self._mark = self._seen.popleft()[1]
        return self._mark

    def claimed(self, start: int, began: float, ended: float, count: int, walked: tuple[int, int] | None) -> None:
        """Note a claim: where it started, when it began and ended, how many messages it brought, and their ids."""
        if not start:
            self._looked_at_all(began, ended, count, walked)
        if walked is not None and self._is_slow:
            self._seen.append((ended, walked[1]))

    def _looked_at_all(self, began: float, ended: float, count: int, walked: tuple[int, int] | None) -> None:
        took = ended - began
        if took <= SLOW + SLOW_EACH * count:
            self.drop()
            return
        self._is_slow = True
        self.look_back_at = ended + max(LOOK_BACK, took / LOOK_BACK_SHARE)
        if walked is not None:
            # Nothing is ready below now; above there may be more of what was committed late.
            below = walked[0] - 1
            self._mark = min(self._mark, below)
            self._seen = deque(seen for seen in self._seen if seen[1] <= below)

    def drop(self) -> None:
        """Let the next claim look at all of the queue."""
        self._is_slow = False
        self._mark = 0
        self._seen.clear()
        self.look_back_at = math.inf
