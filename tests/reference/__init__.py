"""
The pages of the reference that are made from the code: settings, commands, signals, tables.

`python -m tests.reference` writes them; a test compares them. Each module makes one page. What the code says of
itself (comments, help texts, docstrings) is taken from there. What it does not say stands in the module as words;
where words are missing, or left over, making the page fails and says which.
"""

import importlib
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"

PAGES = ("settings", "commands", "signals", "tables")


def made(name: str) -> str:
    """Return what docs/NAME.md should be."""
    text: str = importlib.import_module(f"tests.reference.{name}").page()
    return text
