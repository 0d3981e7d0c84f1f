"""
A journal of published messages, including those that have been handled since.

Handled messages are deleted from the tables. The journal therefore records the messages that this process publishes,
with the transaction that wrote each one and the table's file at that time. The database then decides which entries are
valid: an entry is invalid if its transaction or savepoint was rolled back, or if the table was truncated since.
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
    """A message as it was published. ``payload`` and ``headers`` are as a handler receives them."""

    id: int
    queue: str
    payload: Any
    headers: dict[str, Any]
    #: Seconds from publishing to the due time.
    delay: float = 0.0
    #: Seconds from the due time to its expiry. None: it never expires.
    ttl: float | None = None


class Entry(NamedTuple):
    """A message that this process published, with the data that shows whether it is still valid."""

    message: Published
    using: str
    #: The id of the transaction. None: it was committed, and the message was handled at once.
    xmin: int | None
    file: int | None


# Above this number of entries, each publish removes the invalid ones.
PRUNE_THRESHOLD = 10_000

_journal: list[Entry] = []
_lock = threading.Lock()


def mark(using: str | None = None) -> int:
    """Return a mark for the argument ``since``: messages published from now on come after it."""
    return journaling.last_id(alias_of(None, using))


def published(queue: Queue | str | None = None, *, since: int = 0, using: str | None = None) -> list[Published]:
    """
    Return the messages that were published to a queue (None: to any queue) and not rolled back, in order.

    They include all messages since the tables were last empty, which in a ``TestCase`` is the start of the test, or
    only those after ``since`` (see ``mark()``). Messages are included in whatever state they are now: handled, delayed,
    expired or dead. Copies of a topic's messages are included, and so are messages inserted by plain SQL, as long as
    they are in the table. ``using`` is a database alias (None: that of the queue).
    """
    alias = alias_of(queue, using)
    found = {message.id: message for message, *_ in map(_entry_of, journaling.published_since(since, alias))}
    # An entry has the message as it was published, a row as it is now.
    found |= {entry.message.id: entry.message for entry in _valid(alias) if entry.message.id > since}
    name = None if queue is None else name_of(queue)
    return [found[id] for id in sorted(found) if name is None or found[id].queue == name]


@contextmanager
def capture_published(using: str | None = None) -> Iterator[Captured]:
    """
    Capture the messages that are published inside the block, to any queue, in order.

    Yields a sequence of ``Published``, which can be used inside the block and after it. The messages need not be
    committed. Messages that were rolled back, even to a savepoint, are not included.
    """
    captured = Captured(alias_of(None, using))
    yield captured
    captured.end()


class Captured(Sequence[Published]):
    """The sequence of messages that ``capture_published()`` yields."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._since = mark(using)
        self._ended: list[Published] | None = None

    def end(self) -> None:
        """Stop capturing."""
        self._ended = self._messages()

    def to(self, queue: Queue | str) -> list[Published]:
        """Return the messages that were published to this queue."""
        return [message for message in self._messages() if message.queue == name_of(queue)]

    @property
    def payloads(self) -> list[Any]:
        """The payloads of the messages, in order."""
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
    """Return the valid entries, and remove the others from the journal."""
    with _lock:
        noted = [entry for entry in _journal if entry.using == using]
        if not noted:
            return []
        file = journaling.table_file(using)
        fates = journaling.fates({entry.xmin for entry in noted if entry.xmin is not None}, using)
        valid = [entry for entry in noted if entry.file == file and fates.get(entry.xmin) != "aborted"]
        _journal[:] = [entry for entry in _journal if entry.using != using] + valid
    return valid


# --- Recording ------------------------------------------------------------------------------------


def observed(function: Callable[..., Any], observe: Callable[[dict[str, Any], Any], object]) -> Callable[..., Any]:
    """Return a function that calls ``function``, and then ``observe`` with its arguments by name and its result."""
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
    """Record these messages. ``guess`` builds those that cannot be read or are already deleted."""
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
        is_long = len(_journal) > PRUNE_THRESHOLD
    if is_long:
        # A test suite that never uses the journal does not keep the entries of earlier tests.
        _valid(using)


def _note_publish(call: dict[str, Any], id: int) -> None:
    outgoing = call["outgoing"]
    options = {"delay": outgoing.delay, "expires_in": outgoing.expires_in, "headers": outgoing.headers}
    name = call["declaration"].name
    _note(call["using"], [id], lambda: _guess([id], [name], [decode(outgoing.payload)], **options))


def _note_publish_many(call: dict[str, Any], ids: list[int]) -> None:
    def guess() -> list[Published]:
        payloads = [payload for chunk in call["chunks"] for payload in decode(chunk)]
        options = {key: call[key] for key in ("headers", "delay", "expires_in")}
        return _guess(ids, [call["declaration"].name] * len(ids), payloads, **options)

    _note(call["using"], ids, guess)


def _note_publish_to_topic(call: dict[str, Any], ids: list[int]) -> None:
    def guess() -> list[Published]:
        bindings = TopicBinding.objects.using(call["using"]).filter(topic=call["topic"]).order_by("queue")
        # There may be more bindings than copies: queues that were unused for long get none, and it is not known which.
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
