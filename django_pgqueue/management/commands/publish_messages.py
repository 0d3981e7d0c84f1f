"""Publish JSON lines from a file or from standard input."""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from django.core.management.base import CommandError
from django.db import DatabaseError, transaction

from django_pgqueue.exceptions import PayloadError, PGQueueError
from django_pgqueue.management.arguments import at_least, refusal
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.queues import queue_named

# Lines of one publish_many call.
BATCH_SIZE = 1_000


class Command(ExplainedCommand):
    help = "Publish each line of a file as a message: all of them, or none."
    epilog = """
    Blank lines are skipped. All messages are published in one transaction. A queue that is not declared in this project
    keeps the attributes in its row, or is created as Queue(NAME).

    Exit status: 0 if all messages were published. 1 if none was published, because a line is not JSON or not a valid
    payload (the error names the line), the file cannot be read, or the database reports an error or is unavailable.

    Signals: SIGTERM or SIGINT ends the command like any other program, and nothing is published.

    Output: on a terminal, "published N messages to NAME"; otherwise nothing.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="the queue")
        parser.add_argument(
            "file", nargs="?", metavar="FILE", default="-", help="JSON lines in UTF-8 (default: standard input)"
        )
        parser.add_argument(
            "--delay",
            type=at_least(0.0),
            default=0.0,
            help="seconds until the messages are due, at least 0 (default: 0)",
        )
        parser.add_argument(
            "--ttl",
            type=at_least(0.001),
            help="seconds after which a due message expires, at least 0.001 (default: the TTL of the queue)",
        )
        parser.add_argument(
            "--auto-deleted",
            action="store_true",
            help="create an auto-deleted queue if the queue is not declared in this project",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        count = 0
        try:
            queue = queue_named(options["name"], auto_deleted=options["auto_deleted"])
            with opened(options["file"]) as lines, transaction.atomic(using=queue.using):
                for first, payloads in batches(lines):
                    try:
                        queue.publish_many(payloads, delay=options["delay"], ttl=options["ttl"])
                    except PayloadError as error:
                        raise CommandError(f"from line {first}: {error}") from error
                    count += len(payloads)
        except DatabaseError as error:
            raise refusal(error) from error
        except (PGQueueError, ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        if options["verbosity"] > 0 and sys.stdout.isatty():
            self.stdout.write(f"published {count} messages to {queue.name}")


def opened(name: str) -> AbstractContextManager[TextIO]:
    """Open a file of lines. Standard input is "-", and stays open."""
    return nullcontext(sys.stdin) if name == "-" else open(name, encoding="utf-8")


def batches(lines: TextIO) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of the first line, and the payloads, of each batch. Blank lines are skipped."""
    first = 1
    payloads: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not payloads:
            first = number
        try:
            payloads.append(json.loads(line, parse_constant=_refuse_constant))
        except (ValueError, RecursionError) as error:
            raise CommandError(f"line {number} is not JSON: {error}") from error
        if len(payloads) == BATCH_SIZE:
            yield first, payloads
            payloads = []
    if payloads:
        yield first, payloads


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
