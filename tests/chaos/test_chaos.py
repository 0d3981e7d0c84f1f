"""The chaos command: a minute of it, and that it would notice what it is there to notice."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from example_project.demo.ledger import Item, Ledger, Remains, Verdict
from example_project.demo.processes import ROOT
from tests.chaos.plan import Fault, Plan
from tests.chaos.report import counts
from tests.chaos.run import Injected, Result
from tests.support.pgbouncer import find_pgbouncer

PLAN = Plan(seed=1, seconds=60, has_pooler=True)


@pytest.mark.full
def test_no_message_is_lost_whatever_is_done_to_the_server_and_the_workers(tmp_path: Path) -> None:
    """A minute: each kind of fault is injected and recovered from, and the ledger balances."""
    file = tmp_path / "chaos.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seconds", "40", "--seed", "1", "--json", file],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["counts"]["published"] > 100
    assert result["counts"]["lost"] == result["counts"]["stuck"] == result["counts"]["phantom"] == 0
    has_pooler = find_pgbouncer() is not None
    assert any("PgBouncer" in what for what in result["left_out"]) is not has_pooler
    kinds = Plan(1, 40, has_pooler).kinds
    assert {kind: row["recovered"] >= 1 for kind, row in result["recovery_by_kind"].items()} == dict.fromkeys(
        kinds, True
    )


# --- The schedule ---


def test_the_schedule_follows_from_the_seed() -> None:
    """The same seed gives the same faults with the same details, another seed gives others."""
    first = list(islice(PLAN.schedule(), 50))
    assert first == list(islice(Plan(1, 60, has_pooler=True).schedule(), 50))
    assert first != list(islice(Plan(2, 60, has_pooler=True).schedule(), 50))


@pytest.mark.parametrize("has_pooler", [True, False])
def test_each_kind_of_fault_comes_once_before_any_comes_twice(has_pooler: bool) -> None:
    """The shortest run has all of them; without a PgBouncer all but its restart."""
    for seed in range(20):
        plan = Plan(seed, 1, has_pooler)
        assert sorted(fault.kind for fault in islice(plan.schedule(), len(plan.kinds))) == sorted(plan.kinds)
    assert ("restart_pgbouncer" in plan.kinds) is has_pooler


def injected(kind: str, recovery: float | None = 1.0) -> Injected:
    return Injected(Fault(kind, 1.0, {}), 1.0, {}, recovery)


def test_a_kind_of_fault_that_was_never_injected_is_a_problem() -> None:
    """So is one that was not recovered from; a run without either has no problem."""
    verdict = Verdict({}, [])
    all_kinds = [injected(kind) for kind in PLAN.kinds]
    assert Result(PLAN, verdict, all_kinds).all_problems() == []
    assert Result(PLAN, verdict, all_kinds[1:]).all_problems() == [f"never injected: {PLAN.kinds[0]}"]
    (problem,) = Result(PLAN, verdict, [*all_kinds, injected("stop_workers", None)]).all_problems()
    assert problem.startswith("not recovered from")


# --- The ledger ---


@dataclass(frozen=True)
class Handled:
    """A message that a handler handled, where it is atomic with its own write."""

    message_id: int
    key: str
    queue: str
    at: float = 11.1


# A publish of each outcome: two confirmed ones, one rejected on request, one that expires, one of which
# nothing is known and that is not there, one of which nothing is known and that is, one rolled back, one to the topic.
NOTES: list[dict[str, Any]] = [
    {"note": "trying", "at": 10.0, "keys": ["a1", "a2"], "delay": 0, "fates": ["handle", "handle"], "topic": False},
    {"note": "committed", "keys": ["a1", "a2"], "ids": [1, 2], "expires": [None, None], "marked": False},
    {"note": "trying", "at": 10.0, "keys": ["b"], "delay": 0.5, "fates": ["reject"], "topic": False},
    {"note": "committed", "keys": ["b"], "ids": [3], "expires": [None], "marked": False},
    {"note": "trying", "at": 10.0, "keys": ["c"], "delay": 0, "fates": ["handle"], "topic": False},
    {"note": "committed", "keys": ["c"], "ids": [4], "expires": [None], "marked": False},
    {"note": "trying", "at": 10.0, "keys": ["d1", "d2"], "delay": 0, "fates": ["handle", "handle"], "topic": False},
    {
        "note": "trying",
        "at": 10.0,
        "keys": ["e1", "e2"],
        "delay": 1.0,
        "fates": ["handle", "handle"],
        "topic": False,
    },
    {"note": "trying", "at": 10.0, "keys": ["f"], "delay": 0, "fates": ["handle"], "topic": False},
    {"note": "undone", "keys": ["f"], "refused": False},
    {"note": "trying", "at": 10.0, "keys": ["t"], "delay": 0, "fates": ["handle"], "topic": True},
    {"note": "committed", "keys": ["t"], "ids": [7, 8], "expires": [None], "marked": False},
]
HANDLED = [
    Handled(1, "a1", "late"),
    Handled(2, "a2", "atomic"),
    Handled(5, "e1", "late"),
    Handled(6, "e2", "late"),
    Handled(7, "t", "bound"),
    Handled(8, "t", "bound.auto"),
]
HEARD = [(100, "t"), (101, "t")]
ITEMS = [Item(3, "b", "late", "late.dead", is_dead=True), Item(4, "c", "brief", "brief.expired", is_dead=True)]


def close(handled: list[Handled], items: list[Item], heard: list[tuple[int, str]] = HEARD) -> Verdict:
    ledger = Ledger(expired="brief.expired", bound=["bound", "bound.auto"])
    for note in NOTES:
        ledger.read("publisher0-1", note)
    for one in handled:
        note = {"id": one.message_id, "key": one.key, "queue": one.queue, "delivery": 1, "at": one.at}
        ledger.read("consumer0-2", {"note": "started", "atomic": one.queue == "atomic", **note})
        ledger.read("consumer0-2", {"note": "handled", **note})
    for process, key in heard:
        ledger.read(f"subscriber0-{process}", {"note": "heard", "key": key})
    marks = [(one.message_id, "handled") for one in handled if one.queue == "atomic"]
    return ledger.close(Remains(items, marks))


def test_the_ledger_balances_when_every_message_is_accounted_for() -> None:
    """Handled, set aside as asked, expired, or never committed."""
    verdict = close(HANDLED, ITEMS)
    assert verdict.problems == []
    assert {name: count for name, count in counts(verdict).items() if count} == {
        "published": 8,
        "handled": 6,
        "dead_as_asked": 1,
        "expired": 1,
        "topic": 1,
        "heard": 1,
        "unknown": 4,
        "unknown_committed": 2,
        "undone": 1,
    }


def test_a_late_handler_may_run_twice_and_is_counted() -> None:
    """At least once: the consumer may have died before the ack."""
    verdict = close([*HANDLED, HANDLED[0]], ITEMS)
    assert (verdict.figures["duplicates"], verdict.problems) == (1, [])


@pytest.mark.parametrize(
    ("handled", "items", "problem"),
    [
        pytest.param(HANDLED[1:], ITEMS, "lost: 1 (a1)", id="lost"),
        pytest.param(HANDLED, ITEMS[1:], "lost: 1 (b)", id="a lost dead letter"),
        pytest.param(HANDLED, ITEMS[:1], "lost: 1 (c)", id="gone though nothing says that it expired"),
        pytest.param(HANDLED[1:], [*ITEMS, Item(1, "a1", "late", "late", False)], "stuck: 1 (a1)", id="stuck"),
        pytest.param(HANDLED[1:], [*ITEMS, Item(1, "a1", "late", None, False)], "stuck: 1 (a1)", id="still an orphan"),
        pytest.param(
            HANDLED, [*ITEMS, Item(1, "a1", "late", "late", False)], "stuck: 1 (a1)", id="handled, never settled"
        ),
        pytest.param([*HANDLED, Handled(9, "f", "late")], ITEMS, "phantom: 1 (f)", id="rolled back"),
        pytest.param([*HANDLED, Handled(9, "x", "late")], ITEMS, "phantom: 1 (x)", id="from nowhere"),
        pytest.param([*HANDLED[:3], *HANDLED[4:]], ITEMS, "torn: 1 (e2)", id="half of a transaction"),
        pytest.param(
            [*HANDLED[:3], *HANDLED[4:], Handled(6, "e2", "late", at=10.9)], ITEMS, "early: 1 (e2)", id="early"
        ),
        pytest.param([Handled(2, "a1", "late"), *HANDLED[1:]], ITEMS, "mistaken: 1 (a1)", id="another id"),
        pytest.param([*HANDLED, HANDLED[1]], ITEMS, "duplicates_atomic: 1 (a2)", id="atomic twice"),
        pytest.param(
            HANDLED, [*ITEMS, Item(2, "a2", "atomic", "atomic.dead", True)], "duplicates_atomic: 1 (a2)", id="and dead"
        ),
        pytest.param(HANDLED[:5], ITEMS, "lost: 1 (copy 8)", id="lost for one of the bound queues"),
        pytest.param([*HANDLED[:5], Handled(9, "t", "bound.auto"), HANDLED[5]], ITEMS, "mistaken: 1 (t)", id="a copy"),
        pytest.param(
            HANDLED[:5], [*ITEMS, Item(8, "t", "bound.auto", None, False)], "stuck: 1 (t@bound.auto)", id="copy"
        ),
    ],
)
def test_the_ledger_notices(handled: list[Handled], items: list[Item], problem: str) -> None:
    """A message deleted by SQL, kept for ever, made up, torn from its transaction, given too early or twice."""
    verdict = close(handled, items)
    assert len(verdict.problems) == 1
    assert verdict.problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("heard", "problem"),
    [
        pytest.param([*HEARD, HEARD[0]], "heard_twice: 1 (t)", id="twice by one subscriber"),
        pytest.param([*HEARD, (100, "f")], "phantom: 1 (f)", id="rolled back"),
    ],
)
def test_the_ledger_notices_live_messages(heard: list[tuple[int, str]], problem: str) -> None:
    """A live subscriber gets a message once at the most, and nothing that was rolled back; it may miss some."""
    assert close(HANDLED, ITEMS, heard).problems == [problem]
    assert close(HANDLED, ITEMS, []).problems == []


def test_the_ledger_notices_a_topic_that_lost_its_bindings() -> None:
    """Nobody got a copy of what was published."""
    ledger = Ledger(bound=["bound", "bound.auto"])
    for note in NOTES[-2:]:
        ledger.read("publisher0-1", {**note, "ids": []})
    assert ledger.close(Remains()).problems[0] == "lost: 1 (t@bound)"


# --- The clock ---

CLOCK = """
import json, sys, time
from tests.chaos import clock
before = time.time(), time.monotonic()
clock.shift(float(sys.argv[1]))
import datetime
import psycopg
from django.conf import settings
from django.utils import timezone
settings.configure(USE_TZ=True)
shifted = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
assert type(shifted) is type(timezone.now()) and isinstance(shifted, datetime.datetime)
assert psycopg.sql.Literal(shifted).as_string(None).startswith("'2026-01-02")
print(json.dumps({
    "time": time.time() - before[0],
    "time_ns": time.time_ns() / 1e9 - before[0],
    "now": datetime.datetime.now().timestamp() - before[0],
    "utc": datetime.datetime.now(datetime.UTC).timestamp() - before[0],
    "django": timezone.now().timestamp() - before[0],
    "monotonic": time.monotonic() - before[1],
}))
"""


@pytest.mark.parametrize("shift", [86_400.0, -600.0])
def test_a_shifted_clock_is_wrong_for_everything_but_monotonic_time(shift: float) -> None:
    """Python's and Django's ideas of the time of day are off by so much; elapsed time is not."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CLOCK, str(shift)], cwd=ROOT, capture_output=True, check=True)
    took = time.monotonic() - started
    found = json.loads(done.stdout)
    assert 0 <= found.pop("monotonic") <= took
    assert all(shift - 0.01 <= seconds <= shift + took for seconds in found.values()), found
