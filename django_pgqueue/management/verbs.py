"""Commands that do one thing to each of the named queues."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias
from django_pgqueue.exceptions import PGQueueError
from django_pgqueue.management.arguments import refusal
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.queues import Queue, queue_named


class QueuesCommand(ExplainedCommand):
    """Calls ``act`` for each queue and prints ``done``. The failure of one queue does not stop the others."""

    done: str

    def act(self, queue: Queue) -> None:
        """Perform the action. May raise ``PGQueueError``."""
        raise NotImplementedError

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="+", metavar="NAME", help="queues")
        parser.add_argument(
            "--database", choices=tuple(connections), help="database alias of the queues (default: DATABASE)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_alias(options["database"])
        failures = []
        for name in dict.fromkeys(options["names"]):
            try:
                self.act(queue_named(name, using))
            except (PGQueueError, ValueError) as error:
                failures.append(str(error))
            except DatabaseError as error:
                raise refusal(error) from error
            else:
                self.stdout.write(f"{self.done} {name}")
        if failures:
            raise CommandError("; ".join(failures))
