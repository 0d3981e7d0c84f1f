"""Run the reaper."""

import json
import threading
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias
from django_pgqueue.management.arguments import at_least, on_stop_signal, refusal, while_read
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.reaper import Reaped, Reaper
from django_pgqueue.runtime.connections import own_connection
from django_pgqueue.runtime.loop import run_every


class Command(ExplainedCommand):
    help = (
        "Delete expired messages and idle auto-deleted queues, adopt orphans, and dead-letter messages that kill their"
        " workers."
    )
    epilog = """
    Run it every minute. Several reapers may run at once.

    Exit status: 0, also if a signal ended --interval. 1 if the database reports an error or is unavailable. With
    --interval, it waits if the database is unavailable, and exits with 1 only if the database reports an error at the
    start.

    Signals: SIGTERM or SIGINT ends --interval after the current run. A single run ends like any other program. Each
    batch is a separate transaction, and finished batches are kept.

    Output: one line if anything was done, or always with --verbosity 2: "expired N, dead-lettered N, adopted N, queues
    reaped N, topic bodies N, tombstones N". With --dry-run: "would expire N, dead-letter N, adopt N, reap N queues" and
    the names of these queues. With --format json, one object for each run.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--interval",
            type=at_least(0.1),
            help="seconds between two runs, at least 0.1 (default: run once)",
        )
        parser.add_argument(
            "--idle-for",
            type=at_least(0.0),
            help="seconds for which a queue must be idle, at least 0 (default: REAP_IDLE_AFTER)",
        )
        parser.add_argument(
            "--batch-size",
            type=at_least(1),
            default=1000,
            help="largest number of messages for one statement, at least 1 (default: 1000)",
        )
        parser.add_argument("--dry-run", action="store_true", help="show what would be done without doing it")
        parser.add_argument(
            "--format",
            choices=("text", "json"),
            default="text",
            help="output for people or for programs (default: text)",
        )
        parser.add_argument(
            "--database", choices=tuple(connections), help="database alias of the queues (default: DATABASE)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_alias(options["database"])
        reaper = Reaper(using, idle_for=options["idle_for"], batch_size=options["batch_size"])
        if options["dry_run"]:
            try:
                self._preview(reaper, options["format"])
            except DatabaseError as error:
                raise refusal(error) from error
            return

        def run_once() -> None:
            self._report(reaper.run_once(), options["format"], options["verbosity"])
            # Whoever reads the lines through a pipe wants them as they come.
            self.stdout.flush()

        if options["interval"] is None:
            try:
                with own_connection(using, "reaper"):
                    run_once()
            except DatabaseError as error:
                raise refusal(error) from error
            return
        stop = threading.Event()
        with on_stop_signal(stop.set), own_connection(using, "reaper"):
            try:
                run_every(
                    lambda: options["interval"],
                    while_read(run_once, stop),
                    stop,
                    alias=using,
                    loop="reaper",
                    strict=True,
                )
            except DatabaseError as error:
                raise refusal(error) from error

    def _report(self, reaped: Reaped, form: str, verbosity: int) -> None:
        if form == "json":
            self.stdout.write(json.dumps(asdict(reaped)))
        # Nothing in cron where nothing was done: cron mails what is printed.
        elif reaped != Reaped() or verbosity > 1:
            self.stdout.write(
                f"expired {reaped.expired}, dead-lettered {reaped.dead_lettered}, adopted {reaped.adopted},"
                f" queues reaped {len(reaped.queues)}, topic bodies {reaped.bodies}, tombstones {reaped.events}"
            )

    def _preview(self, reaper: Reaper, form: str) -> None:
        preview = reaper.preview()
        if form == "json":
            self.stdout.write(json.dumps(asdict(preview)))
            return
        self.stdout.write(
            f"would expire {preview.expired}, dead-letter {preview.dead_lettered}, adopt {preview.adopted},"
            f" reap {len(preview.queues)} queues"
        )
        for name in preview.queues:
            self.stdout.write(f"  {name}")
