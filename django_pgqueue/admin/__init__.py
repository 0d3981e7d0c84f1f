"""
The tables in Django's admin: the content of the queues, and the operations on them.

Rows cannot be edited in forms: the library declares queues and publishes messages. The operations
(``operations.py``) use the library too. They require a permission and are recorded in the admin's log.
"""

from django_pgqueue.admin.base import UncountedPaginator
from django_pgqueue.admin.messages import MessageQueueItemAdmin
from django_pgqueue.admin.queues import MessageQueueAdmin
from django_pgqueue.admin.records import QueueConsumerAdmin, QueueEventAdmin, TopicBindingAdmin

__all__ = [
    "MessageQueueAdmin",
    "MessageQueueItemAdmin",
    "QueueConsumerAdmin",
    "QueueEventAdmin",
    "TopicBindingAdmin",
    "UncountedPaginator",
]
