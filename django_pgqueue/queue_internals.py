"""Operations on a queue that are for the library's own modules and not part of ``Queue``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from django_pgqueue import instrumentation
from django_pgqueue.attributes import Attributes
from django_pgqueue.conf import settings
from django_pgqueue.consumer.handler import Handler, check_function
from django_pgqueue.message import add_headers, encode_headers
from django_pgqueue.services import publishing, session
from django_pgqueue.services.declaring import Declaration
from django_pgqueue.services.publishing import Outgoing
from django_pgqueue.validation import Seconds, check_count, check_seconds

if TYPE_CHECKING:
    from django_pgqueue.queues import Queue

#: Takes a message, or a list of messages if ``batch`` is given.
HandlerFunction = Callable[[Any], Any]


def declaration_of(queue: Queue[Any]) -> Declaration:
    """Return a queue's attributes as stored in its row."""
    return queue._attributes.declaration


def dead_letter_of(queue: Queue[Any]) -> str | None:
    """Return the name of a queue's configured dead-letter queue. Does not read settings."""
    return queue._attributes.dead_letter


def copy_ttl(queue: Queue[Any]) -> float | None:
    """Return the TTL of a topic's messages in seconds, as a binding of this queue stores it. None: the default."""
    return queue._attributes.copy_ttl


def add_binding(queue: Queue[Any], topic: str) -> None:
    """Add a topic to the bindings that the queue declares."""
    queue._attributes.topics.add(topic)


def remove_binding(queue: Queue[Any], topic: str) -> None:
    """Remove a topic from the bindings that the queue declares."""
    queue._attributes.topics.discard(topic)


def make_handler(
    queue: Queue[Any],
    function: HandlerFunction,
    *,
    concurrency: int = 1,
    ack: str = "late",
    timeout: Seconds = 3600,
    batch: int | None = None,
) -> Handler:
    """Return a ``Handler`` for a ``Consumer``, without registering it. Takes the arguments of ``Queue.handler()``."""
    attributes = queue._attributes
    return Handler(
        is_async=check_function(function, queue.name, ack),
        queue=queue,
        function=function,
        concurrency=check_count(concurrency, "concurrency"),
        ack=ack,
        timeout=check_seconds(timeout, "timeout", zero=False),
        read_declaration=lambda: attributes.declaration,
        batch=None if batch is None else check_count(batch, "batch"),
        load=None if attributes.validation is None else attributes.load,
    )


def publish_at(queue: Queue[Any], due: datetime | None, payload: str, headers: Mapping[str, Any]) -> int:
    """
    Publish a payload that is JSON text, due at a time (in the past or None: immediately). For the backend of Tasks.

    The time is by the database's clock, which may differ from this machine's and takes another statement to read.
    Otherwise like ``Queue.publish()``.
    """
    delay, expires_in = queue._attributes.times(0 if due is None else session.seconds_until(due, queue.using), None)
    text = encode_headers(headers, settings.MAX_PAYLOAD_BYTES)
    return send(queue._attributes, Outgoing(payload, text, delay or None, expires_in), headers)


def send(attributes: Attributes[Any], outgoing: Outgoing, headers: Mapping[str, Any] | None) -> int:
    """Publish a message under the instrument, which gets the caller's ``headers``. Returns its id."""
    with instrumentation.instrument.publishing(partial(_target, attributes), headers) as publication:
        if publication.context:
            outgoing = replace(outgoing, headers=add_headers(outgoing.headers, publication.context))
        message_id = publishing.publish(attributes.declaration, outgoing, attributes.using)
        publication.published([message_id])
    return message_id


def send_many(
    attributes: Attributes[Any], chunks: list[str], text: str, headers: Mapping[str, Any] | None, **times: float | None
) -> list[int]:
    """Publish messages under the instrument, as one publication. Returns their ids."""
    if not chunks:
        return []
    with instrumentation.instrument.publishing(partial(_target, attributes), headers, is_batch=True) as publication:
        text = add_headers(text, publication.context)
        ids = publishing.publish_many(attributes.declaration, chunks, attributes.using, headers=text, **times)
        publication.published(ids)
    return ids


def _target(attributes: Attributes[Any]) -> instrumentation.Target:
    return instrumentation.Target(attributes.name, attributes.using, attributes.auto_deleted)
