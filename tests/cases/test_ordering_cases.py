"""Real failures of other systems over order and fairness: B74 (retries before fresh), B76 (one queue's flood)."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections, transaction

from django_pgqueue import Message, Nack, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import claiming, declaring
from tests.support.processes import consuming, drain
from tests.support.rows import make_message, payloads
from tests.support.sessions import fetch
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

# --- B74: a retried message pushes ahead of fresh ones ---


@pytest.mark.parametrize("prefetch", [1, 2, 10, 100])
def test_b74_messages_that_fail_all_the_time_take_no_more_than_their_half(prefetch: int) -> None:
    """
    Twenty that fail at once and come back at once, before two hundred good ones, one handled at a time.

    A claim takes from both walks, so the good ones are through after about twice as many starts.
    """
    queue = Queue("q", max_deliveries=1_000)
    queue.publish_many(["bad"] * 20)
    queue.publish_many(range(200))
    starts: list[Any] = []
    done = threading.Event()

    def handle(message: Message) -> None:
        if not done.is_set():
            starts.append(message.payload)
        if len(starts) - starts.count("bad") == 200 or starts.count("bad") > 330:
            done.set()
        if message.payload == "bad":
            raise Nack("as ever", delay=0)

    with consuming(Consumer([make_handler(queue, handle)], prefetch=prefetch)):
        assert done.wait(60)
    good = [start for start in starts if start != "bad"]
    # The order of publishing, and a half of the turns: with claims of one a matter of chance.
    assert good == list(range(200))
    assert starts.count("bad") <= 330
    # Nor do the fresh ones shut out the retries.
    assert starts.count("bad") >= 30


@contextmanager
def fresh(queue: Queue, depth: int) -> Iterator[None]:
    """Publish as fast as is consumed: as many as are missing to this depth, all the time."""
    stop = threading.Event()

    def publish() -> None:
        try:
            while not stop.wait(0.01):
                queue.publish_many(["fresh"] * (depth - payloads(queue.name).count("fresh")))
        finally:
            connections.close_all()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(DEADLINE)


@pytest.mark.parametrize("prefetch", [1, 10, 100])
def test_b74_lapsed_messages_come_back_soon_beside_a_steady_stream(settings: Any, prefetch: int) -> None:
    """Each within a lease and five seconds, though each is handled alone; and the stream does not stop."""
    settings.PGQUEUE = {"LEASE": 3, "POLL_INTERVAL": 1}
    queue = Queue("q")
    queue.declare()
    restarted: dict[int, float] = {}
    starts: list[Any] = []

    def handle(message: Message) -> None:
        starts.append(message.payload)
        if message.payload != "fresh":
            restarted.setdefault(message.payload, time.monotonic())
        time.sleep(0.005)

    with fresh(queue, 50):
        wait_until(lambda: len(payloads("q")) == 50)
        # Their workers died while they held them, the last lease runs out in a moment.
        for number in range(50):
            make_message("q", number, lease=0.5)
        lapsed_at = time.monotonic() + 0.5
        with consuming(Consumer([make_handler(queue, handle)], prefetch=prefetch)):
            wait_until(lambda: len(restarted) == 50)
            before = len(starts)
            wait_until(lambda: starts[before:].count("fresh") > 50)
    assert max(restarted.values()) - lapsed_at < 3 + 5
    assert Counter(starts)["fresh"] > 50


@pytest.mark.parametrize("path", ["poll", "notify", "reclaim"])
def test_b74_the_order_is_that_of_publishing_on_every_path(settings: Any, path: str) -> None:
    """
    Claimed one at a time, fresh messages come by id, and what was delayed comes by its due time.

    However the consumer came to look: by itself, woken, or while it takes lapsed ones in between. (A
    claim of several hands them out by id.)
    """
    settings.PGQUEUE = {"LEASE": 30, "POLL_INTERVAL": 60}
    queue = Queue("q")
    queue.declare()
    seen: list[Any] = []
    expected = [f"fresh {number}" for number in range(60)]
    delayed = [f"due {number}" for number in range(20)]

    def publish() -> None:
        with transaction.atomic():
            for number in reversed(range(20)):
                make_message("q", f"due {number}", due_in=-100 + number)
        for first in range(0, 60, 20):
            queue.publish_many(expected[first : first + 20])

    if path == "notify":
        handler = make_handler(queue, lambda message: seen.append(message.payload))
        with consuming(Consumer([handler], prefetch=1)):
            queue.publish("first")
            wait_until(lambda: seen)
            publish()
            wait_until(lambda: len(seen) == 81)
    else:
        publish()
        if path == "reclaim":
            for number in range(5):
                make_message("q", f"lapsed {number}", lease=-1)
        seen += drain(queue, prefetch=1)
    assert [payload for payload in seen if payload.startswith("fresh")] == expected
    assert [payload for payload in seen if payload.startswith("due")] == delayed
    if path == "reclaim":
        assert [payload for payload in seen if payload.startswith("lapsed")] == [f"lapsed {n}" for n in range(5)]


# --- B76: a flood in one queue starves the others ---

FLOOD = 50_000


def flood(name: str) -> None:
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) SELECT %s, '{}' FROM generate_series(1, %s)",
        [name, FLOOD],
    )


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many claims there were, by queue."""
    seen: Counter[str] = Counter()
    claim = claiming.claim

    def counted(declaration: declaring.Declaration, using: str, **options: Any) -> claiming.Claim:
        seen[declaration.name] += 1
        return claim(declaration, using, **options)

    monkeypatch.setattr(claiming, "claim", counted)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("queues", [3, 200])
def test_b76_a_flood_in_one_queue_leaves_the_others_their_pace(
    settings: Any, claims: Counter[str], queues: int
) -> None:
    """
    50,000 in "a" that take 20 ms each; what is published to "b" and "c" meanwhile is handled at once.

    Each queue has threads of its own in a consumer. Queues that are empty cost one claim (and one
    look) per POLL_INTERVAL each, however busy the others are.
    """
    settings.PGQUEUE = {"POLL_INTERVAL": 2}
    names = ["a", "b", "c", *(f"empty.{number}" for number in range(queues - 3))]
    declared = {name: Queue(name) for name in names}
    for queue in declared.values():
        queue.declare()
    flood("a")
    waits: list[float] = []
    handled = Counter[str]()

    def slow(message: Message) -> None:
        time.sleep(0.02)
        handled["a"] += 1

    def quick(message: Message) -> None:
        waits.append(time.monotonic() - message.payload)

    handlers = [make_handler(declared[name], slow if name == "a" else quick) for name in names]
    with consuming(Consumer(handlers)):
        wait_until(lambda: handled["a"] > 10, 60)
        before, started, done = Counter(claims), time.monotonic(), handled["a"]
        for _ in range(25):
            declared["b"].publish(time.monotonic())
            declared["c"].publish(time.monotonic())
            time.sleep(0.2)
        wait_until(lambda: len(waits) == 50)
        elapsed, after, done = time.monotonic() - started, Counter(claims), handled["a"] - done
    assert sorted(waits)[int(len(waits) * 0.95)] < 2
    # The flood goes on meanwhile.
    assert done > elapsed / 0.02 / 4
    assert len(payloads("a")) > FLOOD / 2
    for name in names[3:]:
        # Woken all together when the listener (re)connects; else one look per interval.
        assert after[name] - before[name] <= elapsed / 2 + 4, name
