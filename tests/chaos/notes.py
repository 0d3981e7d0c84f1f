"""
What the publishers know, on disk and outside the database: each in files of its own, one JSON object a line.

`trying` is on the disk before a publish begins; what became of it follows:

* `committed`: the commit was confirmed; with the messages' ids
* `undone`: it certainly did not commit: rolled back on purpose, or refused before anything was stored
* nothing: unknown; the connection broke, or the publisher was killed
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".notes"


class Notes:
    """The notes of one process; ``source`` is who it is."""

    def __init__(self, folder: Path, source: str) -> None:
        self._file = os.open(folder / f"{source}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, what: str, **details: Any) -> None:
        """Write a note, and return when it is on the disk."""
        os.write(self._file, f"{json.dumps({'note': what, **details})}\n".encode())
        os.fdatasync(self._file)


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield all notes of a run. A last line that its writer did not finish is none."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
