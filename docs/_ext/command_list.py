"""
The help of every command of the package, on the page of commands.

A command whose section is written in the page gets its help below the heading. All others get a section of their own.
"""

import re

from django.core.management import get_commands

HELP = """
```{{eval-rst}}
.. argparse::
   :module: command_parsers
   :func: {name}
   :nodefault:
```
"""


def names() -> list[str]:
    """Return the names of all commands, sorted."""
    return sorted(name for name, app in get_commands().items() if app == "django_pgqueue")


def with_help(page: str) -> str:
    """Return the page's text with the help of all commands."""
    introduction, *parts = re.split(r"^## (\w+)\n", page, flags=re.MULTILINE)
    written = dict(zip(parts[::2], parts[1::2], strict=True))
    if unknown := written.keys() - names():
        raise ValueError(f"there are no such commands: {', '.join(sorted(unknown))}")
    sections = (f"## {name}\n{HELP.format(name=name)}{written.get(name, '')}" for name in names())
    return "\n".join([introduction, *sections])


def add_help(app: object, page: str, source: list[str]) -> None:
    """Called by Sphinx for each page that it has read."""
    if page == "commands":
        source[0] = with_help(source[0])
