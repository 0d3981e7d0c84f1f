"""
Case B108 in its full length: long-running commands with DEBUG on keep no queries.

`python -m tests.soak.debug_memory --seconds 900`: a consumer is idle for two thirds of the time, at a
poll every 0.05 s, beside a reaper at a short interval; then it handles messages in four threads, with
five queries each, 20,000 in the full length.
"""

import time
from pathlib import Path
from typing import Any

from django.db import connection

from django_pgqueue import Message, Queue
from django_pgqueue.models import MessageQueueItem
from tests.soak import main
from tests.support.processes import Worker, command, worker
from tests.support.sessions import fetch
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

THREADS = 4
QUERIES = 5
# Messages for each second of the run.
RATE = 22
# What is handled first, so that pools and caches have their size.
WARM_UP = 200

#: Megabytes by which a process may grow. What Django keeps of 20,000 messages' queries is more.
MAX_GROWTH = 20.0


def handle(message: Message) -> None:
    """Run five queries, and note how many were logged and kept from before."""
    kept = len(connection.queries_log)
    Seen.objects.create(msg_id=message.id, worker=0, attempt=kept)
    for _ in range(QUERIES - 1):
        Seen.objects.filter(msg_id=message.id).exists()
    # Otherwise the run would show nothing.
    assert len(connection.queries_log) == kept + QUERIES


def run(seconds: float) -> dict[str, Any]:
    """Idle, then work. Returns megabytes by process: after the start, and how much each grew."""
    queue = Queue("work")
    count = int(seconds * RATE)
    arguments = ("work", "--handler", "tests.soak.debug_memory.handle", "--concurrency", str(THREADS))
    with (
        worker(*arguments, settings={"POLL_INTERVAL": 0.05}) as consumer,
        command("reap_queues", "--interval", "0.1") as reaper,
    ):
        queue.publish_many([{}] * WARM_UP)
        wait_until(lambda: not MessageQueueItem.objects.exists(), what="the first messages to be handled")
        wait_until(is_reaping, what="the reaper's first run")
        processes = {"consumer": consumer, "reaper": reaper}
        before = {name: megabytes(process) for name, process in processes.items()}
        time.sleep(seconds * 2 / 3)
        idle = growth(processes, before)
        queue.publish_many([{}] * count)
        wait_until(lambda: not MessageQueueItem.objects.exists(), seconds + 120, "the messages to be handled")
        worked = growth(processes, before)
        for process in processes.values():
            assert process.is_running, process.output
    kept = max(Seen.objects.values_list("attempt", flat=True))
    assert kept == 0, f"{kept} queries were kept from one message to the next"
    assert Seen.objects.count() == WARM_UP + count
    for grown in (*idle.values(), *worked.values()):
        assert grown < MAX_GROWTH, (before, idle, worked)
    return {"messages": count, "before": before, "grown_idle": idle, "grown": worked, "queries_kept": kept}


def is_reaping() -> bool:
    """Tell whether the reaper has come to its last statement of a run, so that all of it is loaded."""
    rows = fetch("SELECT query FROM pg_stat_activity WHERE application_name = 'django_pgqueue reaper'")
    return any("queueevent" in query for (query,) in rows)


def growth(processes: dict[str, Worker], before: dict[str, float]) -> dict[str, float]:
    return {name: round(megabytes(process) - before[name], 1) for name, process in processes.items()}


def megabytes(process: Worker) -> float:
    """Return the resident memory of a process."""
    (line,) = [
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmRSS")
    ]
    return round(int(line.split()[1]) / 1024, 1)


if __name__ == "__main__":
    main(run, seconds=900)
