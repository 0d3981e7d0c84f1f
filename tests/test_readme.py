"""What README shows is the code that the tests run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# <!-- from path --> and the fenced block that follows it.
SNIPPET = re.compile(r"^<!-- from (?P<file>\S+) -->\n+```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(text: str) -> list[tuple[str, str]]:
    """Return file and code of each snippet."""
    return [(match["file"], match["code"]) for match in SNIPPET.finditer(text)]


def unfounded(text: str) -> list[str]:
    """Return the files whose snippets are not a contiguous part of them."""
    return [file for file, code in snippets(text) if code not in (ROOT / file).read_text(encoding="utf-8")]


def test_each_snippet_of_the_readme_is_part_of_the_file_it_names():
    """A block after <!-- from FILE --> is, literally, some lines of FILE, and there are such blocks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert snippets(text)
    assert text.count("<!-- from ") == len(snippets(text)), "a comment without its python block"
    assert unfounded(text) == []


@pytest.mark.parametrize("change", ["", "# not there\n"])
def test_a_snippet_that_differs_is_found(change: str):
    """The check itself: the real text passes, one more line does not."""
    file = "example_project/inbox/queues.py"
    code = (ROOT / file).read_text(encoding="utf-8") + change
    assert unfounded(f"<!-- from {file} -->\n```python\n{code}```\n") == ([file] if change else [])
