"""The app's own errors, and the two exceptions that handlers raise to settle a message."""

from collections.abc import Iterable
from datetime import timedelta

from django.db import IntegrityError

# https://www.postgresql.org/docs/current/errcodes-appendix.html
FOREIGN_KEY_VIOLATION = "23503"


class PGQueueError(Exception):
    """The base class of the errors below. It is never raised itself."""


class InvalidQueueName(PGQueueError, ValueError):
    """
    The name of a queue or topic is empty, too long, or contains characters that are not allowed.

    A ``ValueError``. Raised when the ``Queue`` or ``Topic`` is created.
    """


class PayloadError(PGQueueError, ValueError):
    """
    A payload or a header cannot be stored as JSON. A ``ValueError``, raised before any SQL is sent.

    Also raised if the payload does not match the queue's schema. ``path`` is the location of the problem in the value:
    ``$.items[3].price``, ``[57].price`` for ``publish_many()``, or ``headers.trace`` for headers. ``reason`` describes
    the problem.
    """

    def __init__(self, reason: str, path: str = "$") -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        self.path = path


class PayloadTooLarge(PayloadError):
    """The UTF-8 JSON of a payload, or of all headers together, has more than ``MAX_PAYLOAD_BYTES`` bytes."""


class QueueNotFound(PGQueueError, IntegrityError):
    """
    The queue has no row, and it must not be created silently. A subclass of Django's ``IntegrityError``.

    ``queue`` is the queue's name. ``sqlstate`` is always that of a foreign-key violation, for code that checks the
    SQLSTATE of an ``IntegrityError``. The caller's transaction stays usable.
    """

    sqlstate = FOREIGN_KEY_VIOLATION

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} does not exist")
        self.queue = queue


class CanaryFailed(PGQueueError):
    """
    A redrive was stopped because some messages of its canary were not handled successfully in time.

    ``queue`` is the queue's name. ``died`` is a list of the ids of messages that were dead-lettered again, ``pending``
    a list of those that were not settled in time, and ``redriven`` the number of messages that were sent back.
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
    Messages could not be settled or extended, because the caller no longer has their lease.

    ``queue`` is the queue's name, and ``ids`` a list of the ids of these messages. The other messages of the call have
    been settled.
    """

    def __init__(self, queue: str, ids: Iterable[int]) -> None:
        self.queue = queue
        self.ids = sorted(ids)
        super().__init__(f"lease lost on queue {queue!r}: messages {self.ids}")


class Nack(Exception):
    """
    Raised by a handler to give the message back, to be delivered again after ``delay`` seconds.

    ``reason`` is text or an exception, for the message's history. ``delay`` is a number or a ``timedelta``; None: the
    queue's back-off. The delivery counts: after ``max_deliveries`` deliveries, the message is moved to the dead-letter
    queue.
    """

    def __init__(self, reason: object = "", *, delay: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay = delay


class Reject(Exception):
    """
    Raised by a handler to move the message to the dead-letter queue immediately.

    ``reason`` is text or an exception, for the message's history.
    """

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)
        self.reason = reason
