"""
Compute what a server carries from what a message costs it (``capacity.py``), and when that is too little.

The assumptions are the constants here; ``notes/capacity.md`` states them for the reader.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import capacity, figures, harness

#: Of the server's processors, how much the queue may use: beyond that, what waits grows fast.
SHARE = 0.7
#: The costs were measured with so many cores; twice as many do so much more work.
MEASURED_CORES, DOUBLING = 2, 1.8
#: Sessions that publish one message after the other, without a pause.
PUBLISHERS = 64

DAY = 86_400
# When PostgreSQL vacuums tables on its own for the sake of old ids, by default: transactions, MultiXacts, and
# half of the members that there can be.
FREEZE_XIDS, FREEZE_MULTIXACTS, FREEZE_MEMBERS = 200e6, 400e6, 2**31


@dataclass(frozen=True)
class Server:
    """Cores, megabytes of log that its disk takes in a second, and milliseconds until a flush of it is safe."""

    cores: int
    log_mb: float
    flush_ms: float


SERVERS = [Server(cores, log, flush) for cores, log in ((2, 60), (8, 250), (32, 1_000)) for flush in (0.1, 1, 2)]
MIDDLING = Server(8, 250, 1)
RATES = (100, 1_000, 5_000, 20_000)


@dataclass(frozen=True)
class Use:
    """What one message takes in its whole life. ``session`` is the processor time until its publish commits."""

    cpu: float
    session: float
    log_bytes: float
    transactions: float
    multixacts: float
    members: float
    stored: float
    #: Whether each message is a commit of its own.
    one_by_one: bool


def use(result: Mapping[str, Any], published: str) -> Use:
    """Return what a message takes that is published so and handled by consumers."""
    rows = {
        row["a message"]: {
            key: figures.number(value) for key, value in row.items() if value != "" and key != "a message"
        }
        for row in result["rows"]
    }
    publish, handle = rows[published], rows[capacity.CONSUMER]
    return Use(
        cpu=(publish["server CPU µs"] + handle["server CPU µs"]) / 1e6,
        session=publish["server CPU µs"] / 1e6,
        log_bytes=publish["WAL bytes"] + handle["WAL bytes"],
        transactions=publish["transactions"] + handle["transactions"],
        multixacts=publish["MultiXacts"] + handle["MultiXacts"],
        members=publish["MultiXact members"] + handle["MultiXact members"],
        stored=publish["bytes while it waits"],
        one_by_one=published != capacity.MANY,
    )


def limits(message: Use, server: Server) -> dict[str, float]:
    """Return, for each thing that may run out, the messages a second at which it does."""
    found = {
        "processor": SHARE * MEASURED_CORES * speed(server.cores) / message.cpu,
        "log": server.log_mb * 1e6 / message.log_bytes,
    }
    if message.one_by_one:
        found["flushes"] = committed(PUBLISHERS, server.cores, message.session, server.flush_ms / 1000)
    return found


def speed(cores: int) -> float:
    """Return how much more work so many cores do than those it was measured with."""
    return DOUBLING ** math.log2(cores / MEASURED_CORES)


def committed(sessions: int, cores: int, work: float, flush: float, *, commits: int = 5_000) -> float:
    """
    Return the commits a second of sessions that work, commit and begin again, by simulation.

    A commit waits for a flush that begins after it; only one runs at a time, and takes along all who came
    until it began. ``work`` and ``flush`` are seconds.
    """
    free = [0.0] * cores
    begin, finish, flushed = 0, 1, 2
    events = [(0.0, begin, 1)] * sessions
    now, waiting, flushing, done = 0.0, 0, False, 0
    while done < commits:
        now, kind, count = heapq.heappop(events)
        if kind == begin:
            end = max(now, heapq.heappop(free)) + work
            heapq.heappush(free, end)
            heapq.heappush(events, (end, finish, 1))
            continue
        if kind == finish:
            waiting += count
        else:
            flushing = False
            done += count
            for _ in range(count):
                heapq.heappush(events, (now, begin, 1))
        if waiting and not flushing:
            heapq.heappush(events, (now + flush, flushed, waiting))
            waiting, flushing = 0, True
    return done / now


# --- Tables ---------------------------------------------------------------------------------------


def words(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what the page's text has places for: tables, and figures of its sentences."""
    single, apart, many = (use(result, way) for way in (capacity.TOGETHER, capacity.APART, capacity.MANY))
    cpu = {row["a message"]: figures.number(row["server CPU µs"]) for row in result["rows"]}
    tables = {
        "costs": result["rows"],
        "carries": list(carries(single, many)),
        "takes": list(takes(single)),
        "spread": list(spread(single, many)),
    }
    numbers = {
        "publish_share": 100 * single.session / single.cpu,
        "many_gain": single.cpu / many.cpu,
        "together_multixacts": single.multixacts,
        "apart_multixacts": apart.multixacts,
        "together_cpu": 1e6 * single.session,
        "apart_cpu": 1e6 * apart.session,
        "by_hand_cpu": cpu[capacity.BY_HAND],
        "bulk": capacity.BULK,
        "publishers": capacity.PUBLISHERS,
        "sessions": PUBLISHERS,
        "share": 100 * SHARE,
        "doubling": DOUBLING,
        "measured_cores": MEASURED_CORES,
        "spread_cores": MIDDLING.cores,
    }
    return {
        **{name: harness.table(rows) for name, rows in tables.items()},
        **{name: harness.number(float(f"{value:.3g}")) for name, value in numbers.items()},
    }


def carries(single: Use, many: Use) -> Iterator[dict[str, Any]]:
    for server in SERVERS:
        one_by_one, in_bulk = limits(single, server), limits(many, server)
        yield {
            "cores": server.cores,
            "log MB/s": server.log_mb,
            "a flush": f"{server.flush_ms:g} ms",
            f"one by one, {PUBLISHERS} publishers": rounded(min(one_by_one.values())),
            "bound by": min(one_by_one, key=one_by_one.__getitem__),
            f"{capacity.BULK:,} a call": rounded(min(in_bulk.values())),
            "bound by ": min(in_bulk, key=in_bulk.__getitem__),
        }


def takes(message: Use) -> Iterator[dict[str, Any]]:
    for rate in RATES:
        yield {
            "messages/s": rate,
            "cores (as measured)": round(rate * message.cpu, 2),
            "log MB/s": round(rate * message.log_bytes / 1e6, 2),
            "log GB a day": rate * message.log_bytes * DAY / 1e9,
            "days until tables are frozen: transactions": FREEZE_XIDS / (rate * message.transactions * DAY),
            "days until tables are frozen: MultiXacts": min(
                FREEZE_MULTIXACTS / (rate * message.multixacts * DAY), FREEZE_MEMBERS / (rate * message.members * DAY)
            ),
            "GB waiting after an hour without consumers": rate * message.stored * 3600 / 1e9,
        }


def spread(single: Use, many: Use) -> Iterator[dict[str, Any]]:
    for rate in (10_000, 50_000, 200_000):
        yield {
            "messages/s": rate,
            **{
                f"servers, {how}": math.ceil(rate / min(limits(message, MIDDLING).values()))
                for how, message in (("one by one", single), (f"{capacity.BULK:,} a call", many))
            },
        }


def rounded(value: float) -> int:
    """Return two digits of a computed figure; it has no more."""
    unit = 10 ** max(math.floor(math.log10(value)) - 1, 0)
    return round(value / unit) * unit
