"""The demo's ledger finds what it is there to find."""

from typing import Any

import pytest

from example_project.demo.ledger import Item, Remains, Verdict
from example_project.demo.report import LINES, as_text
from example_project.demo.run import SETTINGS
from example_project.demo.strict import StrictLedger, percentile

NOW = 1_000.0
STANDING, AUTO_DELETED = "demo.standing", "demo.visited"
LEASE = SETTINGS["LEASE"]

Note = tuple[str, dict[str, Any]]


def note(source: str, what: str, **details: Any) -> Note:
    return source, {"note": what, "at": NOW - 10, **details}


def trying(*ids: int) -> Note:
    keys = [str(one) for one in ids]
    return note("publisher0-1", "trying", keys=keys, delay=0, fates=["handle"] * len(ids), topic=False)


def published(*ids: int, expires_at: float | None = None, marked: bool = False) -> list[Note]:
    keys, expires = [str(one) for one in ids], [expires_at] * len(ids)
    done = note("publisher0-1", "committed", keys=keys, ids=list(ids), expires=expires, marked=marked)
    return [trying(*ids), done]


def started(message_id: int, delivery: int = 1, source: str = "consumer-2", **details: Any) -> Note:
    return note(
        source,
        "started",
        **{
            "id": message_id,
            "key": str(message_id),
            "queue": STANDING,
            "delivery": delivery,
            "atomic": False,
            **details,
        },
    )


def delivered(
    message_id: int, delivery: int = 1, source: str = "consumer-2", after: float = 0, *, atomic: bool = False
) -> list[Note]:
    begun = started(message_id, delivery, source, at=NOW - 10 + after, atomic=atomic)
    return [begun, (source, {**begun[1], "note": "handled"})]


def good_run() -> list[Note]:
    """
    Return the notes of a run in which all went well.

    1 to 3 are handled, 2 atomically, 4 expired, 5 is dead, 6 was rolled back; a queue was deleted and one reaped, and
    both came back.
    """
    return [
        *published(1, 2, marked=True),
        *published(3, 5),
        *published(4, expires_at=NOW - 5),
        trying(6),
        note("publisher0-1", "undone", keys=["6"], refused=False),
        *delivered(1),
        *delivered(2, atomic=True),
        *delivered(3),
        started(5),
        note("reaper-3", "expired", queue=AUTO_DELETED, count=1),
        note("faults-4", "deleted", queue=AUTO_DELETED, orphans=2),
        note("reaper-3", "reaped", queue=AUTO_DELETED),
        note("reaper-3", "reaped", queue=f"{AUTO_DELETED}.dead"),
        note("publisher0-1", "made", queue=AUTO_DELETED),
        note("consumer-2", "made", queue=AUTO_DELETED),
        note("consumer-2", "adopted", queue=AUTO_DELETED, count=2),
        note("consumer-2", "woken", seconds=0.002),
    ]


GOOD_MARKS = ((1, "published"), (2, "published"), (2, "handled"))


def item(message_id: int, place: str | None = STANDING, *, is_dead: bool = False) -> Item:
    return Item(message_id, str(message_id), STANDING, place, is_dead)


def close(notes: list[Note], killed: str = "", dead: tuple[int, ...] = (5,), **remains: Any) -> Verdict:
    ledger = StrictLedger({AUTO_DELETED}, LEASE)
    ledger.killed = {killed} if killed else set()
    for source, details in notes:
        ledger.read(source, details)
    items = [item(one, "letters", is_dead=True) for one in dead] + remains.pop("left", [])
    return ledger.close(Remains(items, **{"marks": GOOD_MARKS, "at": NOW, **remains}))


def without(what: str, **details: Any) -> list[Note]:
    """Return the good run without the notes that match."""
    return [
        (source, noted)
        for source, noted in good_run()
        if noted["note"] != what or any(noted[key] != value for key, value in details.items())
    ]


def test_a_good_run_balances():
    """Each message has one end, and the figures add up."""
    verdict = close(good_run())
    assert verdict.problems == []
    figures = verdict.figures
    assert figures["published"] == 5
    assert (figures["handled"], figures["expired"], figures["dead"]) == (3, 1, 1)
    assert (figures["lost"], figures["orphaned"], figures["redelivered"]) == (0, 0, 0)
    assert (figures["queues_deleted"], figures["queues_reaped"], figures["healed"], figures["adopted"]) == (1, 1, 2, 2)
    assert "The ledger balances." in as_text(verdict)


def test_a_message_that_nobody_handled_is_lost():
    """The notes of one message's handling removed: it is lost, and the run fails."""
    verdict = close(without("handled", id=3))
    assert verdict.figures["lost"] == 1
    assert verdict.problems[0] == "lost: 1 (3)"
    assert "The ledger does not balance." in as_text(verdict)


def test_an_expired_message_that_the_reaper_does_not_know_is_lost():
    """What is gone after its time is expired only as far as the reaper says so."""
    verdict = close(without("expired"))
    assert (verdict.figures["expired"], verdict.figures["lost"]) == (0, 1)
    assert verdict.problems


@pytest.mark.parametrize("what", ["orphaned", "waiting"])
def test_a_message_that_is_left_over_is_told(what: str):
    """A message that is still there at the end is not lost, but the run has failed."""
    verdict = close(without("handled", id=3), left=[item(3, None if what == "orphaned" else STANDING)])
    assert (verdict.figures[what], verdict.figures["lost"]) == (1, 0)
    assert verdict.problems == ["stuck: 1 (3)"]


def test_handled_twice_needs_a_reason():
    """A second handling is at-least-once delivery after a kill or a lost lease, and a fault otherwise."""
    twice = [*good_run(), *delivered(3, delivery=2, source="consumer-9", after=LEASE)]
    assert close(twice, killed="consumer-2").problems == []
    assert close(twice, killed="consumer-2").figures["handled_twice"] == 1
    assert close([*twice, note("consumer-2", "lease_lost", ids=[3])]).problems == []
    assert close(twice).problems == ["handled twice without a lost lease: 1 (3)"]


def test_an_atomic_handling_counts_only_with_its_write():
    """The handler noted its end, and what it wrote is not there: the message was not handled."""
    verdict = close(good_run(), marks=((1, "published"), (2, "published")))
    assert (verdict.figures["handled"], verdict.figures["lost"]) == (2, 1)


def test_handled_and_killed_before_the_ack_may_expire_to_a_dead_letter_queue():
    """Such a message was handled and is there all the same. Without the kill it is a fault."""
    dead = (3, 5)
    assert close(good_run(), killed="consumer-2", dead=dead).problems == []
    assert close(good_run(), dead=dead).problems == ["handled messages are still there: 1 (3)"]


def test_a_delivery_under_the_lease_of_another_is_a_problem():
    """Again within half a lease is too early, whoever was killed, unless the first one was given back."""
    early = [*good_run(), *delivered(3, delivery=2, source="consumer-9", after=LEASE / 4)]
    problem = "messages were delivered again under a live lease: 1 (3)"
    assert problem in close(early, killed="consumer-2").problems
    assert close([*early, note("consumer-2", "failed", id=3)]).problems == []


@pytest.mark.parametrize(
    ("notes", "remains", "problem"),
    [
        (delivered(6), {}, "phantom: 1 (6)"),
        (delivered(7), {}, "phantom: 1 (7)"),
        (delivered(3), {}, "one delivery was handled twice: 1 ((3, 1))"),
        (
            [],
            {"marks": (*GOOD_MARKS, (2, "handled"))},
            "duplicates_atomic: 1 (2)",
        ),
        (
            [],
            {"marks": ((1, "published"),)},
            "a publish and the write beside it did not commit together: 1 (2)",
        ),
        ([], {"missing_queues": 1}, "queues removed: 2, created again: 2, missing: 1"),
        (
            [note("consumer-2", "made", queue=STANDING)],
            {},
            "standing queues vanished: 1 (demo.standing)",
        ),
        (
            [note("reaper-3", "expired", queue=AUTO_DELETED, count=1)],
            {},
            "the reaper expired 2 messages, only 1 had reached their TTL",
        ),
        ([note("publisher0-1", "undone", keys=["6"], refused=True)], {}, "publishes were refused"),
        ([trying(8), trying(8, 9), *delivered(8)], {}, "torn: 1 (9)"),
    ],
)
def test_what_is_not_promised_is_a_problem(notes: list[Note], remains: dict[str, Any], problem: str):
    """Whatever happened that must not is told in words, with some ids."""
    assert problem in close([*good_run(), *notes], **remains).problems


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("deleted", "not exercised: no queue was deleted by hand"),
        ("reaped", "not exercised: no queue was reaped"),
        ("made", "not exercised: no publisher healed a queue"),
        ("adopted", "not exercised: no orphan was adopted"),
    ],
)
def test_a_run_that_did_not_exercise_what_it_is_for_fails(what: str, problem: str):
    """A run without deletion, reaping, healing or adoption proves nothing."""
    assert problem in close(without(what)).problems


def test_percentiles():
    """In milliseconds, of what was measured; None of nothing."""
    assert percentile([], 0.5) is None
    assert percentile([0.001 * number for number in range(1, 101)], 0.99) == 100.0
    assert percentile([0.002], 0.5) == 2.0


def test_each_line_of_the_report_has_a_label_and_an_explanation() -> None:
    """Words, both of them; a label stands once."""
    labels = [label.strip() for _, label, _ in LINES]
    assert len(labels) > 20 and len(set(labels)) == len(labels)
    for label, (_, _, explanation) in zip(labels, LINES, strict=True):
        assert label[:1].isalpha() and (label == "published" or len(explanation.split()) > 1), (label, explanation)
