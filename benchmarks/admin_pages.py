"""
How long do the admin's pages take, with 10,000,000 messages on 200 queues?

The queues have different sizes: one holds two million messages, and most hold tens of thousands. Some messages are
leased, some are delayed, and some are dead letters. Django's test client requests the pages in this process, so the
time covers the view, its statements and its templates, but no network and no browser.

Each page is requested once to fill caches. After that, the pages are requested in turns.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from benchmarks.harness import Report, Spread, Target, interleaved, percentile
from django_pgqueue.devdb import DevCluster

QUEUES = 200
BIG, MIDDLE = "admin-000", "admin-100"

MAKE_QUEUES = """
INSERT INTO django_pgqueue_messagequeue (name)
SELECT 'admin-' || lpad(number::text, 3, '0') FROM generate_series(0, %(queues)s - 1) AS number
"""
# A fifth of all on the first queue. Of each queue's: one in a hundred delayed, one in a thousand leased, one in fifty
# set aside where it is.
MAKE_MESSAGES = """
INSERT INTO django_pgqueue_messagequeueitem
    (queue_id, payload, published_at, read_after, lease_expires_at, lease_token, delivery_count,
     dead_lettered_from, dead_lettered_at, failures)
SELECT 'admin-' || lpad((CASE WHEN number %% 5 = 0 THEN 0 ELSE number %% %(queues)s::bigint END)::text, 3, '0'),
       '{"event": "order.paid", "note": "Leave it with the neighbours, please"}',
       statement_timestamp() - interval '1 hour',
       CASE WHEN number %% 100 = 7 THEN statement_timestamp() + interval '1 hour' END,
       CASE WHEN number %% 1000 = 11 THEN statement_timestamp() + interval '1 hour' END,
       CASE WHEN number %% 1000 = 11 THEN gen_random_uuid() END,
       CASE WHEN number %% 1000 = 11 THEN 1 ELSE 0 END,
       CASE WHEN number %% 50 = 13 THEN 'admin-' || lpad((number %% %(queues)s::bigint)::text, 3, '0') END,
       CASE WHEN number %% 50 = 13 THEN statement_timestamp() END,
       CASE WHEN number %% 50 = 13 THEN '[{"reason": "ValueError: no"}]'::jsonb END
FROM generate_series(%(start)s::bigint, %(end)s::bigint) AS number
"""
MAKE_MINUTES = """
INSERT INTO django_pgqueue_queueminute (queue, minute, handled, published)
SELECT name, date_trunc('minute', statement_timestamp()) - number * interval '1 minute',
       number * 17 % 600, number * 19 % 600
FROM django_pgqueue_messagequeue, generate_series(0, 1439) AS number
"""
BATCH = 500_000
SLOWEST = 300.0


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Seed, then ask for each page, in turns."""
    count, rounds = (20_000, 3) if quick else (10_000_000, 15)
    seed(cluster, count)
    pages = urls()
    client = log_in()
    for url in pages.values():
        client.get(url)
    report = Report("admin_pages", "how long do the admin's pages take?", rounds)
    ways = {name: lambda url=url: milliseconds(client, url) for name, url in pages.items()}
    found = interleaved(ways, rounds)
    report.rows = [
        {f"page, with {count:,} messages": name, "ms": Spread.of(took), "highest ms": max(took)}
        for name, took in found.items()
    ]
    report.targets = [
        Target(f"T14: {name}: p95, ms", percentile(took, 95), "<=", SLOWEST) for name, took in found.items()
    ]
    return report


def seed(cluster: DevCluster, count: int) -> None:
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        # The foreign key's check of each row would take most of the time. None of these rows violates it.
        connection.execute("SET session_replication_role = replica")
        connection.execute(MAKE_QUEUES, {"queues": QUEUES})
        for start in range(0, count, BATCH):
            end = min(start + BATCH, count) - 1
            connection.execute(MAKE_MESSAGES, {"queues": QUEUES, "start": start, "end": end})
        connection.execute(MAKE_MINUTES)
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def urls() -> dict[str, str]:
    from django.urls import reverse

    from django_pgqueue.models import MessageQueueItem

    queues = reverse("admin:django_pgqueue_messagequeue_changelist")
    items = reverse("admin:django_pgqueue_messagequeueitem_changelist")
    message = MessageQueueItem.objects.filter(queue=BIG).order_by("-id").values_list("pk", flat=True)[0]
    middle = message // 2
    return {
        "the queues": queues,
        "the queues, last page": f"{queues}?p=4",
        "a queue of two million": reverse("admin:django_pgqueue_messagequeue_change", args=[BIG]),
        "all messages": items,
        "all messages, a page in the middle": f"{items}?after={middle}",
        "messages of the largest queue": f"{items}?queue={BIG}",
        "messages of the largest queue, a page in the middle": f"{items}?queue={BIG}&after=_{middle}",
        "messages of a small queue": f"{items}?queue={MIDDLE}",
        "ready messages of the largest queue": f"{items}?queue={BIG}&state=ready",
        "leased messages of the largest queue": f"{items}?queue={BIG}&state=leased",
        "delayed messages of the largest queue": f"{items}?queue={BIG}&state=delayed",
        "dead letters of a queue": f"{items}?dead_from=admin-013",
        "a message": reverse("admin:django_pgqueue_messagequeueitem_change", args=[message]),
    }


def log_in() -> Any:
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    call_command("migrate", verbosity=0)
    settings.ALLOWED_HOSTS = ["testserver"]
    client = Client()
    client.force_login(User.objects.create_superuser("benchmark"))
    return client


def milliseconds(client: Any, url: str) -> float:
    before = time.perf_counter()
    answer = client.get(url)
    took = (time.perf_counter() - before) * 1000
    if answer.status_code != 200:
        raise RuntimeError(f"{url}: {answer.status_code}")
    if b"was given up" in answer.content:
        raise RuntimeError(f"{url}: given up")
    return took
