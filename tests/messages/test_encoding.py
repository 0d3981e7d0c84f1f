"""Many payloads are encoded at once: to the same text as one by one, and refused by the same rules."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_pgqueue import PayloadError, PayloadTooLarge
from django_pgqueue.message import CHUNK_BYTES, CHUNK_ROWS, MAX_DEPTH, PIECE_ROWS, decode, encode, encode_many

MAX_BYTES = 16 * 1024 * 1024

# Surrogates are no text in UTF-8; NUL is no text in PostgreSQL.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from(
    ["\\", "\\\\", '"', "\\u0000", "\\\\u0000", "\\ud800", "/", "\u2028", "\x7f", "😀", "a\\", '\\"']
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**64), 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """Return what a value arrives as: tuples are lists."""
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, (list, tuple)) else value


def texts(chunks: list[str]) -> list[str]:
    """Return the text of each value in chunks, which are JSON arrays."""
    return [encode(value, MAX_BYTES) for chunk in chunks for value in json.loads(chunk)]


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(VALUES, max_size=8))
@example([])
@example(["\\u0000"])
@example([{"\\u0000": "\\\\u0000"}, (1, (2, ()))])
@example([[[]], {}, [{}], ((), [()])])
def test_many_are_encoded_as_each_would_be(values: list[Any]) -> None:
    """Byte for byte, in order, whole."""
    each = [encode(value, MAX_BYTES) for value in values]
    assert encode_many(values, MAX_BYTES) == ([f"[{','.join(each)}]"] if each else [])
    assert [decode(text) for text in each] == [plain(value) for value in values]


BAD = st.sampled_from(
    [
        float("nan"),
        float("-inf"),
        "\0",
        "\ud800",
        {"a": "x\0y"},
        {"\0": 1},
        {1: 2},
        {None: 1},
        {True: 1},
        [{"a": {2.5: 1}}],
        ({"a": ({3: 1},)},),
        {1, 2},
        b"bytes",
        object(),
        {"a": [1, complex(1)]},
    ]
)


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(VALUES, max_size=5), BAD, st.lists(VALUES, max_size=5))
def test_one_that_is_refused_is_named_by_its_place(before: list[Any], bad: Any, after: list[Any]) -> None:
    """With the message and the path that it has alone."""
    with pytest.raises(PayloadError) as alone:
        encode(bad, MAX_BYTES, f"[{len(before)}]")
    with pytest.raises(PayloadError) as among:
        encode_many([*before, bad, *after], MAX_BYTES)
    assert (among.value.path, str(among.value)) == (alone.value.path, str(alone.value))
    assert among.value.path.startswith(f"[{len(before)}]")


@pytest.mark.parametrize("place", [0, 57, PIECE_ROWS - 1, PIECE_ROWS, 2 * PIECE_ROWS + 7])
def test_keys_that_are_not_text_are_found_in_any_piece(place: int) -> None:
    """JSON would make text of them, silently: two keys could become one."""
    values: list[Any] = [{"a": [1]} for _ in range(3 * PIECE_ROWS)]
    values[place] = {"a": {1: "x"}}
    with pytest.raises(PayloadError, match="keys must be str, not int") as failure:
        encode_many(values, MAX_BYTES)
    assert failure.value.path == f"[{place}].a"


def nested(depth: int, kind: str) -> Any:
    """Return containers in each other, so many."""
    value: Any = {} if kind == "dict" else [] if kind == "list" else ()
    for _ in range(depth - 1):
        value = {"a": value} if kind == "dict" else [value] if kind == "list" else (value,)
    return value


@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
def test_the_deepest_is_taken_and_one_level_more_is_not(kind: str) -> None:
    """Among others as alone: the array that they travel in does not count."""
    deepest, deeper = nested(MAX_DEPTH, kind), nested(MAX_DEPTH + 1, kind)
    (chunk,) = encode_many([1, deepest, 2], MAX_BYTES)
    assert chunk == f"[1,{encode(deepest, MAX_BYTES)},2]"
    for values in ([deeper], [1, deeper], [deepest, deeper]):
        with pytest.raises(PayloadError, match=f"nested deeper than {MAX_DEPTH} levels") as failure:
            encode_many(values, MAX_BYTES)
        assert failure.value.path.startswith(f"[{len(values) - 1}]")
    with pytest.raises(PayloadError, match="nested deeper"):
        encode_many([1, nested(100_000, kind)], MAX_BYTES)


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, MAX_DEPTH + 2])
def test_a_scalar_inside_is_no_level(depth: int) -> None:
    """Only what holds other values counts."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    if depth <= MAX_DEPTH:
        assert encode_many([value], MAX_BYTES) == [f"[{encode(value, MAX_BYTES)}]"]
    else:
        with pytest.raises(PayloadError):
            encode_many([value], MAX_BYTES)


def test_a_value_that_contains_itself_is_refused() -> None:
    """Once it is found; twice the same value is not that."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PayloadError, match="contains itself") as failure:
        encode_many([1, value], MAX_BYTES)
    assert failure.value.path == "[1][0]"
    shared = {"a": [1]}
    assert encode_many([shared, [shared, shared]], MAX_BYTES) == ['[{"a":[1]},[{"a":[1]},{"a":[1]}]]']


def test_a_limit_is_for_each_and_not_for_all() -> None:
    """In bytes of UTF-8: many that each fit are fine, and the one that does not is named."""
    fits = "ä" * 49
    assert len(encode(fits, 100).encode()) == 100
    assert texts(encode_many([fits] * 50, 100)) == [encode(fits, 100)] * 50
    for place in (0, 31):
        values = [fits] * 32
        values[place] = fits + "x"
        with pytest.raises(PayloadTooLarge, match="101 bytes of JSON, at most 100") as failure:
            encode_many(values, 100)
        assert failure.value.path == f"[{place}]"


@pytest.mark.parametrize("values", [iter([1, [2]]), (one for one in (1, [2])), {1: 0, 2: 0}.keys(), (1, 2)])
def test_any_iterable_is_taken(values: Any) -> None:
    """Once through."""
    (chunk,) = encode_many(values, MAX_BYTES)
    assert len(json.loads(chunk)) == 2


def test_chunks_are_bounded_by_rows() -> None:
    """Whole values in order, no more than so many in each."""
    chunks = encode_many(range(2 * CHUNK_ROWS + 3), MAX_BYTES)
    assert [len(json.loads(chunk)) for chunk in chunks] == [CHUNK_ROWS, CHUNK_ROWS, 3]
    assert [one for chunk in chunks for one in json.loads(chunk)] == list(range(2 * CHUNK_ROWS + 3))


@pytest.mark.parametrize(("size", "count"), [(10_000, 1500), (CHUNK_BYTES // 2, 7), (CHUNK_BYTES + 10, 3)])
def test_chunks_are_bounded_by_bytes(size: int, count: int) -> None:
    """About: a single value that is larger goes by itself."""
    chunks = encode_many((f"{number}:" + "x" * size for number in range(count)), MAX_BYTES)
    assert max(map(len, chunks)) <= max(CHUNK_BYTES, size + 10) + count
    values = [one for chunk in chunks for one in json.loads(chunk)]
    assert [int(one.partition(":")[0]) for one in values] == list(range(count))
    assert len(chunks) >= size * count // CHUNK_BYTES


# --- Back again ---


@pytest.mark.parametrize("text", ["null", '"a"', "[1, 2]", '{"a": {"b": [1.5, true]}}', "-0", "1e400", "1" * 400])
def test_what_the_server_writes_is_decoded(text: str) -> None:
    """As the json module would."""
    assert decode(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [("[" * 100_000 + "]" * 100_000, RecursionError), ("1" * 10_000, ValueError)],
    ids=["deep", "long"],
)
def test_what_this_python_cannot_hold_is_an_error(text: str, error: type[Exception]) -> None:
    """Of a kind that a claim sets aside."""
    with pytest.raises(error):
        decode(text)
