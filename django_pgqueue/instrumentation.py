"""
Hooks around publishing, claiming and handling, for an instrument that may be installed.

The work runs inside the context managers of ``instrument``: ``with instrumentation.instrument.publishing(…)``. The
null instrument does nothing and does not evaluate its arguments. An installed instrument is shielded: its errors are
logged, each kind once, and the work continues.
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
    """The parts of a claimed message, or of a topic's message, that an instrument uses."""

    @property
    def id(self) -> Any: ...
    @property
    def headers(self) -> dict[str, Any]: ...


class Labelled(Protocol):
    """The outcome of a message: "ack", "nack", "reject" or "lost"."""

    @property
    def label(self) -> str: ...


@dataclass(eq=False, slots=True)
class Publication:
    """A publish in progress."""

    #: The caller's headers, which must not be changed.
    headers: Mapping[str, Any]
    is_batch: bool
    #: Headers that the instrument adds to each message. Their keys must differ from the caller's.
    context: dict[str, str] = field(default_factory=dict)
    #: The ids of the inserted messages; for a topic, of the copies on bound queues. None: the publish failed.
    ids: list[int] | None = None

    def published(self, ids: list[int]) -> None:
        """Record the ids of the inserted messages."""
        self.ids = ids


@dataclass(eq=False, slots=True)
class Handling:
    """A run of a handler or of a subscriber's callback."""

    messages: Sequence[Traced]
    is_batch: bool = False
    #: The seconds since each message became due. Empty: unknown.
    waits: Sequence[float] = ()
    #: The errors of the handler, by message id.
    errors: dict[Any, BaseException] = field(default_factory=dict)
    #: The label of each message's outcome. Empty: the messages are not settled.
    outcomes: Sequence[str] = ()

    def ended(self, outcomes: Sequence[Labelled]) -> None:
        """Record the outcome of each message."""
        self.outcomes = [outcome.label for outcome in outcomes]


class Instrument(Protocol):
    """The interface of an instrument. Its context managers are entered and exited in the thread or task of the work."""

    def publishing(self, target: Target, publication: Publication, /) -> AbstractContextManager[object]: ...
    def claimed(self, target: Target, messages: Sequence[Traced], began: float, /) -> None:
        """Record claimed messages. ``began``: the monotonic time at which the claim began."""

    def handling(self, target: Target, handling: Handling, /) -> AbstractContextManager[object]: ...


# --- Nothing installed ---


class Unwatched:
    """A publish or a run of a handler without an instrument. Records nothing."""

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
    The instrument of a process in which none is installed.

    ``target`` and ``describe`` are functions, so that their values are only computed if an instrument needs them.
    """

    def publishing(
        self, target: Callable[[], Target], headers: Mapping[str, Any] | None, *, is_batch: bool = False
    ) -> AbstractContextManager[Publication | Unwatched]:
        """Watch a publish. The block adds ``context`` to the headers and calls ``published()``."""
        return UNWATCHED

    def claimed(self, target: Callable[[], Target], messages: Sequence[Traced], began: float) -> None:
        """Record claimed messages. ``began``: the monotonic time at which the claim began."""

    def handling(
        self, describe: Callable[..., tuple[Target, Handling]], *arguments: Any
    ) -> AbstractContextManager[Handling | Unwatched]:
        """
        Watch a run of a handler. The block calls ``failed()`` with each error, and ``ended()`` at its end.

        ``describe`` is called with the other arguments.
        """
        return UNWATCHED


# --- One that is installed ---

# The handling in progress in this thread or task.
_handling: ContextVar[Handling | None] = ContextVar("django_pgqueue_handling", default=None)
# The errors that were already logged: place and type.
_reported: set[tuple[str, type]] = set()


class ShieldedInstrument(NullInstrument):
    """An installed instrument, whose errors do not affect the work."""

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
    def handling(self, describe: Callable[..., tuple[Target, Handling]], *arguments: Any) -> Iterator[Handling]:
        target, current = describe(*arguments)
        token = _handling.set(current)
        try:
            with _Shield("process", lambda: self.inner.handling(target, current)):
                yield current
        finally:
            _handling.reset(token)


instrument: NullInstrument = NullInstrument()


def install(new: Instrument) -> None:
    """Install an instrument in place of any other."""
    global instrument
    instrument = ShieldedInstrument(new)


def uninstall() -> None:
    """Remove the installed instrument."""
    global instrument
    instrument = NullInstrument()


def installed() -> Instrument | None:
    """Return the installed instrument, or None."""
    return instrument.inner if isinstance(instrument, ShieldedInstrument) else None


def failed(message_id: Any, error: BaseException) -> None:
    """Record the error of a message for the handling in progress, if there is one."""
    current = _handling.get()
    if current is not None:
        current.errors[message_id] = error


class _Shield:
    """An instrument's context manager, whose errors do not affect the work inside."""

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
    """Log an instrument's error, once for each place and type."""
    if (at, type(error)) not in _reported:
        _reported.add((at, type(error)))
        logger.warning("instrument failed at=%s", at, exc_info=error)
