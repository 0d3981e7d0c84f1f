"""
What the processes of a run note, each in a file of its own, outside the database.

A note is one JSON object a line, in the file before the call returns: what it tells of outlives the process that
noted it, and the database cannot take it back. Times are monotonic: one clock for all processes of a machine.

Of a publish, ``trying`` is noted before it begins. What became of it follows:

* ``committed``: the commit was confirmed; with the messages' ids
* ``undone``: it certainly did not commit: rolled back on purpose, or refused before anything was stored
* nothing: unknown; the connection broke, or the publisher was killed
"""

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from django_pgqueue import signals

#: The signals that are noted, and as what.
SIGNALS = {
    signals.queue_created: "made",
    signals.queue_healed: "made",
    signals.queue_reaped: "reaped",
    signals.messages_expired: "expired",
    signals.orphans_adopted: "adopted",
    signals.message_failed: "failed",
    signals.lease_lost: "lease_lost",
}

_file: int | None = None


def open_file(folder: str | Path, role: str) -> None:
    """Open this process's file."""
    global _file
    _file = os.open(Path(folder) / f"{role}-{os.getpid()}.notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def follow_signals() -> None:
    """Note from now on what the queue's signals tell."""
    for signal, what in SIGNALS.items():
        signal.connect(partial(_note_signal, what), weak=False)


def note(what: str, **details: Any) -> None:
    """Append a note. One write, so that threads do not mix their lines."""
    assert _file is not None, "this process belongs to no run"
    os.write(_file, f"{json.dumps({'note': what, 'at': time.monotonic(), **details})}\n".encode())


def _note_signal(what: str, sender: str, *, message: Any = None, **details: Any) -> None:
    found = {key: details[key] for key in ("count", "ids") if key in details}
    note(what, queue=sender, **found, **({"id": message.id} if message else {}))


class Reader:
    """Reads the notes of a folder, each once, while they are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets: dict[Path, int] = {}

    def new(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what came since the last call: the file's name without its ending, and the note."""
        for path in sorted(self.folder.glob("*.notes")):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size == offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                # Up to the last whole line: the next one may be on its way.
                text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                yield path.stem, json.loads(line)
