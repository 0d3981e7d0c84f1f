"""What was to be reached, by the ids that begin each judged figure ("T8: ..."), and which benchmarks judge it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    question: str
    target: str
    benchmarks: tuple[str, ...]


TARGETS = {
    "T1": Asked(
        "Do publishers to one queue wait for each other? Share of database time that is lock wait, 32 publishers,"
        " each transaction held open 5 ms; also where a commit costs 1 ms.",
        "≤ 1 %; ≥ 25 × the old way's messages a second, ≥ 0.85 × an insert without the foreign key",
        ("publish", "publishers"),
    ),
    "T2": Asked(
        "The same with 64 processes whose caches of declared queues go stale all the time, beside no refresh at all.",
        "≥ 0.97; at most one write to the queue's row per `DECLARE_TTL`, whatever the number of processes",
        ("stale",),
    ),
    "T3": Asked(
        "One publish in autocommit, one process, beside the same INSERT by raw psycopg, prepared.",
        "≥ 0.85",
        ("publish_one",),
    ),
    "T4": Asked(
        "One publish inside `atomic()`, beside raw BEGIN, INSERT, COMMIT.",
        "≥ 0.85; no further round trip inside the transaction",
        ("publish_one",),
    ),
    "T5": Asked(
        "`publish_many`, 1,000 a call, ids returned, beside raw COPY into the same table.",
        "≥ 0.7; ≥ 1.1 × pgqueuer",
        ("publish_many", "peers"),
    ),
    "T6": Asked(
        "32 publishers whose publishes wake consumers, beside the same without any NOTIFY.", "≥ 0.95", ("notify",)
    ),
    "T7": Asked(
        "From the return of `publish` to the handler's start on an idle queue, beside a raw loop on LISTEN.",
        "p50 ≤ 1.5 ×, p99 ≤ 2 ×",
        ("wakeup",),
    ),
    "T8": Asked(
        "Drain 20,000 small messages, no-op handler, one process, beside a raw loop of the same claim and ack SQL.",
        "≥ 0.5",
        ("drain",),
    ),
    "T9": Asked(
        "The same, and publishing, beside other queues with their best documented settings.",
        "≥ 1.5 × the best in Python, ≥ 20 × procrastinate and django-tasks-db; publishing ahead of all",
        ("peers",),
    ),
    "T10": Asked(
        "p99 of a claim with 1,000,000 ready, with 1,000,000 delayed, a small queue beside a huge one, 1,000 queues;"
        " each also with stale planner statistics; beside 10,000 ready, analysed.",
        "≤ 2 ×",
        ("backlog",),
    ),
    "T11": Asked(
        "Ten minutes at 60 % of capacity, and the same with a snapshot held for five of them, beside minute 1.",
        "messages a second ≥ 0.9, claim p95 ≤ 2 ×; with the snapshot ≥ 0.8, recovered within two minutes",
        ("growth",),
    ),
    "T12": Asked(
        "Publishers while `reap_queues` deletes 10,000 idle queues and expires 1,000,000 messages, beside quiet.",
        "p99 ≤ 1.5 ×; none waits longer than one queue's deletion; memory flat",
        ("reaping",),
    ),
    "T13": Asked("Memory of an idle and of a busy consumer over an hour, after minute 5.", "± 5 %", ("memory",)),
    "T14": Asked("The admin's pages with 10,000,000 messages on 200 queues.", "≤ 300 ms each", ("admin_pages",)),
    "T15": Asked(
        "MultiXact members made per message, and the server's usage over an hour of T1's load, without a vacuum of"
        " the queue table.",
        "usage flat",
        ("multixacts",),
    ),
}
