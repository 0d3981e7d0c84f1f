"""What a consumer reports of its work with each heartbeat."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from django.db import ProgrammingError

from django_pgqueue.consumer.lane import Lane
from django_pgqueue.runtime.loop import describe
from django_pgqueue.services import minutes

logger = logging.getLogger("django_pgqueue")


class MinuteReport:
    """Adds what lanes have counted to the minutes of their queues."""

    def __init__(self, using: str, lanes: Sequence[Lane]) -> None:
        self.using = using
        self.lanes = lanes
        # At the end of a consumer a last heartbeat may be under way.
        self._sending = threading.Lock()

    def send(self) -> None:
        """Add what was counted since the last time."""
        with self._sending:
            tallies = {lane: lane.counted for lane in self.lanes}
            tallies = {lane: tally for lane, tally in tallies.items() if tally != lane.reported}
            if not tallies:
                return
            news = {lane.queue.name: tally.since(lane.reported) for lane, tally in tallies.items()}
            try:
                minutes.count_minute(news, self.using)
            except ProgrammingError as error:
                # The table or the permission is missing. Missing counts must not stop the heartbeats.
                logger.warning("minute counts not written error=%s", describe(error))
            for lane, tally in tallies.items():
                lane.reported = tally
