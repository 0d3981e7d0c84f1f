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
    CanaryFailed,
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
from django_pgqueue.subscriptions import TopicMessage
from django_pgqueue.topics import Topic

__all__ = [
    "CanaryFailed",
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
    "Topic",
    "TopicMessage",
]
