"""Send dead letters back in batches: as fast as possible, at a rate, or after a canary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connections

from django_pgqueue.conf import settings
from django_pgqueue.exceptions import CanaryFailed
from django_pgqueue.message import encode, encode_headers
from django_pgqueue.services import dead_letters, declaring, session
from django_pgqueue.services.dead_letters import DeadLetterFilter
from django_pgqueue.services.declaring import Declaration
from django_pgqueue.validation import check_count

BATCH_SIZE = 1_000
# In seconds, between two checks of the canary and between two batches at a rate.
CANARY_POLL = 0.1
RATE_TICK = 0.1


@dataclass(frozen=True)
class Redrive:
    """
    One redrive of a queue's dead letters.

    ``limit``: at most this many. ``rate``: at most this many per second. ``canary``: this many are sent first, and the
    others only if all of these are settled within ``canary_timeout`` seconds and none is dead-lettered again.
    ``progress`` is called after each batch with the number sent so far.
    """

    declaration: Declaration
    using: str
    letters: DeadLetterFilter
    limit: int | None = None
    rate: float | None = None
    canary: int | None = None
    canary_timeout: float = 300.0
    progress: Callable[[int], object] = lambda _: None

    def run(self) -> int:
        """Send the dead letters back and return how many. Raises ``CanaryFailed``."""
        connection = connections[self.using]
        if (self.rate or self.canary) and (connection.in_atomic_block or not connection.get_autocommit()):
            raise RuntimeError("a redrive with a rate or a canary waits, so it cannot run inside a transaction")
        name = self.declaration.name
        if not declaring.exists(name, self.using) and not dead_letters.redrivable(name, self.letters, self.using):
            # A mistyped name must not create a queue.
            return 0
        declaring.ensure(self.declaration, self.using)
        # Messages that are dead-lettered again from now on are left to the next redrive.
        before = session.now(self.using)
        most = math.inf if self.limit is None else self.limit
        sent: list[int] = []
        if self.canary is not None:
            sent = self._send(min(self.canary, most), before)
            self._watch(sent, before)
        return len(sent) + len(self._send(most - len(sent), before, len(sent)))

    def _send(self, most: float, before: datetime, sent: int = 0) -> list[int]:
        """Send up to ``most`` dead letters. Returns their ids."""
        ids: list[int] = []
        after = 0
        started = time.monotonic()
        while len(ids) < most:
            batch = int(min(BATCH_SIZE, self._allowed(len(ids), started), most - len(ids)))
            found = dead_letters.redrive(self.declaration, self.letters, batch, after, before, self.using)
            ids += found
            self.progress(sent + len(ids))
            if len(found) < batch:
                break
            after = max(found)
        return ids

    def _allowed(self, sent: int, started: float) -> int:
        """Return how many may be sent now. Waits until it is at least one."""
        if self.rate is None:
            return BATCH_SIZE
        while (allowed := int((time.monotonic() - started) * self.rate) + 1 - sent) < 1:
            time.sleep(min(RATE_TICK, 1 / self.rate))
        return allowed

    def _watch(self, ids: list[int], since: datetime) -> None:
        """Wait until all are settled. Raises ``CanaryFailed`` if one is dead-lettered again or not settled in time."""
        deadline = time.monotonic() + self.canary_timeout
        while True:
            fates = dead_letters.outcomes(ids, since, self.using)
            died = [message_id for message_id, dead in fates.items() if dead]
            if died or (fates and time.monotonic() >= deadline):
                raise CanaryFailed(self.declaration.name, died, fates.keys() - set(died), len(ids))
            if not fates:
                return
            time.sleep(CANARY_POLL)


def make_filter(ids: Iterable[int] | None, reason: str | None, headers: Mapping[str, Any] | None) -> DeadLetterFilter:
    """Return a filter for dead letters. Raises ``ValueError`` or ``PayloadError`` for an invalid argument."""
    most = settings.MAX_PAYLOAD_BYTES
    if reason is not None:
        if not isinstance(reason, str):
            raise ValueError(f"reason must be a str, not {type(reason).__name__}")
        # Only for its checks: a reason cannot contain text that PostgreSQL cannot store.
        encode(reason, most, "reason")
    if ids is not None and not isinstance(ids, Iterable):
        raise ValueError(f"ids must be iterable, not {type(ids).__name__}")
    numbers = None if ids is None else [check_count(message_id, "an id", most=2**63 - 1) for message_id in ids]
    return DeadLetterFilter(numbers, reason, None if headers is None else encode_headers(headers, most))
