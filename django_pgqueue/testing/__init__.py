"""
Tools for the tests of your project.

Use them to check published messages, run handlers in the test, let time pass, and cause faults::

    from django_pgqueue.testing import assert_published, drain

    class OrderTests(TestCase):
        def test_an_order_is_paid(self):
            self.client.post("/orders/", {"email": "ada@example.com"})
            assert_published(orders, {"order_id": 1})
            drain(orders)
            assert Order.objects.get().paid

Everything uses the real tables and the real code, on the test's connection and, inside a ``TestCase``, in its
transaction. Nothing here commits. Once this package is imported, the process records the messages that it publishes,
so that they are known even after they have been handled. With pytest, the fixture ``pgqueue`` has the same functions.
"""

from django_pgqueue.testing.assertions import ANYTHING, assert_published
from django_pgqueue.testing.clock import advance, lapse_lease
from django_pgqueue.testing.draining import Drained, drain
from django_pgqueue.testing.faults import lose_notifications, reap, vanish
from django_pgqueue.testing.immediately import immediate
from django_pgqueue.testing.journal import Captured, Published, capture_published, mark, published
from django_pgqueue.testing.live import LiveConsumer, live_consumer

__all__ = [
    "ANYTHING",
    "Captured",
    "Drained",
    "LiveConsumer",
    "Published",
    "advance",
    "assert_published",
    "capture_published",
    "drain",
    "immediate",
    "lapse_lease",
    "live_consumer",
    "lose_notifications",
    "mark",
    "published",
    "reap",
    "vanish",
]
