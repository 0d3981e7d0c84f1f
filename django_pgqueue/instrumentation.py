"""
What an instrument is told of publishing, claiming and handling. There is none unless somebody sets ``instrument``.

Who does the work asks ``instrument is None`` first, and that is all it costs then. An instrument that raises
is logged, each kind of failure once, and the work goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger("django_pgqueue")


class Target(NamedTuple):
    """A queue or a topic, and the alias of its database."""

    name: str
    using: str
    auto_deleted: bool = False
    is_topic: bool = False


class Traced(Protocol):
    """What an instrument needs of a message: a claimed one, or one of a topic."""

    @property
    def id(self) -> Any: ...
    @property
    def headers(self) -> dict[str, Any]: ...


@dataclass(eq=False, slots=True)
class Publication:
    """A publish on its way."""

    #: What the caller gave; not to be changed.
    headers: Mapping[str, Any]
    is_batch: bool
    #: Headers that the instrument adds to each message. None of the caller's.
    context: dict[str, str] = field(default_factory=dict)
    #: Of what was inserted: for a topic of the copies on bound queues. None: it failed.
    ids: list[int] | None = None


@dataclass(eq=False, slots=True)
class Handling:
    """A run of a handler or of a subscriber's callback."""

    messages: Sequence[Traced]
    is_batch: bool = False
    #: Seconds from when each was due until now. Empty: not known.
    waits: Sequence[float] = ()
    #: What was raised, by message id.
    errors: dict[Any, BaseException] = field(default_factory=dict)
    #: "ack", "nack", "reject" or "lost" for each message. Empty: nobody settles them.
    outcomes: Sequence[str] = ()


class Instrument(Protocol):
    """Its context managers are around the work, in its thread or task; what it does is in ``with``'s two ends."""

    def publishing(self, target: Target, publication: Publication, /) -> AbstractContextManager[object]: ...
    def claimed(self, target: Target, messages: Sequence[Traced], began: float, /) -> None:
        """Messages were claimed. ``began``: monotonic time."""

    def handling(self, target: Target, handling: Handling, /) -> AbstractContextManager[object]: ...


instrument: Instrument | None = None

# The handling that is under way in this thread or task.
_handling: ContextVar[Handling | None] = ContextVar("django_pgqueue_handling", default=None)
# What was logged already: where, and the type of the error.
_told: set[tuple[str, type]] = set()


@contextmanager
def publishing(target: Target, headers: Mapping[str, Any] | None, *, is_batch: bool = False) -> Iterator[Publication]:
    """Be told of a publish. Inside, the ``context`` says what to add to the headers; ``ids`` is to be set."""
    publication = Publication(headers or {}, is_batch)
    with _Shielded("publish", lambda current: current.publishing(target, publication)):
        yield publication


def claimed(target: Target, messages: Sequence[Traced], began: float) -> None:
    """Tell of messages that were claimed."""
    try:
        if instrument is not None:
            instrument.claimed(target, messages, began)
    except Exception as error:
        note_failure("claim", error)


@contextmanager
def handling(target: Target, handling: Handling) -> Iterator[None]:
    """Be told of a run of a handler. Inside, ``failed()`` is called with what it raises; ``outcomes`` is to be set."""
    token = _handling.set(handling)
    try:
        with _Shielded("process", lambda current: current.handling(target, handling)):
            yield
    finally:
        _handling.reset(token)


def failed(message_id: Any, error: BaseException) -> None:
    """Note what was raised for a message, where somebody wants to know."""
    current = _handling.get()
    if current is not None:
        current.errors[message_id] = error


class _Shielded:
    """An instrument around a piece of work, which goes on whatever the instrument raises."""

    def __init__(self, at: str, around: Callable[[Instrument], AbstractContextManager[object]]) -> None:
        self._at = at
        self._around = around
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        try:
            if instrument is not None:
                around = self._around(instrument)
                around.__enter__()
                self._entered = around
        except Exception as error:
            note_failure(self._at, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered is None:
            return
        try:
            self._entered.__exit__(kind, error, traceback)
        except Exception as raised:
            if raised is not error:
                note_failure(self._at, raised)


def note_failure(at: str, error: Exception) -> None:
    """Log what an instrument raised, once for each place and type."""
    if (at, type(error)) not in _told:
        _told.add((at, type(error)))
        logger.warning("instrument failed at=%s", at, exc_info=error)
