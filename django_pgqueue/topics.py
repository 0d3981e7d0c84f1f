"""``Topic``: one message for many, live subscribers and bound queues alike."""

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
    A topic. It has no row: publishing to one that nobody listens to is no error.

    ``name``
        As that of a ``Queue``.
    ``using``
        Alias of the database that carries it. None: ``DATABASE``.

    Making one runs no SQL. Raises ``InvalidQueueName``.
    """

    def __init__(self, name: str, *, using: str | None = None) -> None:
        #: The topic's name.
        self.name = check_name(name)
        self._using = using

    def __repr__(self) -> str:
        return f"<Topic {self.name!r}>"

    @property
    def using(self) -> str:
        """The alias of its database. Raises ``ImproperlyConfigured`` if there is no such one."""
        return database_alias(self._using)

    def publish(
        self, payload: Any, *, headers: Mapping[str, Any] | None = None, ttl: Seconds | None = None
    ) -> list[int]:
        """
        Publish a message to all subscribers, and return a list of the ids of its copies on bound queues.

        ``payload`` and ``headers`` are as those of ``Queue.publish()``. Every bound queue gets a copy, or, when this
        raises or the transaction is rolled back, none does. ``ttl``: seconds after which the copies expire
        (``math.inf``: never; None: as the queue was declared). A bound auto-deleted queue that was idle for
        ``REAP_IDLE_AFTER`` is left out.
        Live subscribers get the message once it is committed, whatever its size, and at most once:
        one that is not connected then misses it.

        Inside ``atomic()`` all of it is part of the transaction. Raises ``PayloadError`` or
        ``ValueError`` before any SQL is sent.
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
        """As ``publish()``. Runs in Django's thread for synchronous code, on its connection."""
        return await sync_to_async(self.publish)(payload, **options)

    def subscribe(
        self, callback: Callable[[TopicMessage], object], *, buffer: int = subscriptions.BUFFER
    ) -> Subscription:
        """
        Call ``callback`` with each ``TopicMessage`` from now on, and return the ``Subscription``, to be closed.

        In a thread of its own, one message after the other; what it raises is logged. While it is
        busy up to ``buffer`` messages (1,000) wait; beyond that the oldest are dropped, and the signal
        ``subscription_lagged`` tells. All subscriptions of a process share one connection, which must
        not go through a transaction pooler: see ``LISTEN_DATABASE``. Returns when messages arrive, or
        after ten seconds if the database is away. Raises ``ValueError`` for a callback that is async or no function.
        """
        if not callable(callback):
            raise ValueError(f"{callback!r} is not callable, so it cannot subscribe to topic {self.name!r}")
        if inspect.iscoroutinefunction(callback):
            raise ValueError(f"{callback!r} is async, so calling it does not run it; use listen()")
        return subscriptions.subscribe(self.name, self.using, callback, check_count(buffer, "buffer"))

    def listen(self, *, buffer: int = subscriptions.BUFFER) -> LiveMessages:
        """
        Return ``LiveMessages``: the messages, each a ``TopicMessage``, for ``async for``, from its first step on.

        ``async with topic.listen() as messages`` listens from there on. ``buffer`` is as that of ``subscribe()``.
        """
        return LiveMessages(self.name, self.using, check_count(buffer, "buffer"))

    def bind(self, queue: Queue) -> None:
        """
        Let a queue get a copy of each message, expiring as the queue's own messages do.

        Where queues are declared (while Django starts) this is a declaration too: the binding is
        written when the queue is declared. Later it declares the queue and writes the binding at
        once, inside a transaction as part of it. It ends by ``unbind()``, and with a queue that is
        reaped; the process that bound it binds it again when it declares it. Raises ``ValueError`` for what is no
        ``Queue``, and for one on another database.
        """
        self._check_queue(queue)
        if queue.using != self.using:
            raise ValueError(f"{queue!r} is on database {queue.using!r}, {self!r} on {self.using!r}")
        if apps.ready:
            queue.declare()
            topics.bind(self.name, queue.name, copy_ttl(queue), self.using)
            # Rolled back, it did not happen: then no later declare may write it.
            session.once_committed(lambda: add_binding(queue, self.name), self.using)
        else:
            add_binding(queue, self.name)

    def unbind(self, queue: Queue) -> bool:
        """
        End that, and return whether the queue was bound. Messages that it has stay.

        Waits for publishers that are just putting messages there. Inside a transaction it is part of it.
        """
        self._check_queue(queue)
        was_bound = topics.unbind(self.name, queue.name, self.using)
        session.once_committed(lambda: remove_binding(queue, self.name), self.using)
        return was_bound

    def _check_queue(self, queue: object) -> None:
        if not isinstance(queue, Queue):
            raise ValueError(f"a topic is bound to a Queue, not to {queue!r:.80}")
