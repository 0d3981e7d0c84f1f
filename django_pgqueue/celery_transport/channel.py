"""The channel for kombu: its queues are rows, and a ``Consumer`` claims and settles their messages."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual

from django_pgqueue.celery_transport.waker import Waker
from django_pgqueue.conf import settings
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.handler import ACK, RELEASE, Outcome, Settlement
from django_pgqueue.consumer.lane import Held, Lane
from django_pgqueue.message import Message
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.queues import Queue
from django_pgqueue.services import session
from django_pgqueue.validation import MAX_SECONDS

if TYPE_CHECKING:
    from django_pgqueue.celery_transport.transport import Transport

# AMQP's delivery mode for messages that need not survive a restart of the broker.
TRANSIENT = 1
# A worker that holds this many tasks which run longer than a lease claims no more.
MAX_HELD = 10_000
# Seconds for the threads of a consumer to release what they hold.
CLOSE_TIMEOUT = 10.0


class ChannelConsumer:
    """
    Consumes one queue for a channel. A ``Consumer`` claims, extends and settles, in its own threads.

    For that consumer, this object takes the place of the workers. It keeps the messages until Celery acknowledges or
    rejects them.
    """

    def __init__(self, channel: Channel, queue: Queue, callback: Callable[[Any], object], *, no_ack: bool) -> None:
        handler = make_handler(queue, callback, concurrency=MAX_HELD, timeout=MAX_SECONDS)
        self.channel = channel
        self.queue = queue
        self.callback = callback
        self.no_ack = no_ack
        #: Whether it has stopped claiming. It keeps the messages that it holds until its channel is closed.
        self.is_cancelled = False
        #: Delivery tags of claimed messages that Celery has not received yet, and all held messages by delivery tag.
        self.claimed: deque[str] = deque()
        self.held: dict[str, Held] = {}
        #: The exception that ended the consumer before it was stopped.
        self.error: Exception | None = None
        self._waker: Waker = channel.connection.waker
        self.consumer = Consumer([handler], grace=CLOSE_TIMEOUT, workers=self)
        (self._lane,) = self.consumer.lanes
        self.thread = threading.Thread(target=self._run, name=f"pgqueue {queue.name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.consumer.run()
        except Exception as error:
            self.error = error
            self._waker.wake()

    # --- Called by the consumer ---

    def threads(self) -> list[threading.Thread]:
        """Return no threads, because Celery has its own."""
        return []

    def room(self, lane: Lane) -> int:
        """Return how many messages may be claimed: as many as the channel has room for."""
        return 0 if self.is_cancelled else self.channel.room()

    def hold(self, lane: Lane, held: list[Held]) -> None:
        """Keep claimed messages until Celery receives them."""
        for one in held:
            tag = f"{one.message.id}.{one.message.token}"
            self.held[tag] = one
            self.claimed.append(tag)
        self._waker.wake()

    def give_back(self) -> None:
        """Release all messages that are held."""
        for tag in list(self.held):
            self.settle(tag, RELEASE)

    def stop(self) -> None:
        """Do nothing, because there are no threads."""

    def outage(self) -> None:
        """Do nothing, because Celery manages its own connections."""

    # --- Called by the channel ---

    def settle(self, tag: str, settlement: Settlement) -> None:
        """Let the claiming thread settle a message, if it is still held."""
        if held := self.held.pop(tag, None):
            self._lane.finish(held, settlement)
            self.consumer.wake()

    def deliver(self) -> bool:
        """Deliver claimed messages to Celery, and return whether there were any. Raises the error of the consumer."""
        if self.error is not None:
            raise self.error
        tags = [self.claimed.popleft() for _ in range(len(self.claimed))]
        for tag in tags:
            held = self.held.get(tag)
            if held is None:
                continue
            if self.is_cancelled or not self._lane.may_start(held):
                self.settle(tag, RELEASE)
                continue
            held.started = time.monotonic()
            try:
                message = self.channel.Message(received(held.message, tag), channel=self.channel)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                self.settle(tag, Settlement(Outcome.REJECT, f"not a message of kombu's: {error!r}"))
                continue
            if self.no_ack:
                self.settle(tag, ACK)
            self.callback(message)
        return bool(tags)


class QoS(virtual.QoS):
    """Settles the messages that a channel holds."""

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(delivery_tag, lambda consumer, held: ACK)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.channel.settle(delivery_tag, requeued if requeue else refused)

    def restore_unacked_once(self, stderr: object = None) -> None:
        """Only cancel kombu's finalizer. The consumers release what they hold."""
        self._on_collect.cancel()


class Channel(virtual.Channel):
    """A channel whose queues are rows, or live subscriptions."""

    QoS = QoS
    supports_fanout = True
    connection: Transport

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        #: By consumer tag: the consumers of queues with rows, and the names and callbacks of live queues.
        self.consumers: dict[str, ChannelConsumer] = {}
        self.live: dict[str, tuple[str, Callable[[Any], object]]] = {}

    # --- Declaring ---

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        **options: Any,
    ) -> queue_declare_ok_t:
        """Note a queue's attributes. Its row is created when a message is published to it or when it is consumed."""
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
        """Delete a queue's binding and purge it. Its row is left to the reaper."""
        if queue in self.connection.live:
            for subscription in self.connection.live.pop(queue).values():
                subscription.close()
        else:
            self.connection.topic(exchange).unbind(self.connection.queue(queue))
            self._purge(queue)

    # --- Publishing ---

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Leave text as it is. Only bytes need an encoding."""
        return (body, "utf-8") if isinstance(body, str) else super().encode_body(body, encoding)

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish on Django's connection. Raises ``ChannelError`` if a task would reach no queue."""
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            self._put(routing_key, message)
            return
        is_transient = message["properties"].get("delivery_mode") == TRANSIENT
        is_fanout = self.typeof(exchange).type == "fanout"
        names = () if is_fanout else self._lookup(exchange, routing_key)
        reached = [self._put(name, message) for name in names if name not in self.connection.live]
        if is_fanout or is_transient or exchange not in self.state.exchanges:
            # This also reaches queues that are bound in the database, which this process may not know.
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
        for consumer in self.consumers.values():
            consumer.consumer.wake()

    def room(self) -> int:
        """Return how many more messages the channel may hold."""
        most: int = self.qos.prefetch_count or settings.PREFETCH
        return most - sum(len(consumer.held) for consumer in list(self.consumers.values()))

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
            self.consumers[consumer_tag] = ChannelConsumer(self, self.connection.queue(queue), callback, no_ack=no_ack)
        elif self.connection.live[queue]:
            self.live[consumer_tag] = queue, callback
            self.connection.waker.wake()
        else:
            raise ChannelError(f"{queue!r} is bound to no exchange; replies by queue name (rpc://) are not supported")

    def basic_cancel(self, consumer_tag: str) -> None:
        self._consumers.discard(consumer_tag)
        self.live.pop(consumer_tag, None)
        if consumer_tag in self.consumers:
            self.consumers[consumer_tag].is_cancelled = True

    def settle(self, tag: str, decide: Callable[[ChannelConsumer, Held], Settlement]) -> None:
        """Settle a message that one of the consumers holds. If none holds it, its lease was lost to another worker."""
        for consumer in self.consumers.values():
            if held := consumer.held.get(tag):
                consumer.settle(tag, decide(consumer, held))

    def deliver(self) -> bool:
        """Deliver claimed and live messages, and return whether there were any."""
        found = [consumer.deliver() for consumer in list(self.consumers.values())]
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
        """Release the messages that are held, and close."""
        for consumer in self.consumers.values():
            consumer.consumer.stop()
        for consumer in self.consumers.values():
            consumer.thread.join(CLOSE_TIMEOUT)
        super().close()


def delay_of(message: dict[str, Any], using: str) -> float:
    """Return the seconds until a task's ETA by the database's clock, or 0 if it has none or an unreadable one."""
    try:
        eta = datetime.fromisoformat(message["headers"]["eta"])
    except (KeyError, TypeError, ValueError):
        return 0.0
    return session.seconds_until(eta, using)


def received(message: Message, tag: str) -> dict[str, Any]:
    """Return a claimed message in kombu's form."""
    payload: dict[str, Any] = message.payload
    payload["properties"]["delivery_tag"] = tag
    payload["properties"]["delivery_info"]["redelivered"] = message.delivery_count > 1
    return payload


def refused(consumer: ChannelConsumer, held: Held) -> Settlement:
    return Settlement(Outcome.REJECT, "rejected")


def requeued(consumer: ChannelConsumer, held: Held) -> Settlement:
    return Settlement(Outcome.NACK, "requeued by its worker", consumer.queue.retry_delay(held.message))
