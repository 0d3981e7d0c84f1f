"""Every error that this app raises on purpose, and the two that handlers raise to steer it."""

from collections.abc import Iterable
from datetime import timedelta

from django.db import IntegrityError

# Raised by PostgreSQL when a row refers to a parent that is not there
# (https://www.postgresql.org/docs/current/errcodes-appendix.html).
FOREIGN_KEY_VIOLATION = "23503"


class PGQueueError(Exception):
    """Base of the errors below. Never raised itself."""


class InvalidQueueName(PGQueueError, ValueError):
    """
    A name of a queue or topic is empty, too long, or holds characters that are not allowed.

    A ``ValueError``. Raised where the ``Queue`` or ``Topic`` is made.
    """


class PayloadError(PGQueueError, ValueError):
    """
    A payload or a header cannot be stored as JSON. A ``ValueError``, raised before any SQL is sent.

    Nor is one stored that does not fit the queue's schema. ``path`` tells where in the value the trouble is:
    ``$.items[3].price``; ``[57].price`` of ``publish_many``, ``headers.trace`` of headers. ``reason`` tells what it is.
    """

    def __init__(self, reason: str, path: str = "$") -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        self.path = path


class PayloadTooLarge(PayloadError):
    """A payload, or all headers together, have more bytes of UTF-8 JSON than ``MAX_PAYLOAD_BYTES``."""


class QueueNotFound(PGQueueError, IntegrityError):
    """
    The queue has no row, and it must not be made silently. An ``IntegrityError`` of Django's.

    ``queue`` is its name. ``sqlstate`` is that of a foreign-key violation whichever way it was found, so that code
    which looks at the SQLSTATE of an ``IntegrityError`` sees one answer. The caller's transaction stays
    usable.
    """

    sqlstate = FOREIGN_KEY_VIOLATION

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} does not exist")
        self.queue = queue


class CanaryFailed(PGQueueError):
    """
    A redrive was stopped, because the first messages that it sent back did not all end well.

    ``queue``: its name; ``died``: a list of the ids of those that became dead letters again; ``pending``: of those
    that were not settled in time; ``redriven``: how many messages were sent back.
    """

    def __init__(self, queue: str, died: Iterable[int], pending: Iterable[int], redriven: int) -> None:
        self.queue = queue
        self.died = sorted(died)
        self.pending = sorted(pending)
        self.redriven = redriven
        super().__init__(
            f"redrive of queue {queue!r} stopped after {redriven} messages:"
            f" died again {self.died}, not settled in time {self.pending}"
        )


class LeaseLost(PGQueueError):
    """
    Messages could not be settled or extended, because their lease is no longer the caller's.

    ``queue`` is the queue's name, ``ids`` the list of the messages'. Those that still were the caller's have been
    settled.
    """

    def __init__(self, queue: str, ids: Iterable[int]) -> None:
        self.queue = queue
        self.ids = sorted(ids)
        super().__init__(f"lease lost on queue {queue!r}: messages {self.ids}")


class Nack(Exception):
    """
    Raised by a handler: give the message back, to be delivered again after ``delay`` seconds.

    ``reason`` is text, or the exception itself, for the message's history. ``delay``: a number or a ``timedelta``;
    None: by the queue's back-off. The delivery counts: after ``max_deliveries`` the message goes to the dead-letter
    queue.
    """

    def __init__(self, reason: object = "", *, delay: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay = delay


class Reject(Exception):
    """
    Raised by a handler: give the message up, it goes to the dead-letter queue at once.

    ``reason`` is text, or the exception itself, for the message's history.
    """

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)
        self.reason = reason
