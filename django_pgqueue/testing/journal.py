"""
What was published, also when it was handled since.

A message that was handled is gone from the tables, so what this process publishes is noted as it happens, with the
transaction that wrote it and the file that the table was then. Whether it still counts is for the database to say: not
when the transaction, or the savepoint, was rolled back, nor when the table was emptied.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from django_pgqueue.message import decode
from django_pgqueue.models import TopicBinding
from django_pgqueue.queues import Queue
from django_pgqueue.services import journaling, publishing, topics
from django_pgqueue.testing.names import alias_of, name_of


@dataclass(frozen=True, slots=True)
class Published:
    """A message as it was published. ``payload`` and ``headers`` are what a handler gets."""

    id: int
    queue: str
    payload: Any
    headers: dict[str, Any]
    #: Seconds until it was due.
    delay: float = 0.0
    #: Seconds from then to its expiry. None: never.
    ttl: float | None = None


class Entry(NamedTuple):
    """A message that this process published, and what tells whether that still counts."""

    message: Published
    using: str
    #: The transaction. None: committed, and handled at once.
    xmin: int | None
    file: int | None


# With more than so many the journal is looked through at each publish.
MAX_NOTED = 10_000

_journal: list[Entry] = []
_lock = threading.Lock()


def mark(using: str | None = None) -> int:
    """Return a mark: what is published from now on comes after it."""
    return journaling.last_id(alias_of(None, using))


def published(queue: Queue | str | None = None, *, since: int = 0, using: str | None = None) -> list[Published]:
    """
    Return what was published to a queue (None: to any) and was not rolled back, in order.

    Since the tables were last empty, which for a ``TestCase`` is its beginning, or after ``since`` (see ``mark()``).
    Copies of a topic's messages are among them, and what plain SQL inserted, as long as it is there. Handled, delayed,
    expired, dead: whatever became of a message since. ``using``: database alias (None: the queue's).
    """
    alias = alias_of(queue, using)
    found = {message.id: message for message, *_ in map(_entry_of, journaling.published_since(since, alias))}
    # Noted as it was published, not as it is by now.
    found |= {entry.message.id: entry.message for entry in _valid(alias) if entry.message.id > since}
    name = None if queue is None else name_of(queue)
    return [found[id] for id in sorted(found) if name is None or found[id].queue == name]


@contextmanager
def capture_published(using: str | None = None) -> Iterator[Captured]:
    """
    Give the messages that are published inside the block, to any queue, in order.

    A sequence of ``Published``, to be looked at inside the block and after it. They need not be committed; what was
    rolled back, by a savepoint too, is not in it.
    """
    captured = Captured(alias_of(None, using))
    yield captured
    captured.end()


class Captured(Sequence[Published]):
    """What ``capture_published()`` gives."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._since = mark(using)
        self._ended: list[Published] | None = None

    def end(self) -> None:
        """Capture no more."""
        self._ended = self._messages()

    def to(self, queue: Queue | str) -> list[Published]:
        """Return those that were published to this queue."""
        return [message for message in self._messages() if message.queue == name_of(queue)]

    @property
    def payloads(self) -> list[Any]:
        """The payloads, in order."""
        return [message.payload for message in self._messages()]

    def _messages(self) -> list[Published]:
        return published(since=self._since, using=self._using) if self._ended is None else self._ended

    @overload
    def __getitem__(self, index: int) -> Published: ...

    @overload
    def __getitem__(self, index: slice) -> list[Published]: ...

    def __getitem__(self, index: int | slice) -> Published | list[Published]:
        return self._messages()[index]

    def __len__(self) -> int:
        return len(self._messages())

    def __repr__(self) -> str:
        return repr(self._messages())


def _entry_of(row: journaling.Row) -> tuple[Published, int, int]:
    message = Published(row.id, row.queue, decode(row.payload), decode(row.headers), row.delay, row.ttl)
    return message, row.xmin, row.file


def _valid(using: str) -> list[Entry]:
    """Return what still counts, and forget the rest."""
    with _lock:
        noted = [entry for entry in _journal if entry.using == using]
        if not noted:
            return []
        file = journaling.table_file(using)
        fates = journaling.fates({entry.xmin for entry in noted if entry.xmin is not None}, using)
        valid = [entry for entry in noted if entry.file == file and fates.get(entry.xmin) != "aborted"]
        _journal[:] = [entry for entry in _journal if entry.using != using] + valid
    return valid


# --- Noting ---------------------------------------------------------------------------------------


def observed(function: Callable[..., Any], observe: Callable[[dict[str, Any], Any], object]) -> Callable[..., Any]:
    """Return the function, followed by a call of ``observe`` with its arguments by name, and its result."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        observe(bound.arguments, result)
        return result

    return call


def _note(using: str, ids: Sequence[int], guess: Callable[[], Sequence[Published]]) -> None:
    """Note these messages; what cannot be read, or was taken already, is as ``guess`` makes it of the call."""
    if not ids:
        return
    rows = journaling.published_as(ids, using) if journaling.may_read(using) else []
    file = journaling.table_file(using)
    entries = {
        id: Entry(message, using, xmin, file) for message, xmin, _ in map(_entry_of, rows) for id in [message.id]
    }
    if len(entries) < len(ids):
        entries |= {each.id: Entry(each, using, None, file) for each in guess() if each.id not in entries}
    with _lock:
        _journal.extend(entries.values())
        is_long = len(_journal) > MAX_NOTED
    if is_long:
        # Of a suite that never asks, the tests that are over need not be kept.
        _valid(using)


def _note_publish(call: dict[str, Any], id: int) -> None:
    outgoing = call["outgoing"]
    told = {"delay": outgoing.delay, "expires_in": outgoing.expires_in, "headers": outgoing.headers}
    name = call["declaration"].name
    _note(call["using"], [id], lambda: _guess([id], [name], [decode(outgoing.payload)], **told))


def _note_publish_many(call: dict[str, Any], ids: list[int]) -> None:
    def guess() -> list[Published]:
        payloads = [payload for chunk in call["chunks"] for payload in decode(chunk)]
        told = {key: call[key] for key in ("headers", "delay", "expires_in")}
        return _guess(ids, [call["declaration"].name] * len(ids), payloads, **told)

    _note(call["using"], ids, guess)


def _note_publish_to_topic(call: dict[str, Any], ids: list[int]) -> None:
    def guess() -> list[Published]:
        bindings = TopicBinding.objects.using(call["using"]).filter(topic=call["topic"]).order_by("queue")
        # More of them than copies: those of queues that nobody has used for long got none, and which is not known.
        queues = [binding.queue for binding in bindings]
        payloads = [decode(call["payload"])] * len(ids)
        return _guess(ids, queues, payloads, headers=call["headers"], delay=None, expires_in=call["ttl"])

    _note(call["using"], ids, guess)


def _guess(
    ids: Sequence[int],
    queues: Sequence[str],
    payloads: Sequence[Any],
    *,
    headers: str,
    delay: float | None,
    expires_in: float | None,
) -> list[Published]:
    delay = delay or 0.0
    ttl = None if expires_in is None else expires_in - delay
    return [
        Published(id, queue, payload, decode(headers), delay, ttl)
        for id, queue, payload in zip(ids, queues, payloads, strict=False)
    ]


publishing.publish = observed(publishing.publish, _note_publish)
publishing.publish_many = observed(publishing.publish_many, _note_publish_many)
topics.publish_to_topic = observed(topics.publish_to_topic, _note_publish_to_topic)
