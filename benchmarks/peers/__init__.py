"""
How does it compare with other queues? Publishing, draining, waking up, a held snapshot, a killed worker.

The other queues run on the same server as ours, in turns, each in its own database and with the versions that
``benchmarks/peers/requirements/`` pins. Each is a separate program in ``benchmarks/peers/`` (``run_NAME``) that uses
the queue as its documentation shows, and speaks a small protocol (``wire.py``). ``catalog.py`` contains the settings
and the guarantees of each; the notes below the table repeat them. ``--only celery`` measures only queues with that word
in their names, and ours, including those that the quick form leaves out.

The same rules apply to all queues:

* Every handler does nothing, but receives the payload as an object. For queues that return bytes, the handler decodes
  them.
* Publishing one by one: each publish commits before the next one starts. In bulk: the queue's own method for many
  messages, with 1,000 in each call; queues without one publish 1,000 messages in a transaction.
* Before a drain, the queue is filled with 20,000 messages, and the database is vacuumed and analysed. The workers count
  messages a second from the moment when the last of them has its first message, so the start does not count. A slow
  drain is stopped after some seconds. Four workers of a fast queue get 60,000 messages; otherwise the drain would be
  over before all of them run.
* Wake-up: from the return of a publish to the start of the handler in an idle worker, at random times.
* Beside a held snapshot: another session of the same database keeps a REPEATABLE READ transaction open in which it ran
  ``SELECT 1``. The drain is divided into three parts of equal time.
* A killed worker: twenty messages are published to a worker whose handler never returns. A second worker takes the
  messages that the first does not hold. Then the first gets SIGKILL. The time runs until all messages that it held run
  again, through the queue's own mechanism, set to about 30 seconds if possible, for at most 90 seconds.
* There is one row for the usual settings, and one for the best settings in the queue's documentation if they differ.
  Figures that do not depend on the settings are in the first row, and the drain beside a snapshot is in the last.

This is the setup of each queue:

* **raw psycopg**: a table like ours; INSERT, COPY, and a loop of LISTEN, claim and delete on one connection.
* **django_pgqueue**: the defaults, with ``consume_queues`` on one queue, and handlers for one message and for batches
  of 100, acked late (the default) and in the handler's transaction. One-by-one publishing is also measured with
  Django's options for prepared statements, which Django does not use by default.
* **pgqueuer**: on asyncpg, under uvloop as with its command line; logged tables, with the autovacuum settings of
  ``pgq autovac``; batch_size 10 (the default) and 100; the entrypoint is a coroutine.
* **procrastinate**: publishing through its synchronous connector; the task is a coroutine; concurrency 1 with finished
  jobs kept (the defaults), and concurrency 10 with finished jobs deleted.
* **django-tasks-db**: on Django 5.2; ``db_worker`` unchanged, but without its random delay at the start and its log
  lines for each task. None of its settings makes a drain faster; for wake-ups its interval is 1 s (the default) and
  0.1 s.
* **pgmq**: its SQL and its Python client; a plain loop of read and delete, on a connection in autocommit.
* **Celery**: on Redis without persistence, acked early (the default), and on Redis with fsync on every write, acked
  late; in bulk with one pipeline of a producer.
* **pg-boss**, **graphile-worker**: on Node.js, with tasks that are async functions; the rows name the settings for
  batches, notifications and the local queue.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Report, Spread, Target, percentile, ratio
from benchmarks.peers import measuring
from benchmarks.peers.catalog import OURS, PEERS, PGQUEUER, Peer
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.measuring import Rate, Recovery
from benchmarks.peers.running import Contender
from django_pgqueue.devdb import DevCluster

# Each peer's publishers and workers have connections.
SERVER_OPTIONS = {"max_connections": "300"}

# The table's, of which each row has some.
COLUMNS = (
    "one by one/s",
    "in bulk/s",
    "drained/s, 1 process",
    "drained/s, 4 processes",
    "wake-up p50 ms",
    "wake-up p99 ms",
    *(f"drained/s beside a snapshot, part {part}" for part in range(1, measuring.PARTS + 1)),
    "killed: s until all ran again",
    "stuck",
    "lost",
)


@dataclass(frozen=True)
class Plan:
    """How much is done. Four workers, snapshots and wake-ups have fewer rounds: nothing of theirs is judged."""

    rounds: int
    depth: int
    fast_depth: int  # for four workers, where one makes as many a second as ``depth``
    publishing: float  # seconds
    cap: float  # seconds of a drain
    snapshots: int  # rounds
    snapshot_depth: int
    snapshot_cap: float
    wake_ups: tuple[int, int]  # rounds, and messages in each
    patience: float


FULL = Plan(5, 20_000, 60_000, 1.0, 2.0, 2, 120_000, 9.0, (3, 33), measuring.WAIT_TIMEOUT)
QUICK = Plan(1, 2_000, 2_000, 0.2, 0.5, 1, 2_000, 0.5, (1, 3), 1.0)


@dataclass
class Found:
    """What was measured of a peer, by its settings where they matter."""

    contender: Contender
    one: dict[str, list[float]] = field(default_factory=dict)
    many: list[float] = field(default_factory=list)
    drains: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    delays: dict[str, list[float]] = field(default_factory=dict)
    beside_snapshot: list[list[float]] = field(default_factory=list)
    recovery: Recovery | None = None

    @property
    def peer(self) -> Peer:
        return self.contender.peer

    @property
    def best_drains(self) -> list[float]:
        """Return one process's rates with those settings with which it was fastest."""
        return max((rates for (_, processes), rates in self.drains.items() if processes == 1), key=median)


def run(cluster: DevCluster, *, quick: bool, only: str = "") -> Report:
    """Measure all peers, in turn; or those with ``only`` in their names, and ours."""
    plan = QUICK if quick else FULL
    report = Report("peers", "how does it compare with other queues?", plan.rounds)
    commands, missing = installed(chosen(quick=quick, only=only))
    if missing and not quick:
        raise Unavailable("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        all_found = [
            Found(stack.enter_context(Contender.opened(peer, command, cluster.url, folder)))
            for peer, command in commands
        ]
        in_turn(plan.rounds, (publish, drain), all_found, plan)
        in_turn(plan.snapshots, (drain_beside_snapshot,), all_found, plan)
        in_turn(plan.wake_ups[0], (wake_up,), all_found, plan)
        # Side by side: they mostly wait.
        with ThreadPoolExecutor(len(all_found)) as pool:
            list(pool.map(recover, all_found, [plan] * len(all_found)))
    for found in all_found:
        report.rows += rows(found)
        report.notes[found.peer.name] = f"{found.peer.guarantees} Recovery: {found.peer.recovery}"
    report.notes |= {name: f"not installed: {reason}" for name, reason in missing.items()}
    report.targets += targets({found.peer.name: found for found in all_found})
    return report


def chosen(*, quick: bool, only: str) -> list[Peer]:
    if not only:
        return [peer for peer in PEERS if peer.quick or not quick]
    found = [peer for peer in PEERS if only.casefold() in peer.name.casefold()]
    if not found:
        sys.exit(f"no peer has {only} in its name; there are {', '.join(peer.name for peer in PEERS)}")
    return [OURS, *(peer for peer in found if peer is not OURS)]


def installed(peers: Sequence[Peer]) -> tuple[list[tuple[Peer, list[str]]], dict[str, str]]:
    """Return the commands that run the peers' programs, and why there is none for others."""
    commands, missing = [], {}
    with ThreadPoolExecutor(len(peers)) as pool:
        for peer, future in [(peer, pool.submit(peer.interpreter)) for peer in peers]:
            try:
                commands.append((peer, future.result()))
            except Unavailable as error:
                missing[peer.name] = str(error)
    return commands, missing


# --- A round --------------------------------------------------------------------------------------

Step = Callable[[Found, Plan, int], None]


def in_turn(rounds: int, steps: Sequence[Step], all_found: Sequence[Found], plan: Plan) -> None:
    for number in range(rounds):
        for step in steps:
            for found in all_found:
                step(found, plan, number)


def publish(found: Found, plan: Plan, _number: int) -> None:
    for way in found.peer.publishing:
        rate = measuring.publish_one_by_one(found.contender, way, plan.publishing)
        found.one.setdefault(way, []).append(rate)


def drain(found: Found, plan: Plan, number: int) -> None:
    """Drain with each of its settings. What fills its queue is what it publishes in bulk."""
    published = Rate(0, 0)
    for way, processes in drains(found.peer, several=number % 2 == 0):
        published += fill(found.contender, depth(found, plan, way, processes))
        course = measuring.drain(found.contender, found.peer.working[way], processes, plan.cap)
        found.drains.setdefault((way, processes), []).append(course.rates()[0])
    found.many.append(published.per_second)


def drain_beside_snapshot(found: Found, plan: Plan, _number: int) -> None:
    """Drain, with its best settings, as much as it can in that time, up to a bound."""
    contender = found.contender
    if found.peer.on_postgresql:
        wanted = int(median(found.drains[contender.best, 1]) * plan.snapshot_cap)
        fill(contender, max(plan.depth, min(wanted, plan.snapshot_depth)))
        settings = found.peer.working[contender.best]
        found.beside_snapshot.append(measuring.drain_beside_snapshot(contender, settings, plan.snapshot_cap))


def wake_up(found: Found, plan: Plan, _number: int) -> None:
    found.contender.publisher().ask("clear")
    ways = found.peer.waking or dict([next(iter(found.peer.working.items()))])
    for way, settings in ways.items():
        delays = measuring.wake_up(found.contender, settings, plan.wake_ups[1], found.peer.polls.get(way, 0))
        found.delays.setdefault(way, []).extend(delays)


def recover(found: Found, plan: Plan) -> None:
    settings = {**found.contender.ordinary, **found.peer.recovery_settings}
    found.recovery = measuring.recover(found.contender, settings, plan.patience)


def drains(peer: Peer, *, several: bool) -> Iterator[tuple[str, int]]:
    """Yield settings and numbers of processes: four only with the ordinary and the best settings."""
    ways = list(peer.working)
    for way in ways:
        yield way, 1
        if several and way in (ways[0], ways[-1]):
            yield way, 4


def depth(found: Found, plan: Plan, way: str, processes: int) -> int:
    is_fast = processes > 1 and found.drains[way, 1][-1] > plan.depth
    return plan.fast_depth if is_fast else plan.depth


def fill(contender: Contender, depth: int) -> Rate:
    """Publish in bulk until so many are there, and some if they are there already."""
    return measuring.publish_many(contender, max(depth - measuring.left(contender), depth // 10))


# --- What was found -------------------------------------------------------------------------------


def rows(found: Found) -> list[dict[str, Any]]:
    """Return a row for each of a peer's settings; what does not depend on them stands in the first."""
    peer = found.peer
    ordinary, best = next(iter(peer.working)), list(peer.working)[-1]
    cells: dict[str, dict[str, Any]] = {way: {} for way in peer.working}
    for way, rates in found.one.items():
        cells.setdefault(way or ordinary, {})["one by one/s"] = Spread.of(rates)
    cells[ordinary]["in bulk/s"] = Spread.of(found.many)
    for (way, processes), rates in found.drains.items():
        cells[way][f"drained/s, {processes} process{'es' * (processes > 1)}"] = Spread.of(rates)
    for way, delays in found.delays.items():
        cells.setdefault(way, {}).update(
            {"wake-up p50 ms": percentile(delays, 50), "wake-up p99 ms": percentile(delays, 99)}
        )
    for part, rates in enumerate(zip(*found.beside_snapshot, strict=True), 1):
        cells[best][f"drained/s beside a snapshot, part {part}"] = Spread.of(rates)
    if found.recovery:
        cells[ordinary] |= recovered(found.recovery)
    return [
        {"way": f"{peer.name}, {way}" if way else peer.name, **dict.fromkeys(COLUMNS, ""), **of_way}
        for way, of_way in cells.items()
    ]


def recovered(recovery: Recovery) -> dict[str, Any]:
    never = f"not within {measuring.WAIT_TIMEOUT:.0f} s"
    return {
        "killed: s until all ran again": never if recovery.seconds is None else recovery.seconds,
        "stuck": recovery.stuck,
        "lost": recovery.lost,
    }


def targets(found: Mapping[str, Found]) -> Iterator[Target]:
    """Judge ours, by default settings and with handlers of batches, beside each peer's best."""
    ours = found[OURS.name]
    batches = ours.drains[list(OURS.working)[-1], 1]
    for peer in PEERS:
        if peer.name not in found:
            continue
        theirs = found[peer.name]
        measured = {
            "one": ("T9: published one by one", ours.one[""], max(theirs.one.values(), key=median)),
            "many": ("T9: published in bulk", ours.many, theirs.many),
            "drain": ("T9: drained by one process in batches of 100", batches, theirs.best_drains),
        }
        for measure, bound in peer.targets.items():
            what, values, baseline = measured[measure]
            yield Target(f"{what} / {peer.name}", ratio(values, baseline), ">=", bound)
    if PGQUEUER.name in found:
        yield Target("T5: published in bulk / pgqueuer", ratio(ours.many, found[PGQUEUER.name].many), ">=", 1.1)
