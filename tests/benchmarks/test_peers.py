"""How the benchmark of peers makes figures of what workers report: ``benchmarks/peers/running.py``."""

import pytest

from benchmarks.peers.running import Course, Numbers

SECOND = 10**9


def steady(first: float, rate: int, seconds: float) -> list[Numbers]:
    """Return the reports of a worker that has its first message at ``first`` and then handles ``rate`` a second."""
    steps = int(seconds * 50)
    return [(int((first + step / 50) * SECOND), 1 + rate * step // 50) for step in range(steps + 1)]


def test_a_course_begins_when_the_last_worker_has_its_first_message() -> None:
    """The time in which only some of them ran does not count, nor does what they handled in it."""
    course = Course([steady(1, 100, 3), steady(2, 100, 2)], cap=10)
    assert course.start == 2 * SECOND
    assert course.rates()[0] == pytest.approx(200, rel=0.01)


def test_a_worker_that_comes_when_most_is_done_does_not_begin_it() -> None:
    """Else a short drain would be measured by its last messages."""
    course = Course([steady(1, 100, 3), steady(3.9, 100, 0.1)], cap=10)
    assert course.start == 1 * SECOND


def test_a_course_ends_at_its_cap() -> None:
    """What is handled later, and the idle time after it, do not count."""
    course = Course([steady(1, 100, 5)], cap=2)
    assert (course.end - course.start) / SECOND == 2
    assert course.rates()[0] == pytest.approx(100, rel=0.01)


def test_parts_of_a_course_have_their_own_rates() -> None:
    """Two parts of equal time: the first at 100 a second, the second at 50."""
    slow = [(ns, 200 + count) for ns, count in steady(3, 50, 2)]
    course = Course([steady(1, 100, 1.98) + slow], cap=10)
    assert course.rates(2) == [pytest.approx(100, rel=0.02), pytest.approx(50, rel=0.02)]


def test_the_first_batch_is_not_counted() -> None:
    """A worker has a batch when its time begins, and the last batch is still running when it ends."""
    batches = [(step * SECOND // 10, (step + 1) * 100) for step in range(1, 11)]
    assert Course([batches], cap=10).rates()[0] == pytest.approx(1000)


def test_messages_that_start_at_once_give_no_rate() -> None:
    with pytest.raises(ValueError, match="too few"):
        Course([[(SECOND, 100)]], cap=10).rates()
