"""Mark queues as in use, and record which consumer uses them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from uuid import UUID

from django_pgqueue.services import consumers, declaring
from django_pgqueue.services.declaring import Declaration

logger = logging.getLogger("django_pgqueue")


class Heartbeat:
    """
    Marks queues as in use, without waiting for locks.

    Missing queues in ``declared`` are created again. ``names`` are queues whose attributes this process does not know;
    a missing one is only logged, once. With ``consumer``, the consumer's row is also written.
    """

    def __init__(
        self,
        using: str,
        *,
        declared: Sequence[Declaration] = (),
        names: Sequence[str] = (),
        consumer: UUID | None = None,
    ) -> None:
        self.using = using
        self.declared = {declaration.name: declaration for declaration in declared}
        self.names = sorted({*self.declared, *names})
        self.consumer = consumer
        self._missing: set[str] = set()

    def run_once(self) -> set[str]:
        """Write one heartbeat. Returns the names of the queues that were missing."""
        if self.consumer is not None:
            consumers.beat(self.consumer, socket.gethostname(), os.getpid(), self.names, self.using)
        missing = set(self.names) - declaring.touch(self.names, self.using)
        for name in sorted(missing & self.declared.keys()):
            declaring.declare(self.declared[name], self.using)
        unknown = missing - self.declared.keys()
        for name in sorted(unknown - self._missing):
            logger.warning("queue not found, its heartbeat has no effect queue=%s", name)
        self._missing = unknown
        return missing
