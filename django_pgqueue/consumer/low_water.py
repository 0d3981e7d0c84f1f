"""
Low-water mark: the id at which a consumer's claims of a queue may start.

A claim walks over the index entries of all messages that were handled but not vacuumed yet. While a session holds back
vacuum (a long report, a backup, a replica's feedback), their number grows, and claims become slower and slower. A
consumer whose claims have become slow remembers the id up to which everything was done a moment ago, and starts there.

This skips messages whose publisher committed late, after it had drawn their ids, and messages whose lease has expired.
The mark therefore lags behind, and at intervals a claim examines the whole queue again.
"""

from __future__ import annotations

import math
from collections import deque

# In seconds. A claim is slow if it took longer than SLOW, plus SLOW_EACH for each message that it returned.
SLOW = 0.003
SLOW_EACH = 0.00005

# In seconds: how far the mark lags behind. A publisher that commits within this time is never skipped.
TRAIL = 0.25

# A claim examines the whole queue after LOOK_BACK seconds. If that takes long, it does so less often, so that it takes
# at most LOOK_BACK_SHARE of the time.
LOOK_BACK = 1.0
LOOK_BACK_SHARE = 0.1


class LowWaterMark:
    """The id after which claims of one queue start. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._is_slow = False
        self._mark = 0
        #: The ids up to which the walk found everything done, each with its time.
        self._seen: deque[tuple[float, int]] = deque()
        #: The time after which a claim has to examine the whole queue. Infinite: every claim does.
        self.look_back_at = math.inf

    def start(self, now: float) -> int:
        """Return the id after which a claim may start now. 0: it has to examine the whole queue."""
        if not self._is_slow or now >= self.look_back_at:
            return 0
        while self._seen and self._seen[0][0] <= now - TRAIL:
            self._mark = self._seen.popleft()[1]
        return self._mark

    def claimed(self, start: int, began: float, ended: float, count: int, walked: tuple[int, int] | None) -> None:
        """
        Record a claim.

        ``start``: the id after which it started. ``began``, ``ended``: its times. ``count``: how many messages it
        returned. ``walked``: the lowest and the highest id that the walk in id order claimed.
        """
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
            # Nothing below is ready now. Above, there may be more messages that were committed late.
            below = walked[0] - 1
            self._mark = min(self._mark, below)
            self._seen = deque(seen for seen in self._seen if seen[1] <= below)

    def drop(self) -> None:
        """Make the next claim examine the whole queue."""
        self._is_slow = False
        self._mark = 0
        self._seen.clear()
        self.look_back_at = math.inf
