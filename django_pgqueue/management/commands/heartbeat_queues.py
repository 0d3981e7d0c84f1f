"""Keep queues in use on behalf of consumers that do not use this library."""

import threading
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias, settings
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.management.arguments import at_least, on_stop_signal, refusal
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.registry import find_queue
from django_pgqueue.runtime.connections import own_connection
from django_pgqueue.runtime.loop import run_every


class Command(ExplainedCommand):
    help = "Mark queues as in use, so that the reaper keeps them. Missing queues of this project are created."
    epilog = """
    For consumers that do not use this library. A queue that does not exist and is not declared in this project is
    logged once.

    Exit status: with --once, 0 if all queues exist, and 1 if a queue does not exist, or the database reports an error
    or is unavailable. Otherwise 0 if a signal ended it, and 1 if the database reports an error at the start. If the
    database is unavailable, it waits.

    Signals: SIGTERM or SIGINT ends it after the current heartbeat. With --once it ends like any other program.

    Output: only log messages.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="+", metavar="NAME", help="queues")
        parser.add_argument(
            "--interval",
            type=at_least(0.1),
            help="seconds between two heartbeats, at least 0.1 (default: HEARTBEAT_INTERVAL)",
        )
        parser.add_argument(
            "--once", action="store_true", help="mark them once and exit; fail if a queue does not exist"
        )
        parser.add_argument(
            "--database", choices=tuple(connections), help="database alias of the queues (default: DATABASE)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_alias(options["database"])
        found = [find_queue(name) for name in options["names"]]
        declared = [declaration_of(queue) for queue in found if queue is not None]
        heartbeat = Heartbeat(using, declared=declared, names=options["names"])
        if options["once"]:
            try:
                missing = heartbeat.run_once() - heartbeat.declared.keys()
            except DatabaseError as error:
                raise refusal(error) from error
            if missing:
                raise CommandError(f"no such queue: {', '.join(sorted(missing))}")
            return
        interval = options["interval"] or settings.HEARTBEAT_INTERVAL
        stop = threading.Event()
        with on_stop_signal(stop.set), own_connection(using, "heartbeat"):
            try:
                run_every(lambda: interval, heartbeat.run_once, stop, alias=using, loop="heartbeat", strict=True)
            except DatabaseError as error:
                raise refusal(error) from error
