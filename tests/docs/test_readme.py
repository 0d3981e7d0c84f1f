"""What README shows is the code that the tests run."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# <!-- from path --> and the fenced block that follows it.
SNIPPET = re.compile(r"^<!-- from (?P<file>\S+) -->\n+```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(text: str) -> list[tuple[str, str]]:
    """Return file and code of each snippet."""
    return [(match["file"], match["code"]) for match in SNIPPET.finditer(text)]


def unfounded(text: str) -> list[str]:
    """Return the files whose snippets are empty, or not a contiguous part of them."""
    return [
        file
        for file, code in snippets(text)
        if not code.strip() or code not in (ROOT / file).read_text(encoding="utf-8")
    ]


def test_each_snippet_of_the_readme_is_part_of_the_file_it_names():
    """A block after <!-- from FILE --> is, literally, some lines of FILE, and there are such blocks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert snippets(text)
    assert text.count("<!-- from ") == len(snippets(text)), "a comment without its python block"
    assert unfounded(text) == []


def test_a_snippet_that_differs_is_found():
    """The check itself: the real text passes, one more line or nothing at all does not."""
    file = "example_project/inbox/queues.py"
    code = (ROOT / file).read_text(encoding="utf-8")
    found = [
        unfounded(f"<!-- from {file} -->\n```python\n{block}```\n") for block in (code, f"{code}# not there\n", "")
    ]
    assert found == [[], [file], [file]]
