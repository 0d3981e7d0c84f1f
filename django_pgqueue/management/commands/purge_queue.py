"""Delete what waits on a queue."""

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias
from django_pgqueue.exceptions import PGQueueError, QueueNotFound
from django_pgqueue.management.arguments import at_least, progress_line, refusal
from django_pgqueue.queues import Queue
from django_pgqueue.registry import find_queue
from django_pgqueue.services import declaring, operating


class Command(BaseCommand):
    help = "Delete the messages of a queue that nobody holds. They are gone for good."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("--limit", type=at_least(1), help="so many at the most")
        parser.add_argument("--database", choices=tuple(connections), help="alias (default: DATABASE)")
        parser.add_argument("--dry-run", action="store_true", help="count them, change nothing")
        parser.add_argument("--no-input", action="store_false", dest="interactive", help="do not ask")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_alias(options["database"])
        try:
            queue = find_queue(options["name"], using) or Queue(options["name"], using=using)
            if not declaring.exists(queue.name, queue.using):
                raise QueueNotFound(queue.name)
            waiting = operating.purgeable(queue.name, queue.using)
            if options["limit"] is not None:
                waiting = min(waiting, options["limit"])
            if options["dry_run"]:
                self.stdout.write(f"would purge {waiting} messages")
                return
            # A script has no terminal, and means it.
            question = f"Delete {waiting} messages of queue {queue.name!r} for good? [y/N] "
            if options["interactive"] and sys.stdin.isatty() and not confirmed(question):
                raise CommandError("not purged")
            with progress_line(sys.stderr, "purged") as progress:
                count = queue.purge(options["limit"], progress=progress)
        except (PGQueueError, ValueError) as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            raise refusal(error) from error
        self.stdout.write(f"purged {count} messages")


def confirmed(question: str) -> bool:
    """Ask at the terminal. One that is closed there has not said yes."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
