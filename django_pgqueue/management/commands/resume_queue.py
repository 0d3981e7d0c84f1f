"""Start claims of paused queues again."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from django_pgqueue.exceptions import PGQueueError
from django_pgqueue.management.arguments import refusal
from django_pgqueue.queues import Queue, find_queue


class Command(BaseCommand):
    help = "Start claims of paused queues again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="+", metavar="NAME")

    def handle(self, *args: Any, **options: Any) -> None:
        failures = []
        for name in dict.fromkeys(options["names"]):
            try:
                (find_queue(name) or Queue(name)).resume()
            except (PGQueueError, ValueError) as error:
                failures.append(str(error))
            except DatabaseError as error:
                raise refusal(error) from error
            else:
                self.stdout.write(f"resumed {name}")
        if failures:
            raise CommandError("; ".join(failures))
