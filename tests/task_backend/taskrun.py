"""Tasks in the tests: settings, and a consumer that runs what is enqueued."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.task_backend.queues import task_handlers
from tests.support.waiting import DEADLINE

BACKEND = "django_pgqueue.task_backend.PGQueueBackend"


def tasks_setting(*queues: str, **options: Any) -> dict[str, Any]:
    """Return `TASKS` with one backend. Without queues it takes any."""
    return {"default": {"BACKEND": BACKEND, "QUEUES": list(queues), "OPTIONS": options}}


def run_tasks(*names: str, timeout: float = DEADLINE, **options: Any) -> int:
    """Run what is enqueued until nothing is ready, and return how many messages that were."""
    consumer = Consumer(list(task_handlers(names or ("default",)).values()), drain=True, **options)
    # In a thread, so that one that never ends fails the test.
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(consumer.run)
        try:
            return future.result(timeout)
        finally:
            consumer.stop(now=True)
