"""
The parsers of the management commands, for sphinx-argparse: ``:module: command_parsers``, ``:func: NAME``.

Without the options of every Django command, and without what is only true of this build.
"""

import re
from argparse import SUPPRESS, ArgumentParser

from django.core.management import load_command_class
from django.core.management.base import BaseCommand

# Left to itself Sphinx makes a dash of two hyphens.
OPTION = re.compile(r"(?<![\w`-])(--[a-z][a-z-]*( [A-Z]+)?)")
LABEL = re.compile(r"^([A-Z][a-z ]+:)", re.MULTILINE)


def __getattr__(name: str) -> ArgumentParser:
    if name.startswith("_"):
        raise AttributeError(name)
    parser = load_command_class("django_pgqueue", name).create_parser("manage.py", name)
    common = {action.dest for action in BaseCommand().create_parser("manage.py", name)._actions}
    for action in parser._actions:
        if action.dest in common:
            action.help = SUPPRESS
        elif action.dest == "database":
            action.choices, action.metavar = None, "ALIAS"
        action.help = OPTION.sub(r"``\1``", action.help or "")
    parser.epilog = LABEL.sub(r"**\1**", OPTION.sub(r"``\1``", parser.epilog or ""))
    return parser
