"""
What a project's own tests need: what was published, handlers run here and now, time that passes, faults.

    from django_pgqueue.testing import assert_published, drain

    class OrderTests(TestCase):
        def test_an_order_is_paid(self):
            self.client.post("/orders/", {"email": "ada@example.com"})
            assert_published(orders, {"order_id": 1})
            drain(orders)
            assert Order.objects.get().paid

Everything goes through the real tables and the real code, on the test's own connection and, inside a ``TestCase``,
in its transaction. Nothing here commits. From the import on, this process notes what it publishes, so that a message
is known after it was handled, too. With pytest the same is in the fixture ``pgqueue``.
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
