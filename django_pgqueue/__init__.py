"""
A message queue for Django on the PostgreSQL that the project already has.

    from django_pgqueue import Queue

    orders = Queue("orders")

    @orders.handler
    def handle_order(message): ...

    orders.publish({"order_id": 42})

Importing this package works before Django's apps are loaded and runs no SQL.
"""

from django_pgqueue.exceptions import (
    InvalidQueueName,
    LeaseLost,
    Nack,
    PayloadError,
    PayloadTooLarge,
    PGQueueError,
    QueueNotFound,
    Reject,
)
from django_pgqueue.message import Message
from django_pgqueue.queues import Queue

__all__ = [
    "InvalidQueueName",
    "LeaseLost",
    "Message",
    "Nack",
    "PGQueueError",
    "PayloadError",
    "PayloadTooLarge",
    "Queue",
    "QueueNotFound",
    "Reject",
]
