"""``Topic``: publishes each message to many receivers, which are live subscribers and bound queues."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps

from django_pgqueue import instrumentation, subscriptions
from django_pgqueue.conf import database_alias, settings
from django_pgqueue.message import add_headers, encode, encode_headers
from django_pgqueue.queue_internals import add_binding, copy_ttl, remove_binding
from django_pgqueue.queues import Queue
from django_pgqueue.services import session, topics
from django_pgqueue.subscriptions import LiveMessages, Subscription, TopicMessage
from django_pgqueue.validation import Seconds, check_count, check_name, check_ttl


class Topic:
    """
    A topic. Topics have no row, and publishing without any receivers is not an error.

    ``name``
        The topic's name. The rules for the name of a ``Queue`` apply.
    ``using``
        The alias of the database that carries the topic. None: ``DATABASE``.

    Creating a topic runs no SQL. Raises ``InvalidQueueName``.
    """

    def __init__(self, name: str, *, using: str | None = None) -> None:
        #: The topic's name.
        self.name = check_name(name)
        self._using = using

    def __repr__(self) -> str:
        return f"<Topic {self.name!r}>"

    @property
    def using(self) -> str:
        """The alias of the topic's database. Raises ``ImproperlyConfigured`` if the alias does not exist."""
        return database_alias(self._using)

    def publish(
        self, payload: Any, *, headers: Mapping[str, Any] | None = None, ttl: Seconds | None = None
    ) -> list[int]:
        """
        Publish a message to all receivers, and return a list of the ids of its copies on bound queues.

        ``payload`` and ``headers`` are the same as for ``Queue.publish()``. ``ttl`` is the time in seconds after which
        the copies expire (``math.inf``: never; None: the TTL that each queue was declared with).

        Every bound queue gets a copy. If an error is raised or the transaction is rolled back, no queue does. A bound
        auto-deleted queue that has been idle for ``REAP_IDLE_AFTER`` is skipped. Live subscribers get the message after
        the commit, whatever its size, and at most once: a subscriber that is not connected at that time misses it.

        Inside ``atomic()``, everything is part of the transaction. Raises ``PayloadError`` or ``ValueError`` before any
        SQL is sent.
        """
        most = settings.MAX_PAYLOAD_BYTES
        body, text, ttl = encode(payload, most), encode_headers(headers, most), check_ttl(ttl)
        with instrumentation.instrument.publishing(
            lambda: instrumentation.Target(self.name, self.using, is_topic=True), headers
        ) as publication:
            text = add_headers(text, publication.context)
            ids = topics.publish_to_topic(self.name, body, text, ttl, self.using)
            publication.published(ids)
        return ids

    async def apublish(self, payload: Any, **options: Any) -> list[int]:
        """Like ``publish()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish)(payload, **options)

    def subscribe(
        self, callback: Callable[[TopicMessage], object], *, buffer: int = subscriptions.BUFFER
    ) -> Subscription:
        """
        Call ``callback`` with each ``TopicMessage`` from now on. Return the ``Subscription``, which the caller closes.

        The callback runs in a separate thread, for one message at a time; its errors are logged. While it is
        busy, up to ``buffer`` messages (1,000) wait. Beyond that, the oldest are dropped and the signal
        ``subscription_lagged`` is sent. All subscriptions of a process share one connection, which must not go through
        a transaction pooler: see ``LISTEN_DATABASE``. Returns when the subscription is connected, or after ten seconds
        if the database is unavailable. Raises ``ValueError`` if the callback is async or not callable.
        """
        if not callable(callback):
            raise ValueError(f"{callback!r} is not callable, so it cannot subscribe to topic {self.name!r}")
        if inspect.iscoroutinefunction(callback):
            raise ValueError(f"{callback!r} is async, so calling it does not run it; use listen()")
        return subscriptions.subscribe(self.name, self.using, callback, check_count(buffer, "buffer"))

    def listen(self, *, buffer: int = subscriptions.BUFFER) -> LiveMessages:
        """
        Return ``LiveMessages``, which yields each ``TopicMessage`` with ``async for``, from the first iteration on.

        ``async with topic.listen() as messages`` listens from the start of the block. ``buffer`` is the same as for
        ``subscribe()``.
        """
        return LiveMessages(self.name, self.using, check_count(buffer, "buffer"))

    def bind(self, queue: Queue) -> None:
        """
        Bind a queue, so that it gets a copy of each message. Copies expire like the queue's own messages.

        While Django starts, in ``queues.py``, this only declares the binding, which is written when the queue is
        declared. Later, this declares the queue and writes the binding immediately; inside a transaction, both are part
        of that transaction. A binding ends with ``unbind()`` or when the queue is reaped. In the latter case, the
        process that bound the queue binds it again when it declares it. Raises ``ValueError`` if ``queue`` is not a
        ``Queue`` or is on another database.
        """
        self._check_queue(queue)
        if queue.using != self.using:
            raise ValueError(f"{queue!r} is on database {queue.using!r}, {self!r} on {self.using!r}")
        if apps.ready:
            queue.declare()
            topics.bind(self.name, queue.name, copy_ttl(queue), self.using)
            # Only after the commit, so that a later declare() does not write a binding that was rolled back.
            session.once_committed(lambda: add_binding(queue, self.name), self.using)
        else:
            add_binding(queue, self.name)

    def unbind(self, queue: Queue) -> bool:
        """
        Remove the binding of a queue, and return whether the queue was bound. Its messages stay.

        Waits for open transactions that publish to the topic. Inside a transaction, the removal is part of that
        transaction.
        """
        self._check_queue(queue)
        was_bound = topics.unbind(self.name, queue.name, self.using)
        session.once_committed(lambda: remove_binding(queue, self.name), self.using)
        return was_bound

    def _check_queue(self, queue: object) -> None:
        if not isinstance(queue, Queue):
            raise ValueError(f"a topic can only be bound to a Queue, not to {queue!r:.80}")
