"""The targets, by the ids that begin each judged figure ("T8: ..."), and the benchmarks that judge them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    question: str
    target: str
    benchmarks: tuple[str, ...]


TARGETS = {
    "T1": Asked(
        "Do publishers to one queue wait for each other? The share of database time spent on lock waits, with 32"
        " publishers that hold each transaction open for 5 ms; also with commits that cost 1 ms.",
        "≤ 1 %; ≥ 25 × the messages a second of the old way, ≥ 0.85 × an insert without the foreign key",
        ("publish", "publishers"),
    ),
    "T2": Asked(
        "The same with 64 processes whose caches of declared queues expire all the time, compared with no refresh at"
        " all.",
        "≥ 0.97; at most one write to the queue's row per `DECLARE_TTL`, regardless of the number of processes",
        ("stale",),
    ),
    "T3": Asked(
        "One publish in autocommit, in one process, compared with the same INSERT by raw psycopg, prepared.",
        "≥ 0.85",
        ("publish_one",),
    ),
    "T4": Asked(
        "One publish inside `atomic()`, compared with a raw BEGIN, INSERT, COMMIT.",
        "≥ 0.85; no further round trip inside the transaction",
        ("publish_one",),
    ),
    "T5": Asked(
        "`publish_many` with 1,000 messages in each call, ids returned, compared with a raw COPY into the same table.",
        "≥ 0.7; ≥ 1.1 × pgqueuer",
        ("publish_many", "peers"),
    ),
    "T6": Asked(
        "32 publishers whose publishes wake consumers, compared with the same without NOTIFY.", "≥ 0.95", ("notify",)
    ),
    "T7": Asked(
        "The time from the return of `publish` to the start of the handler on an idle queue, compared with a raw LISTEN"
        " loop.",
        "p50 ≤ 1.5 ×, p99 ≤ 2 ×",
        ("wakeup",),
    ),
    "T8": Asked(
        "Draining 20,000 small messages with a handler that does nothing, in one process, compared with a raw loop of"
        " the same claim and ack SQL.",
        "≥ 0.5",
        ("drain",),
    ),
    "T9": Asked(
        "The same, and publishing, compared with other queues in their best documented settings.",
        "≥ 1.5 × the best in Python, ≥ 20 × procrastinate and django-tasks-db; publishing faster than all others",
        ("peers",),
    ),
    "T10": Asked(
        "The p99 of a claim with 1,000,000 ready messages, with 1,000,000 delayed messages, on a small queue beside a"
        " huge one, and with 1,000 queues, each also with stale planner statistics; compared with 10,000 ready messages"
        " and fresh statistics.",
        "≤ 2 ×",
        ("backlog",),
    ),
    "T11": Asked(
        "Ten minutes at 60 % of capacity, and the same with a snapshot held open for five minutes, compared with the"
        " first minute.",
        "messages a second ≥ 0.9, claim p95 ≤ 2 ×; with the snapshot ≥ 0.8, and recovery within two minutes",
        ("growth",),
    ),
    "T12": Asked(
        "Publishers while `reap_queues` deletes 10,000 idle queues and expires 1,000,000 messages, compared with no"
        " reaper.",
        "p99 ≤ 1.5 ×; no publisher waits longer than the deletion of one queue; flat memory usage",
        ("reaping",),
    ),
    "T13": Asked("The memory of an idle and of a busy consumer over an hour, from minute 5.", "± 5 %", ("memory",)),
    "T14": Asked("The pages of the admin with 10,000,000 messages on 200 queues.", "≤ 300 ms each", ("admin_pages",)),
    "T15": Asked(
        "The MultiXact members created for each message, and the server's usage over an hour of T1's load, without a"
        " vacuum of the queue table.",
        "flat usage",
        ("multixacts",),
    ),
}
