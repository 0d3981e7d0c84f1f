"""Where claims start while walks are slow: what that leaves out for a moment, it does not leave out for long."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from django_pgqueue import Message, Nack, Queue
from django_pgqueue.consumer import low_water
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.low_water import LOOK_BACK, LOOK_BACK_SHARE, SLOW, SLOW_EACH, TRAIL, LowWaterMark
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import claiming, notifying
from tests.support.processes import consuming, drain
from tests.support.rows import make_message, payloads
from tests.support.sessions import Session, connect, fetch
from tests.support.waiting import busy, wait_until

# --- The mark by itself, with made-up times ---


# Seconds of a walk that is slow for the hundred messages that it brings.
TOOK = SLOW + SLOW_EACH * 100 + 0.007


def slow(mark: LowWaterMark, at: float, *, ids: tuple[int, int] | None = None, took: float = TOOK) -> None:
    """Claim once, slowly: what a consumer does."""
    start = mark.start(at)
    mark.claimed(start, at, at + took, 0 if ids is None else ids[1] - ids[0] + 1, ids)


def test_quick_walks_look_at_all_of_the_queue() -> None:
    """Each of them, and there is nothing to come back for."""
    mark = LowWaterMark()
    for at in range(10):
        slow(mark, at, ids=(at * 10 + 1, at * 10 + 10), took=SLOW / 2)
        assert mark.start(at + 0.9) == 0
    assert mark.look_back_at == float("inf")


def test_a_walk_that_brings_more_may_take_longer() -> None:
    """A claim of hundreds is not slow because of them."""
    mark = LowWaterMark()
    slow(mark, 0, ids=(1, 500), took=SLOW + SLOW_EACH * 490)
    assert mark.look_back_at == float("inf")
    slow(mark, 1, ids=(501, 510), took=SLOW + SLOW_EACH * 490)
    assert mark.look_back_at < 3


def test_the_mark_trails() -> None:
    """Claims start behind what was seen done a moment ago, and not behind what was seen just now."""
    mark = LowWaterMark()
    slow(mark, 0.0, ids=(1, 100))
    assert mark.start(TOOK + TRAIL - 0.02) == 0
    assert mark.start(TOOK + TRAIL + 0.001) == 100
    slow(mark, 0.3, ids=(101, 200))
    slow(mark, 0.4, ids=(201, 300))
    assert mark.start(0.5) == 100
    assert mark.start(0.3 + TOOK + TRAIL + 0.001) == 200
    assert mark.start(0.4 + TOOK + TRAIL + 0.001) == 300


def test_a_look_at_all_does_not_let_the_mark_jump_ahead() -> None:
    """A publisher that drew its id before it and commits a moment after it is not left out either."""
    mark = LowWaterMark()
    slow(mark, 0.0, ids=(1, 100))
    slow(mark, 0.4, ids=(101, 200))
    assert mark.start(mark.look_back_at) == 0
    at = mark.look_back_at
    assert mark.start(at - 0.01) == 200
    slow(mark, at, ids=(500, 600))
    # 499 may still be on its way.
    assert mark.start(at + TOOK + 0.01) == 200
    assert mark.start(at + TOOK + TRAIL + 0.001) == 600


def test_it_looks_at_all_of_the_queue_every_so_often() -> None:
    """LOOK_BACK seconds after the last time."""
    mark = LowWaterMark()
    looks = []
    for step in range(100):
        at = step * 0.1
        looks.append(mark.start(at) == 0)
        slow(mark, at, ids=(step * 10 + 1, step * 10 + 10))
    # The first ones until something was seen long enough ago, then one in each LOOK_BACK.
    assert looks[:4] == [True, True, True, False]
    assert 10 * 0.8 / LOOK_BACK <= sum(looks[3:]) <= 10 / LOOK_BACK


@pytest.mark.parametrize("took", [0.5, 3.0])
def test_where_that_takes_long_it_is_done_rarely(took: float) -> None:
    """It takes LOOK_BACK_SHARE of the time at the most."""
    mark = LowWaterMark()
    slow(mark, 0.0, ids=(1, 100), took=took)
    assert mark.look_back_at == pytest.approx(took + took / LOOK_BACK_SHARE)


def test_what_was_committed_late_is_walked_through_from_its_lowest_id() -> None:
    """Two thousand below the mark are claimed one claim after the other, not one claim a second."""
    mark = LowWaterMark()
    slow(mark, 0.0, ids=(5000, 5099))
    assert mark.start(0.9) == 5099
    slow(mark, 0.95, ids=(5100, 5199))
    slow(mark, 1.1, ids=(1000, 1099))
    for number in range(1, 20):
        at = 1.1 + number * 0.02
        assert 0 < mark.start(at) <= 1000 + number * 100 - 1
        slow(mark, at, ids=(1000 + number * 100, 1099 + number * 100))
    assert mark.start(1.6 + TRAIL) == 2999


def test_a_look_that_finds_nothing_leaves_the_mark() -> None:
    """There is nothing below, nor above."""
    mark = LowWaterMark()
    slow(mark, 0.0, ids=(1, 100))
    assert mark.start(0.9) == 100
    slow(mark, 1.1)
    assert mark.start(1.2) == 100


def test_it_is_dropped_when_walks_are_quick_again() -> None:
    """Vacuum has been there: told by a look at all of the queue, not by the quick claims that the mark makes."""
    mark = LowWaterMark()
    slow(mark, 0.0, ids=(1, 100))
    slow(mark, 0.5, ids=(101, 200), took=0.0001)
    assert mark.start(0.8) == 200
    slow(mark, 1.1, ids=(201, 300), took=0.0001)
    assert mark.look_back_at == float("inf")
    assert [mark.start(at) for at in (1.2, 1.5, 3.0)] == [0, 0, 0]


# --- A consumer whose walks all count as slow ---


@pytest.fixture
def all_slow(monkeypatch: pytest.MonkeyPatch, transactional_db: None, settings: Any) -> None:
    """Each walk is slow, and polling is too rare to find anything."""
    monkeypatch.setattr(low_water, "SLOW", -1.0)
    monkeypatch.setattr(low_water, "SLOW_EACH", 0.0)
    settings.PGQUEUE = {"POLL_INTERVAL": 60}


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Where each claim started."""
    found: list[int] = []
    real_claim = claiming.claim

    def claim(*args: Any, above: int = 0, **options: Any) -> claiming.Claim:
        found.append(above)
        return real_claim(*args, above=above, **options)

    monkeypatch.setattr(claiming, "claim", claim)
    yield found


class Seen:
    """A handler that remembers what it was given and when, by monotonic time."""

    def __init__(self) -> None:
        self.at: dict[Any, float] = {}
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            self.count += 1
            self.at[message.payload] = time.monotonic()


def publish_until(queue: Queue, condition: Callable[[], object], each: str = "flow") -> int:
    """Publish beside a consumer until something is so. Returns how many."""
    published = 0
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        queue.publish(f"{each} {published}")
        published += 1
        time.sleep(0.002)
    return published


def test_a_message_that_is_committed_late_is_handled_within_a_look_back(all_slow: None, starts: list[int]) -> None:
    """Its id was drawn before those of others that are handled by now."""
    queue, seen = Queue("q"), Seen()
    queue.declare()
    with Session() as other, consuming(Consumer([make_handler(queue, seen)])):
        other.begin()
        late = other.run(queue.publish, "late")
        published = publish_until(queue, lambda: starts and starts[-1] > late)
        began = time.monotonic()
        other.commit()
        published += publish_until(queue, lambda: "late" in seen.at, "after")
        # With room for a busy machine; without looking back it would not come at all.
        assert seen.at["late"] - began < LOOK_BACK + 4
        wait_until(lambda: not payloads("q"))
    assert seen.count == published + 1


def test_it_is_found_also_where_nothing_else_comes(all_slow: None, starts: list[int]) -> None:
    """The consumer does not sleep past its look back: nobody tells it of what is below the mark."""
    queue, seen = Queue("q"), Seen()
    queue.declare()
    with Session() as other, consuming(Consumer([make_handler(queue, seen)])):
        other.begin()
        late = other.run(queue.publish, "late")
        publish_until(queue, lambda: starts and starts[-1] > late)
        wait_until(lambda: payloads("q") == [])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(notifying, "wake", lambda *told: None)
            other.commit()
        wait_until(lambda: "late" in seen.at, 15)


def test_many_that_are_committed_late_are_handled_at_once(all_slow: None, starts: list[int]) -> None:
    """Two thousand below the mark, of one transaction: not a claim's worth each second."""
    queue, seen = Queue("q"), Seen()
    queue.declare()
    with Session() as other, consuming(Consumer([make_handler(queue, seen)], prefetch=20)):
        other.begin()
        late = other.run(queue.publish_many, list(range(2000)))
        publish_until(queue, lambda: starts and starts[-1] > late[-1])
        other.commit()
        wait_until(lambda: 0 in seen.at)
        began = time.monotonic()
        # A hundred claims, which would take as many seconds.
        wait_until(lambda: all(number in seen.at for number in range(2000)), 25)
        assert time.monotonic() - began < 25 * busy()


def test_a_lapsed_lease_below_the_mark_is_redelivered(all_slow: None, starts: list[int]) -> None:
    """Its consumer died: the walk that goes past it finds it at the next look at all."""
    queue, seen = Queue("q"), Seen()
    queue.declare()
    dead = [make_message("q", f"dead {number}", lease=2).id for number in range(3)]
    with consuming(Consumer([make_handler(queue, seen)])):
        publish_until(queue, lambda: starts and starts[-1] > dead[-1])
        publish_until(queue, lambda: all(f"dead {number}" in seen.at for number in range(3)))
        wait_until(lambda: not payloads("q"))


def test_a_suspect_below_the_mark_is_not_starved(all_slow: None, starts: list[int]) -> None:
    """Met while others are in hand, it is left and comes next, although newer ones keep coming."""
    queue = Queue("q")
    queue.declare()
    dead = [make_message("q", f"dead {number}", lease=1.5).id for number in range(5)]
    seen = Seen()

    def handle(message: Message) -> None:
        # Slower than what comes.
        time.sleep(0.02)
        seen(message)

    with consuming(Consumer([make_handler(queue, handle)], prefetch=5)):
        publish_until(queue, lambda: starts and starts[-1] > dead[-1])
        # There are always some in hand.
        publish_until(queue, lambda: all(f"dead {number}" in seen.at for number in range(5)))
    first, last = min(seen.at[f"dead {n}"] for n in range(5)), max(seen.at[f"dead {n}"] for n in range(5))
    assert last - first < 10


def test_what_waits_below_a_suspect_is_not_passed(all_slow: None, starts: list[int]) -> None:
    """A suspect comes before what is older than it; that comes as soon as there are no more."""
    queue, seen = Queue("q"), Seen()

    def handle(message: Message) -> None:
        seen(message)
        if message.suspect:
            time.sleep(TRAIL)

    queue.publish_many([f"old {number}" for number in range(5)])
    for number in range(3):
        make_message("q", f"suspect {number}", lease=-1)
    queue.publish_many([f"new {number}" for number in range(200)])
    Consumer([make_handler(queue, handle)], drain=True, prefetch=10).run()
    order = sorted(seen.at, key=seen.at.__getitem__)
    assert {one.split()[0] for one in order[:3]} == {"suspect"}
    assert {one.split()[0] for one in order[3:8]} == {"old"}
    assert len(order) == 208


def test_a_drain_ends_with_nothing_left(all_slow: None, starts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what is committed late while it drains."""
    # Not because it just happens to look at all.
    monkeypatch.setattr(low_water, "LOOK_BACK", 60.0)
    queue = Queue("q")
    queue.declare()
    with Session() as other:
        other.begin()
        late = other.run(queue.publish_many, list(range(300)))
        queue.publish_many([-1] * 3000)
        handled: list[Any] = []

        def handle(message: Message) -> None:
            handled.append(message.payload)
            if len(handled) == 3000:
                # Nothing is left above the mark.
                assert max(starts) > late[-1]
                other.commit()
            time.sleep(0.0003)

        assert Consumer([make_handler(queue, handle)], drain=True, prefetch=50).run() == 3300
    assert handled[3000:] == list(range(300))
    assert payloads("q") == []


def test_due_messages_are_not_hidden(all_slow: None, starts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed or given back, their ids are below the mark: they come when they are due."""
    # Not because a look at all finds them.
    monkeypatch.setattr(low_water, "LOOK_BACK", 60.0)
    queue = Queue("q")
    seen = Seen()
    nacked = threading.Event()

    def handle(message: Message) -> None:
        if message.payload == "given back" and message.delivery_count == 1:
            nacked.set()
            raise Nack(delay=0.7)
        seen(message)

    with consuming(Consumer([make_handler(queue, handle)])):
        ids = [queue.publish("delayed", delay=0.7), queue.publish("given back")]
        wait_until(nacked.is_set)
        began = time.monotonic()
        publish_until(queue, lambda: starts and starts[-1] > ids[-1])
        publish_until(queue, lambda: "delayed" in seen.at and "given back" in seen.at)
    assert max(seen.at["delayed"], seen.at["given back"]) - began < 0.7 + 4


def test_consumers_beside_each_other_handle_each_once(all_slow: None) -> None:
    """Two consumers, four publishers whose transactions overlap: all is handled, nothing twice."""
    queue = Queue("q")
    queue.declare()
    handled: list[Any] = []

    def publish(number: int) -> None:
        with Session() as session:
            for step in range(40):
                session.begin()
                session.run(queue.publish, [number, step, 0])
                time.sleep(0.001 * (step % 7))
                session.run(queue.publish, [number, step, 1])
                session.commit()

    def handle(message: Message) -> None:
        handled.append(tuple(message.payload))

    publishers = [threading.Thread(target=publish, args=[number]) for number in range(4)]
    with consuming(Consumer([make_handler(queue, handle)])), consuming(Consumer([make_handler(queue, handle)])):
        for thread in publishers:
            thread.start()
        for thread in publishers:
            thread.join()
        wait_until(lambda: len(handled) >= 320)
    assert sorted(handled) == [(n, step, half) for n in range(4) for step in range(40) for half in range(2)]


def test_draining_by_two_ends_with_nothing_left(all_slow: None) -> None:
    """What one leaves is the other's."""
    queue = Queue("q")
    queue.publish_many(list(range(2000)))
    assert sorted(drain(queue, prefetch=30)) == list(range(2000))
    assert payloads("q") == []


# --- With walks that are slow because vacuum is held back ---

BUFFERS = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "


def buffers_of_a_claim(above: int) -> int:
    """Return how many pages a claim reads."""
    from django_pgqueue.services import claiming

    params = {
        "name": "q",
        "limit": 10,
        "lease": 60,
        "token": uuid4(),
        "consumer": uuid4(),
        "suspects": True,
        "skip_suspects": False,
        "most_bytes": None,
        "above": above,
    }
    with connect(autocommit=False) as session:
        session.execute("SET LOCAL enable_seqscan = off")
        ((plan,),) = session.execute(BUFFERS + claiming.CLAIM, params).fetchall()  # type: ignore[arg-type]
        session.rollback()
    top = plan[0]["Plan"]
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


@pytest.mark.django_db(transaction=True)
def test_behind_a_held_snapshot_claims_start_above_what_is_dead(starts: list[int]) -> None:
    """Twenty thousand handled and not vacuumed: a claim behind the mark reads a fraction of the pages."""
    queue = Queue("q")
    queue.declare()
    with connect(autocommit=False) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem")
        fetch(
            "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
            " SELECT 'q', '1' FROM generate_series(1, 20000)"
        )
        fetch("DELETE FROM django_pgqueue_messagequeueitem")
        seen = Seen()
        with consuming(Consumer([make_handler(queue, seen)])):
            publish_until(queue, lambda: starts and starts[-1])
            wait_until(lambda: not payloads("q"))
        mark = max(starts)
        assert mark > 20_000
        queue.publish_many(list(range(10)))
        everything, marked = buffers_of_a_claim(0), buffers_of_a_claim(mark)
        holder.rollback()
    assert MessageQueueItem.objects.count() == 10
    assert marked * 5 < everything, (marked, everything)
