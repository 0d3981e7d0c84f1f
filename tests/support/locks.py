"""Who waits for whom."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.sessions import connect

LOCK_WAITS = """
SELECT DISTINCT activity.pid, activity.wait_event, left(activity.query, 200)
FROM pg_stat_activity AS activity LEFT JOIN pg_locks AS lock ON lock.pid = activity.pid AND NOT lock.granted
WHERE activity.datname = current_database() AND (activity.wait_event_type = 'Lock' OR lock.pid IS NOT NULL)
"""


def is_waiting(pid: int) -> bool:
    """Tell whether this backend waits for a lock now."""
    with connect() as admin:
        return any(row[0] == pid for row in admin.execute(LOCK_WAITS).fetchall())


@contextmanager
def lock_waits() -> Iterator[list[tuple[Any, ...]]]:
    """Watch the database from beside, and collect every wait for a lock that is seen meanwhile."""
    seen: list[tuple[Any, ...]] = []
    stop = threading.Event()

    def watch() -> None:
        with connect() as admin:
            while True:
                seen.extend(admin.execute(LOCK_WAITS).fetchall())
                if stop.wait(0.002):
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
