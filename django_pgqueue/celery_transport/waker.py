"""Waking Celery's event loop from a thread."""

from __future__ import annotations

import socket
from contextlib import suppress


class Waker:
    """A file descriptor that becomes readable when any thread wakes it."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)

    def fileno(self) -> int:
        return self._ours.fileno()

    def wake(self) -> None:
        # If the socket is full, it is readable already. If it is closed, nobody waits for it.
        with suppress(OSError):
            self._theirs.send(b".")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            self._ours.recv(4096)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
