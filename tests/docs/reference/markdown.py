"""What a page is put together from: tables, code, and the demand for words."""

import re
from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def code(text: object) -> str:
    """Return text as code."""
    return f"`{text}`"


def plain(text: str) -> str:
    """Return a docstring or comment as Markdown: one line a paragraph, one backquote for code."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).replace("``", "`")


def demand(words: Mapping[str, object], wanted: Iterable[str], what: str) -> None:
    """Fail unless there are words for all that is wanted, and for nothing else."""
    missing, left_over = set(wanted) - set(words), set(words) - set(wanted)
    assert not missing, f"write words in tests/docs/reference for {what}: {', '.join(sorted(missing))}"
    assert not left_over, f"take the words out of tests/docs/reference, there is no such {what}: {', '.join(left_over)}"
