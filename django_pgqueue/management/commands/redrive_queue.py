"""Send dead letters back to where they came from."""

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias
from django_pgqueue.exceptions import CanaryFailed, PGQueueError, QueueNotFound
from django_pgqueue.management.arguments import at_least, progress_line, refusal
from django_pgqueue.queues import queue_named
from django_pgqueue.redrive import make_filter
from django_pgqueue.services import dead_letters, declaring


class Command(BaseCommand):
    help = "Send the dead letters of a queue back to it, with a fresh count of deliveries."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="the queue that gave them up, not its dead-letter queue")
        parser.add_argument("--id", type=at_least(1), action="append", dest="ids", help="only this one (repeatable)")
        parser.add_argument("--reason", metavar="TEXT", help="only those with TEXT in the reason of their last failure")
        parser.add_argument(
            "--header",
            action="append",
            metavar="KEY=VALUE",
            default=[],
            help="only those with this header, a text (repeatable)",
        )
        parser.add_argument("--limit", type=at_least(1), help="so many at the most")
        parser.add_argument("--rate", type=at_least(0.001), help="so many a second")
        parser.add_argument(
            "--canary",
            type=at_least(1),
            metavar="N",
            help="N go first; the others follow only when these were settled and none died again",
        )
        parser.add_argument(
            "--canary-timeout",
            type=at_least(0.1),
            default=300.0,
            help="seconds that the canary gets (default: 300)",
        )
        parser.add_argument("--database", choices=tuple(connections), help="alias (default: DATABASE)")
        parser.add_argument("--dry-run", action="store_true", help="count them, change nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_alias(options["database"])
        headers = {}
        for pair in options["header"]:
            key, equals, value = pair.partition("=")
            if not equals:
                raise CommandError(f"--header is KEY=VALUE, not {pair!r}")
            headers[key] = value
        try:
            queue = queue_named(options["name"], using)
            letters = make_filter(options["ids"], options["reason"], headers)
            count = dead_letters.redrivable(queue.name, letters, queue.using)
            if not count and not declaring.exists(queue.name, queue.using):
                raise QueueNotFound(queue.name)
            if options["dry_run"]:
                if options["limit"] is not None:
                    count = min(count, options["limit"])
                self.stdout.write(f"would redrive {count} messages")
                return
            with progress_line(sys.stderr, "redriven") as progress:
                count = queue.redrive(
                    options["limit"],
                    ids=options["ids"],
                    reason=options["reason"],
                    headers=headers,
                    rate=options["rate"],
                    canary=options["canary"],
                    canary_timeout=options["canary_timeout"],
                    progress=progress,
                )
        except CanaryFailed as error:
            raise CommandError(str(error), returncode=2) from error
        except (PGQueueError, ValueError) as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            raise refusal(error) from error
        self.stdout.write(f"redriven {count} messages")
