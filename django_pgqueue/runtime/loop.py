"""What every loop stands on: a connection of its own, and patience when the database is away."""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Callable

from django.db import DatabaseError, InterfaceError, connections, reset_queries

logger = logging.getLogger("django_pgqueue")

#: What a database that is away, read-only or restarting raises through Django.
DATABASE_FAULTS = (DatabaseError, InterfaceError)

# Seconds between two attempts while the database is away: doubled up to the cap, with jitter.
FIRST_RETRY = 0.1
LONGEST_RETRY = 5.0

# How a server refuses a session for good. libpq hands out no SQLSTATE for that, so it is read from the
# text; a server that speaks another language seems to be away.
REFUSED = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|is not permitted to log in"
    r'|(role|user|database) "[^"]*" does not exist|permission denied for database|no such (database|user)'
)


class Outage:
    """The database, seen from one loop: one log line when it is lost, one when it is back."""

    def __init__(self, loop: str) -> None:
        self.loop = loop
        self.attempts = 0

    def failed(self, error: Exception) -> float:
        """Note a failure. Returns the seconds to wait before the next attempt."""
        if not self.attempts:
            logger.warning("database lost loop=%s error=%s", self.loop, describe(error))
        self.attempts += 1
        # Exponent capped too: a long outage must not overflow.
        delay: float = min(FIRST_RETRY * 2 ** min(self.attempts, 10), LONGEST_RETRY)
        return delay * random.uniform(0.5, 1)

    def recovered(self) -> None:
        """Note a success."""
        if self.attempts:
            logger.warning("database back loop=%s attempts=%s", self.loop, self.attempts)
            self.attempts = 0


def describe(error: BaseException) -> str:
    """Return an error's class and SQLSTATE. Its text may quote data or a DSN, so it is left out."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return f"{name}[{sqlstate}]" if sqlstate else name


def is_passing(error: BaseException) -> bool:
    """Tell a fault that passes (server away, restarting, read-only) from one that needs a person."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    if sqlstate is None:
        # The connection broke, or was refused.
        return REFUSED.search(str(error)) is None
    # By class of SQLSTATE: 08 connection, 25 transaction state (read-only), 40 rollback, 53 resources,
    # 55 object in use, 57 operator, 58 system.
    return sqlstate[:2] in {"08", "25", "40", "53", "55", "57", "58"}


def run_every(
    interval: Callable[[], float],
    run_once: Callable[[], object],
    stop: threading.Event,
    *,
    alias: str,
    loop: str,
    strict: bool = False,
) -> None:
    """
    Call ``run_once`` every ``interval()`` seconds until ``stop`` is set.

    A database fault closes this thread's connection and is retried with back-off. Any other error is
    logged, and the loop goes on: a thread that ended would be missed by nobody. With ``strict`` a
    fault that needs a person is raised, until a first call has succeeded.
    """
    outage = Outage(loop)
    while not stop.is_set():
        try:
            run_once()
        except DATABASE_FAULTS as error:
            connections[alias].close()
            if strict and not is_passing(error):
                raise
            stop.wait(outage.failed(error))
        except Exception:
            logger.exception("loop failed, it goes on loop=%s", loop)
            stop.wait(interval())
        else:
            strict = False
            outage.recovered()
            stop.wait(interval())
        reset_queries()
