"""What may be published, what is refused before any SQL is sent, and how it comes back."""

import json
import math

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from django_pgqueue import InvalidQueueName, PayloadError, PayloadTooLarge, PGQueueError, Queue
from django_pgqueue.message import MAX_DEPTH
from django_pgqueue.models import MessageQueueItem
from tests.support.rows import payloads
from tests.support.sessions import run_async

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue():
    return Queue("payloads")


def round_trip(queue: Queue, payload):
    """Publish, claim and ack: what the handler gets."""
    queue.publish(payload)
    (message,) = queue.claim()
    queue.ack(message)
    return message.payload


VALUES = [
    None,
    True,
    0,
    -1,
    2**63,
    10**400,
    1.5,
    -2.5e-300,
    "",
    "ä€😀\U0010ffff\ufffe \t\n\r\x01\x7f",
    "\\u0000",
    '"; DROP TABLE x; --',
    "%s %(name)s {} {0}",
    [],
    {},
    [[], [[]], {}],
    {"": {"a": [1, 2.5, None, False, "x"]}},
    {"k" * 10_000: "v" * 100_000},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_json_values_come_back_equal(queue, value):
    """By every way in: publish, publish_many, in a transaction, the async calls."""
    assert round_trip(queue, value) == value
    queue.publish_many([value, value])
    with transaction.atomic():
        queue.publish(value)
    run_async(queue.apublish(value))
    run_async(queue.apublish_many([value]))
    messages = queue.claim(10)
    assert [message.payload for message in messages] == [value] * 5
    assert type(messages[0].payload) is type(value)


def test_headers_come_back_equal(queue):
    """They are a mapping of text to JSON values."""
    headers = {"trace": "00-ab", "n": 1, "nested": {"a": [None]}, "ü": "😀"}
    queue.publish(1, headers=headers)
    queue.publish_many([1], headers=headers)
    assert [message.headers for message in queue.claim(2)] == [headers, headers]


REFUSED = [
    (float("nan"), "$"),
    ({"a": [1, math.inf]}, "$.a[1]"),
    ({"a": {"b": "x\0"}}, "$.a.b"),
    ({1: "a"}, "$"),
    ({"a": {None: 1}}, "$.a"),
    pytest.param({"a": object()}, "$.a", id="object"),
    (["\ud800"], "$[0]"),
]


@pytest.mark.parametrize(("value", "path"), REFUSED, ids=repr)
def test_bad_payloads_are_refused_before_any_sql(queue, value, path):
    """One error class, a ValueError, with the path; every way in; not one statement is sent."""
    with CaptureQueriesContext(connection) as queries:
        for publish in (queue.publish, lambda bad: run_async(queue.apublish(bad))):
            with pytest.raises(PayloadError) as failure:
                publish(value)
            assert failure.value.path == path and str(failure.value).startswith(f"{path}: ")
        with pytest.raises(PayloadError) as failure:
            queue.publish_many([*range(57), value, *range(42)])
        assert failure.value.path == path.replace("$", "[57]", 1)
        with pytest.raises(PayloadError) as failure:
            queue.publish(1, headers={"h": value})
        assert failure.value.path == path.replace("$", "headers.h", 1)
    assert len(queries) == 0
    assert issubclass(PayloadError, ValueError) and issubclass(PayloadError, PGQueueError)
    assert not MessageQueueItem.objects.exists()


@pytest.mark.parametrize("headers", [["a"], "a", {1: 2}, {"a": {1}}], ids=repr)
def test_bad_headers_are_refused_before_any_sql(queue, headers):
    """Publishing one or many."""
    with CaptureQueriesContext(connection) as queries:
        for publish in (lambda: queue.publish(1, headers=headers), lambda: queue.publish_many([1], headers=headers)):
            with pytest.raises(PayloadError, match="^headers"):
                publish()
    assert len(queries) == 0


def test_a_refused_payload_leaves_the_transaction_usable(queue):
    """It is refused before the server hears of it."""
    with transaction.atomic():
        queue.publish({"n": 1})
        with pytest.raises(PayloadError):
            queue.publish({"n": float("nan")})
        queue.publish({"n": 2})
    assert payloads("payloads") == [{"n": 1}, {"n": 2}]


def test_the_size_limit_is_in_bytes_of_json(queue):
    """MAX_PAYLOAD_BYTES counts UTF-8, quotes included; one byte more is too large."""
    with override_settings(PGQUEUE={"MAX_PAYLOAD_BYTES": 1000}):
        assert round_trip(queue, "😀" * 249 + "xx") == "😀" * 249 + "xx"
        with CaptureQueriesContext(connection) as queries:
            with pytest.raises(PayloadTooLarge, match=r"^\$: 1001 bytes of JSON, at most 1000"):
                queue.publish("😀" * 249 + "xxx")
            with pytest.raises(PayloadTooLarge, match=r"^\[1\]: "):
                queue.publish_many(["x", "x" * 1000])
            with pytest.raises(PayloadTooLarge, match="^headers: "):
                queue.publish("x", headers={"h": "x" * 1000})
        assert len(queries) == 0


def test_the_default_limit_takes_sixteen_mebibytes(queue):
    """And a payload of that size makes the round trip."""
    largest = "x" * (16 * 1024 * 1024 - 2)
    assert round_trip(queue, largest) == largest
    with pytest.raises(PayloadTooLarge):
        queue.publish(largest + "x")


def test_the_deepest_payload_makes_the_round_trip(queue):
    """MAX_DEPTH levels are readable in a handler's stack, one more is refused."""
    deepest = nested(MAX_DEPTH)
    assert round_trip(queue, deepest) == deepest
    with pytest.raises(PayloadError, match="nested deeper than 500 levels"):
        queue.publish(nested(MAX_DEPTH + 1))


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


BAD_NAMES = ["", " ", "a ", " a", "a\nb", "a\0b", "a\ud800", "a" * 251, "a" * 251 + ".dead", "e\u0301", None, 7, b"a"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
def test_bad_names_are_refused_before_any_sql(name):
    """When the queue is declared, so no publish can meet one; a dead-letter queue's name likewise."""
    with CaptureQueriesContext(connection) as queries:
        with pytest.raises(InvalidQueueName):
            Queue(name)
        if name is not None:
            with pytest.raises(InvalidQueueName):
                Queue("good", dead_letter=name)
    assert len(queries) == 0


@pytest.mark.parametrize("name", ["a", "a" * 250, "a b", "ü€😀", "quote\"'%s", "a.dead", "a" * 250 + ".dead", "\u00e9"])
def test_good_names_work_in_every_statement(name):
    """Published to, woken, claimed from, dead-lettered, healed."""
    queue = Queue(name, auto_deleted=True)
    queue.declare()
    queue.publish(1)
    with transaction.atomic():
        queue.publish_many([2, 3])
    messages = queue.claim(10)
    assert [message.payload for message in messages] == [1, 2, 3]
    queue.ack(messages[0])
    queue.nack(messages[1], delay=0)
    queue.reject(messages[2])
    assert queue.stats().exists


@pytest.mark.parametrize(
    "options",
    [{"delay": -1}, {"delay": math.nan}, {"ttl": 0}, {"ttl": "5"}, {"delay": 1e12}, {"delay": 10**400}],
    ids=repr,
)
def test_bad_times_are_refused_before_any_sql(queue, options):
    """Negative, not a number, too far for a date that Python can read back."""
    with CaptureQueriesContext(connection) as queries:
        with pytest.raises(ValueError):
            queue.publish(1, **options)
        with pytest.raises(ValueError):
            queue.publish_many([1], **options)
    assert len(queries) == 0


@pytest.mark.real_input
def test_every_line_of_the_real_input_comes_back_equal(queue, real_input):
    """Real webhooks, 1 to 28 kB each: published one by one, in bulk and in a transaction."""
    lines = [json.loads(line) for line in real_input.read_text(encoding="utf-8").splitlines()]
    assert lines
    half = len(lines) // 2
    ids = [queue.publish(line) for line in lines[: half // 2]]
    with transaction.atomic():
        ids += [queue.publish(line) for line in lines[half // 2 : half]]
    ids += queue.publish_many(lines[half:])
    received = {}
    while messages := queue.claim(100):
        received.update((message.id, message.payload) for message in messages)
        queue.ack(*messages)
    assert [received[message_id] for message_id in ids] == lines
    assert len(received) == len(lines)
