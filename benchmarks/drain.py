"""
What does a consumer add to its two statements? 20,000 small messages and a handler that does nothing.

Our queue is measured with ``Consumer``, which ``manage.py consume_queues --drain`` runs, in its own process and with
Django's default settings. The baseline is a loop of raw psycopg in its own process: it claims 100 messages, decodes
them, calls the same function for each, and acks them, with the same statements, prepared. It extends no leases, handles
no failures, and does not survive a lost connection. A message that kills it takes all 100 with it, again and again.

Our rows show the promises of the consumer and their cost: the ack after the handler, in batches (at least once, the
default); the ack before the handler, one statement for each message (at most once); and the ack in a transaction around
the handler (exactly-once effects in this database). Slow rows use fewer messages.

The time runs from the first to the last call of the handler, over all processes of a row; the start of the processes is
not included. Messages are counted on both sides: there must be as many calls as messages, and no message may be left.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psycopg

from benchmarks.claiming import RawConsumer
from benchmarks.harness import PAYLOAD, ROOT, Cost, Meter, Report, Spread, Target, interleaved, ratio, set_up_django
from benchmarks.publishing import QUEUE, prepare
from django_pgqueue.devdb import DevCluster
from django_pgqueue.queue_internals import make_handler

MESSAGES = 20_000
FEWER = 4_000


@dataclass(frozen=True)
class Way:
    """How a row drains: by ``Consumer`` with a handler of these options, or raw."""

    title: str
    raw: bool = False
    processes: int = 1
    messages: int = MESSAGES
    is_async: bool = False
    ack: str = "late"
    concurrency: int = 1
    batch: int | None = None


RAW, OURS = Way("raw psycopg", raw=True), Way("ours, one by one")
RAW_BESIDE, OURS_BESIDE = Way("raw psycopg", raw=True, processes=4), Way("ours, one by one", processes=4)
WAYS = (
    RAW,
    OURS,
    Way("ours, batch=100", batch=100),
    Way("ours, concurrency=4", concurrency=4),
    Way("ours, async", is_async=True),
    Way('ours, ack="early"', ack="early", messages=FEWER),
    Way('ours, ack="atomic"', ack="atomic", messages=FEWER),
    Way('ours, ack="atomic", batch=100', ack="atomic", batch=100),
    RAW_BESIDE,
    OURS_BESIDE,
)


@dataclass(frozen=True)
class Drained:
    """One row in one round: messages a second, and what each of them cost."""

    rate: float
    cost: Cost


def run(cluster: DevCluster, *, quick: bool) -> Report:
    """Drain by each way in turn."""
    rounds = 1 if quick else 5
    report = Report("drain", "what does a consumer add to its two statements? (no-op handler)", rounds)
    counts = {way: min(way.messages, 500) if quick else way.messages for way in WAYS}
    found = interleaved({way: partial(drain, cluster, way, counts[way]) for way in WAYS}, rounds)
    rates = {way: [one.rate for one in drained] for way, drained in found.items()}
    report.rows = [
        {
            "processes": f"{way.processes} process{'es' if way.processes > 1 else ''}",
            "way": way.title,
            "messages": counts[way],
            "messages/s": Spread.of(rates[way]),
            "of raw": ratio(rates[way], rates[RAW if way.processes == 1 else RAW_BESIDE]),
            # With the end of the processes, but without their start.
            "client CPU us a message": Spread.of([1e6 * one.cost.client_cpu for one in drained]),
            "server CPU us a message": Spread.of([1e6 * one.cost.server_cpu for one in drained]),
            "WAL bytes a message": Spread.of([one.cost.wal_bytes for one in drained]),
        }
        for way, drained in found.items()
    ]
    report.targets = [Target("T8: ours, one by one / raw psycopg", ratio(rates[OURS], rates[RAW]), ">=", 0.5)]
    return report


def drain(cluster: DevCluster, way: Way, count: int) -> Drained:
    """Fill the queue, and let processes empty it."""
    from django_pgqueue import Queue

    prepare(cluster.url)
    Queue(QUEUE).publish_many([PAYLOAD] * count)
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE django_pgqueue_messagequeueitem")
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(consumer(way)) for _ in range(way.processes)]
            for process in processes:
                answer(process)
            with Meter(cluster) as meter:
                for process in processes:
                    tell(process, "go")
                handled = [json.loads(answer(process)) for process in processes]
        ((left,),) = connection.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchall()
    if left or sum(one["count"] for one in handled) != count:
        sys.exit(f"{way.title}: of {count} messages {left} are left; handled: {handled}")
    busy = [one for one in handled if one["count"]]
    nanoseconds = max(one["last"] for one in busy) - min(one["first"] for one in busy)
    return Drained(count / nanoseconds * 1e9, meter.cost.per(count))


@contextlib.contextmanager
def consumer(way: Way) -> Iterator[subprocess.Popen[str]]:
    """Run a process that drains when it is told to."""
    command = [sys.executable, "-m", "benchmarks.drain", json.dumps(asdict(way))]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    """Wait for a line: that it is ready, and then what it has handled."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a consumer process has ended with status {process.wait()}")
    return line


# --- In the consumer processes --------------------------------------------------------------------

#: Monotonic nanoseconds, of each message that was handled.
times: list[int] = []


def note(message: Any) -> None:
    """Be the handler that does nothing, but for telling when."""
    times.append(time.monotonic_ns())


def note_batch(messages: list[Any]) -> None:
    times.extend([time.monotonic_ns()] * len(messages))


async def note_async(message: Any) -> None:
    note(message)


def drain_raw() -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as raw:
        consumer = RawConsumer(raw, QUEUE)
        while messages := consumer.claim():
            for message in messages:
                note(message)
            consumer.ack(messages)


def drain_by_consumer(way: Way) -> None:
    from django_pgqueue import Queue
    from django_pgqueue.consumer.consumer import Consumer

    function = note_async if way.is_async else note_batch if way.batch else note
    handler = make_handler(Queue(QUEUE), function, ack=way.ack, concurrency=way.concurrency, batch=way.batch)
    Consumer([handler], drain=True).run()


def main() -> None:
    way = Way(**json.loads(sys.argv[1]))
    set_up_django()
    # Imported here, not when it counts.
    import django_pgqueue.consumer  # noqa: F401

    print("ready", flush=True)
    sys.stdin.readline()
    if way.raw:
        drain_raw()
    else:
        drain_by_consumer(way)
    print(json.dumps({"first": min(times, default=0), "last": max(times, default=0), "count": len(times)}), flush=True)


if __name__ == "__main__":
    main()
