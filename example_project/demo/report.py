"""What people see of a run: a bar while it runs, the ledger at its end."""

import sys
from collections.abc import Iterable
from typing import Any

from example_project.demo.ledger import Verdict
from example_project.demo.strict import StrictLedger

LINES = (
    ("published", "published", ""),
    ("handled", "  handled", "their handler succeeded"),
    ("expired", "  expired", "their TTL had passed; the reaper reports the same number"),
    ("dead", "  dead", "rejected; they are in dead-letter queues"),
    ("orphaned", "  orphaned", "without a queue at the end"),
    ("waiting", "  waiting", "still on a queue at the end"),
    ("lost", "  lost", "unaccounted for"),
    ("rolled_back", "rolled back", "published in transactions that were rolled back; none was delivered"),
    ("redelivered", "redelivered", "delivered more than once: returned, failed, or their consumer was killed"),
    ("handled_twice", "handled twice", "among these: the consumer was killed before the ack, or it lost the lease"),
    ("queues_deleted", "queues deleted", "by hand, while they were in use"),
    ("orphans_made", "  orphans made", "messages that lost their queue in this way"),
    (
        "adopted",
        "  orphans adopted",
        "messages that returned to their queue; the others were being handled, or expired",
    ),
    ("queues_reaped", "queues reaped", "idle for a second and empty"),
    ("healed", "healed", "queues that were created again when they were needed"),
    ("healed_by_publishers", "  by publishers", "during a publish"),
    ("consumers_killed", "consumers killed", "by SIGKILL, while they held messages"),
    ("leases_lost", "leases lost", "messages whose consumer was too slow for its lease"),
    ("seconds", "seconds", "from the first publish to the last handled message"),
    ("throughput", "messages/s", "handled, with publishing and reaping on the same machine"),
    (
        "wakeup_p50_ms",
        "wake-up p50 ms",
        "from the call of publish() to the start of the handler, with all queues at rest",
    ),
    ("wakeup_p99_ms", "wake-up p99 ms", "  measured with one probe at a time, after the load"),
    ("busy_wakeup_p50_ms", "  busy p50 ms", "the same under load: the queue of the probe is empty,"),
    (
        "busy_wakeup_p99_ms",
        "  busy p99 ms",
        "  but its consumers also handle all other messages, and one of them is killed",
    ),
)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the figures by name, and what is wrong."""
    return {**{key: verdict.figures[key] for key, _, _ in LINES}, "problems": verdict.problems}


def as_text(verdict: Verdict) -> str:
    """Return the ledger as text."""
    end = "The ledger balances." if not verdict.problems else "The ledger does not balance."
    return "\n".join([*table(verdict, LINES), "", end])


def table(verdict: Verdict, lines: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each figure: its label, its value and a remark."""
    return [f"{label:20}{shown(verdict.figures[key]):>10}  {remark}".rstrip() for key, label, remark in lines]


def shown(value: Any) -> str:
    """Return a figure as text."""
    return "-" if value is None else str(value)


class Bar:
    """A progress bar on standard error, where that is a terminal and tqdm is installed; else nothing."""

    def __init__(self, messages: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=messages, unit="msg", desc="handled", file=sys.stderr, dynamic_ncols=True)

    def show(self, ledger: StrictLedger) -> None:
        """Show the state of a run."""
        if self._bar is None:
            return
        told = {name: ledger.tally[name] for name in ("healed", "queues_reaped", "queues_deleted", "adopted")}
        self._bar.set_postfix({"published": len(ledger.published), **told}, refresh=False)
        self._bar.update(len(ledger.handled) - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
