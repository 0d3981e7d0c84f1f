"""Repeat a function at an interval, and retry with back-off while the database is unavailable."""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Callable

from django.db import DatabaseError, InterfaceError, connections, reset_queries

logger = logging.getLogger("django_pgqueue")

#: The errors that Django raises when the database is unavailable, read-only or restarting.
DATABASE_FAULTS = (DatabaseError, InterfaceError)

# In seconds, between two attempts while the database is unavailable: doubled up to the maximum, with jitter.
FIRST_RETRY = 0.1
LONGEST_RETRY = 5.0

# Messages with which a server refuses a session permanently. libpq provides no SQLSTATE for them, so the text is
# matched. A server with messages in another language appears to be unavailable.
REFUSED = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|is not permitted to log in"
    r'|(role|user|database) "[^"]*" does not exist|permission denied for database|no such (database|user)'
)


class Outage:
    """An outage of the database, as one loop sees it. Logs one line when it begins and one when it ends."""

    def __init__(self, loop: str) -> None:
        self.loop = loop
        self.attempts = 0

    def failed(self, error: Exception) -> float:
        """Record a failed attempt. Returns the seconds to wait before the next one."""
        if not self.attempts:
            logger.warning("database lost loop=%s error=%s", self.loop, describe(error))
        self.attempts += 1
        # The exponent is capped too, so that a long outage does not overflow.
        delay: float = min(FIRST_RETRY * 2 ** min(self.attempts, 10), LONGEST_RETRY)
        return delay * random.uniform(0.5, 1)

    def recovered(self) -> None:
        """Record a successful attempt."""
        if self.attempts:
            logger.warning("database back loop=%s attempts=%s", self.loop, self.attempts)
            self.attempts = 0


def describe(error: BaseException) -> str:
    """Return an error's class and SQLSTATE, without its text, which may quote data or a DSN."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return f"{name}[{sqlstate}]" if sqlstate else name


def is_passing(error: BaseException) -> bool:
    """Return whether an error is temporary (the server is unavailable, restarting or read-only)."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    if sqlstate is None:
        # The connection broke or was refused.
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

    After a database error, this thread's connection is closed and the call is retried with back-off. Any other error is
    logged and the loop continues, because nobody would notice the end of its thread. With ``strict``, a database error
    that is not temporary is raised until the first call has succeeded.
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
            logger.exception("loop failed, continuing loop=%s", loop)
            stop.wait(interval())
        else:
            strict = False
            outage.recovered()
            stop.wait(interval())
        reset_queries()
