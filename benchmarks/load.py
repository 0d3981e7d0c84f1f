"""
The processes of the long runs: publishers at a bounded rate, and consumers that tell what their claims took.

    python -m benchmarks.load publish NAME RATE    RATE messages a second, evenly spaced; 0: as many as it is told
    python -m benchmarks.load consume NAME PATH    ``manage.py consume_queues NAME --handler PATH``

Both write lines of numbers, which begin with CLOCK_MONOTONIC in nanoseconds (all processes of a machine
share it). They end when their standard input does, so that none outlives the benchmark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness import PAYLOAD, ROOT, set_up_django

# Seconds between two looks at how much is due, and how many messages one call takes at most.
TICK = 0.01
MAX_BATCH = 200
# Seconds until a process has written its first line.
START = 60.0


class Process:
    """One of them, and the lines that it has written: ``lines`` grows as they come in."""

    def __init__(self, *arguments: object, module: str = "benchmarks.load") -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.lines: list[tuple[int, ...]] = []
        self._has_begun = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def begun(self) -> None:
        """Wait for the first line."""
        if not self._has_begun.wait(START):
            raise TimeoutError(f"process {self.pid} of the load has not begun within {START} s")

    def tell(self, number: int) -> None:
        """Let a publisher without a rate publish so many in all."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"process {self.pid} of the load has ended with status {self._process.returncode}")

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(tuple(map(int, line.split())))
            self._has_begun.set()


@contextlib.contextmanager
def processes(count: int, *arguments: object) -> Iterator[list[Process]]:
    """Run some of a kind, and go on when all are at work."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(Process(*arguments))
            stack.callback(found[-1].end)
        for process in found:
            process.begun()
        yield found


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process has resident."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- In the processes -----------------------------------------------------------------------------

#: The path of ``count``, and how often it was called.
COUNT = "benchmarks.load.count"
handled = 0


def count(message: Any) -> None:
    """Be the handler, or its first line. One thread calls it."""
    global handled
    handled += 1


def publish(name: str, rate: float) -> None:
    """At each tick publish what is due: one message with ``publish``, the others with ``publish_many``."""
    from django_pgqueue import Queue

    queue = Queue(name)
    began = time.monotonic()
    due: Callable[[], int] = (lambda: int((time.monotonic() - began) * rate)) if rate else told
    published = 0
    while True:
        wanted = min(due() - published, MAX_BATCH)
        if wanted > 0:
            queue.publish(PAYLOAD)
        if wanted > 1:
            queue.publish_many([PAYLOAD] * (wanted - 1))
        published += max(wanted, 0)
        tell(published)
        if wanted < MAX_BATCH:
            time.sleep(TICK)


def consume(name: str, path: str) -> None:
    """
    Be ``manage.py consume_queues``, and tell of each claim.

    Microseconds, how many messages were handled so far, how many blocks of memory Python has allocated.
    """
    from django.core.management import execute_from_command_line

    from benchmarks import load
    from django_pgqueue.services import claiming

    if path != COUNT:
        # A handler that fails on purpose: nobody wants to read of it.
        logging.getLogger("django_pgqueue").addHandler(logging.NullHandler())
    claim = claiming.claim

    def timed(*args: Any, **kwargs: Any) -> claiming.Claim:
        before = time.perf_counter_ns()
        claimed = claim(*args, **kwargs)
        tell((time.perf_counter_ns() - before) // 1000, load.handled, sys.getallocatedblocks())
        return claimed

    claiming.claim = timed
    execute_from_command_line(["manage.py", "consume_queues", name, "--handler", path])


def tell(*numbers: int) -> None:
    # Past the buffers, in one piece.
    os.write(1, f"{time.monotonic_ns()} {' '.join(map(str, numbers))}\n".encode())


_told = 0


def told() -> int:
    """Return the last number that came in."""
    return _told


def listen() -> None:
    """Take in numbers, and end this process with its standard input."""
    global _told
    rest = b""
    # Not through sys.stdin, whose lock a thread that reads for ever would still hold at the end.
    while chunk := os.read(0, 4096):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            _told = int(lines[-1])
    os._exit(0)


def main() -> None:
    """Be one of the processes."""
    threading.Thread(target=listen, daemon=True).start()
    set_up_django()
    kind, name, how = sys.argv[1:]
    if kind == "publish":
        publish(name, float(how))
    else:
        consume(name, how)


if __name__ == "__main__":
    main()
