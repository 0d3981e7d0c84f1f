"""
Case B29 in its full number: 50,000 wake-ups while handlers run for half a minute.

`python -m tests.soak.notification_queue --seconds 30`. A session that listens and is in a transaction
keeps the server from emptying its queue of notifications, until no commit that notifies succeeds.
"""

import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from django.test import override_settings

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem
from tests.soak import main
from tests.support.processes import database_url, worker
from tests.support.sessions import connect
from tests.support.waiting import wait_until

# Not its every transaction: it delivers notifications in one, which lasts where a busy machine lets it wait.
WATCH = """
SELECT pg_notification_queue_usage(), coalesce(max(extract(epoch FROM clock_timestamp() - state_change)), 0)::float8
FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'django_pgqueue listener'
    AND state LIKE 'idle in transaction%'
"""
QUEUES: list[dict[str, Any]] = [
    {"name": "busy", "function": "do_nothing"},
    {"name": "slow", "function": "handle_without_database"},
]
# Its transaction is open for as long as the handler runs.
ATOMIC: dict[str, Any] = {"name": "atomic", "handler": {"ack": "atomic"}}


def run(seconds: float, *, messages: int = 50_000, setting: str = "") -> dict[str, Any]:
    """Let handlers run for so many seconds and longer, send the wake-ups meanwhile, and watch."""
    # In manual mode a handler has to commit by itself, which those of the tests don't.
    queues = QUEUES if setting == "AUTOCOMMIT=False" else [*QUEUES, ATOMIC]
    url = database_url()
    if setting:
        url += f"{'&' if '?' in url else '?'}{setting}"
    with TemporaryDirectory() as folder:
        log, hold = Path(folder) / "log", Path(folder) / "hold"
        # By name: the example project's handlers, which are atomic, are not for manual mode.
        names = [queue["name"] for queue in queues]
        with worker(*names, queues=queues, settings={"POLL_INTERVAL": 60}, url=url) as running:
            for name in names[1:]:
                Queue(name).publish({"log": str(log), "hold": str(hold)})
            wait_until(log.exists, what="the slow handler")
            ends = time.monotonic() + seconds
            with Watch() as watch:
                _send(messages)
                while time.monotonic() < ends:
                    time.sleep(0.05)
            hold.touch()
            wait_until(lambda: not MessageQueueItem.objects.exists(), 60, what="all to be handled")
            assert "Traceback" not in running.output, running.output
            assert "failed" not in running.output, running.output
    assert watch.looks > 10
    assert watch.usage < 0.01, watch.usage
    assert watch.age < 1, f"the listener was idle in a transaction for {watch.age} s"
    return {
        "wake_ups": messages,
        "highest_usage": watch.usage,
        "longest_transaction_seconds": round(watch.age, 3),
    }


def _send(messages: int) -> None:
    queue = Queue("busy")
    # Each publish wakes the worker, and not only one in so many milliseconds.
    with override_settings(PGQUEUE={"NOTIFY_INTERVAL": 0}):
        for number in range(messages):
            queue.publish(number)


class Watch(threading.Thread):
    """Look at the queue of notifications, and at the listener's transactions, from beside."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = self.age = 0.0
        self.looks = 0
        self._stop_watching = threading.Event()

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_watching.set()
        self.join()

    def run(self) -> None:
        with connect() as admin:
            while not self._stop_watching.wait(0.05):
                usage, age = admin.execute(WATCH).fetchone() or (0.0, 0.0)
                self.usage, self.age = max(self.usage, usage), max(self.age, age)
                self.looks += 1


if __name__ == "__main__":
    main(run, seconds=30)
