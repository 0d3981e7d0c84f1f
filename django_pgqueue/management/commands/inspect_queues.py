"""Queues in numbers."""

import json
import math
import threading
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connections
from django.utils.timezone import localtime as now

from django_pgqueue import services
from django_pgqueue.conf import database_alias
from django_pgqueue.loop import run_every
from django_pgqueue.management.arguments import at_least, on_stop_signal, refusal
from django_pgqueue.services import QueueStats

# What moves a terminal's cursor, and clears what it stands before.
HOME, TO_END_OF_LINE, TO_END = "\033[H", "\033[K", "\033[J"
CLEAR = HOME + TO_END

COLUMNS = ("ready", "delayed", "leased", "dead", "expired", "orphaned")


class Command(BaseCommand):
    help = (
        "Show the number of messages by state, the oldest due age, until when orphans live, how often a day a queue"
        " came back after it was reaped (revived) or gone otherwise (vanished), and what the reaper may remove."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="queues (default: all)")
        parser.add_argument("--format", choices=("text", "json"), default="text")
        parser.add_argument(
            "--watch", action="store_true", help="show them again every --interval seconds, until SIGINT or SIGTERM"
        )
        parser.add_argument("--interval", type=at_least(0.1), default=2.0, help="seconds (default: 2)")
        parser.add_argument("--database", choices=tuple(connections), help="alias (default: DATABASE)")

    def handle(self, *args: Any, **options: Any) -> None:
        names, using = options["names"], database_alias(options["database"])
        try:
            if not options["watch"]:
                missing = self._show(services.stats(names, using), options["format"], names)
            else:
                self._watch(names, using, options["format"], options["interval"])
                return
        except DatabaseError as error:
            raise refusal(error) from error
        if missing:
            raise CommandError(f"no such queue: {', '.join(missing)}")

    def _show(self, found: list[QueueStats], form: str, names: list[str]) -> list[str]:
        """Print the numbers, and return the names of queues that there are not."""
        if form == "json":
            self.stdout.write(json.dumps([as_json(stats) for stats in found]))
        else:
            self.stdout.write("\n".join(table(found)))
        return sorted(set(names) - {stats.name for stats in found})

    def _watch(self, names: list[str], using: str, form: str, interval: float) -> None:
        is_live = form == "text" and self.stdout.isatty()
        stop = threading.Event()

        def show() -> None:
            found = services.stats(names, using)
            if is_live:
                # From the top, each line over the one that stands there: nothing flickers.
                lines = [f"{now():%H:%M:%S}, every {interval:g} s", *table(found)]
                self.stdout.write(HOME + "".join(f"{line}{TO_END_OF_LINE}\n" for line in lines) + TO_END, ending="")
            else:
                self._show(found, form, names)
            self.stdout.flush()

        with on_stop_signal(stop.set):
            if is_live:
                self.stdout.write(CLEAR, ending="")
            run_every(lambda: interval, show, stop, alias=using, loop="inspect", strict=True)


def as_json(stats: QueueStats) -> dict[str, Any]:
    """Return the numbers as JSON has them: it knows no UUID and no infinity."""
    return {
        **asdict(stats),
        "owner": None if stats.owner is None else str(stats.owner),
        "orphans_expire_in": "never" if stats.orphans_expire_in == math.inf else stats.orphans_expire_in,
    }


def table(found: list[QueueStats]) -> list[str]:
    """Return the numbers as lines of text with aligned columns."""
    rows: list[tuple[str, ...]] = [
        ("queue", *COLUMNS, "oldest due", "last active", "orphans until", "revived/d", "vanished/d", "state")
    ]
    rows += [
        (
            stats.name,
            *(str(getattr(stats, column)) for column in COLUMNS),
            _age(stats.oldest_due_age),
            _age(stats.last_active_age) if stats.exists else "no row",
            "never" if stats.orphans_expire_in == math.inf else _age(stats.orphans_expire_in),
            str(stats.revived_per_day),
            str(stats.vanished_per_day),
            ", ".join(_states(stats)),
        )
        for stats in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _states(stats: QueueStats) -> list[str]:
    """Return what is special about a queue, in words."""
    states = []
    if stats.paused:
        states.append("paused")
    if stats.owner is not None:
        states.append(f"owned by {stats.owner}")
    if stats.reapable:
        states.append("reapable")
    return states


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.1f}s"
