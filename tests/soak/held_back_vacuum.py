"""
Case B83: a transaction that is left open elsewhere, so that vacuum can clean nothing up.

`python -m tests.soak.held_back_vacuum --seconds 300`: 4 publishers offer 500 messages a second to 4
consumers, each a process, for so long; before that a fifth of it in quiet, after it up to two fifths to
recover in. The server is one of its own, with its own autovacuum as it comes.

Each claim walks over what was handled and cannot be removed yet: the claims get slower the longer it
lasts. The figures are those of the first and the last fifth of the time, which for 300 seconds are minutes.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from statistics import quantiles
from threading import Timer
from typing import Any

import psycopg

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.devdb import throwaway
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import claiming
from tests.soak import main
from tests.support.crew import crew
from tests.support.processes import run as run_command

# Also when this is run from the command line.
MODULE = "tests.soak.held_back_vacuum"

NAME = "q"
PROCESSES = 4
RATE = 500

# What must hold in the end: of the last fifth against the first.
MAX_SLOWER = 5
LEAST_THROUGHPUT = 0.6
# Seconds until claims are as fast again as in the quiet before (or twice that: machines vary).
MAX_RECOVERY = 120.0
AS_FAST = 2.0
# Claims that are faster than this many milliseconds are as fast as any, on a busy machine.
FAST = 10.0

# Seconds for consumers to handle what is left when the publishers have ended.
TAIL = 2.0

STATE = """
SELECT n_dead_tup, pg_relation_size(relid), pg_relation_size('django_pgqueue_item_claim_idx')
FROM pg_stat_user_tables
WHERE relname = 'django_pgqueue_messagequeueitem'
"""

# --- In the processes of the crews ----------------------------------------------------------------


def publish(number: int, seconds: float, rate: float) -> int:
    """Publish at this rate, and return how many it were."""
    queue = Queue(NAME)
    began = time.monotonic()
    published = 0
    while (elapsed := time.monotonic() - began) < seconds:
        # As many as are due by now: after a stall it catches up.
        while published < elapsed * rate:
            queue.publish({"number": number, "of": published})
            published += 1
        time.sleep(0.002)
    return published


def consume(number: int, seconds: float) -> dict[str, Any]:
    """Consume, and return when each claim was made and how long it took, and how many were handled when."""
    claims: list[tuple[float, float]] = []
    handled: Counter[int] = Counter()
    claim = claiming.claim

    def timed(*args: Any, **options: Any) -> claiming.Claim:
        began = time.perf_counter()
        try:
            return claim(*args, **options)
        finally:
            claims.append((round(time.time(), 3), round((time.perf_counter() - began) * 1000, 3)))

    def handle(message: Message) -> None:
        handled[int(time.time())] += 1

    claiming.claim = timed  # type: ignore[assignment]  # for as long as this process lasts
    consumer = Consumer([make_handler(Queue(NAME), handle)])
    timer = Timer(seconds, consumer.stop)
    timer.start()
    consumer.run()
    return {"claims": claims, "handled": list(handled.items())}


# --- The run --------------------------------------------------------------------------------------


def run(seconds: float, rate: float = RATE) -> dict[str, Any]:
    """
    Hold a snapshot open for so long, and return the figures before, at its start and end, and after.

    Less than a minute is too short for rates and for recovery: then only the ledger is checked.
    """
    quiet, recovery = seconds / 5, seconds * 2 / 5
    total = quiet + seconds + recovery
    with throwaway(durable=True) as server:
        done = run_command("migrate", url=server.url)
        assert done.returncode == 0, done.stderr
        with (
            crew(PROCESSES, f"{MODULE}:publish", url=server.url) as publishers,
            crew(PROCESSES, f"{MODULE}:consume", url=server.url) as consumers,
            psycopg.connect(server.url, autocommit=True) as watcher,
        ):
            consumers.start(total + TAIL)
            began = time.time()
            publishers.start(total, rate / PROCESSES)
            states = []

            def watch(until: float) -> None:
                while time.time() < until:
                    time.sleep(max(0.0, min(seconds / 30, until - time.time())))
                    (state,) = watcher.execute(STATE).fetchall()
                    states.append((round(time.time() - began, 1), *state))

            watch(began + quiet)
            with psycopg.connect(server.url) as holder:
                holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                holder.execute("SELECT count(*) FROM django_pgqueue_messagequeue")
                watch(began + quiet + seconds)
                holder.rollback()
            watch(began + total)
            published = sum(publishers.results())
            told = consumers.results()
            ((left,),) = watcher.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchall()
    held = began + quiet
    figures = {
        "seconds": seconds,
        "offered_per_second": rate,
        "published": published,
        "handled": sum(count for one in told for _, count in one["handled"]),
        "left": left,
        "quiet": measure(told, began + quiet / 2, held),
        "first_fifth": measure(told, held, held + seconds / 5),
        "last_fifth": measure(told, held + seconds * 4 / 5, held + seconds),
        "recovered_after_seconds": recovered(told, held + seconds, recovery, measure(told, began + quiet / 2, held)),
        "dead_tuples_table_bytes_index_bytes": states,
    }
    check(figures)
    return figures


def measure(told: Sequence[dict[str, Any]], since: float, until: float) -> dict[str, float]:
    """Return the claims' percentiles in milliseconds, and the messages handled a second, of a span of time."""
    claims = [took for one in told for at, took in one["claims"] if since <= at < until]
    if len(claims) < 2:
        claims = [math.inf, math.inf]
    percentiles = quantiles(claims, n=100)
    handled = sum(count for one in told for at, count in one["handled"] if since <= at < until)
    return {
        "claim_p50_ms": round(percentiles[49], 2),
        "claim_p95_ms": round(percentiles[94], 2),
        "handled_per_second": round(handled / (until - since), 1),
    }


def recovered(told: Sequence[dict[str, Any]], since: float, seconds: float, quiet: dict[str, float]) -> float | None:
    """Return after how many seconds claims were as fast again as in the quiet. None: not within this time."""
    step = max(1.0, seconds / 60)
    limit = max(quiet["claim_p95_ms"] * AS_FAST, FAST)
    for number in range(int(seconds / step)):
        start = since + number * step
        if measure(told, start, start + step)["claim_p95_ms"] <= limit:
            return round((number + 1) * step, 1)
    return None


def check(figures: dict[str, Any]) -> None:
    """Raise AssertionError where the outcome is not what is promised."""
    shown = json.dumps({key: value for key, value in figures.items() if not key.startswith("dead")})
    assert figures["published"] == figures["handled"] + figures["left"], shown
    if figures["seconds"] < 60:
        return
    first, last = figures["first_fifth"], figures["last_fifth"]
    assert last["claim_p95_ms"] <= max(MAX_SLOWER * first["claim_p95_ms"], FAST), shown
    assert last["handled_per_second"] >= LEAST_THROUGHPUT * figures["offered_per_second"], shown
    after = figures["recovered_after_seconds"]
    assert after is not None and after <= MAX_RECOVERY, shown


if __name__ == "__main__":
    main(run, seconds=300)
