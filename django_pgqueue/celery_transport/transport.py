"""
A broker for Celery: ``broker_transport = "django_pgqueue.celery_transport:Transport"``.

A task is a message of the queue of that name, published on Django's connection. What a worker holds is
claimed, extended and settled by a ``Consumer`` of this package; Celery takes the place of its handlers.
Kombu's virtual transport knows the exchanges. What is sent to whoever listens just then (remote control,
events) goes through topics and leaves no row.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any
from uuid import uuid4

from amqp.protocol import queue_declare_ok_t
from django.db import connections
from kombu.exceptions import ChannelError
from kombu.transport import virtual

from django_pgqueue.conf import database_alias, settings
from django_pgqueue.consumer.consumer import OWN_THREADS, Consumer
from django_pgqueue.consumer.handler import ACK, RELEASE, Outcome
from django_pgqueue.consumer.lane import Held, Lane
from django_pgqueue.message import Message
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.queues import Queue
from django_pgqueue.registry import find_queue
from django_pgqueue.services import session
from django_pgqueue.subscriptions import BUFFER, Subscription
from django_pgqueue.topics import Topic
from django_pgqueue.validation import MAX_SECONDS

# AMQP's delivery mode of messages that need not outlive the broker.
TRANSIENT = 1
# So many tasks that run longer than a lease stop a worker from claiming more.
MOST_HELD = 10_000
# Seconds that the threads of a consumer get to give back what they hold.
CLOSE_TIMEOUT = 10.0


class Bell:
    """A file descriptor that becomes readable when any thread rings."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)

    def fileno(self) -> int:
        return self._ours.fileno()

    def ring(self) -> None:
        # Full: it is readable already. Closed: nobody waits any more.
        with suppress(OSError):
            self._theirs.send(b".")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            self._ours.recv(4096)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Feed(Consumer):
    """Claims one queue's messages for a channel, and keeps and settles them there, in threads of its own."""

    def __init__(self, channel: Channel, queue: Queue, callback: Callable[[Any], object], *, no_ack: bool) -> None:
        handler = make_handler(queue, callback, concurrency=MOST_HELD, timeout=MAX_SECONDS)
        super().__init__([handler], grace=CLOSE_TIMEOUT)
        self.channel = channel
        self.queue = queue
        self.callback = callback
        self.no_ack = no_ack
        #: It claims no more. What it holds it keeps until its channel is closed.
        self.is_cancelled = False
        #: Claimed, and not yet handed to Celery; what is held by delivery tag.
        self.claimed: deque[str] = deque()
        self.held: dict[str, Held] = {}
        self.bell: Bell = channel.connection.bell
        #: What ended it before it was stopped.
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name=f"pgqueue {queue.name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.run()
        except Exception as error:
            self.error = error
            self.bell.ring()

    def _threads(self) -> list[threading.Thread]:
        return super()._threads()[:OWN_THREADS]

    def _room(self, lane: Lane) -> int:
        return 0 if self.is_cancelled else self.channel.room()

    def _hold(self, lane: Lane, messages: Any, claimed: float) -> None:
        super()._hold(lane, messages, claimed)
        while not lane.waiting.empty():
            held = lane.waiting.get()
            if held is not None:
                tag = f"{held.message.id}.{held.message.token}"
                self.held[tag] = held
                self.claimed.append(tag)
        self.bell.ring()

    def _finish(self) -> None:
        for tag in list(self.held):
            self.settle(tag, RELEASE)
        super()._finish()

    def settle(self, tag: str, outcome: Outcome) -> None:
        """Let the claiming thread settle a message, if it is held."""
        if held := self.held.pop(tag, None):
            self._lanes[0].finished.append((held, outcome))
            self._wake()

    def deliver(self) -> bool:
        """Hand to Celery what was claimed, and return whether there was anything. Raises what ended it."""
        if self.error is not None:
            raise self.error
        tags = [self.claimed.popleft() for _ in range(len(self.claimed))]
        for tag in tags:
            held = self.held.get(tag)
            if held is None:
                continue
            if self.is_cancelled or not self._lanes[0].may_start(held):
                self.settle(tag, RELEASE)
                continue
            held.started = time.monotonic()
            try:
                message = self.channel.Message(received(held.message, tag), channel=self.channel)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                self.settle(tag, Outcome("reject", f"not a message of kombu's: {error!r}"))
                continue
            if self.no_ack:
                self.settle(tag, ACK)
            self.callback(message)
        return bool(tags)


class QoS(virtual.QoS):
    """Settles what a channel holds."""

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(delivery_tag, lambda feed, held: ACK)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.channel.settle(delivery_tag, requeued if requeue else lambda feed, held: Outcome("reject", "rejected"))

    def restore_unacked_once(self, stderr: object = None) -> None:
        """Nothing to do: the feeds give back what they hold."""
        self._on_collect.cancel()


class Channel(virtual.Channel):
    """A channel whose queues are rows, or live subscriptions."""

    QoS = QoS
    supports_fanout = True
    connection: Transport

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        #: By consumer tag: of queues that are rows, and the callbacks of those that are not.
        self.feeds: dict[str, Feed] = {}
        self.live: dict[str, tuple[str, Callable[[Any], object]]] = {}

    # --- Declaring ---

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        **options: Any,
    ) -> queue_declare_ok_t:
        """Note a queue's attributes. Its row is made when it is published to, or consumed."""
        name = queue or f"amq.gen-{uuid4()}"
        if passive:
            stats = self.connection.queue(name).stats()
            if not stats.exists:
                raise ChannelError(f"there is no queue {name!r}")
            return queue_declare_ok_t(name, stats.ready, 0)
        if options.get("auto_delete") and not options.get("durable", True):
            self.connection.live.setdefault(name, {})
        else:
            ttl = (options.get("arguments") or {}).get("x-message-ttl")
            self.connection.queue(name, auto_deleted=bool(options.get("auto_delete")), ttl=ttl and ttl / 1000)
        return queue_declare_ok_t(name, 0, 0)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        if queue in self.connection.live:
            self.connection.listen(queue, exchange)
        elif self.typeof(exchange).type == "fanout":
            self.connection.topic(exchange).bind(self.connection.queue(queue))

    def _size(self, queue: str) -> int:
        return self.connection.queue(queue).stats().ready

    def _purge(self, queue: str) -> int:
        return self.connection.queue(queue).purge()

    def _delete(self, queue: str, exchange: str, *args: Any, **kwargs: Any) -> None:
        """End a queue's bindings and empty it; its row is left to the reaper."""
        if queue in self.connection.live:
            for subscription in self.connection.live.pop(queue).values():
                subscription.close()
        else:
            self.connection.topic(exchange).unbind(self.connection.queue(queue))
            self._purge(queue)

    # --- Publishing ---

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Keep text readable; only bytes need an encoding."""
        return (body, "utf-8") if isinstance(body, str) else super().encode_body(body, encoding)

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish on Django's connection. Raises ``ChannelError`` for a task that would reach no queue."""
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            self._put(routing_key, message)
            return
        is_transient = message["properties"].get("delivery_mode") == TRANSIENT
        is_fanout = self.typeof(exchange).type == "fanout"
        names = () if is_fanout else self._lookup(exchange, routing_key)
        reached = [self._put(name, message) for name in names if name not in self.connection.live]
        if is_fanout or is_transient or exchange not in self.state.exchanges:
            # And those that are bound in the database: this process need not know them.
            reached += self.connection.topic(exchange).publish(message)
        if not (reached or is_transient or is_fanout):
            raise ChannelError(f"no queue is known for {routing_key!r} of exchange {exchange!r}")

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> int:
        expiration = message["properties"].get("expiration")
        ttl = None if expiration is None else max(int(expiration), 1) / 1000
        to = self.connection.queue(queue)
        return to.publish(message, delay=delay_of(message, to.using), ttl=ttl)

    # --- Consuming ---

    def basic_qos(self, *args: Any, **kwargs: Any) -> None:
        super().basic_qos(*args, **kwargs)
        for feed in self.feeds.values():
            feed._wake()

    def room(self) -> int:
        """How many more messages may be held."""
        most: int = self.qos.prefetch_count or settings.PREFETCH
        return most - sum(len(feed.held) for feed in list(self.feeds.values()))

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], object],
        consumer_tag: str,
        **kwargs: Any,
    ) -> None:
        self._consumers.add(consumer_tag)
        if queue not in self.connection.live:
            self.feeds[consumer_tag] = Feed(self, self.connection.queue(queue), callback, no_ack=no_ack)
        elif self.connection.live[queue]:
            self.live[consumer_tag] = queue, callback
            self.connection.bell.ring()
        else:
            raise ChannelError(f"{queue!r} is bound to no exchange; replies by queue name (rpc://) are not supported")

    def basic_cancel(self, consumer_tag: str) -> None:
        self._consumers.discard(consumer_tag)
        self.live.pop(consumer_tag, None)
        if consumer_tag in self.feeds:
            self.feeds[consumer_tag].is_cancelled = True

    def settle(self, tag: str, decide: Callable[[Feed, Held], Outcome]) -> None:
        """Settle what one of the feeds holds. What none holds was lost, and is another worker's."""
        for feed in self.feeds.values():
            if held := feed.held.get(tag):
                feed.settle(tag, decide(feed, held))

    def deliver(self) -> bool:
        """Hand out what was claimed and heard, and return whether there was anything."""
        found = [feed.deliver() for feed in list(self.feeds.values())]
        return any([*found, *(self._deliver_live(queue, callback) for queue, callback in list(self.live.values()))])

    def _deliver_live(self, queue: str, callback: Callable[[Any], object]) -> bool:
        delivered = False
        for exchange, subscription in list(self.connection.live.get(queue, {}).items()):
            while (heard := subscription.take()) is not None:
                if queue in self._lookup(exchange, heard.payload["properties"]["delivery_info"]["routing_key"]):
                    callback(self.Message(heard.payload, channel=self))
                    delivered = True
        return delivered

    def close(self) -> None:
        """Give back what is held, and close."""
        for feed in self.feeds.values():
            feed.stop()
        for feed in self.feeds.values():
            feed.thread.join(CLOSE_TIMEOUT)
        super().close()


class Transport(virtual.Transport):
    """One connection of kombu's."""

    Channel = Channel
    driver_type = driver_name = "django_pgqueue"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset({"direct", "topic", "fanout"})
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.using = database_alias(client.transport_options.get("using"))
        self._lease: float | None = client.transport_options.get("visibility_timeout")
        #: Queues without rows, and what they listen to by exchange.
        self.live: dict[str, dict[str, Subscription]] = {}
        self._queues: dict[str, Queue] = {}
        self._hub: Any = None

    @cached_property
    def bell(self) -> Bell:
        """Rings when there may be something to deliver."""
        return Bell()

    def queue(self, name: str, *, auto_deleted: bool = False, ttl: float | None = None) -> Queue:
        """Return the queue as the project declares it, else as Celery does."""
        if name not in self._queues:
            self._queues[name] = find_queue(name, self.using) or Queue(
                name, auto_deleted=auto_deleted, ttl=ttl, lease=self._lease, using=self.using
            )
        return self._queues[name]

    def topic(self, exchange: str) -> Topic:
        return Topic(f"exchange.{exchange}", using=self.using)

    def listen(self, queue: str, exchange: str) -> None:
        """Hear an exchange from now on, for a queue that has no rows."""
        subscription = Subscription(self.topic(exchange).name, self.using, BUFFER, self.bell.ring)
        self.live[queue][exchange] = subscription
        subscription.open()
        subscription.wait_until_listening(CLOSE_TIMEOUT)

    def _deliver_all(self) -> bool:
        self.bell.silence()
        # Nobody else does that in a worker's main process, which publishes events and replies.
        connections[self.using].close_if_unusable_or_obsolete()
        found = [channel.deliver() for channel in list(self.channels)]
        return any(found)

    def drain_events(self, connection: object, timeout: float | None = None, **kwargs: Any) -> None:
        """Wait until something was delivered, else raise ``TimeoutError``."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_all():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            select.select([self.bell], [], [], left)

    def register_with_event_loop(self, connection: object, loop: Any) -> None:
        self._hub = loop
        loop.add_reader(self.bell.fileno(), self._deliver_all)

    def close_connection(self, connection: object) -> None:
        super().close_connection(connection)
        for subscription in (each for queue in self.live.values() for each in queue.values()):
            subscription.close()
        self.live.clear()
        bell = self.__dict__.pop("bell", None)
        if bell is not None:
            if self._hub is not None:
                self._hub.remove_reader(bell.fileno())
            bell.close()


def delay_of(message: dict[str, Any], using: str) -> float:
    """Return the seconds until a task's ETA, by the database's clock. 0: none, or one that the worker has to judge."""
    try:
        eta = datetime.fromisoformat(message["headers"]["eta"])
    except (KeyError, TypeError, ValueError):
        return 0.0
    return session.seconds_until(eta, using)


def received(message: Message, tag: str) -> dict[str, Any]:
    """Return a claimed message as kombu takes it."""
    payload: dict[str, Any] = message.payload
    payload["properties"]["delivery_tag"] = tag
    payload["properties"]["delivery_info"]["redelivered"] = message.delivery_count > 1
    return payload


def requeued(feed: Feed, held: Held) -> Outcome:
    return Outcome("nack", "requeued by its worker", feed.queue.retry_delay(held.message))
