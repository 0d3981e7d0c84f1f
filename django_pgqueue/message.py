"""A claimed message, and the encoding and decoding of its JSON."""

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

# A consumer decodes with the json module, whose recursion is limited by the interpreter (1,000 frames on CPython 3.11,
# including those of the handler). Every published message must be decodable there.
MAX_DEPTH = 500

# One statement of publish_many carries at most CHUNK_ROWS values and about CHUNK_BYTES bytes, so that neither the
# client nor the server holds a hundred thousand messages at once. PIECE_ROWS values are encoded together.
CHUNK_ROWS = 5_000
CHUNK_BYTES = 4 * 1024 * 1024
PIECE_ROWS = 100

# JSON's containers, and the types of most values in them.
NESTING = (dict, list, tuple)
SCALARS = frozenset({str, int, float, bool, type(None)})

# One encoder for every way to publish, so that JSON always has the same form to compare, to measure and to read.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# json.loads without its handling of whitespace.
_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # typeshed takes the factory for a class


@dataclass(frozen=True, slots=True)
class Message(Generic[P]):
    """
    One claimed message. It is immutable; settle it with its queue: ``queue.ack(message)``.

    Times are by the database's clock, and aware unless ``USE_TZ`` is False.
    """

    #: The id, which does not change when the message moves to another queue.
    id: int
    #: The name of the queue from which it was claimed.
    queue: str
    #: The published payload as JSON values, with tuples as lists. With a schema, the payload as loaded by the schema.
    payload: P
    #: A dict, empty if there are no headers.
    headers: dict[str, Any]
    #: How often it was claimed, including this time: 1 at the first delivery.
    delivery_count: int
    #: When it was inserted.
    published_at: datetime
    #: When the lease ends, as of the claim. Extending the lease does not change this value.
    lease_expires_at: datetime
    #: The fencing token of the lease. Each claim of the message has another token.
    token: UUID = field(repr=False)
    #: True if an earlier delivery neither settled it nor gave it back. The message may have killed its worker, so it
    #: was claimed alone.
    suspect: bool = False
    #: The approximate size in bytes: the number of characters of the payload's JSON.
    size: int = field(default=0, repr=False, compare=False)
    #: When it was published, in minutes since 1970. None: the publish was counted after an earlier delivery.
    minute: int | None = field(default=None, repr=False, compare=False)


def decode(text: str) -> Any:
    """
    Return the value of JSON text from PostgreSQL, which is valid and has no surrounding whitespace.

    Raises ``ValueError`` or ``RecursionError`` if Python cannot represent the value.
    """
    return _scan(text, 0)[0]


def encode(value: object, max_bytes: int, root: str = "$") -> str:
    """
    Return ``value`` as the JSON text to store, or raise ``PayloadError`` with the path of the problem.

    Accepts None, bool, int, finite float, str without NUL and lone surrogates, list and tuple (decoded as a list), and
    dict with str keys, nested up to ``MAX_DEPTH`` levels. Subclasses are decoded as the plain type. ``PayloadTooLarge``
    is raised if the UTF-8 JSON has more than ``max_bytes`` bytes.
    """
    try:
        text = _encode(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        _raise_where(value, root)
        raise PayloadError(str(error), root) from error
    # A fast check that accepts almost every payload. Only others are checked node by node.
    if "\\u0000" in text or not _has_text_keys(value, MAX_DEPTH):
        _raise_where(value, root)
    if size > max_bytes:
        raise PayloadTooLarge(f"{size} bytes of JSON, at most {max_bytes} are allowed", root)
    return text


def encode_many(values: Iterable[object], max_bytes: int) -> list[str]:
    """
    Return values as JSON arrays, in order, of up to ``CHUNK_ROWS`` values and about ``CHUNK_BYTES`` bytes each.

    Each value must be accepted by ``encode()``. The path of a ``PayloadError`` starts with the value's position.
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
    """Yield the JSON of some values, separated by commas, and the number of values."""
    for start in range(0, len(values), PIECE_ROWS):
        piece = values[start : start + PIECE_ROWS]
        # Encoding values together takes half as long as one by one. If their total size is allowed, so is each.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = _encode(piece)
            fits = len(text.encode()) <= min(max_bytes, CHUNK_BYTES)
            if fits and "\\u0000" not in text and _has_text_keys(piece, MAX_DEPTH + 1):
                yield text[1:-1], len(piece)
                continue
        for position, value in enumerate(piece, start):
            yield encode(value, max_bytes, f"[{position}]"), 1


def _has_text_keys(value: Any, depth: int) -> bool:
    """Return whether all keys are str, in at most ``depth`` levels. The encoder silently converts other keys."""
    if not isinstance(value, NESTING):
        return True
    if not depth:
        return False
    if isinstance(value, dict):
        try:
            # Faster than checking each key.
            "".join(value)
        except TypeError:
            return False
        value = value.values()
    for child in value:  # noqa: SIM110 - a generator takes longer
        if type(child) not in SCALARS and not _has_text_keys(child, depth - 1):
            return False
    return True


def encode_headers(headers: Mapping[str, object] | None, max_bytes: int) -> str:
    """Return headers, a mapping of str to JSON values, as JSON text. None: no headers."""
    if not headers:
        return "{}"
    if not isinstance(headers, Mapping):
        raise PayloadError(f"headers must be a mapping, not {type(headers).__name__}", "headers")
    return encode(dict(headers), max_bytes, "headers")


def add_headers(headers: str, added: Mapping[str, str]) -> str:
    """Return the JSON text of headers with other headers added, whose keys must be different."""
    if not added:
        return headers
    text = _encode(added)
    return text if headers == "{}" else f"{text[:-1]},{headers[1:]}"


def _raise_where(value: object, root: str) -> None:
    """Walk a value and raise ``PayloadError`` at the first node that cannot be stored as JSON."""
    # Iterative, because this also handles values that exceed the recursion limit.
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
            raise PayloadError(f"{what}text contains a NUL character, which jsonb cannot store", path)
        try:
            node.encode()
        except UnicodeEncodeError as error:
            raise PayloadError(f"{what}text contains half of a surrogate pair", path) from error
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
    """Return whether there are any messages. Raises ``ValueError`` for a message of another queue."""
    for message in messages:
        if not isinstance(message, Message):
            raise ValueError(f"not a message: {message!r:.80}")
        if message.queue != name:
            raise ValueError(f"message {message.id} was claimed from queue {message.queue!r}, not {name!r}")
    return bool(messages)
