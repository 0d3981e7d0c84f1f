"""
Every session of a worker is killed again and again: those of its loops, and those of its handlers.

`python -m tests.soak.killed_sessions --seconds 300`. Whatever is published is handled; the worker
keeps its process, does not spin, and tells each loss and each return once.
"""

import json
import os
import random
import time
from collections import Counter
from typing import Any
from unittest import mock

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem
from tests.soak import main
from tests.support.processes import Worker, worker
from tests.support.sessions import connect
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

HANDLERS = "killed_sessions handler"
LOOPS = ("consumer", "leases", "heartbeat", "listener")
KILL = """
SELECT application_name, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND (application_name = %s OR application_name LIKE 'django_pgqueue %%')
"""
# A handler whose own session is killed fails, and that counts: no message may run out of deliveries here.
ENDLESS = {"max_deliveries": 1_000}
QUEUES = [
    {"name": "late", "queue": ENDLESS},
    {"name": "atomic", "queue": ENDLESS, "handler": {"ack": "atomic", "concurrency": 2}},
]


def run(seconds: float, *, every: tuple[float, float] = (0.2, 1.2), seed: int = 0) -> dict[str, Any]:
    """Publish without pause and kill at random intervals for so many seconds; then let it come to rest."""
    ids: dict[str, list[int]] = {"late": [], "atomic": []}
    killed: Counter[str] = Counter()
    settings = {"POLL_INTERVAL": 5, "LEASE": 3, "BACKOFF": {"base": 0.1, "factor": 1, "jitter": 0}}
    options = {"options": "", "application_name": HANDLERS}
    with (
        mock.patch.dict(os.environ, {"PGQUEUE_TEST_OPTIONS": json.dumps(options)}),
        worker(queues=QUEUES, settings=settings) as running,
    ):
        began, cpu = time.monotonic(), running.cpu_seconds()
        _publish_and_kill(seconds, every, random.Random(seed), ids, killed)
        assert running.is_running, running.output
        share = (running.cpu_seconds() - cpu) / (time.monotonic() - began)
        wait_until(lambda: not MessageQueueItem.objects.exists(), 60, what="the rest to be handled")
        # A loop that has nothing to do learns of its loss when it has, so the next kill must not come too soon.
        wait_until(lambda: told(running, "lost") == told(running, "back"), what="each loss to be over")
        assert running.is_running
        assert "Traceback" not in running.output, running.output
        losses = told(running, "lost")
        for loop in LOOPS:
            assert losses[loop] <= killed["rounds"], (losses, killed)
    assert share < 0.5, share
    return {**_ledger(ids), **killed, "losses_told": dict(losses), "cpu_share": round(share, 3)}


def _publish_and_kill(
    seconds: float,
    every: tuple[float, float],
    source: random.Random,
    ids: dict[str, list[int]],
    killed: Counter[str],
) -> None:
    queues = [Queue(spec["name"], **ENDLESS) for spec in QUEUES]
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        next_kill = time.monotonic() + source.uniform(*every)
        while time.monotonic() < next_kill:
            for queue in queues:
                ids[queue.name].append(queue.publish({"sleep": source.uniform(0, 0.02)}))
            time.sleep(0.02)
        with connect() as admin:
            killed.update(name for name, done in admin.execute(KILL, [HANDLERS]).fetchall() if done)
        killed["rounds"] += 1
    assert killed[HANDLERS], killed
    for loop in LOOPS:
        assert killed[f"django_pgqueue {loop}"], (loop, killed)


def told(running: Worker, word: str) -> dict[str, int]:
    return {loop: running.output.count(f"database {word} loop={loop} ") for loop in LOOPS}


def _ledger(ids: dict[str, list[int]]) -> dict[str, Any]:
    """Each was handled; an effect in the transaction of the ack is there exactly once."""
    starts = {
        name: Counter(Seen.objects.filter(msg_id__in=published).values_list("msg_id", flat=True))
        for name, published in ids.items()
    }
    for name, published in ids.items():
        lost = set(published) - starts[name].keys()
        assert not lost, (name, sorted(lost))
    assert set(starts["atomic"].values()) == {1}
    return {
        "published": sum(map(len, ids.values())),
        "lost": 0,
        "started_again": sum(count - 1 for count in starts["late"].values()),
    }


if __name__ == "__main__":
    main(run, seconds=300)
