"""What a consumer holds: one message under a lease, and the JSON that travels in it."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from json.scanner import make_scanner
from typing import Any, Generic
from uuid import UUID

from django_pgqueue.exceptions import PayloadError, PayloadTooLarge
from django_pgqueue.schema import P

# A consumer decodes with the json module, whose recursion is bounded by the interpreter (1,000
# frames on CPython 3.11, those of the handler included). What is published must be readable there.
MAX_DEPTH = 500

# A statement of publish_many carries at most so many values and bytes, so that neither the client nor the
# server holds a hundred thousand messages in one piece. So many values are encoded in one go.
CHUNK_ROWS = 5_000
CHUNK_BYTES = 4 * 1024 * 1024
PIECE_ROWS = 100

# What holds other values, and what mostly is in it.
NESTING = (dict, list, tuple)
SCALARS = frozenset({str, int, float, bool, type(None)})

# The same JSON for every publish path: one form to compare, to measure and to read in psql.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# json.loads without its search for space.
_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # typeshed takes the factory for a class


@dataclass(frozen=True, slots=True)
class Message(Generic[P]):
    """
    One claimed message. Frozen: settling it is the queue's work (``queue.ack(message)``).

    Times are by the database's clock, and aware unless ``USE_TZ`` is off.
    """

    #: Stays the same for as long as the message lives, on whatever queue.
    id: int
    #: The name of the queue that it was claimed from.
    queue: str
    #: What was published, as JSON values: tuples arrive as lists. Where the queue has a schema, what that makes of it.
    payload: P
    #: A dict; empty where none were given.
    headers: dict[str, Any]
    #: How often it was claimed, this time included: 1 at the first delivery.
    delivery_count: int
    #: When it was inserted.
    published_at: datetime
    #: When the lease ended as of the claim; what extends it does not change this.
    lease_expires_at: datetime
    #: Fences the lease: a later claim of the same message has another one.
    token: UUID = field(repr=False)
    #: True when an earlier delivery neither settled it nor gave it back: its worker may have died
    #: of it, so it was claimed alone.
    suspect: bool = False
    #: Bytes, about: the characters of the payload's JSON.
    size: int = field(default=0, repr=False, compare=False)
    #: Minutes since 1970 when it was published. None: an earlier delivery was settled, and its publish counted then.
    minute: int | None = field(default=None, repr=False, compare=False)


def decode(text: str) -> Any:
    """
    Return the value of JSON text as PostgreSQL writes it: valid, and without space around it.

    Raises ``ValueError`` or ``RecursionError`` for what this Python cannot hold.
    """
    return _scan(text, 0)[0]


def encode(value: object, max_bytes: int, root: str = "$") -> str:
    """
    Return ``value`` as the JSON text that is stored, or raise ``PayloadError`` naming the path.

    Accepted: None, bool, int, finite float, str without NUL and lone surrogates, list and tuple
    (arrives as a list), and dict with str keys, nested up to ``MAX_DEPTH``. Subclasses arrive as
    the plain type. ``max_bytes`` bounds the UTF-8 JSON; beyond it ``PayloadTooLarge`` is raised.
    """
    try:
        text = _encode(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        _raise_where(value, root)
        raise PayloadError(str(error), root) from error
    # This clears almost every payload; only what it cannot clear is walked node by node.
    if "\\u0000" in text or not _has_text_keys(value, MAX_DEPTH):
        _raise_where(value, root)
    if size > max_bytes:
        raise PayloadTooLarge(f"{size} bytes of JSON, at most {max_bytes} are allowed", root)
    return text


def encode_many(values: Iterable[object], max_bytes: int) -> list[str]:
    """
    Return values as JSON arrays, in order, of up to ``CHUNK_ROWS`` values and about ``CHUNK_BYTES`` bytes each.

    Each value is held to what ``encode`` accepts; the path of a ``PayloadError`` starts with its position.
    """
    chunks: list[str] = []
    texts: list[str] = []
    rows = size = 0
    for text, count in _pieces(list(values), max_bytes):
        if texts and (rows + count > CHUNK_ROWS or size + len(text) > CHUNK_BYTES):
            chunks.append(f"[{','.join(texts)}]")
            texts, rows, size = [], 0, 0
        texts.append(text)
        rows += count
        size += len(text)
    return [*chunks, f"[{','.join(texts)}]"] if texts else []


def _pieces(values: list[object], max_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield JSON of some values, separated by commas, and how many they are."""
    for start in range(0, len(values), PIECE_ROWS):
        piece = values[start : start + PIECE_ROWS]
        # Many at once cost half as much as one by one. If all of them together fit, so does each.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = _encode(piece)
            fits = len(text.encode()) <= min(max_bytes, CHUNK_BYTES)
            if fits and "\\u0000" not in text and _has_text_keys(piece, MAX_DEPTH + 1):
                yield text[1:-1], len(piece)
                continue
        for position, value in enumerate(piece, start):
            yield encode(value, max_bytes, f"[{position}]"), 1


def _has_text_keys(value: Any, depth: int) -> bool:
    """Tell whether all keys are text, in no more than ``depth`` levels: JSON makes text of others, silently."""
    if not isinstance(value, NESTING):
        return True
    if not depth:
        return False
    if isinstance(value, dict):
        try:
            # Faster than looking at each.
            "".join(value)
        except TypeError:
            return False
        value = value.values()
    for child in value:  # noqa: SIM110 - a generator takes longer
        if type(child) not in SCALARS and not _has_text_keys(child, depth - 1):
            return False
    return True


def encode_headers(headers: Mapping[str, object] | None, max_bytes: int) -> str:
    """Return headers as JSON text. They are a mapping of str to JSON values, None means none."""
    if not headers:
        return "{}"
    if not isinstance(headers, Mapping):
        raise PayloadError(f"headers must be a mapping, not {type(headers).__name__}", "headers")
    return encode(dict(headers), max_bytes, "headers")


def add_headers(headers: str, added: Mapping[str, str]) -> str:
    """Return the JSON text of headers with others, which have other keys, added."""
    if not added:
        return headers
    text = _encode(added)
    return text if headers == "{}" else f"{text[:-1]},{headers[1:]}"


def _raise_where(value: object, root: str) -> None:
    """Walk a value and raise ``PayloadError`` at the first thing that JSON cannot carry."""
    # Iterative, because the values that matter here are those that exhaust recursion.
    stack: list[tuple[str, object, int, tuple[int, ...]]] = [(root, value, 1, ())]
    while stack:
        path, node, depth, ancestors = stack.pop()
        if id(node) in ancestors:
            raise PayloadError("the value contains itself", path)
        _check_scalar(node, path)
        if isinstance(node, (dict, list, tuple)):
            if depth > MAX_DEPTH:
                raise PayloadError(f"nested deeper than {MAX_DEPTH} levels", _shorten(path))
            inside = (*ancestors, id(node))
            children = [(child_path, child, depth + 1, inside) for child_path, child in _children(node, path)]
            stack.extend(reversed(children))


def _children(node: Any, path: str) -> Iterator[tuple[str, object]]:
    if not isinstance(node, dict):
        for index, child in enumerate(node):
            yield f"{path}[{index}]", child
        return
    for key, child in node.items():
        if not isinstance(key, str):
            raise PayloadError(f"keys must be str, not {type(key).__name__}: {key!r:.80}", path)
        _check_scalar(key, path, what="key ")
        yield f"{path}.{key}", child


def _check_scalar(node: object, path: str, what: str = "") -> None:
    if isinstance(node, str):
        if "\0" in node:
            raise PayloadError(f"{what}text holds a NUL character, which jsonb cannot store", path)
        try:
            node.encode()
        except UnicodeEncodeError as error:
            raise PayloadError(f"{what}text holds half of a surrogate pair", path) from error
    elif isinstance(node, float):
        if not math.isfinite(node):
            raise PayloadError(f"{node!r} is not JSON", path)
    elif isinstance(node, int):
        try:
            str(int(node))
        except ValueError as error:
            raise PayloadError("the integer has too many digits", path) from error
    elif node is not None and not isinstance(node, (dict, list, tuple)):
        raise PayloadError(f"{type(node).__name__} is not JSON; convert it first", path)


def _shorten(path: str) -> str:
    return path if len(path) <= 80 else f"{path[:60]}…{path[-15:]}"


def check_own(messages: Sequence[object], name: str) -> bool:
    """Return whether there are any messages, and raise ``ValueError`` for one that is not of the queue of this name."""
    for message in messages:
        if not isinstance(message, Message):
            raise ValueError(f"not a message: {message!r:.80}")
        if message.queue != name:
            raise ValueError(f"message {message.id} was claimed from queue {message.queue!r}, not {name!r}")
    return bool(messages)
