"""
Live subscribers of topics: pass notifications from the process's listener to callbacks and async loops.

Each subscription has its own buffer, which is limited in messages and characters. A subscriber that is slow or stuck
loses its oldest messages, but does not delay other subscribers or fill the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from uuid import UUID
from weakref import finalize

from django_pgqueue import instrumentation, signals
from django_pgqueue.conf import settings
from django_pgqueue.runtime.guard import ConnectionGuard
from django_pgqueue.runtime.listener import ChannelSet, listener_of
from django_pgqueue.services import notifying, topics

logger = logging.getLogger("django_pgqueue")

# The default limit of a subscription's buffer in messages, and the limit in characters of JSON (one message is always
# kept).
BUFFER = 1_000
BUFFER_CHARACTERS = 64 * 1024 * 1024
# In seconds: how long subscribing waits until notifications arrive. If the database is unavailable, it does not wait
# longer.
HEARD_WITHIN = 10.0


@dataclass(frozen=True, slots=True)
class TopicMessage:
    """One message of a topic, as live subscribers get it. It does not need to be settled."""

    #: The id of the publish. Copies on queues have other ids.
    id: UUID
    #: The topic's name.
    topic: str
    #: The published payload, as JSON values.
    payload: Any
    #: A dict, empty if there are no headers.
    headers: dict[str, Any]


class Subscription:
    """
    One live subscriber, from ``open()`` to ``close()``. The end of a ``with`` block calls ``close()``.

    ``wake`` is called in the listener's thread whenever there may be a message to take.
    """

    def __init__(self, topic: str, using: str, buffer: int, wake: Callable[[], object]) -> None:
        self.topic = topic
        self.using = using
        #: How many messages this subscription is known to have lost.
        self.dropped = 0
        #: A number that changes whenever messages were or may have been missed.
        self.gaps = 0
        self._most = buffer
        self._wake = wake
        self._lock = threading.Lock()
        self._contents: deque[str] = deque()
        self._characters = 0
        self._is_lagging = False
        self._was_connected = False
        #: Whether ``close()`` was called.
        self.is_closed = False
        self._alias = settings.LISTEN_DATABASE or using
        self._listener = listener_of(self._alias)
        self._channels = ChannelSet({notifying.topic_channel(topic): self._receive})

    def open(self) -> None:
        """Start to listen, shortly after the call."""
        self._listener.add(self._channels)

    def close(self) -> None:
        """Stop the subscription. Buffered messages are dropped; a running callback ends normally."""
        # Takes no lock: see Listener.remove.
        self.is_closed = True
        self._listener.remove(self._channels)
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_listening(self) -> bool:
        """Whether messages arrive: not before the first connection, and not while the database is unavailable."""
        return self._channels.listening.is_set() and not self.is_closed

    def wait_until_listening(self, timeout: float) -> bool:
        """Wait until messages arrive, at most ``timeout`` seconds. Returns whether they do."""
        return self._channels.listening.wait(timeout)

    def take(self) -> TopicMessage | None:
        """Remove and return the oldest message. None: there is none, or the subscription is closed."""
        while True:
            with self._lock:
                if not self._contents or self.is_closed:
                    self._is_lagging = False
                    return None
                content = self._contents.popleft()
                self._characters -= len(content)
            try:
                return decode(content, self.topic)
            except (ValueError, RecursionError):
                # Any role may send notifications on the channel.
                logger.debug("notification is not a message topic=%s", self.topic)

    def _receive(self, notification: str | None) -> None:
        if self.is_closed:
            return
        if notification is None:
            if not self.is_listening:
                return
            # On the first connection as well, because a caller who has read a table before may have missed messages.
            self.gaps += 1
            if self._was_connected:
                self._lagged("disconnected", None)
            self._was_connected = True
            self._wake()
            return
        try:
            content = _read(notification, self._alias)
        except ValueError:
            logger.debug("notification is not a message topic=%s", self.topic)
            return
        if content is None:
            self.dropped += 1
            self.gaps += 1
            self._lagged("expired", 1)
            return
        self._put(content)
        self._wake()

    def _put(self, content: str) -> None:
        dropped = 0
        with self._lock:
            self._contents.append(content)
            self._characters += len(content)
            while len(self._contents) > self._most or (
                self._characters > BUFFER_CHARACTERS and len(self._contents) > 1
            ):
                self._characters -= len(self._contents.popleft())
                dropped += 1
            self.dropped += dropped
            self.gaps += bool(dropped)
            is_new = bool(dropped) and not self._is_lagging
            self._is_lagging = self._is_lagging or bool(dropped)
        if is_new:
            # Once until it has caught up, so that a stuck subscriber does not flood the log.
            self._lagged("full", dropped)

    def _lagged(self, reason: str, dropped: int | None) -> None:
        signals.subscription_lagged.send_robust(self.topic, using=self.using, reason=reason, dropped=dropped)


def decode(content: str, topic: str) -> TopicMessage:
    """Return the message. Raises ``ValueError`` or ``RecursionError`` if the content is not a message."""
    match json.loads(content):
        case {"id": str(message_id), "payload": payload, "headers": dict(headers)}:
            return TopicMessage(UUID(message_id), topic, payload, headers)
    raise ValueError("not a message of a topic")


# The last notification and its content, because several subscriptions of a process get the same notification one after
# the other, in the listener's thread.
_last_read = threading.local()


def _read(notification: str, alias: str) -> str | None:
    if getattr(_last_read, "notification", None) != notification:
        _last_read.content = topics.read_notification(notification, alias)
        _last_read.notification = notification
    content: str | None = _last_read.content
    return content


def subscribe(topic: str, using: str, callback: Callable[[TopicMessage], object], buffer: int) -> Subscription:
    """Call ``callback`` for each message, in a new thread, until the subscription is closed."""
    arrived = threading.Event()
    subscription = Subscription(topic, using, buffer, arrived.set)

    def describe(message: TopicMessage) -> tuple[instrumentation.Target, instrumentation.Handling]:
        return instrumentation.Target(topic, using, is_topic=True), instrumentation.Handling([message])

    def deliver() -> None:
        guard = ConnectionGuard()
        guard.watch()
        while not subscription.is_closed:
            # Cleared before the check, so that a message which arrives after it is not missed.
            arrived.clear()
            while message := subscription.take():
                guard.before(0)
                with instrumentation.instrument.handling(describe, message):
                    call(callback, message)
                if guard.after():
                    logger.error("subscriber left a transaction open, rolled back topic=%s id=%s", topic, message.id)
            arrived.wait()
        guard.close()

    threading.Thread(target=deliver, name=f"pgqueue topic {topic}", daemon=True).start()
    subscription.open()
    if not subscription.wait_until_listening(HEARD_WITHIN):
        warn_of_silence(topic)
    return subscription


def call(callback: Callable[[TopicMessage], object], message: TopicMessage) -> None:
    """Call a subscriber's function and log its errors."""
    try:
        callback(message)
    except BaseException as error:
        # Including SystemExit, because nobody would notice the end of the thread.
        instrumentation.failed(message.id, error)
        logger.exception("subscriber failed topic=%s id=%s", message.topic, message.id)


def warn_of_silence(topic: str) -> None:
    """Log a warning that messages published now are missed."""
    logger.warning("subscribed, but not connected yet topic=%s", topic)


class LiveMessages:
    """
    The messages of a topic, for ``async for``. Listening starts at the first iteration.

    ``async with`` starts listening before its block, so that no message published in the block is missed.
    """

    def __init__(self, topic: str, using: str, buffer: int) -> None:
        self._arguments = topic, using, buffer
        self._arrived = asyncio.Event()
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> Self:
        subscription = self._open()
        try:
            async with asyncio.timeout(HEARD_WITHIN):
                while not subscription.is_listening:
                    self._arrived.clear()
                    if not subscription.is_listening:
                        await self._arrived.wait()
        except TimeoutError:
            warn_of_silence(subscription.topic)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicMessage:
        subscription = self._open()
        while not subscription.is_closed:
            self._arrived.clear()
            if message := subscription.take():
                return message
            await self._arrived.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop listening. A waiting iteration ends."""
        if self._subscription is not None:
            self._subscription.close()

    @property
    def dropped(self) -> int:
        """How many messages are known to have been lost."""
        return self._subscription.dropped if self._subscription else 0

    @property
    def gaps(self) -> int:
        """
        A number that changes whenever messages were or may have been missed, for example after a lost connection.

        A program that can read the missed data elsewhere does so at the start and whenever this number has changed:
        save the number before reading, and compare it after each message.
        """
        return self._subscription.gaps if self._subscription else 0

    def _open(self) -> Subscription:
        if self._subscription is None:
            loop, arrived = asyncio.get_running_loop(), self._arrived
            is_asked = False

            def arrive() -> None:
                nonlocal is_asked
                is_asked = False
                arrived.set()

            def wake() -> None:
                nonlocal is_asked
                # One call at a time. Otherwise, a blocked loop would accumulate a call for each message.
                if not is_asked:
                    is_asked = True
                    # The loop is closed, so nobody waits for messages.
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(arrive)

            self._subscription = Subscription(*self._arguments, wake)
            # A loop that is cancelled or left by break only drops this object, without calling aclose().
            finalize(self, self._subscription.close)
            self._subscription.open()
        return self._subscription
