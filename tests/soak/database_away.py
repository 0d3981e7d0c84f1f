"""
Case B18 in its full length: the server is away when a worker starts, and again in the middle of its work.

`python -m tests.soak.database_away --seconds 180`: 60 s at the start, 120 s later. Only with a server
of the tests' own.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from django.db import connection

from django_pgqueue import Queue
from django_pgqueue.devdb import DevCluster
from django_pgqueue.models import MessageQueueItem
from tests.soak import main
from tests.support import cluster
from tests.support.processes import Worker, command
from tests.support.waiting import wait_until
from tests.testapp.models import Seen


def run(seconds: float, *, prompt: float = 10.0) -> dict[str, Any]:
    """
    Let the server be away for a third of the time at the start, and for two thirds in mid-work.

    `prompt`: how many seconds after its return what waits has to be handled at the latest.
    """
    server = cluster.cluster
    assert server is not None, "the server that DATABASE_URL names is not ours to stop"
    queue = Queue("work")
    with TemporaryDirectory() as folder:
        first = queue.publish({})
        stop(server)
        with command(
            "consume_queues", "--concurrency", "2", queues=["work"], settings={"POLL_INTERVAL": 60}
        ) as running:
            figures = {"at_start": _outage(running, server, seconds / 3, prompt, first)}

            mark, hold = Path(folder) / "mark", Path(folder) / "hold"
            # One is in its handler, several are held by the worker, when the server goes. Its lease may
            # lapse meanwhile: its second delivery must not wait as well.
            held = queue.publish_many([{"mark": str(mark), "hold": str(hold), "times": 1}, *[{}] * 4])
            wait_until(mark.exists)
            stop(server)
            figures["in_mid_work"] = _outage(running, server, seconds * 2 / 3, prompt)
            hold.touch()
            wait_until(lambda: Seen.objects.filter(msg_id__in=held).values("msg_id").distinct().count() == len(held))
            wait_until(lambda: not MessageQueueItem.objects.exists(), what="the last ack")
            assert "Traceback" not in running.output, running.output
            assert running.stop() == 0
    return figures


def stop(server: DevCluster) -> None:
    server.stop("fast")
    # This process has no more use for its own dead connection.
    connection.close()


def _outage(
    running: Worker, server: DevCluster, seconds: float, prompt: float, waiting: int | None = None
) -> dict[str, Any]:
    """Let it last, end it, and see how soon a message is handled: the one that waits, and one published after."""
    back = lines(running, "back")
    # A loop that has nothing to do at the time notices nothing; the listener does.
    wait_until(lambda: lines(running, "lost") != back, what="the line of a loss")
    cpu = running.cpu_seconds()
    time.sleep(seconds)
    share = (running.cpu_seconds() - cpu) / max(seconds, 1.0)
    assert running.is_running, running.output
    server.start()
    began = time.monotonic()
    if waiting is not None:
        wait_until(Seen.objects.filter(msg_id=waiting).exists, what="what was published before the outage")
    fresh = Queue("work").publish({})
    wait_until(Seen.objects.filter(msg_id=fresh, worker=running.pid).exists, 30, what="what was published after it")
    took = time.monotonic() - began
    assert took < prompt, took
    assert share < 0.2, share
    # Each loop that noticed says so once, and once that it is over.
    wait_until(lambda: lines(running, "lost") == lines(running, "back"), what="the lines of the return")
    for loop, count in lines(running, "back").items():
        assert count - back[loop] <= 1, running.output
    return {"away_seconds": seconds, "handled_after_seconds": round(took, 2), "cpu_share": round(share, 3)}


def lines(running: Worker, word: str) -> dict[str, int]:
    """Return how often each loop of a worker told that its database was lost, or is back."""
    return {
        loop: running.output.count(f"database {word} loop={loop} ")
        for loop in ("consumer", "leases", "heartbeat", "listener")
    }


if __name__ == "__main__":
    main(run, seconds=180)
