"""Queues in numbers."""

import json
import math
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connections

from django_pgqueue import services
from django_pgqueue.conf import database_alias
from django_pgqueue.management.arguments import refusal
from django_pgqueue.services import QueueStats

COLUMNS = ("ready", "delayed", "leased", "dead", "expired", "orphaned")


class Command(BaseCommand):
    help = (
        "Show the number of messages by state, the oldest due age, until when orphans live, how often a day a queue"
        " came back after it was reaped (revived) or gone otherwise (vanished), and what the reaper may remove."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="queues (default: all)")
        parser.add_argument("--format", choices=("text", "json"), default="text")
        parser.add_argument("--database", choices=tuple(connections), help="alias (default: DATABASE)")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            found = services.stats(options["names"], database_alias(options["database"]))
        except DatabaseError as error:
            raise refusal(error) from error
        if options["format"] == "json":
            self.stdout.write(json.dumps([as_json(stats) for stats in found]))
        else:
            for line in table(found):
                self.stdout.write(line)
        missing = sorted(set(options["names"]) - {stats.name for stats in found})
        if missing:
            raise CommandError(f"no such queue: {', '.join(missing)}")


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
