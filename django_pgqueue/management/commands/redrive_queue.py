"""Send dead letters back to where they came from."""

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias
from django_pgqueue.exceptions import CanaryFailed, PGQueueError, QueueNotFound
from django_pgqueue.management.arguments import at_least, progress_line, refusal
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.queues import queue_named
from django_pgqueue.redrive import make_filter
from django_pgqueue.services import dead_letters, declaring


class Command(ExplainedCommand):
    help = "Send the dead letters of a queue back to it. Their delivery counts start from 0 again."
    epilog = """
    If you give several conditions, a message must meet all of them. Only messages that were dead before the command
    started are sent back, and none that a consumer holds. A message that went through several dead-letter queues goes
    back one step.

    Exit status: 0 if the messages were sent back. 1 if neither the queue nor a dead letter of it exists, an option is
    wrong, or the database reports an error or is unavailable. 2 if the canary failed: one of its messages was
    dead-lettered again or was not settled in time, and no other message was sent. 130 if a signal ended it.

    Signals: SIGTERM or SIGINT ends the command, which then prints how many messages it has sent. Each batch of at most
    1,000 messages is a separate transaction, and finished batches are kept.

    Output: "redriven N messages" or "would redrive N messages". If stderr is a terminal, it shows the progress.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="the queue that they came from, not the dead-letter queue")
        parser.add_argument(
            "--id", type=at_least(1), action="append", dest="ids", help="only this message id, at least 1 (repeatable)"
        )
        parser.add_argument("--reason", metavar="TEXT", help="only messages whose last failure has TEXT in its reason")
        parser.add_argument(
            "--header",
            action="append",
            metavar="KEY=VALUE",
            default=[],
            help="only messages with this header, whose value is text (repeatable)",
        )
        parser.add_argument("--limit", type=at_least(1), help="number of messages to send, at least 1 (default: all)")
        parser.add_argument("--rate", type=at_least(0.001), help="maximum messages per second, at least 0.001")
        parser.add_argument(
            "--canary",
            type=at_least(1),
            metavar="N",
            help="send N messages first, at least 1, and the others if all of these are settled and none died again",
        )
        parser.add_argument(
            "--canary-timeout",
            type=at_least(0.1),
            default=300.0,
            help="seconds in which the canary must be settled, at least 0.1 (default: 300)",
        )
        parser.add_argument(
            "--database", choices=tuple(connections), help="database alias of the queues (default: DATABASE)"
        )
        parser.add_argument("--dry-run", action="store_true", help="count the messages without sending them")

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
