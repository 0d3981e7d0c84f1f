"""The cron job."""

import json
import threading
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections

from django_pgqueue.conf import database_alias
from django_pgqueue.management.arguments import at_least, on_stop_signal, refusal, while_read
from django_pgqueue.reaper import Reaped, Reaper
from django_pgqueue.runtime.connections import own_connection
from django_pgqueue.runtime.loop import run_every


class Command(BaseCommand):
    help = (
        "Remove expired messages and idle auto-deleted queues, bring back orphans, set aside what killed its workers."
        " Run it every minute; several may run at once."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--interval",
            type=at_least(0.1),
            help="run again every so many seconds (default: run once)",
        )
        parser.add_argument("--idle-for", type=at_least(0.0), help="seconds of idleness (default: REAP_IDLE_AFTER)")
        parser.add_argument(
            "--batch-size",
            type=at_least(1),
            default=1000,
            help="messages per statement (default: 1000)",
        )
        parser.add_argument("--dry-run", action="store_true", help="tell which queues would go, change nothing")
        parser.add_argument("--format", choices=("text", "json"), default="text")
        parser.add_argument("--database", choices=tuple(connections), help="alias (default: DATABASE)")

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
