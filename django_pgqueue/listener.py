"""The one LISTEN connection of a process: it turns notifications into calls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql

from django_pgqueue.loop import DATABASE_FAULTS, Outage, dedicated_connection, is_direct

logger = logging.getLogger("django_pgqueue")

# Seconds: how soon a stop is noticed, and how often a quiet connection proves that it is alive.
TICK = 0.25
LIVENESS_INTERVAL = 30.0

# Seconds: how long a notification through a pooler may take, and when one that was not heard is sent again.
PROOF_TIMEOUT = 2.0
PROOF_INTERVAL = 300.0

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
        self._told_deaf = False

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
            if not is_direct(raw) and not self._hears(raw):
                wrapper.close()
                outage.recovered()
                self._poll_only(stop)
                return
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

    def _hears(self, raw: psycopg.Connection[Any]) -> bool:
        """
        Tell whether notifications arrive through a pooler.

        They do where it lends a session of the server for as long as the connection lasts. Where it
        lends one for each transaction, LISTEN succeeds and nothing is ever heard.
        """
        channel = f"django_pgqueue?{uuid4().hex}"
        raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        # From another connection: what a session sends to itself comes with the answer, in any mode.
        other = dedicated_connection(self.alias, "listener")
        try:
            other.connect()
            other.connection.execute("SELECT pg_notify(%s, '')", [channel])
        finally:
            other.close()
        heard = any(raw.notifies(timeout=PROOF_TIMEOUT, stop_after=1))
        raw.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
        return heard

    def _poll_only(self, stop: threading.Event) -> None:
        if not self._told_deaf:
            self._told_deaf = True
            logger.warning(
                "polling only: no notification arrives through the pooler; LISTEN_DATABASE may name an alias"
                " that goes to the server itself database=%s",
                self.alias,
            )
        stop.wait(PROOF_INTERVAL)

    def _receive(self, raw: psycopg.Connection[Any], stop: threading.Event) -> None:
        proven = time.monotonic()
        while not stop.is_set():
            # To the end of the generator: leaving it early would lose the rest of the batch.
            for channel in {notify.channel for notify in raw.notifies(timeout=TICK, stop_after=1)}:
                self.wake(self.channels.get(channel))
            if time.monotonic() - proven > LIVENESS_INTERVAL:
                raw.execute("SELECT 1")
                proven = time.monotonic()
