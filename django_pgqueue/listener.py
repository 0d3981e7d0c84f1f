"""The one LISTEN connection of a process: it turns notifications into calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
from psycopg import sql

from django_pgqueue.loop import DATABASE_FAULTS, Outage, dedicated_connection

# Seconds: how soon a stop is noticed, and how often a quiet connection proves that it is alive.
TICK = 0.25
LIVENESS_INTERVAL = 30.0

# A half-open connection never reports an error by itself; these let the kernel give it up.
KEEPALIVE = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


class Listener:
    """
    LISTEN on channels and call ``wake(queue)`` for each notification.

    ``channels`` maps a channel to the queue it belongs to. After every (re)connect ``wake(None)``
    asks for a look at all queues: what was sent in between is lost. ``listening`` tells whether
    notifications arrive at present.
    """

    def __init__(self, alias: str, channels: Mapping[str, str], wake: Callable[[str | None], None]) -> None:
        self.alias = alias
        self.channels = channels
        self.wake = wake
        self.listening = False

    def run(self, stop: threading.Event) -> None:
        """Listen until ``stop`` is set. Never ends for a database fault."""
        outage = Outage("listener")
        while not stop.is_set():
            try:
                self._listen(stop, outage)
            except (*DATABASE_FAULTS, psycopg.Error) as error:
                stop.wait(outage.failed(error))
            finally:
                self.listening = False

    def _listen(self, stop: threading.Event, outage: Outage) -> None:
        wrapper = dedicated_connection(self.alias, "listener")
        for option, value in KEEPALIVE.items():
            wrapper.settings_dict["OPTIONS"].setdefault(option, value)
        try:
            wrapper.connect()
            raw: psycopg.Connection[Any] = wrapper.connection
            # A listener is idle by trade; a server-wide limit on idle sessions must not end it.
            raw.execute("SET idle_session_timeout = 0")
            for channel in self.channels:
                raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            self.listening = True
            outage.recovered()
            self.wake(None)
            self._receive(raw, stop)
        finally:
            wrapper.close()

    def _receive(self, raw: psycopg.Connection[Any], stop: threading.Event) -> None:
        proven = time.monotonic()
        while not stop.is_set():
            # To the end of the generator: leaving it early would lose the rest of the batch.
            for channel in {notify.channel for notify in raw.notifies(timeout=TICK, stop_after=1)}:
                self.wake(self.channels.get(channel))
            if time.monotonic() - proven > LIVENESS_INTERVAL:
                raw.execute("SELECT 1")
                proven = time.monotonic()
