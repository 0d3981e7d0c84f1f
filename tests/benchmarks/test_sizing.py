"""What docs/capacity.md computes from the measured costs."""

import pytest

from benchmarks import capacity, harness, sizing
from benchmarks.sizing import Server, Use, committed, limits


def a_use(**changes: float) -> Use:
    defaults = {
        "cpu": 400e-6,
        "session": 300e-6,
        "log_bytes": 2_000,
        "transactions": 1,
        "multixacts": 1,
        "members": 4,
        "stored": 2_000,
    }
    return Use(**{**defaults, **changes}, one_by_one=True)


def test_one_session_waits_for_each_flush() -> None:
    """A commit of its own takes work and a flush."""
    assert committed(1, 2, work=0.001, flush=0.002) == pytest.approx(1 / 0.003, rel=0.01)


def test_sessions_that_commit_together_share_a_flush() -> None:
    """Each waits for the rest of the one under way and for its own: between one and two of them."""
    found = committed(50, 50, work=0.0001, flush=0.002)
    assert found * 1.05 >= 50 / (2 * 0.002)
    assert found <= 50 / 0.002


def test_processors_are_the_end_where_flushes_cost_nothing() -> None:
    """However many publish: each core does one publish at a time."""
    assert committed(50, 4, work=0.001, flush=0.0) == pytest.approx(4_000, rel=0.02)


def test_more_publishers_never_get_less_done() -> None:
    """The simulation has no contention but for cores and flushes."""
    rates = [committed(sessions, 8, work=0.0003, flush=0.001) for sessions in (1, 4, 16, 64)]
    assert rates == sorted(rates)


def test_what_is_scarcest_decides() -> None:
    """A small disk is the end of a large server, a slow one that of few publishers."""
    assert limits(a_use(), Server(2, 1_000, 0.0)).keys() == {"processor", "log", "flushes"}
    assert limits(a_use(), Server(2, 1_000, 0.0))["processor"] == pytest.approx(0.7 * 2 / 400e-6)
    found = [limits(a_use(), server) for server in (Server(2, 100, 0.1), Server(32, 1, 0.1), Server(32, 1_000, 20))]
    assert [min(each, key=each.__getitem__) for each in found] == ["processor", "log", "flushes"]


def test_twice_the_cores_are_not_twice_the_speed() -> None:
    """The assumption that the page states."""
    assert sizing.speed(2) == 1
    assert sizing.speed(8) == pytest.approx(1.8**2)


def test_a_message_costs_its_publish_and_its_handling() -> None:
    """As the benchmark's rows have them; in bulk no message waits for a flush of its own."""
    columns = ("server CPU µs", "WAL bytes", "transactions", "MultiXacts", "MultiXact members", "bytes while it waits")
    rows = {capacity.TOGETHER: (300, 1_000, 1, 0.9, 4, 1_800), capacity.MANY: (30, 900, 0, 0, 0, 1_700)}
    rows[capacity.CONSUMER] = (90, 1_500, 0.1, 0, 0, "")  # type: ignore[assignment]
    result = {"rows": [{"a message": way, **dict(zip(columns, row, strict=True))} for way, row in rows.items()]}
    assert sizing.use(result, capacity.TOGETHER) == Use(
        pytest.approx(390e-6), 300e-6, 2_500, pytest.approx(1.1), 0.9, 4, 1_800, one_by_one=True
    )
    assert not sizing.use(result, capacity.MANY).one_by_one


def test_computed_figures_have_two_digits() -> None:
    """They are not better than that."""
    assert [sizing.rounded(value) for value in (3_345.6, 128_999, 42.4)] == [3_300, 130_000, 42]
    assert harness.number(sizing.rounded(3_345.6)) == "3,300"
