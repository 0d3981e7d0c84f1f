"""
What watches publishing, claiming and handling: nothing, unless an instrument is installed.

``instrument`` is what the work is done under: ``with instrumentation.instrument.publishing(…)``. The null instrument
does nothing, and does not ask for what it would be told. One that is installed is shielded: what it raises is
logged, each kind of failure once, and the work goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
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


class Labelled(Protocol):
    """What became of a message: "ack", "nack", "reject" or "lost"."""

    @property
    def label(self) -> str: ...


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

    def published(self, ids: list[int]) -> None:
        """Note what was inserted."""
        self.ids = ids


@dataclass(eq=False, slots=True)
class Handling:
    """A run of a handler or of a subscriber's callback."""

    messages: Sequence[Traced]
    is_batch: bool = False
    #: Seconds from when each was due until now. Empty: not known.
    waits: Sequence[float] = ()
    #: What was raised, by message id.
    errors: dict[Any, BaseException] = field(default_factory=dict)
    #: The label of what became of each message. Empty: nobody settles them.
    outcomes: Sequence[str] = ()

    def ended(self, outcomes: Sequence[Labelled]) -> None:
        """Note what became of each message."""
        self.outcomes = [outcome.label for outcome in outcomes]


class Instrument(Protocol):
    """Its context managers are around the work, in its thread or task; what it does is in ``with``'s two ends."""

    def publishing(self, target: Target, publication: Publication, /) -> AbstractContextManager[object]: ...
    def claimed(self, target: Target, messages: Sequence[Traced], began: float, /) -> None:
        """Messages were claimed. ``began``: monotonic time."""

    def handling(self, target: Target, handling: Handling, /) -> AbstractContextManager[object]: ...


# --- Nothing installed ---


class Unwatched:
    """A publish or a run of a handler that nothing watches: what is noted on it is not kept."""

    __slots__ = ()
    context: Mapping[str, str] = MappingProxyType({})

    def __enter__(self) -> Unwatched:
        return self

    def __exit__(self, *error: object) -> None: ...
    def published(self, ids: list[int]) -> None: ...
    def ended(self, outcomes: Sequence[Labelled]) -> None: ...


UNWATCHED = Unwatched()


class NullInstrument:
    """
    The instrument of a process where none is installed.

    ``target`` and ``handling`` are functions, so that nothing is put together for nobody.
    """

    def publishing(
        self, target: Callable[[], Target], headers: Mapping[str, Any] | None, *, is_batch: bool = False
    ) -> AbstractContextManager[Publication | Unwatched]:
        """Watch a publish. Inside, ``context`` says what to add to the headers; ``published()`` is to be called."""
        return UNWATCHED

    def claimed(self, target: Callable[[], Target], messages: Sequence[Traced], began: float) -> None:
        """Tell of messages that were claimed. ``began``: monotonic time."""

    def handling(
        self, target: Callable[[], Target], handling: Callable[[], Handling]
    ) -> AbstractContextManager[Handling | Unwatched]:
        """Watch a run of a handler. Inside, ``failed()`` is called with what it raises; ``ended()`` is to be called."""
        return UNWATCHED


# --- One that is installed ---

# The handling that is under way in this thread or task.
_handling: ContextVar[Handling | None] = ContextVar("django_pgqueue_handling", default=None)
# What was logged already: where, and the type of the error.
_reported: set[tuple[str, type]] = set()


class ShieldedInstrument(NullInstrument):
    """An installed instrument, around work that goes on whatever it raises."""

    def __init__(self, inner: Instrument) -> None:
        self.inner = inner

    @contextmanager
    def publishing(
        self, target: Callable[[], Target], headers: Mapping[str, Any] | None, *, is_batch: bool = False
    ) -> Iterator[Publication]:
        publication = Publication(headers or {}, is_batch)
        with _Shield("publish", lambda: self.inner.publishing(target(), publication)):
            yield publication

    def claimed(self, target: Callable[[], Target], messages: Sequence[Traced], began: float) -> None:
        try:
            self.inner.claimed(target(), messages, began)
        except Exception as error:
            note_failure("claim", error)

    @contextmanager
    def handling(self, target: Callable[[], Target], handling: Callable[[], Handling]) -> Iterator[Handling]:
        current = handling()
        token = _handling.set(current)
        try:
            with _Shield("process", lambda: self.inner.handling(target(), current)):
                yield current
        finally:
            _handling.reset(token)


instrument: NullInstrument = NullInstrument()


def install(new: Instrument) -> None:
    """Let an instrument watch from now on, in place of any other."""
    global instrument
    instrument = ShieldedInstrument(new)


def uninstall() -> None:
    """Let nothing watch from now on."""
    global instrument
    instrument = NullInstrument()


def installed() -> Instrument | None:
    """Return the instrument that is installed."""
    return instrument.inner if isinstance(instrument, ShieldedInstrument) else None


def failed(message_id: Any, error: BaseException) -> None:
    """Note what was raised for a message, where somebody wants to know."""
    current = _handling.get()
    if current is not None:
        current.errors[message_id] = error


class _Shield:
    """An instrument's context manager around a piece of work, which goes on whatever that raises."""

    def __init__(self, at: str, around: Callable[[], AbstractContextManager[object]]) -> None:
        self._at = at
        self._around = around
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        try:
            around = self._around()
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
    if (at, type(error)) not in _reported:
        _reported.add((at, type(error)))
        logger.warning("instrument failed at=%s", at, exc_info=error)
