"""
django-tasks-db: ``enqueue`` and ``manage.py db_worker``, without its random delay at the start.

It has no way for many: 1,000 in a transaction. Nor has it one to find the tasks of a worker that died.
Tasks that are done stay until ``prune_db_task_results``.
"""

from urllib.parse import parse_qs, urlsplit

import django
from django.conf import settings
from wire import URL, handled, main, serve, start_worker, wait_for_go

# The worker imports this module once more, by the task's path.
if not settings.configured:
    parts = urlsplit(URL)
    settings.configure(
        INSTALLED_APPS=["django_tasks_db"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts.path.removeprefix("/"),
                "USER": parts.username,
                "HOST": parse_qs(parts.query)["host"][0],
                "CONN_MAX_AGE": None,
            }
        },
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
        USE_TZ=True,
    )
    django.setup()

from django.core.management import call_command
from django.db import connection, transaction
from django_tasks import TaskResultStatus, task
from django_tasks_db.models import DBTaskResult


@task()
def handle(payload: dict) -> None:
    handled(payload)


def setup() -> None:
    call_command("migrate", verbosity=0)


class Publisher:
    def __init__(self) -> None:
        from run_django_tasks_db import handle

        self.one = handle.enqueue

    def many(self, payloads: list) -> None:
        with transaction.atomic():
            for payload in payloads:
                self.one(payload)

    def left(self) -> int:
        return DBTaskResult.objects.filter(status__in=[TaskResultStatus.READY, TaskResultStatus.RUNNING]).count()

    def clear(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {DBTaskResult._meta.db_table}")


def worker(mode: str, *, interval: str = "1") -> None:
    start_worker(mode)
    connection.ensure_connection()
    wait_for_go()
    # Its lines for each task, on by default, would go to stdout.
    call_command("db_worker", interval=float(interval), startup_delay=False, verbosity=0)


if __name__ == "__main__":
    main(setup, lambda: serve(Publisher()), worker)
