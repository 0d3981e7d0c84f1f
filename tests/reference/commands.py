"""docs/commands.md: every command, from argparse and `command_words.py`."""

import inspect
import re
from argparse import Action, _StoreFalseAction, _StoreTrueAction
from collections.abc import Iterator
from dataclasses import dataclass

from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand

from tests.reference.command_words import COMMANDS, OPTIONS, UNITS, Words
from tests.reference.markdown import code, demand, linked, plain, table

HEAD = """\
# Commands

`python manage.py COMMAND`. Each has the options of all of Django's commands too (`--settings`, `--verbosity`, …).

For all of them: an error is told in one line on stderr. The exit status is 2 where the arguments are wrong, and 1 where
a [system check](findings.md) finds an error, with which none but `diagnose_queues` starts. What is said of signals
holds for a process of its own; `call_command` in another thread than the main one leaves them alone.
"""

FLAGS = (_StoreTrueAction, _StoreFalseAction)


@dataclass(frozen=True)
class Row:
    """One argument or option."""

    #: `NAME` or `--limit`.
    name: str
    shown: str
    value: str
    default: str
    help: str


def names() -> list[str]:
    """Return the names of this app's commands."""
    return sorted(name for name, app in get_commands().items() if app == "django_pgqueue")


def page() -> str:
    """Return what docs/commands.md should be."""
    demand(COMMANDS, names(), "command")
    parsers = {name: load_command_class("django_pgqueue", name) for name in names()}
    actions = {name: own_actions(command, name) for name, command in parsers.items()}
    rows = {name: [row_of(name, action) for action in actions[name]] for name in names()}
    wordless = [f"{name} {row.name}" for name in names() for row in rows[name] if not row.help]
    assert not wordless, f"write words in command_words.OPTIONS for: {', '.join(wordless)}"
    overview = table(("command", "what it does"), [(f"[{name}](#{name})", parsers[name].help) for name in names()])
    sections = [section(name, parsers[name].help, rows[name], COMMANDS[name]) for name in names()]
    return "\n".join([HEAD, overview, *sections])


def section(name: str, help: str, rows: list[Row], words: Words) -> str:
    """Return what the page says of one command."""
    arguments = [row for row in rows if not row.name.startswith("--")]
    options = [row for row in rows if row.name.startswith("--")]
    usage = " ".join(["python manage.py", name, *(row.shown for row in arguments), "[options]"])
    parts = [f"## {name}", linked(f"{help} {words.about}"), code(usage)]
    head = ("option", "value", "default", "what it is")
    lines = [(row.name, row.value, row.default, row.help) for row in (*arguments, *options)]
    parts += [table(head, [(code(name), *rest) for name, *rest in lines])]
    parts += [table(("exit status", "when"), [(code(status), text) for status, text in words.exits.items()])]
    parts += [f"**Signals.** {words.signals}", f"**Output.** {words.prints}"]
    if words.json:
        what = "" if name == "consume_queues" else "**`--format json`:** "
        parts += [
            f"{what}{words.json}",
            table(("key", "what it is"), [(code(key), text) for key, text in words.keys.items()]),
        ]
    has_format = any(row.name == "--format" for row in options)
    assert bool(words.json) == has_format or name == "consume_queues", f"{name}: say what --format json prints"
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def own_actions(command: BaseCommand, name: str) -> list[Action]:
    """Return a command's arguments and options, without those that all commands have."""
    common = {action.dest for action in BaseCommand().create_parser("manage.py", name)._actions}
    return [action for action in command.create_parser("manage.py", name)._actions if action.dest not in common]


def row_of(command: str, action: Action) -> Row:
    """Return the row of one argument or option."""
    name = action.option_strings[-1] if action.option_strings else str(action.metavar)
    words, default = split(action)
    shown = {"*": f"[{name} …]", "+": f"{name} [{name} …]", "?": f"[{name}]"}.get(str(action.nargs), name)
    text = OPTIONS.get(f"{command} {name}") or OPTIONS.get(name) or words
    return Row(name, shown, value_of(action, name), linked(default), linked(plain(text)))


def split(action: Action) -> tuple[str, str]:
    """Return an action's help without the default that it tells, and that default."""
    found = re.fullmatch(r"(.*?) ?\(?default: ([^)]*)\)?", action.help or "")
    words, told = (found[1], found[2]) if found else (action.help or "", "")
    default = action.default
    if default is None or default == [] or isinstance(action, FLAGS):
        return words, told
    value = f"{default:g}" if isinstance(default, int | float) else str(default)
    assert not told or told.startswith(value) or value == "-", f"{action.option_strings}: {told!r} is {value!r}"
    return words, told or value


def value_of(action: Action, name: str) -> str:
    """Return what an option takes."""
    if isinstance(action, FLAGS):
        return ""
    if name == "--database":
        return "an alias of `DATABASES`"
    if action.choices:
        return " or ".join(map(code, action.choices))
    if action.type is None or isinstance(action.type, type):
        return str(action.metavar or "text").lower() if name.startswith("--") else ""
    least = inspect.getclosurevars(action.type).nonlocals["least"]
    return f"{UNITS[name]}, {'from' if isinstance(least, float) else 'whole, from'} {least:g}"


def numbers() -> Iterator[str]:
    """Yield the options that take a number, for the test of `UNITS`."""
    for name in names():
        for action in own_actions(load_command_class("django_pgqueue", name), name):
            if action.type is not None and not isinstance(action.type, type):
                yield action.option_strings[-1]
