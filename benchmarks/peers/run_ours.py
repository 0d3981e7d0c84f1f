"""django_pgqueue: ``Queue.publish``, ``publish_many`` and ``manage.py consume_queues``."""

import os
import sys
from pathlib import Path

from wire import URL, handled, main, serve, start_worker, wait_for_go

sys.path.append(str(Path(__file__).resolve().parents[2]))


def set_up(options: dict[str, str]) -> None:
    os.environ.update(DJANGO_SETTINGS_MODULE="example_project.settings", DEBUG="0", SECRET_KEY="only-for-benchmarks")
    import django
    from django.db import connections

    if options.get("prepared"):
        # Django's own options, which a connection through a transaction pooler may not be able to have.
        connections.settings["default"]["OPTIONS"] |= {"server_side_binding": True, "prepare_threshold": 5}
    django.setup()


def setup() -> None:
    set_up({})
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


class Publisher:
    def __init__(self) -> None:
        from django_pgqueue import Queue

        self.queue = Queue("peers")
        self.queue.declare()
        self.one = self.queue.publish
        self.many = self.queue.publish_many

    def left(self) -> int:
        from django_pgqueue.models import MessageQueueItem

        return MessageQueueItem.objects.count()

    def clear(self) -> None:
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE django_pgqueue_messagequeueitem")


def publisher(**options: str) -> None:
    set_up(options)
    serve(Publisher())


def worker(mode: str, **options: str) -> None:
    start_worker(mode)
    set_up(options)
    from django.core.management import call_command

    from django_pgqueue import Queue

    queue = Queue("peers", lease=float(options.get("lease", 60)))
    batch = int(options["batch"]) if "batch" in options else None
    queue.handler(batch=batch, ack=options.get("ack", "late"))(handle if batch is None else handle_batch)
    wait_for_go()
    call_command("consume_queues", "peers")


def handle(message) -> None:
    handled(message.payload)


def handle_batch(messages) -> None:
    handled(*[message.payload for message in messages])


if __name__ == "__main__":
    assert URL, "DATABASE_URL"
    main(setup, publisher, worker)
