"""Queues in numbers."""

import json
import math
import threading
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError, connections
from django.utils.timezone import localtime as now

from django_pgqueue.conf import database_alias
from django_pgqueue.durations import duration
from django_pgqueue.management.arguments import at_least, on_stop_signal, refusal, while_read
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.monitoring.queue_numbers import SAMPLE_SIZE, Numbers, Rate, is_cut, numbers_of
from django_pgqueue.monitoring.queue_numbers import at_least as count_of
from django_pgqueue.runtime.loop import run_every
from django_pgqueue.services import counting
from django_pgqueue.services.counting import DEPTH_STATES, QueueStats

# What moves a terminal's cursor, and clears what it stands before.
HOME, TO_END_OF_LINE, TO_END = "\033[H", "\033[K", "\033[J"
CLEAR = HOME + TO_END

HEADER = (
    "queue",
    *DEPTH_STATES,
    "orphaned",
    "oldest due",
    "published",
    "handled",
    "dead letters",
    "consumers",
    "last active",
    "orphans until",
    "revived/d",
    "vanished/d",
    "state",
)

Figures = dict[str, Any]


class Command(ExplainedCommand):
    help = "Show the numbers of the queues: messages by state, ages, rates, dead letters, consumers, reapable queues."
    epilog = f"""
    It shows the same numbers as the admin. Only about {SAMPLE_SIZE:,} messages of each queue are read, so it is fast
    with any number of messages: "1,000+" means at least 1,000. --exact reads all messages of the queues, which takes a
    while if there are millions. A queue that no longer exists is shown if it has orphans. Rates are messages per
    second, averaged over the last minutes that consumers have reported. "revived" and "vanished" show how often a queue
    was created again in the last 24 hours, after the reaper or something else had deleted its row.

    Exit status: 0, also if a signal ended --watch. 1 if a named queue does not exist (the others are shown), or the
    database reports an error or is unavailable. With --watch, it waits if the database is unavailable, and exits with 1
    only if the database reports an error at the start.

    Signals: SIGTERM or SIGINT ends --watch after the current update. Without --watch it ends like any other program.

    Output: a table with one line for each queue. --watch redraws it on a terminal, and otherwise prints one table after
    the other. With --format json the output is one list, or with --watch one list for each update, each on its own
    line.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="queues (default: all)")
        parser.add_argument(
            "--format",
            choices=("text", "json"),
            default="text",
            help="output for people or for programs (default: text)",
        )
        parser.add_argument("--exact", action="store_true", help="count all messages, which reads all of them")
        parser.add_argument("--watch", action="store_true", help="update the numbers until SIGINT or SIGTERM")
        parser.add_argument(
            "--interval",
            type=at_least(0.1),
            default=2.0,
            help="seconds between two updates of --watch, at least 0.1 (default: 2)",
        )
        parser.add_argument(
            "--database", choices=tuple(connections), help="database alias of the queues (default: DATABASE)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        names, using, exact = options["names"], database_alias(options["database"]), options["exact"]
        try:
            if options["watch"]:
                self._watch(names, using, options["format"], options["interval"], exact=exact)
                return
            found = inspect(names, using, exact=exact)
        except DatabaseError as error:
            raise refusal(error) from error
        self._show(found, options["format"])
        if missing := sorted(set(names) - {figures["name"] for figures in found}):
            raise CommandError(f"no such queue: {', '.join(missing)}")

    def _show(self, found: list[Figures], form: str) -> None:
        self.stdout.write(json.dumps(found) if form == "json" else "\n".join(table(found)))

    def _watch(self, names: list[str], using: str, form: str, interval: float, *, exact: bool) -> None:
        is_live = form == "text" and self.stdout.isatty()
        stop = threading.Event()

        def show() -> None:
            found = inspect(names, using, exact=exact)
            if is_live:
                # From the top, each line over the one that stands there: nothing flickers.
                lines = [f"{now():%H:%M:%S}, every {interval:g} s", *table(found)]
                self.stdout.write(HOME + "".join(f"{line}{TO_END_OF_LINE}\n" for line in lines) + TO_END, ending="")
            else:
                self._show(found, form)
            self.stdout.flush()

        with on_stop_signal(stop.set):
            if is_live:
                self.stdout.write(CLEAR, ending="")
            run_every(lambda: interval, while_read(show, stop), stop, alias=using, loop="inspect", strict=True)


def inspect(names: Sequence[str], using: str, *, exact: bool) -> list[Figures]:
    """Return the figures of the named queues that exist (without names: of all queues)."""
    found = numbers_of(list(dict.fromkeys(names)) or None, using)
    stats = {each.name: each for each in counting.stats(names, using)} if exact else {}
    return [
        figures_of(numbers, stats.get(name))
        for name, numbers in sorted(found.items())
        if numbers.depth is not None or numbers.orphans.messages
    ]


def figures_of(numbers: Numbers, exact: QueueStats | None) -> Figures:
    """Return a queue's figures for JSON, which has no UUIDs and no infinity. docs/commands.md lists the names."""
    depth, counted = numbers.depth, exact or numbers.depth
    orphaned = exact.orphaned if exact else numbers.orphans.messages
    expire_in = exact.orphans_expire_in if exact else numbers.orphans.expire_in
    reapable_in = numbers.reapable_in
    return {
        "name": numbers.name,
        "exists": depth is not None,
        **{state: getattr(counted, state, 0) for state in DEPTH_STATES},
        "at_least": numbers.is_more and exact is None,
        "orphaned": orphaned,
        "orphaned_at_least": exact is None and is_cut(orphaned),
        "orphans_expire_in": "never" if expire_in == math.inf else expire_in,
        "oldest_due_age": counted.oldest_due_age if counted else None,
        "publish_rate": numbers.publish_rate.per_second,
        "publish_rate_at_least": numbers.publish_rate.is_at_least,
        "handle_rate": numbers.handle_rate.per_second,
        "dead_letters": numbers.dead_letters,
        "dead_letters_at_least": is_cut(numbers.dead_letters),
        "dead_letter": numbers.dead_letter_queue,
        "consumers": depth.consumers if depth else 0,
        "last_active_age": depth.last_active_age if depth and math.isfinite(depth.last_active_age) else None,
        "reapable": reapable_in == 0,
        "reapable_in": reapable_in,
        "paused": bool(depth and depth.paused),
        "exclusive": bool(depth and depth.exclusive),
        "owner": str(depth.owner) if depth and depth.owner else None,
        "revived_per_day": numbers.events.get("revived", 0),
        "vanished_per_day": numbers.events.get("vanished", 0),
    }


def table(found: list[Figures]) -> list[str]:
    """Return the figures as lines of text with aligned columns."""
    rows = [HEADER, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        figures["name"],
        *(count_of(figures[state], more=figures["at_least"]) for state in DEPTH_STATES),
        count_of(figures["orphaned"], more=figures["orphaned_at_least"]),
        _age(figures["oldest_due_age"]),
        str(Rate(figures["publish_rate"], figures["publish_rate_at_least"])),
        str(Rate(figures["handle_rate"])),
        count_of(figures["dead_letters"], more=figures["dead_letters_at_least"]),
        str(figures["consumers"]),
        _age(figures["last_active_age"]) if figures["exists"] else "no row",
        "never" if figures["orphans_expire_in"] == "never" else _age(figures["orphans_expire_in"]),
        str(figures["revived_per_day"]),
        str(figures["vanished_per_day"]),
        ", ".join(_states(figures)),
    )


def _states(figures: Figures) -> list[str]:
    """Return what is special about a queue, in words."""
    states = []
    if figures["exclusive"]:
        states.append(f"owned by {figures['owner']}" if figures["owner"] else "exclusive")
    if figures["dead_letter"] not in (None, f"{figures['name']}.dead"):
        states.append(f"dead letters to {figures['dead_letter']}")
    if figures["reapable_in"] is not None:
        states.append(f"reapable in {_age(figures['reapable_in'])}" if figures["reapable_in"] else "reapable")
    if figures["paused"]:
        states.append("paused")
    return states


def _age(seconds: float | None) -> str:
    # Without a space, so that columns are split at spaces.
    return duration(seconds).replace(" ", "")
