"""
What the processes of a run note, each in a file of its own, outside the database.

A note is one JSON object a line, in the file before the call returns: what it tells of outlives the
process that noted it, and the database cannot take it back.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django_pgqueue import signals
from example_project.demo.run import ROLE_VARIABLE, Run

_file: int | None = None


def open_for(run: Run) -> None:
    """Open this process's file, and note from now on what the queue's signals tell."""
    global _file
    name = f"{os.environ[ROLE_VARIABLE]}-{os.getpid()}.notes"
    _file = os.open(Path(run.folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    os.write(_file, f"{json.dumps({'note': what, 'at': time.time(), **details})}\n".encode())


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
