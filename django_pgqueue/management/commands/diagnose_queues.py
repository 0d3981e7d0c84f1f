"""What is wrong with the queues, or soon will be."""

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.apps import apps
from django.core.checks import ERROR, WARNING, CheckMessage, run_checks
from django.core.management.base import CommandError
from django.db import DatabaseError, ProgrammingError, connections

from django_pgqueue.conf import settings
from django_pgqueue.management.arguments import refusal
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.monitoring import diagnosis
from django_pgqueue.monitoring.findings import APP, FINDINGS

LEVELS = {"error": ERROR, "warning": WARNING}

# Exit statuses.
FINE, WARNINGS, ERRORS = 0, 1, 2

UNDEFINED_TABLE = "42P01"


class Command(ExplainedCommand):
    help = "Report what is wrong with the queues, their tables or the server, and how to fix it. Changes nothing."
    epilog = """
    It takes a few seconds. It runs even if a system check fails, and reports the failure.

    Exit status: 0 if there are no findings at the level of --fail-level or above. 1 if there are warnings and
    --fail-level is warning. 2 if there are errors, or the database reports an error or is unavailable.

    Signals: SIGTERM or SIGINT ends the command like any other program.

    Output: each finding with its remedy, the most severe first. The last line is "N findings" or "nothing is wrong".
    """
    # It runs them itself, to report them in its own way.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--fail-level",
            choices=tuple(LEVELS),
            default="error",
            help="lowest level that makes the exit status non-zero (default: error)",
        )
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
        using = options["database"] or settings.DATABASE
        try:
            found = self._look(using)
        except DatabaseError as error:
            raise CommandError(str(refusal(error)), returncode=ERRORS) from error
        found.sort(key=lambda message: -message.level)
        if options["format"] == "json":
            self.stdout.write(json.dumps([as_json(message) for message in found]))
        else:
            self._report(found)
        worst = max((message.level for message in found), default=0)
        if worst >= ERROR:
            sys.exit(ERRORS)
        if worst >= LEVELS[options["fail_level"]]:
            sys.exit(WARNINGS)

    def _look(self, using: Any) -> list[CheckMessage]:
        is_there = using in tuple(connections)
        checked = run_checks([apps.get_app_config(APP)], databases=[using] if is_there else None)
        found = [message for message in checked if str(message.id).startswith(f"{APP}.")]
        # With settings of another kind there may be nothing to look at, or no way to.
        if {number_of(message) for message in found} & {"E001", "E003", "E009"}:
            return found
        try:
            return found + diagnosis.examine(using)
        except ProgrammingError as error:
            if getattr(error.__cause__, "sqlstate", None) != UNDEFINED_TABLE:
                raise
            return [*found, diagnosis.missing_tables(str(error))]

    def _report(self, found: list[CheckMessage]) -> None:
        style = {"error": self.style.ERROR, "warning": self.style.WARNING, "info": self.style.NOTICE}
        for message in found:
            self.stdout.write(f"{style[level_of(message)](number_of(message))}  {message.msg}")
            for line in (remedy_of(message), message.hint):
                if line:
                    self.stdout.write(f"      {line}")
        count = len(found)
        self.stdout.write("nothing is wrong" if not count else f"{count} finding{'' if count == 1 else 's'}")


def as_json(message: CheckMessage) -> dict[str, str | None]:
    return {
        "id": number_of(message),
        "level": level_of(message),
        "text": str(message.msg),
        "remedy": remedy_of(message),
        "hint": None if message.hint is None else str(message.hint),
    }


def number_of(message: CheckMessage) -> str:
    """Return ``E005`` of ``django_pgqueue.E005``."""
    return str(message.id).rpartition(".")[2]


def level_of(message: CheckMessage) -> str:
    if message.level >= ERROR:
        return "error"
    return "warning" if message.level >= WARNING else "info"


def remedy_of(message: CheckMessage) -> str | None:
    """Return how to fix a finding of this package. None: another package reported it."""
    kind = FINDINGS.get(number_of(message))
    return None if kind is None else kind.remedy
