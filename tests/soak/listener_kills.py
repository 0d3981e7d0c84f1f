"""
Cases B16 and B27 in their full number: the LISTEN connection is killed again and again.

A worker polls once a minute, so that polling cannot hide a dead listener. In each round its backend
is terminated, and a message published a while after.
"""

import random
import time
from typing import Any

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem
from tests.soak import main
from tests.support.processes import Worker, worker
from tests.support.sessions import connect
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

LISTENERS = """
SELECT pid, state, xact_start FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'django_pgqueue listener'
"""

# Seconds from the kill to the publish: after the listener is back, and in the middle of it.
AFTERWARDS = (3.0, 3.0)
BETWEEN = (0.0, 0.3)


def listeners() -> list[tuple[Any, ...]]:
    """Return process id, state and start of the transaction of each listening session."""
    with connect() as admin:
        return admin.execute(LISTENERS).fetchall()


def kill_listener() -> float:
    """Terminate the one listening session. Returns the monotonic time at which it was told so."""
    ((pid, *_),) = wait_until(listeners, what="the listener")
    killed = time.monotonic()
    with connect() as admin:
        assert admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid]).fetchone() == (True,)
    return killed


def run(
    seconds: float,
    *,
    rounds: int | None = None,
    offset: tuple[float, float] = AFTERWARDS,
    prompt: float = 5.0,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Kill and publish for so many seconds, or so many rounds.

    `offset` is the range of what lies between, `prompt` how many seconds after the kill a message has to
    be handled at the latest.
    """
    with worker(settings={"POLL_INTERVAL": 60}) as running:
        wait_until(listeners, what="the listener")
        ids, figures = _hammer(running, seconds, rounds, offset, random.Random(seed))
        # It is killed at the end: the last ack has to be in.
        wait_until(lambda: not MessageQueueItem.objects.exists(), what="the last ack")
        assert running.is_running
        # Each loss and each return told once, and by no other loop.
        done = figures["rounds"]
        for line in ("database lost", "database back"):
            assert running.output.count(f"{line} loop=listener") == done, running.output
            assert running.output.count(line) == done, running.output
        assert "Traceback" not in running.output
        assert len(listeners()) == 1
    # Nothing counted as a failed attempt, nothing was handled twice.
    assert sorted(Seen.objects.filter(msg_id__in=ids).values_list("msg_id", "attempt")) == [(one, 1) for one in ids]
    assert figures["slowest_seconds"] < prompt, figures
    assert figures["cpu_share"] < 0.2, figures
    return figures


def _hammer(
    running: Worker,
    seconds: float,
    rounds: int | None,
    offset: tuple[float, float],
    source: random.Random,
) -> tuple[list[int], dict[str, Any]]:
    queue = Queue("work")
    time.sleep(0.2)  # Let it fall asleep.
    ids = [queue.publish({})]
    wait_until(Seen.objects.filter(msg_id=ids[0]).exists, what="the wake-up before any kill")
    began, cpu = time.monotonic(), running.cpu_seconds()
    slowest, done = 0.0, 0
    while done < rounds if rounds is not None else time.monotonic() - began < seconds:
        killed = kill_listener()
        time.sleep(source.uniform(*offset))
        ids.append(queue.publish({}))
        wait_until(Seen.objects.filter(msg_id=ids[-1]).exists, what=f"the message of round {done}")
        slowest = max(slowest, time.monotonic() - killed)
        done += 1
        # The next kill is for a listener that is back, and has said so.
        wait_until(lambda done=done: running.output.count("database back loop=listener") >= done)  # type: ignore[misc]
        wait_until(lambda: len(listeners()) == 1)
    return ids, {
        "rounds": done,
        "slowest_seconds": round(slowest, 3),
        "cpu_share": round((running.cpu_seconds() - cpu) / (time.monotonic() - began), 3),
    }


if __name__ == "__main__":
    main(lambda seconds: {"B16": run(seconds / 2), "B27": run(seconds / 2, offset=BETWEEN)}, seconds=200)
