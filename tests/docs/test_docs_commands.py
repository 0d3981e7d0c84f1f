"""Every command that the docs and README show is there, and takes the options that it is shown with."""

import re
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: A command in running text, in code, in a list of arguments.
SHOWN = re.compile(r"manage\.py,? +([a-z_]+)((?:,? +(?!#)[^\s|`]+)*)")


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """Return each command that is shown, with its long options."""
    return [(name, re.findall(r"--[a-z-]+", rest)) for name, rest in SHOWN.findall(text)]


def test_commands_are_found_in_every_form() -> None:
    """In text, in a crontab, in YAML."""
    assert commands_in("run `manage.py reap_queues --interval 60` now") == [("reap_queues", ["--interval"])]
    assert commands_in("* * * * * venv/bin/python manage.py reap_queues\n--x") == [("reap_queues", [])]
    assert commands_in('command: [python, manage.py, consume_queues, --grace, "60"]') == [
        ("consume_queues", ["--grace"])
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_there(page: Path) -> None:
    """With their options."""
    for name, options in commands_in(page.read_text()):
        assert name in get_commands(), f"{page.name}: there is no command {name}"
        parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(options) <= known, f"{page.name}: {name} has no {set(options) - known}"


def test_our_options_are_in_the_docs() -> None:
    """Those of consume_queues that deployments need."""
    text = "".join(page.read_text() for page in PAGES)
    for option in ("--health-port", "--health-host", "--health-file", "--health-target", "--grace", "--fail-level"):
        assert option in text
