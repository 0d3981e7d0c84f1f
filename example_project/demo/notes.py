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
from pathlib import Path
from typing import Any

from django_pgqueue import signals

_file: int | None = None


def open_file(folder: str | Path, role: str) -> None:
    """Open this process's file."""
    global _file
    _file = os.open(Path(folder) / f"{role}-{os.getpid()}.notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def follow_signals() -> None:
    """Note from now on what the queue's signals tell."""
    signals.queue_created.connect(_note_created)
    signals.queue_healed.connect(_note_created)
    signals.queue_reaped.connect(_note_reaped)
    signals.messages_expired.connect(_note_expired)
    signals.orphans_adopted.connect(_note_adopted)
    signals.message_failed.connect(_note_failed)
    signals.lease_lost.connect(_note_lease_lost)


def note(what: str, **details: Any) -> None:
    """Append a note. One write, so that threads do not mix their lines."""
    assert _file is not None, "this process belongs to no run"
    os.write(_file, f"{json.dumps({'note': what, 'at': time.monotonic(), **details})}\n".encode())


def _note_created(sender: str, **kwargs: Any) -> None:
    note("made", queue=sender)


def _note_reaped(sender: str, **kwargs: Any) -> None:
    note("reaped", queue=sender)


def _note_expired(sender: str, *, count: int, **kwargs: Any) -> None:
    note("expired", queue=sender, count=count)


def _note_adopted(sender: str, *, count: int, **kwargs: Any) -> None:
    note("adopted", queue=sender, count=count)


def _note_failed(sender: str, *, message: Any, **kwargs: Any) -> None:
    note("failed", id=message.id)


def _note_lease_lost(sender: str, *, ids: list[int], **kwargs: Any) -> None:
    note("lease_lost", ids=ids)


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
