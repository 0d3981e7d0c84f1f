"""
A broker for Celery: ``broker_transport = "django_pgqueue.celery_transport:Transport"``.

A task is a message in the queue of the same name, published on Django's connection. A ``Consumer`` of this package
claims, extends and settles the messages of a worker. Celery takes the place of its handlers. Kombu's virtual transport
manages the exchanges. Messages for those who listen at that moment (remote control, events) go through topics and leave
no row.
"""

from __future__ import annotations

import select
import time
from functools import cached_property
from typing import Any

from django.db import connections
from kombu.transport import virtual

from django_pgqueue.celery_transport.channel import CLOSE_TIMEOUT, Channel
from django_pgqueue.celery_transport.waker import Waker
from django_pgqueue.conf import database_alias
from django_pgqueue.queues import Queue
from django_pgqueue.registry import find_queue
from django_pgqueue.subscriptions import BUFFER, Subscription
from django_pgqueue.topics import Topic


class Transport(virtual.Transport):
    """One connection of kombu."""

    Channel = Channel
    driver_type = driver_name = "django_pgqueue"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset({"direct", "topic", "fanout"})
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.using = database_alias(client.transport_options.get("using"))
        self._lease: float | None = client.transport_options.get("visibility_timeout")
        #: Live queues, which have no rows, and their subscriptions by exchange.
        self.live: dict[str, dict[str, Subscription]] = {}
        self._queues: dict[str, Queue] = {}
        self._hub: Any = None

    @cached_property
    def waker(self) -> Waker:
        """Wakes the worker when there may be something to deliver."""
        return Waker()

    def queue(self, name: str, *, auto_deleted: bool = False, ttl: float | None = None) -> Queue:
        """Return the queue as the project declares it, or else with Celery's attributes. ``ttl`` is in seconds."""
        if name not in self._queues:
            self._queues[name] = find_queue(name, self.using) or Queue(
                name, auto_deleted=auto_deleted, ttl=ttl, lease=self._lease, using=self.using
            )
        return self._queues[name]

    def topic(self, exchange: str) -> Topic:
        return Topic(f"exchange.{exchange}", using=self.using)

    def listen(self, queue: str, exchange: str) -> None:
        """Subscribe to an exchange for a live queue."""
        subscription = Subscription(self.topic(exchange).name, self.using, BUFFER, self.waker.wake)
        self.live[queue][exchange] = subscription
        subscription.open()
        subscription.wait_until_listening(CLOSE_TIMEOUT)

    def _deliver_all(self) -> bool:
        self.waker.clear()
        # Nothing else closes old connections in a worker's main process, which publishes events and replies.
        connections[self.using].close_if_unusable_or_obsolete()
        found = [channel.deliver() for channel in list(self.channels)]
        return any(found)

    def drain_events(self, connection: object, timeout: float | None = None, **kwargs: Any) -> None:
        """Wait until a message is delivered. Raises ``TimeoutError`` after ``timeout`` seconds (None: wait forever)."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_all():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            select.select([self.waker], [], [], left)

    def register_with_event_loop(self, connection: object, loop: Any) -> None:
        self._hub = loop
        loop.add_reader(self.waker.fileno(), self._deliver_all)

    def close_connection(self, connection: object) -> None:
        super().close_connection(connection)
        for subscription in (each for queue in self.live.values() for each in queue.values()):
            subscription.close()
        self.live.clear()
        waker = self.__dict__.pop("waker", None)
        if waker is not None:
            if self._hub is not None:
                self._hub.remove_reader(waker.fileno())
            waker.close()
