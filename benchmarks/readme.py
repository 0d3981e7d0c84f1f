"""Put the before/after table of ``results/publish.json`` into README.md, between two markers."""

import json
import re
from typing import Any

from benchmarks import harness

README = harness.ROOT / "README.md"
MARKED = re.compile(r"(<!-- benchmark: publish -->\n).*?(<!-- /benchmark -->)", re.DOTALL)


def update() -> None:
    """Write the table of the last full run into README.md."""
    result = json.loads((harness.RESULTS / "publish.json").read_text())
    README.write_text(with_table(README.read_text(), result))


def with_table(text: str, result: dict[str, Any]) -> str:
    """Return the text with the table between its markers, and what it was measured on."""
    machine = result["machine"]
    block = (
        f"{harness.table(result['rows'])}\n\n"
        f"{result['rounds']} interleaved rounds on {machine['cores']} cores of {machine['cpu']}, PostgreSQL"
        f" {machine['postgresql']}, {result['date']}: median (lowest-highest).\n"
    )
    text, count = MARKED.subn(lambda found: f"{found[1]}{block}{found[2]}", text)
    if count != 1:
        raise ValueError("README.md must have the markers of the benchmark's table once")
    return text
