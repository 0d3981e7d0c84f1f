"""A run's result, as JSON for the record and as text for people."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from example_project.demo.ledger import Verdict
from example_project.demo.report import table
from tests.chaos.run import Result

#: The figures of the ledger that are told, with remarks.
COUNTS = {
    "published": "confirmed, or found where the outcome was unknown",
    "handled": "",
    "dead_as_asked": "rejected by their handlers, as their publishers asked",
    "dead_otherwise": "set aside after too many deliveries that faults ended",
    "expired": "had a TTL of a second",
    "duplicates": "handled again, where the ack came after the handler (at least once)",
    "topic": "published to the topic; their copies on bound queues are among the above",
    "heard": "of these, heard by a live subscriber (at most once)",
    "unknown": "the connection broke, or the publisher was killed, during the publish",
    "unknown_committed": "of these, found",
    "undone": "rolled back on purpose, or refused",
    "refused": "of these, refused: the standing queue's row had just been deleted",
    "lost": "confirmed, and nowhere",
    "stuck": "still there after the leases",
    "phantom": "there or handled, and never published or rolled back",
    "duplicates_atomic": "handled again or left, where the ack commits with the handler (exactly once)",
    "torn": "missing of a transaction of which the rest is there",
    "early": "handled before their delay was over",
    "mistaken": "stored under another id than the publisher was told",
    "heard_twice": "",
}


def as_json(result: Result) -> dict[str, Any]:
    """Return all there is to know of a run."""
    problems = result.all_problems()
    return {
        "seed": result.plan.seed,
        "asked_seconds": result.plan.seconds,
        "seconds": round(result.seconds, 1),
        "seconds_until_drained": round(result.drained, 1),
        "versions": result.versions,
        "left_out": left_out(result),
        "counts": counts(result.verdict),
        "faults": len(result.injected),
        "recovered": sum(one.recovery is not None for one in result.injected),
        "recovery_by_kind": recovery(result),
        "problems": problems,
        "ok": not problems,
        "schedule": [
            {
                **asdict(one.fault),
                "at": round(one.at, 2),
                "done": one.done,
                "recovery": None if one.recovery is None else round(one.recovery, 3),
            }
            for one in result.injected
        ],
    }


def counts(verdict: Verdict) -> dict[str, int]:
    """Return the figures by name."""
    return {name: verdict.figures[name] for name in COUNTS}


def recovery(result: Result) -> dict[str, dict[str, Any]]:
    """Return for each kind of fault how often it was injected, and the seconds until it was over."""
    found: dict[str, dict[str, Any]] = {}
    for kind in result.plan.kinds:
        all_of_kind = [one.recovery for one in result.injected if one.fault.kind == kind]
        times = [seconds for seconds in all_of_kind if seconds is not None]
        found[kind] = {
            "injected": len(all_of_kind),
            "recovered": len(times),
            "median": round(median(times), 3) if times else None,
            "max": round(max(times), 3) if times else None,
        }
    return found


def left_out(result: Result) -> list[str]:
    """Return what could not be part of the run."""
    return [] if result.plan.has_pooler else ["PgBouncer, its processes and its restart: there is no binary"]


def as_text(result: Result) -> str:
    """Return the ledger and the recovery times."""
    lines = table(result.verdict, [(name, name, remark) for name, remark in COUNTS.items()])
    lines += ["", f"{'fault':22}{'injected':>10}{'recovered':>11}{'median s':>10}{'max s':>8}"]
    for kind, row in recovery(result).items():
        times = "".join(
            f"{'-' if row[key] is None else format(row[key], '.2f'):>{width}}"
            for key, width in (("median", 10), ("max", 8))
        )
        lines.append(f"{kind:22}{row['injected']:>10}{row['recovered']:>11}{times}")
    lines += ["", f"seed {result.plan.seed}, {result.seconds:.0f} s, drained after {result.drained:.0f} s"]
    lines += [f"LEFT OUT: {what}" for what in left_out(result)]
    problems = result.all_problems()
    lines += [f"PROBLEM: {problem}" for problem in problems] or ["The ledger balances."]
    return "\n".join(lines)
