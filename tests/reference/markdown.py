"""What the pages share: tables, code, links, and the demand for words."""

import re
from collections.abc import Iterable, Mapping, Sequence

from django_pgqueue.conf import SETTING_TYPES
from django_pgqueue.monitoring.findings import FINDINGS

#: The name of a setting, where it is not part of something longer.
SETTING = re.compile(rf"(?<![\w`\[.])({'|'.join(sorted(SETTING_TYPES, key=len, reverse=True))})(?![\w`\]])")


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


def linked(text: str) -> str:
    """Link the settings that a text names."""
    return SETTING.sub(lambda found: f"[{found[1]}](settings.md#{found[1].lower()})", text)


def finding(number: str) -> str:
    """Return a link to a finding."""
    heading = f"{number} {FINDINGS[number].title}".lower()
    return f"[{number}](findings.md#{re.sub(r'[^-a-z0-9_ ]', '', heading).replace(' ', '-')})"


def demand(words: Mapping[str, object], wanted: Iterable[str], what: str) -> None:
    """Fail unless there are words for all that is wanted, and for nothing else."""
    missing, left_over = set(wanted) - set(words), set(words) - set(wanted)
    assert not missing, f"write words in tests/reference for {what}: {', '.join(sorted(missing))}"
    assert not left_over, f"take the words out of tests/reference, there is no such {what}: {', '.join(left_over)}"
