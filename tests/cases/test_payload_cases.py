"""Real failures of other systems over what a message holds: B01, B03, B05, B06, B08, B10."""

import datetime
import decimal
import enum
import hashlib
import json
import os
import uuid

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils.translation import gettext_lazy

from django_pgqueue import PayloadError, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import notifying
from django_pgqueue.services.beliefs import beliefs
from tests.support.rows import make_queue, payloads
from tests.support.sessions import fetch, run_async, second_session

pytestmark = pytest.mark.django_db(transaction=True)

NUL = chr(0)


def refused(queue: Queue, payload) -> str:
    """Assert that every way in refuses the payload before any SQL, alike, and return the path."""
    with CaptureQueriesContext(connection) as queries:
        one = {path_of(queue.publish, payload), path_of(lambda bad: run_async(queue.apublish(bad)), payload)}
        many = {path_of(queue.publish_many, [payload])}
        many |= {path_of(lambda bad: run_async(queue.apublish_many(bad)), [payload])}
    assert len(queries) == 0
    (path,) = one
    # A path of hundreds of steps is shortened in the middle.
    assert many == {path.replace("$", "[0]", 1)} or "…" in path
    return path


def path_of(publish, bad) -> str:
    with pytest.raises(PayloadError) as failure:
        publish(bad)
    assert isinstance(failure.value, ValueError)
    return failure.value.path


def comes_back(queue: Queue, payload, as_what=None) -> None:
    """Assert that a payload arrives as it is, or `as_what`."""
    queue.publish(payload)
    (message,) = queue.claim()
    queue.ack(message)
    expected = payload if as_what is None else as_what
    assert message.payload == expected and type(message.payload) is type(expected)


@pytest.fixture
def queue():
    return Queue("cases")


# --- B01: zero character in a string or a key ---


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ({"a": f"x{NUL}y"}, "$.a"),
        ({f"k{NUL}": 1}, "$"),
        ([NUL], "$[0]"),
        ({"a": {"b": ["ok", NUL]}}, "$.a.b[1]"),
    ],
    ids=repr,
)
def test_b01_a_zero_character_is_refused_with_its_path_and_the_rest_commits(queue, bad, path):
    """The caller's marker and the good message are there; of a hundred with a bad one, none."""
    assert refused(queue, bad) == path
    with transaction.atomic():
        make_queue("marker")
        with pytest.raises(PayloadError):
            queue.publish(bad)
        queue.publish({"ok": 1})
    assert MessageQueue.objects.filter(name="marker").exists()
    assert payloads("cases") == [{"ok": 1}]
    with pytest.raises(PayloadError) as failure:
        queue.publish_many([*[{"n": n} for n in range(57)], bad, *[{"n": n} for n in range(42)]])
    assert failure.value.path.startswith("[57]")
    assert payloads("cases") == [{"ok": 1}]


def test_b01_the_six_characters_that_spell_it_are_text(queue):
    """Backslash, u, four zeros: harmless, also as a key and with more backslashes before it."""
    for text in ("\\u0000", "\\\\u0000", "x\\u0000y"):
        comes_back(queue, {text: [text]})


# --- B03: lone surrogates versus real emoji ---


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        (chr(0xD800), "$"),
        (chr(0xDC00) + "x", "$"),
        (chr(0xD83D) + chr(0xDE00), "$"),
        ({chr(0xD800): 1}, "$"),
        ({"a": [1, chr(0xDFFF)]}, "$.a[1]"),
    ],
    ids=ascii,
)
def test_b03_halves_of_a_pair_are_refused_as_the_zero_character_is(queue, bad, path):
    """Also both halves as two Python characters: nothing is mended silently."""
    assert refused(queue, bad) == path


@pytest.mark.parametrize("text", ["\U0001f600", "\U0010ffff", "\ufffe", "a\U0001f600b"], ids=ascii)
def test_b03_whole_characters_come_back_equal(queue, text):
    """Nothing is dropped or replaced."""
    comes_back(queue, text)
    comes_back(queue, {text: text})


# --- B05: UUID, datetime, Decimal, tuple, integer keys ---


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "bad",
    [
        {1: "a"},
        {1: "a", "1": "b"},
        uuid.UUID(int=5),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(2026, 1, 1),
        datetime.date(2026, 1, 1),
        datetime.timedelta(1),
        decimal.Decimal("1.10"),
        {1, 2},
        gettext_lazy("text"),
        Colour.RED,
        MessageQueue(name="model"),
        {"a": [uuid.UUID(int=5)]},
        {True: 1},
        {None: 1},
    ],
    ids=repr,
)
def test_b05_what_json_has_no_word_for_is_refused_by_name(queue, bad):
    """The type and the path are in the message; two keys that would become one are never merged."""
    path = refused(queue, bad)
    with pytest.raises(PayloadError) as failure:
        queue.publish({"outer": bad})
    inner = bad["a"][0] if path == "$.a[0]" else next(iter(bad)) if isinstance(bad, dict) else bad
    assert type(inner).__name__ in str(failure.value)
    assert failure.value.path.startswith("$.outer")


def test_b05_a_tuple_arrives_as_a_list(queue):
    """As documented, and so do subclasses as the plain type."""

    class Text(str):
        pass

    class Number(enum.IntEnum):
        ONE = 1

    comes_back(queue, (1, 2), [1, 2])
    comes_back(queue, {"a": ((), [()])}, {"a": [[], [[]]]})
    comes_back(queue, Text("a"), "a")
    comes_back(queue, Number.ONE, 1)


# --- B06: a notification that grows with the payload ---


def test_b06_no_publish_fails_because_of_its_size_and_no_notification_holds_a_payload(queue):
    """Around 8,000 bytes, in characters of four bytes, on the longest name, 10,000 in one transaction."""
    longest = Queue("\U0001f600" * 250)
    sent = [{"t": "x" * size} for size in range(7_900, 8_101, 10)]
    sent += [{"t": "\U0001f600" * 2_500}]
    with second_session() as listener:
        for one in (queue, longest):
            listener.execute(f'LISTEN "{notifying.channel(one.name)}"')
        for payload in sent:
            beliefs.notified.clear()
            queue.publish(payload)
        longest.publish({"t": "y" * 100_000})
        beliefs.notified.clear()
        with transaction.atomic():
            queue.publish_many([{"n": n} for n in range(10_000)])
        heard = list(listener.notifies(timeout=1))
    assert len(heard) == len(sent) + 2
    assert {notification.channel for notification in heard} == {
        notifying.channel(queue.name),
        notifying.channel(longest.name),
    }
    assert all(len(notification.channel.encode()) <= 63 and notification.payload == "" for notification in heard)

    def digest(payload) -> str:
        return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()

    received = [digest(message.payload) for message in queue.claim(11_000)]
    assert received == [digest(payload) for payload in sent + [{"n": n} for n in range(10_000)]]
    assert longest.claim()[0].payload == {"t": "y" * 100_000}


# --- B08: very deep or circular structures ---


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_b08_within_the_documented_depth_it_comes_back(queue):
    """Two hundred levels do."""
    comes_back(queue, nested(200))


@pytest.mark.parametrize("depth", [900, 5_000, 50_000])
def test_b08_beyond_the_depth_it_is_a_payload_error(queue, depth):
    """Neither RecursionError nor the server's stack error reaches the caller."""
    value = nested(depth)
    try:
        refused(queue, value)
    finally:
        # Taken apart by hand: freeing it in one go would recurse on some versions.
        while value:
            value = value.pop()


def test_b08_a_value_that_contains_itself_is_a_payload_error(queue):
    """A dict, a list, and a loop over two of them."""
    loop: dict = {}
    loop["self"] = loop
    assert refused(queue, loop) == "$.self"
    one: list = []
    one.append({"other": one})
    assert refused(queue, one) == "$[0].other"


def test_b08_an_undecodable_row_is_dead_lettered_and_its_neighbours_handled(queue):
    """
    Put in by SQL: 6,000 levels deep, and an integer that Python refuses to read.

    The claim that meets such a row sets it aside alone. The deep one is readable on Python 3.12 and
    later: then it is handled as any other.
    """
    queue.declare()
    deep = "[" * 6_000 + "]" * 6_000
    try:
        json.loads(deep)
        is_readable = True
    except RecursionError:
        is_readable = False
    with second_session() as psql:
        statement = "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('cases', %s) RETURNING id"
        ids = [psql.execute(statement, [text]).fetchone()[0] for text in (deep, "9" * 5_000, '{"n": 1}')]
    handled = []
    Consumer([make_handler(queue, lambda message: handled.append(message.id))], drain=True).run()
    undecodable = ids[1:2] if is_readable else ids[:2]
    assert sorted(handled) == sorted(set(ids) - set(undecodable))
    assert fetch("SELECT id, queue_id, failures->-1->>'reason' FROM django_pgqueue_messagequeueitem ORDER BY id") == [
        (message_id, "cases.dead", "undecodable payload or headers") for message_id in undecodable
    ]


# --- B10: raw bytes and text that is not UTF-8 ---


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        (b"\xff\xfe", "$"),
        ({"a": b"x"}, "$.a"),
        (bytearray(b"x"), "$"),
        (memoryview(b"x"), "$"),
        ([os.fsdecode(b"\xe9")], "$[0]"),
    ],
    ids=["bytes", "nested bytes", "bytearray", "memoryview", "surrogate-escaped"],
)
def test_b10_bytes_and_undecodable_names_are_refused(queue, bad, path):
    """No repr() and no base64 on the quiet."""
    assert refused(queue, bad) == path
    assert not MessageQueueItem.objects.exists()


def test_b10_text_that_was_decoded_wrongly_is_still_text(queue):
    """It comes back as it was published, mojibake and all."""
    comes_back(queue, "é".encode().decode("latin-1"))
