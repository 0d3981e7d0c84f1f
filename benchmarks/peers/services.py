"""Servers that a peer needs beside PostgreSQL."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.peers import environments
from benchmarks.peers.environments import Unavailable

# Seconds for Redis to come up.
DEADLINE = 20.0


def celery() -> list[str]:
    """Return the command of a Python that has Celery, where there is a Redis too."""
    command = environments.python("celery")
    redis_server()
    return command


def redis_server() -> str:
    """Return the path of the system's redis-server, or of that of Celery's environment."""
    here = ROOT / ".venv-peers-celery" / "bin" / "redis-server"
    found = shutil.which("redis-server") or (here.exists() and str(here))
    if not found:
        raise Unavailable("no redis-server on PATH: install your system's package of that name")
    return found


@contextlib.contextmanager
def redis(*, appendfsync: str | None) -> Iterator[Mapping[str, str]]:
    """Run a Redis on a unix socket and nothing else; without ``appendfsync`` nothing goes to disk."""
    # Where PostgreSQL's data is too: a folder for temporary files may be in memory.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        socket = Path(folder, "redis.sock")
        on_disk = ["--appendonly", "yes", "--appendfsync", appendfsync] if appendfsync else []
        command = [redis_server(), "--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", "", *on_disk]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + DEADLINE
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("redis-server did not start")
                time.sleep(0.05)
            # A worker that is told to end does so at once: an end in order takes a pool half a minute.
            yield {"REDIS_SOCKET": str(socket), "REMAP_SIGTERM": "SIGQUIT"}
        finally:
            process.terminate()
            process.wait()
