"""What a run consists of, and its schedule of faults. All of it follows from the seed and from what is there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from example_project.demo.processes import Role

LEASE = 3.0
SETTINGS = {
    "LEASE": LEASE,
    "HEARTBEAT_INTERVAL": 1,
    "POLL_INTERVAL": 1,
    "DECLARE_TTL": 1,
    # Three times the two above: a queue that nobody could use for that long during a fault is reaped.
    "REAP_IDLE_AFTER": 3,
    "BACKOFF": {"base": 0.2, "factor": 2, "max": 2, "jitter": 0.1},
}
REAP_INTERVAL = 1.0

LATE, ATOMIC = "chaos.late", "chaos.atomic"
AUTO, AUTO_ATOMIC = "chaos.auto", "chaos.auto.atomic"
# Only processes behind PgBouncer use it, so that nobody else can hide that these do not recover.
POOLED = "chaos.pooled"
# What expires there goes to a dead-letter queue, where the ledger finds it.
BRIEF, BRIEF_TTL, EXPIRED = "chaos.brief", 1.0, "chaos.brief.expired"
STEADY = (LATE, ATOMIC, AUTO, AUTO_ATOMIC)
# Each of these gets a copy of what is published to the topic; its live subscribers note it under LIVE.
TOPIC, BOUND = "chaos.topic", ("chaos.bound", "chaos.bound.auto")
LIVE = "live"

# Seconds between the recovery from one fault and the next fault.
GAP = (0.3, 1.5)
# Seconds for which a session is idle in its transaction, in runs of LONG seconds and in shorter ones.
LONG, IDLE_LONG, IDLE_SHORT = 300.0, 60.0, 8.0
# A clock is wrong by so many seconds.
SHIFTS = (-86_400.0, -600.0, -60.0, 60.0, 600.0, 86_400.0)


def roles(*, has_pooler: bool) -> list[Role]:
    """Return the processes of a run."""
    consume = ("--prefetch", "10", "--grace", "5")
    found = [
        Role("publisher0", "tests.chaos.publisher", (*STEADY, BRIEF)),
        Role("publisher1", "tests.chaos.publisher", (*STEADY, BRIEF)),
        Role("consumer0", "consume_queues", (*STEADY, *BOUND, BRIEF, *consume)),
        Role("consumer1", "consume_queues", (*STEADY, *BOUND, BRIEF, *consume)),
        Role("subscriber0", "tests.chaos.subscriber"),
        Role("subscriber1", "tests.chaos.subscriber", is_pooled=has_pooler),
        Role("reaper0", "reap_queues", ("--interval", str(REAP_INTERVAL))),
    ]
    if has_pooler:
        found += [
            Role("publisher2", "tests.chaos.publisher", (POOLED, POOLED, *STEADY), is_pooled=True),
            Role("publisher3", "tests.chaos.publisher", (POOLED, ATOMIC), is_pooled=True),
            Role("consumer2", "consume_queues", (POOLED, ATOMIC, AUTO, *consume), is_pooled=True),
            Role("consumer3", "consume_queues", (POOLED, *consume), is_pooled=True),
        ]
    return found


@dataclass(frozen=True)
class Fault:
    """A fault to be injected ``gap`` seconds after the one before is over."""

    kind: str
    gap: float
    details: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A run's plan."""

    seed: int
    seconds: float
    has_pooler: bool

    @property
    def roles(self) -> list[Role]:
        return roles(has_pooler=self.has_pooler)

    @property
    def queues(self) -> list[str]:
        """The queues whose rows are deleted, and on which messages have to be handled again before a fault is over."""
        return [*STEADY, *BOUND, *([POOLED] if self.has_pooler else [])]

    @property
    def places(self) -> list[str]:
        """Where messages arrive: the queues, and the live subscribers."""
        return [*self.queues, LIVE]

    @property
    def kinds(self) -> list[str]:
        """The kinds of faults that can be injected here."""
        return [kind for kind in DETAILS if self.has_pooler or kind != "restart_pgbouncer"]

    def schedule(self) -> Iterator[Fault]:
        """Yield faults without end: each kind once in random order, then any."""
        # By text, whose hash is the same in every process and Python.
        rng = random.Random(f"chaos {self.seed}")
        first = self.kinds
        rng.shuffle(first)
        for number in count():
            kind = first[number] if number < len(first) else rng.choice(self.kinds)
            gap = round(rng.uniform(*GAP), 2)
            yield Fault(kind, gap, DETAILS[kind](rng, self))

    def names(self, *kinds: str) -> list[str]:
        return [role.name for role in self.roles if role.kind in kinds]


def _restart(rng: random.Random, plan: Plan) -> dict[str, Any]:
    return {"down": round(rng.uniform(0, 1.5), 2)}


def _sessions(rng: random.Random, plan: Plan) -> dict[str, Any]:
    return {"share": round(rng.uniform(0.2, 1), 2), "seed": rng.randrange(2**32)}


def _workers(rng: random.Random, plan: Plan) -> list[str]:
    """Return one consumer (each queue has another one), and now and then somebody else too."""
    others = [rng.choice(plan.names("publisher", "subscriber", "reaper"))] if rng.random() < 0.5 else []
    return [rng.choice(plan.names("consumer")), *others]


def _kill(rng: random.Random, plan: Plan) -> dict[str, Any]:
    return {"workers": _workers(rng, plan), "down": round(rng.uniform(0, 1), 2)}


def _stop(rng: random.Random, plan: Plan) -> dict[str, Any]:
    return {"workers": _workers(rng, plan), "seconds": round(rng.uniform(LEASE + 0.5, 2 * LEASE), 2)}


def _delete_queues(rng: random.Random, plan: Plan) -> dict[str, Any]:
    # A bound one each time: its bindings have to come back as well.
    return {"queues": [rng.choice(BOUND), rng.choice([name for name in plan.queues if name not in BOUND])]}


def _shift_clock(rng: random.Random, plan: Plan) -> dict[str, Any]:
    victims = [rng.choice(plan.names(kind)) for kind in ("publisher", "consumer", "subscriber", "reaper")]
    return {"shifts": {name: rng.choice(SHIFTS) for name in victims}}


def _idle(rng: random.Random, plan: Plan) -> dict[str, Any]:
    return {
        "queue": rng.choice(STEADY),
        "seconds": IDLE_LONG if plan.seconds >= LONG else IDLE_SHORT,
        "commits": rng.random() < 0.5,
    }


#: Each kind of fault, with what decides its details.
DETAILS: dict[str, Callable[[random.Random, Plan], dict[str, Any]]] = {
    "restart_fast": _restart,
    "restart_immediate": _restart,
    "terminate_sessions": _sessions,
    "kill_workers": _kill,
    "stop_workers": _stop,
    "restart_pgbouncer": _restart,
    "delete_queues": _delete_queues,
    "shift_clocks": _shift_clock,
    "idle_in_transaction": _idle,
}
