"""
What a project's own tests do with queues, for Django's test runner: see tests/cases/test_testing_cases.py.

Run by its dotted path, so that pytest does not collect it.
"""

from django.contrib.auth.models import Group
from django.core.management import call_command
from django.db import connection
from django.test import TestCase, TransactionTestCase

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from tests.support.sessions import in_threads


def make_group(message: Message) -> None:
    Group.objects.get(name="of the test")
    Group.objects.create(name=message.payload["name"])


class ClaimInTestCase(TestCase):
    """All in one transaction, which is rolled back at the end."""

    def test_claims_and_settles(self) -> None:
        self.assertEqual(MessageQueueItem.objects.count(), 0)
        queue = Queue("suite")
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            queue.publish_many([{"n": 1}, {"n": 2}, {"n": 3}])
        self.assertTrue(callbacks)
        one, two, three = queue.claim(3)
        queue.extend(one)
        queue.ack(one)
        queue.nack(two)
        queue.reject(three, reason="no")
        Reaper("default").run_once()
        self.assertTrue(connection.in_atomic_block)
        self.assertEqual(MessageQueueItem.objects.count(), 2)

    # Whichever of the two runs second would see what the first had left.
    test_leaves_nothing_behind = test_claims_and_settles


class DrainInTransactionTestCase(TransactionTestCase):
    """Committed, and flushed at the end."""

    def drain(self) -> int:
        queue = Queue("suite")
        return Consumer([make_handler(queue, make_group, concurrency=4)], drain=True).run()

    def test_drains(self) -> None:
        self.assertEqual(MessageQueueItem.objects.count(), 0)
        Group.objects.create(name="of the test")
        Queue("suite").publish_many([{"name": str(n)} for n in range(20)])
        self.assertEqual(self.drain(), 20)
        self.assertTrue(connection.is_usable())
        self.assertEqual(Group.objects.count(), 21)
        self.assertEqual(MessageQueueItem.objects.count(), 0)
        Queue("suite").publish({"name": "left"})

    def test_drains_after_threads_published(self) -> None:
        self.assertEqual(MessageQueueItem.objects.count(), 0)
        Group.objects.create(name="of the test")
        in_threads(4, lambda number: Queue("suite").publish({"name": str(number)}))
        call_command("consume_queues", "suite", handler="tests.testapp.suite.make_group", drain=True)
        self.assertEqual(Group.objects.count(), 5)
        Queue("suite").publish({"name": "left"})

    test_drains_again = test_drains
