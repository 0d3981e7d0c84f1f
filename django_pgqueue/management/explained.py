"""Commands whose ``--help`` also explains exit statuses, signals and output."""

import inspect
from typing import Any

from django.core.management.base import BaseCommand, CommandParser, DjangoHelpFormatter


class HelpFormatter(DjangoHelpFormatter):
    """Keeps paragraphs apart, which argparse joins."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = inspect.cleandoc(text).split("\n\n")
        return "\n\n".join(super(HelpFormatter, self)._fill_text(each, width, indent) for each in paragraphs)


class ExplainedCommand(BaseCommand):
    """``epilog`` is printed below the options: paragraphs of plain text, which the docs also use."""

    epilog: str

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs.setdefault("formatter_class", HelpFormatter)
        return super().create_parser(prog_name, subcommand, epilog=inspect.cleandoc(self.epilog), **kwargs)
