"""Delete the messages that wait on a queue."""

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias
from django_pgqueue.exceptions import PGQueueError, QueueNotFound
from django_pgqueue.management.arguments import at_least, progress_line, refusal
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.queues import Queue
from django_pgqueue.registry import find_queue
from django_pgqueue.services import declaring, operating


class Command(ExplainedCommand):
    help = "Delete all messages of a queue that no consumer holds. They cannot be restored."
    epilog = """
    This includes ready, delayed, expired and dead messages. On a terminal, it asks for confirmation first. Messages
    that are published after the command has started are kept.

    Exit status: 0 if the messages were deleted. 1 if the queue does not exist, the answer was not yes, or the database
    reports an error or is unavailable. 130 if a signal ended it.

    Signals: SIGTERM or SIGINT ends the command, which then prints how many messages it has deleted. Each batch of at
    most 1,000 messages is a separate transaction, and finished batches stay deleted.

    Output: "purged N messages" or "would purge N messages". If stderr is a terminal, it shows the progress.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="the queue")
        parser.add_argument("--limit", type=at_least(1), help="number of messages to delete, at least 1 (default: all)")
        parser.add_argument(
            "--database", choices=tuple(connections), help="database alias of the queues (default: DATABASE)"
        )
        parser.add_argument("--dry-run", action="store_true", help="count the messages without deleting them")
        parser.add_argument("--no-input", action="store_false", dest="interactive", help="do not ask for confirmation")

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
            question = f"Permanently delete {waiting} messages of queue {queue.name!r}? [y/N] "
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
    """Ask at the terminal. A closed standard input counts as no."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
