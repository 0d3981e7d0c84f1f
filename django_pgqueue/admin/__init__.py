"""
The tables in Django's admin: what is in the queues, and what an operator does to them.

Nothing is edited in a form: queues are declared and messages published by the library. What can be done
(``operations.py``) goes through it as well, asks for a permission, and stands in the admin's log.
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
