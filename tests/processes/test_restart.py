"""The server goes away and comes back: a worker stays, does not spin, and goes on."""

import signal
import time
from pathlib import Path
from typing import Literal

import pytest
from django.db import connection

from django_pgqueue import Queue
from django_pgqueue.devdb import DevCluster
from tests.support.processes import command, worker
from tests.support.rows import payloads
from tests.support.waiting import busy, wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_worker_survives_a_restart_of_the_server(
    server: DevCluster, mode: Literal["fast", "immediate"], tmp_path: Path
) -> None:
    """
    It keeps its process, and handles what was published before and after, woken and in time.

    One message is in its handler when the server goes: it is settled, or delivered again, once the
    server is back. While it is away the worker waits; it does not spin.
    """
    queue, mark, hold = Queue("work"), tmp_path / "mark", tmp_path / "hold"
    with worker("--concurrency", "2", settings={"POLL_INTERVAL": 60, "LEASE": 6}) as running:
        queue.publish({})
        wait_until(lambda: Seen.objects.count() == 1)
        queue.publish({"mark": str(mark), "hold": str(hold)})
        wait_until(mark.exists)
        server.stop(mode)
        connection.close()
        before = running.cpu_seconds()
        time.sleep(2)
        assert running.is_running
        assert running.cpu_seconds() - before < 0.6
        server.start()
        hold.touch()
        ids = [queue.publish({}) for _ in range(3)]
        wait_until(lambda: Seen.objects.filter(msg_id__in=ids).count() == 3)
        wait_until(lambda: not payloads("work"), 30)
        assert running.is_running
        assert Seen.objects.filter(msg_id__in=ids).values_list("worker", "attempt").distinct().get() == (running.pid, 1)
        # One line when it was lost, one when it was back, for each loop; no traceback.
        assert running.output.count("database lost loop=consumer") == 1
        assert running.output.count("database back loop=consumer") == 1
        assert "Traceback" not in running.output
        assert running.stop() == 0


def test_a_worker_ends_while_the_server_is_away(server: DevCluster) -> None:
    """SIGTERM in the back-off: nothing is held, so it ends at once, with exit status 0."""
    with worker() as running:
        server.stop("fast")
        connection.close()
        wait_until(lambda: "database lost loop=consumer" in running.output)
        began = time.monotonic()
        running.send(signal.SIGTERM)
        assert running.wait() == 0
        assert time.monotonic() - began < 3 * busy()
        assert "Traceback" not in running.output


def test_a_worker_that_starts_before_the_server_waits_for_it(server: DevCluster) -> None:
    """A supervisor may start both in any order."""
    Queue("work").publish({})
    server.stop("fast")
    connection.close()
    with command("consume_queues", queues=["work"]) as running:
        wait_until(lambda: "database lost" in running.output)
        server.start()
        wait_until(lambda: Seen.objects.count() == 1)
        assert running.stop() == 0
