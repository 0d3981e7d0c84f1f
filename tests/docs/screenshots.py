"""
Pictures of the admin for the docs: `python -m tests.docs.screenshots` writes docs/img/, light and dark.

The queues are made up, and the same each time but for what depends on the clock.
"""

import os
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "img"
WIDTH, PHONE = 1280, 390


def make_queues() -> int:
    """Fill the tables with what a shop may have. Returns the id of a dead letter."""
    from django.db import connection
    from django.db.models.functions import Now

    from django_pgqueue import Queue
    from django_pgqueue.services import consumers, minutes, reaping, session
    from django_pgqueue.services.minutes import Tally
    from tests.support.rows import make_message, make_queue, seconds

    orders = Queue("orders", max_deliveries=3)
    orders.publish_many({"order": number, "total": "129.90"} for number in range(240))
    for number, reason in enumerate(("card declined", "card declined", "no such customer")):
        payload = {"order": 9000 + number, "customer": {"name": "Ada Lovelace", "country": "GB"}, "total": "12.50"}
        Queue("payments").publish(payload, headers={"tenant": "acme"})
        (message,) = Queue("payments").claim()
        Queue("payments").nack(message, delay=0, reason="TimeoutError: the bank does not answer")
        (message,) = Queue("payments").claim()
        Queue("payments").reject(message, reason=f"PaymentRefused: {reason}")
    make_queue("mails", paused_at=Now())
    for _ in range(35):
        make_message("mails", {"to": "ada@example.com"}, published_at=Now() - seconds(1500))
    for delay in (60, 600, 3600):
        make_message("mails", {"to": "later@example.com"}, due_in=delay)
    make_queue("import.nightly", exclusive=True, exclusive_consumer_id=UUID(int=0x3F9A2C44 << 96))
    make_queue("replies.4711", auto_deleted=True, idle=3000)
    make_queue("replies.4712", auto_deleted=True, idle=7200)
    Queue("thumbnails").publish_many({"image": number} for number in range(1200))
    consumers.beat(UUID(int=1), "worker-1", 4711, ["orders", "payments", "thumbnails"], "default")
    consumers.beat(UUID(int=2), "worker-2", 4711, ["orders", "thumbnails"], "default")
    reaping.record_run(0.2, {}, "default")
    with connection.cursor() as cursor:
        for ago in range(59, -1, -1):
            minute = int(session.now("default").timestamp() // 60)
            tallies = {
                "orders": Tally(300 + (ago * 37) % 120, (ago * 7) % 5, 0, {minute: 300 + (ago * 31) % 130}),
                "payments": Tally(
                    40 + (ago * 11) % 30, 2 if ago < 12 else 0, int(ago == 5), {minute: 42 + (ago * 13) % 30}
                ),
                "thumbnails": Tally(handled=0 if 20 < ago < 32 else 900 - 9 * ago, published={minute: 560 + ago % 9}),
            }
            minutes.count_minute(tallies, "default")
            if ago:
                cursor.execute(
                    "UPDATE django_pgqueue_queueminute SET minute = minute - %s * interval '1 minute'"
                    " WHERE minute = date_trunc('minute', statement_timestamp())",
                    [ago],
                )
    from django_pgqueue.models import MessageQueueItem

    letter: Any = MessageQueueItem.objects.filter(dead_lettered_from="payments").order_by("id").first()
    return int(letter.pk)


def main() -> None:
    """Make a database, serve it, and take the pictures."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.test.testcases import LiveServerThread
    from django.test.utils import setup_databases, setup_test_environment, teardown_databases
    from django.urls import reverse

    from tests.support.browser import browser

    setup_test_environment()
    settings.ALLOWED_HOSTS = ["localhost"]
    databases = setup_databases(verbosity=0, interactive=False)
    try:
        letter = make_queues()
        User.objects.create_superuser("ada", password="lovelace")
        server = LiveServerThread("localhost", StaticFilesHandler)
        server.daemon = True
        server.start()
        server.is_ready.wait()
        pages = {
            "queues": reverse("admin:django_pgqueue_messagequeue_changelist"),
            "queue": reverse("admin:django_pgqueue_messagequeue_change", args=["payments"]),
            "dead-letters": reverse("admin:django_pgqueue_messagequeueitem_changelist") + "?dead_from=payments",
            "message": reverse("admin:django_pgqueue_messagequeueitem_change", args=[letter]),
            "redrive": reverse("admin:django_pgqueue_messagequeue_operate", args=["payments", "redrive"]),
            "purge": reverse("admin:django_pgqueue_messagequeue_operate", args=["mails", "purge"]),
            "reap": reverse("admin:django_pgqueue_messagequeue_reap"),
        }
        FOLDER.mkdir(parents=True, exist_ok=True)
        for scheme, (width, suffix) in product(("light", "dark"), ((WIDTH, ""), (PHONE, "-phone"))):
            options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
            with browser() as chromium, chromium.open(f"http://localhost:{server.port}", **options) as tab:
                tab.log_in("ada", "lovelace")
                for name, path in pages.items():
                    if suffix and name not in ("queues", "message"):
                        continue
                    tab.go(path)
                    target = FOLDER / f"admin-{name}{suffix}-{scheme}.png"
                    tab.do(lambda page, target=target: page.screenshot(path=target))
        server.terminate()
    finally:
        teardown_databases(databases, verbosity=0)


if __name__ == "__main__":
    main()
