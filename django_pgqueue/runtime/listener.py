"""
The single LISTEN connection of a process, which turns notifications into calls.

Consumers and subscriptions share it. It is opened for the first that needs it and closed after the last. A forked child
opens its own.
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

# In seconds: how soon a stop or a new channel is noticed, and how often an idle connection is tested.
TICK = 0.25
LIVENESS_INTERVAL = 30.0
# In seconds: how soon the server must answer the test.
LIVENESS_TIMEOUT = 10.0

# In seconds: how long a test notification through a pooler may take, and when to repeat a test that failed.
PROOF_TIMEOUT = 2.0
PROOF_INTERVAL = 300.0

#: Called in the listener's thread with the text of a notification. None: listening has begun or ended; earlier
#: notifications are lost.
Receive = Callable[[str | None], None]


class ChannelSet:
    """The channels that one user of the connection listens to, and the function to call for each."""

    def __init__(self, channels: Mapping[str, Receive]) -> None:
        self.channels = dict(channels)
        #: Set while notifications arrive.
        self.listening = threading.Event()
        self.is_removed = False


class Listener:
    """
    LISTEN on the channels of all sets, over one connection.

    After a database error it connects again, and calls every receiver with None.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.Lock()
        self._sets: tuple[ChannelSet, ...] = ()
        self._thread: threading.Thread | None = None
        self._reported_deaf = False

    def add(self, channel_set: ChannelSet) -> None:
        """Listen to these channels as well. Returns at once; the set's ``listening`` is set when it is done."""
        with self._lock:
            self._sets = (*self._sets, channel_set)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pgqueue listener", daemon=True)
                thread.start()
                self._thread = thread

    def remove(self, channel_set: ChannelSet) -> None:
        """
        Stop listening to these channels, shortly after the call. The connection is closed after the last set.

        Takes no lock, because the garbage collector also calls it, in a thread that may hold any lock.
        """
        channel_set.is_removed = True

    def _is_needed(self) -> bool:
        with self._lock:
            if self._thread is not threading.current_thread():
                # This thread has ended and is only closing its connection. A set that was added since then has
                # started another thread.
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
                # For example, no file descriptor is left. Nobody would notice the end of this thread.
                logger.exception("loop failed, continuing loop=listener")
                self._stop_listening()
                self._wait(LONGEST_RETRY)

    def _stop_listening(self) -> None:
        for channel_set in self._sets if self._is_needed() else ():
            if channel_set.listening.is_set():
                channel_set.listening.clear()
                # Receivers poll more often while no notifications arrive.
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
            # The pooler assigns one session for as long as the connection lasts. It is idle most of the time.
            raw.execute("SET idle_session_timeout = 0")
        outage.recovered()
        self._receive(raw)

    def _poll_only(self) -> None:
        if not self._reported_deaf:
            self._reported_deaf = True
            logger.warning(
                "polling only: no notification arrives through the pooler; set LISTEN_DATABASE to an alias"
                " that connects directly to the server database=%s",
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
            # Consume the whole generator. Leaving it early would lose the rest of the batch, and while it runs, a
            # receiver could not use the connection.
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
    Return whether a notification from another connection, to the alias ``sender``, arrives on this one.

    Through a pooler it arrives if the pooler assigns a session for as long as the connection lasts. If it assigns a
    session for each transaction, LISTEN succeeds but no notification arrives.
    """
    channel = f"{settings.CHANNEL_PREFIX}?{uuid4().hex}"
    raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    # From another connection, because a session receives its own notifications in either mode.
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
    Run a statement on the connection. Raises an error if the server does not answer within LIVENESS_TIMEOUT.

    A middlebox may keep the TCP connection open but forward nothing. The kernel then reports no error and the answer
    never arrives, so the socket is shut down after the timeout to end the wait.
    """

    def hang_up() -> None:
        # The socket is closed already if the answer arrived at the last moment.
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


# By process id and alias, because a forked child inherits its parent's listeners.
_listeners: dict[tuple[int, str], Listener] = {}
_listeners_lock = threading.Lock()


def listener_of(alias: str) -> Listener:
    """Return this process's listener on a database."""
    with _listeners_lock:
        return _listeners.setdefault((os.getpid(), alias), Listener(alias))


def _renew_lock() -> None:
    # Another thread of the parent may have held it at the fork.
    global _listeners_lock
    _listeners_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
