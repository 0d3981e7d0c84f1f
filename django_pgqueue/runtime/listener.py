"""
The one LISTEN connection of a process: it turns notifications into calls.

Consumers and subscriptions share it. It is opened by the first that needs it and closed after the
last; a child made by fork has one of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import psycopg
from django.db import connections
from psycopg import sql

from django_pgqueue.conf import settings
from django_pgqueue.runtime.connections import dedicated_connection, is_direct, own_connection
from django_pgqueue.runtime.loop import DATABASE_FAULTS, LONGEST_RETRY, Outage

logger = logging.getLogger("django_pgqueue")

# Seconds: how soon a stop or a new channel is noticed, and how often a quiet connection proves that it is
# alive.
TICK = 0.25
LIVENESS_INTERVAL = 30.0
# Seconds that the server has for that.
LIVENESS_TIMEOUT = 10.0

# Seconds: how long a notification through a pooler may take, and when one that was not heard is sent again.
PROOF_TIMEOUT = 2.0
PROOF_INTERVAL = 300.0

#: Called in the listener's thread with the text of a notification. None: listening began or ended; what
#: was sent before it began is lost.
Receive = Callable[[str | None], None]


class ChannelSet:
    """What one user of the connection wants to hear: what to call for each channel."""

    def __init__(self, channels: Mapping[str, Receive]) -> None:
        self.channels = dict(channels)
        #: Set while notifications arrive.
        self.listening = threading.Event()
        self.is_removed = False


class Listener:
    """
    LISTEN on the channels of all sets, over one connection.

    A database fault never ends it: it connects again, and calls every receiver with None.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.Lock()
        self._sets: tuple[ChannelSet, ...] = ()
        self._thread: threading.Thread | None = None
        self._reported_deaf = False

    def add(self, channel_set: ChannelSet) -> None:
        """Listen to these channels too; soon, its ``listening`` tells when."""
        with self._lock:
            self._sets = (*self._sets, channel_set)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pgqueue listener", daemon=True)
                thread.start()
                self._thread = thread

    def remove(self, channel_set: ChannelSet) -> None:
        """
        End that, soon. The connection is closed after the last set.

        Takes no lock: the garbage collector calls it too, in any thread, whatever that holds just then.
        """
        channel_set.is_removed = True

    def _is_needed(self) -> bool:
        with self._lock:
            if self._thread is not threading.current_thread():
                # This one has ended, and is only closing its connection: whoever added a set since has
                # started another.
                return False
            removed = [channel_set for channel_set in self._sets if channel_set.is_removed]
            if removed:
                self._sets = tuple(channel_set for channel_set in self._sets if channel_set not in removed)
            for channel_set in removed:
                channel_set.listening.clear()
            if not self._sets:
                self._thread = None
            return bool(self._sets)

    def _run(self) -> None:
        outage = Outage("listener")
        while self._is_needed():
            try:
                with own_connection(self.alias, "listener"):
                    self._listen(outage)
            except (*DATABASE_FAULTS, psycopg.Error) as error:
                pause = outage.failed(error)
                self._stop_listening()
                self._wait(pause)
            except Exception:
                # No more file descriptors, say. A thread that ended would be missed by nobody.
                logger.exception("loop failed, it goes on loop=listener")
                self._stop_listening()
                self._wait(LONGEST_RETRY)

    def _stop_listening(self) -> None:
        for channel_set in self._sets if self._is_needed() else ():
            if channel_set.listening.is_set():
                channel_set.listening.clear()
                # Who sleeps until the next poll polls more often from now on.
                for receive in channel_set.channels.values():
                    _call(receive, None)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._is_needed() and (left := until - time.monotonic()) > 0:
            time.sleep(min(TICK, left))

    def _listen(self, outage: Outage) -> None:
        wrapper = connections[self.alias]
        wrapper.connect()
        raw: psycopg.Connection[Any] = wrapper.connection
        if not is_direct(raw):
            if not hears(raw, self.alias):
                wrapper.close()
                outage.recovered()
                self._poll_only()
                return
            # The session is lent for as long as the connection lasts. It is idle by trade.
            raw.execute("SET idle_session_timeout = 0")
        outage.recovered()
        self._receive(raw)

    def _poll_only(self) -> None:
        if not self._reported_deaf:
            self._reported_deaf = True
            logger.warning(
                "polling only: no notification arrives through the pooler; LISTEN_DATABASE may name an alias"
                " that goes to the server itself database=%s",
                self.alias,
            )
        self._wait(PROOF_INTERVAL)

    def _receive(self, raw: psycopg.Connection[Any]) -> None:
        sets: tuple[ChannelSet, ...] = ()
        sets_of: dict[str, list[ChannelSet]] = {}
        proven = time.monotonic()
        while self._is_needed():
            if self._sets is not sets:
                sets, sets_of = self._listen_to_changed(raw, self._sets, sets_of)
            # To the end of the generator: leaving it early would lose the rest of the batch, and while it
            # runs the connection is taken, which a receiver may need.
            for notify in list(raw.notifies(timeout=TICK, stop_after=1)):
                for channel_set in sets_of.get(notify.channel, ()):
                    if not channel_set.is_removed:
                        _call(channel_set.channels[notify.channel], notify.payload)
            if time.monotonic() - proven > LIVENESS_INTERVAL:
                prove_alive(raw)
                proven = time.monotonic()

    def _listen_to_changed(
        self, raw: psycopg.Connection[Any], sets: tuple[ChannelSet, ...], before: Mapping[str, list[ChannelSet]]
    ) -> tuple[tuple[ChannelSet, ...], dict[str, list[ChannelSet]]]:
        sets_of: dict[str, list[ChannelSet]] = {}
        for channel_set in sets:
            for channel in channel_set.channels:
                sets_of.setdefault(channel, []).append(channel_set)
        for channel in sets_of.keys() - before.keys():
            raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        for channel in before.keys() - sets_of.keys():
            raw.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
        for channel_set in sets:
            if not channel_set.listening.is_set():
                channel_set.listening.set()
                for receive in channel_set.channels.values():
                    _call(receive, None)
        return sets, sets_of


def hears(raw: psycopg.Connection[Any], sender: str) -> bool:
    """
    Tell whether what another connection, to the alias ``sender``, sends arrives on this one.

    Through a pooler it does where that lends a session of the server for as long as the connection lasts. Where
    it lends one for each transaction, LISTEN succeeds and nothing is ever heard.
    """
    channel = f"{settings.CHANNEL_PREFIX}?{uuid4().hex}"
    raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    # From another connection: what a session sends to itself comes with the answer, in any mode.
    other = dedicated_connection(sender, "listener")
    try:
        other.connect()
        other.connection.execute("SELECT pg_notify(%s, '')", [channel])
    finally:
        other.close()
    heard = any(raw.notifies(timeout=PROOF_TIMEOUT, stop_after=1))
    raw.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
    return heard


def prove_alive(raw: psycopg.Connection[Any]) -> None:
    """
    Have the server answer, or raise.

    Behind a middlebox that keeps the connection and carries nothing, the kernel is content and the answer
    never comes. Only the end of the socket ends that wait, so that comes after LIVENESS_TIMEOUT.
    """

    def hang_up() -> None:
        # Already closed: the answer came at the last moment.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    with socket.socket(fileno=os.dup(raw.fileno())) as end:
        timer = threading.Timer(LIVENESS_TIMEOUT, hang_up)
        timer.daemon = True
        timer.start()
        try:
            raw.execute("SELECT 1")
        finally:
            timer.cancel()


def _call(receive: Receive, text: str | None) -> None:
    try:
        receive(text)
    except (*DATABASE_FAULTS, psycopg.Error):
        raise
    except Exception:
        logger.exception("receiver of a notification failed")


# By process and alias: what a child inherits through fork is the parent's.
_listeners: dict[tuple[int, str], Listener] = {}
_listeners_lock = threading.Lock()


def listener_of(alias: str) -> Listener:
    """Return this process's listener on a database."""
    with _listeners_lock:
        return _listeners.setdefault((os.getpid(), alias), Listener(alias))


def _renew_lock() -> None:
    # A thread of the parent may have held it.
    global _listeners_lock
    _listeners_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
