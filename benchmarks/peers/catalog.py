"""The peers: where each one's program runs, with which settings, and what it guarantees meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from benchmarks.peers import environments, services

Settings = Mapping[str, str]


@dataclass(frozen=True)
class Peer:
    """
    ``name``: as the tables have it. ``program``: a file of this folder.
    ``interpreter``: makes the environment where it is not there yet and returns the command that runs
    ``program``; raises ``environments.Unavailable``.
    ``publishing``, ``working``: what the table calls it, to the settings of ``publisher`` and ``worker``. The
    ordinary ones come first, the best documented ones last. ``waking``: those with which wake-ups are measured,
    where that is not the first of ``working``. ``polls``: of those, the seconds between two looks of a worker that
    nobody wakes.
    ``guarantees``: durable? at least once? what becomes of messages in flight at a crash? transactional publishing?
    ``recovery``: its mechanism for the messages of a worker that died, and which of its knobs were set;
    ``recovery_settings`` are those, on top of the ordinary ones.
    ``service``: what has to run beside the server; gives further environment variables for the programs.
    ``on_postgresql``: whether an open snapshot can matter.
    ``targets``: how many times as fast ours has to be, by measure (one, many, drain).
    ``quick``: whether it is installed within seconds, and so takes part in the quick form.
    """

    name: str
    program: str
    interpreter: Callable[[], list[str]]
    guarantees: str
    recovery: str
    working: Mapping[str, Settings]
    publishing: Mapping[str, Settings] = field(default_factory=lambda: {"": {}})
    waking: Mapping[str, Settings] | None = None
    polls: Mapping[str, float] = field(default_factory=dict)
    recovery_settings: Settings = field(default_factory=dict)
    service: Callable[[], AbstractContextManager[Mapping[str, str]]] = lambda: contextlib.nullcontext({})
    on_postgresql: bool = True
    targets: Mapping[str, float] = field(default_factory=lambda: {"one": 1, "many": 1})
    quick: bool = False


def this_python() -> list[str]:
    return [sys.executable]


RAW = Peer(
    name="raw psycopg",
    program="run_raw.py",
    interpreter=this_python,
    working={"batch 10": {"batch": "10"}, "batch 100": {"batch": "100"}},
    recovery_settings={"lease": "30"},
    targets={},
    quick=True,
    guarantees=(
        "Durable, at least once, part of the publisher's transaction. It has no handlers that may fail, no retries,"
        " no lease extension and no dead letters: it shows the limit and is not a queue."
    ),
    recovery="A lease of 30 s on the row. The next claim takes the row when the lease has expired.",
)

OURS = Peer(
    name="django_pgqueue",
    program="run_ours.py",
    interpreter=this_python,
    publishing={"": {}, "prepared statements": {"prepared": "yes"}},
    working={
        "one by one": {},
        "one by one, ack atomic": {"ack": "atomic"},
        "batch 100, ack atomic": {"ack": "atomic", "batch": "100"},
        "batch 100": {"batch": "100"},
    },
    recovery_settings={"lease": "30"},
    targets={},
    quick=True,
    guarantees=(
        "Durable, at least once; with ack atomic, exactly once for everything that the handler writes to this"
        " database. Publishing is part of the caller's transaction. Messages that a dead worker held are delivered"
        " again, one at a time, when their leases end; after max_deliveries they become dead letters."
    ),
    recovery="A lease on each message, extended while its consumer lives: lease=30 (default 60).",
)

PGQUEUER = Peer(
    name="pgqueuer",
    program="run_pgqueuer.py",
    interpreter=partial(environments.python, "pgqueuer"),
    working={"batch_size 10": {}, "batch_size 100": {"batch": "100"}},
    recovery_settings={"timeout": "5"},
    targets={"one": 1, "many": 1, "drain": 1.5},
    quick=True,
    guarantees=(
        "Durable, at least once, part of the caller's transaction if it shares the connection. Outcomes are written"
        " in batches: jobs that a dead worker had finished but not yet written run again. By default, a job that"
        " raises is deleted, and its traceback is kept in the log table. Each insert sends a NOTIFY in its"
        " transaction."
    ),
    recovery=(
        "A heartbeat for each job. A job whose heartbeat is older than heartbeat_timeout (30 s, the default) is"
        " picked again at the next dequeue. An idle worker dequeues once every dequeue_timeout: 5 s (default 30)."
    ),
)

PROCRASTINATE = Peer(
    name="procrastinate",
    program="run_procrastinate.py",
    interpreter=partial(environments.python, "procrastinate"),
    working={"concurrency 1": {}, "concurrency 10": {"concurrency": "10", "delete": "successful"}},
    recovery_settings={"stalled": "30"},
    targets={"one": 1, "many": 1, "drain": 20},
    quick=True,
    guarantees=(
        "Durable; part of the caller's transaction only with its Django connector or with a connection that the"
        " caller passes. A job of a dead worker stays in the state doing until a periodic task of the project asks for"
        " stalled jobs and retries them: at least once with this task, at most once without it. Each insert sends a"
        " NOTIFY in its transaction."
    ),
    recovery=(
        "The periodic task of its documentation, here every 10 s: get_stalled_jobs() (30 s without a heartbeat of the"
        " worker, the default) and retry_job()."
    ),
)

DJANGO_TASKS_DB = Peer(
    name="django-tasks-db",
    program="run_django_tasks_db.py",
    interpreter=partial(environments.python, "django-tasks-db"),
    working={"": {}},
    waking={"interval 1": {}, "interval 0.1": {"interval": "0.1"}},
    polls={"interval 1": 1, "interval 0.1": 0.1},
    targets={"one": 1, "many": 1, "drain": 20},
    quick=True,
    guarantees=(
        "Durable, part of the caller's transaction. At most once: a task whose worker died stays RUNNING and never"
        " runs again, and a task that raises is not retried. It polls."
    ),
    recovery="None.",
)

PGMQ = Peer(
    name="pgmq",
    program="run_pgmq.py",
    interpreter=partial(environments.python, "pgmq"),
    publishing={"": {}, "own connection in autocommit": {"connection": "own"}},
    working={
        "batch 10": {},
        "batch 100, archived": {"batch": "100", "settle": "archive"},
        "batch 100": {"batch": "100"},
    },
    waking={"polling every 100 ms": {}, "polling every 10 ms": {"interval": "10"}, "NOTIFY": {"wait": "notify"}},
    polls={"polling every 100 ms": 0.1, "polling every 10 ms": 0.01},
    quick=True,
    guarantees=(
        "Durable, at least once, part of the caller's transaction if the caller passes its connection. The benchmark"
        " runs a plain loop of read and delete, not a worker: it has no handlers that may fail and no limit of"
        " deliveries, and nothing extends the visibility timeout of a message that takes longer. NOTIFY is a trigger"
        " on each insert that updates one row of the queue, so publishers wait for each other: here it is used only to"
        " measure wake-ups."
    ),
    recovery="A visibility timeout for each read: vt=30, the client's default.",
)

CELERY_IN_MEMORY = Peer(
    name="Celery, Redis in memory",
    program="run_celery.py",
    interpreter=services.celery,
    publishing={"": {}, "argsrepr given": {"argsrepr": "-"}},
    working={
        "prefork": {},
        "prefork, prefetch 128": {"prefetch": "128"},
        "solo, prefetch 128": {"pool": "solo", "prefetch": "128", "quiet": "yes"},
    },
    service=partial(services.redis, appendfsync=None),
    on_postgresql=False,
    targets={"one": 1, "many": 1, "drain": 1.5},
    guarantees=(
        "Not durable: Redis keeps nothing on disk. At most once for running tasks, because a task is acked before it"
        " starts (the default). Publishing is not part of the database's transaction: after the commit, a message may"
        " be missing; before the commit, it may refer to data that is never committed. The worker is a parent with one"
        " child (prefork), or one process (solo)."
    ),
    recovery=(
        "None for the task that was running. Messages that were fetched but not started come back after the"
        " visibility timeout: an hour by default, as here."
    ),
)

CELERY_ON_DISK = Peer(
    name="Celery, Redis fsync always",
    program="run_celery.py",
    interpreter=services.celery,
    publishing={"": {}, "argsrepr given": {"argsrepr": "-"}},
    working={
        "prefork, acks late": {"late": "yes"},
        "prefork, acks late, prefetch 128": {"late": "yes", "prefetch": "128"},
        "solo, acks late, prefetch 128": {"late": "yes", "pool": "solo", "prefetch": "128", "quiet": "yes"},
    },
    recovery_settings={"timeout": "30"},
    service=partial(services.redis, appendfsync="always"),
    on_postgresql=False,
    targets={"one": 1, "many": 1, "drain": 1.5},
    guarantees=(
        "Durable (appendfsync always), at least once (acks late). Publishing is not part of the database's"
        " transaction: after the commit, a message may be missing; before the commit, it may refer to data that is"
        " never committed. A task that runs longer than the visibility timeout is started a second time while it still"
        " runs."
    ),
    recovery=(
        "The visibility timeout, which starts when the worker fetches: 30 s, checked every second (by default an"
        " hour, checked every 100 s)."
    ),
)

PG_BOSS = Peer(
    name="pg-boss",
    program="run_pg_boss.mjs",
    interpreter=partial(environments.node, "pg-boss"),
    working={
        "batch 100, polls": {"batch": "100"},
        "batch 1,000, notified": {"batch": "1000", "notify": "yes", "poll": "0.5"},
        "batch 1,000, localConcurrency 4, notified": {
            "batch": "1000",
            "concurrency": "4",
            "notify": "yes",
            "poll": "0.5",
        },
    },
    waking={"polling every 0.5 s": {"poll": "0.5"}, "notified": {"notify": "yes"}},
    polls={"polling every 0.5 s": 0.5},
    recovery_settings={"poll": "0.5", "supervise": "5"},
    guarantees=(
        "Durable, at least once, up to three runs by default; part of the caller's transaction if the caller passes"
        " it. A batch is completed or failed as a whole. By default, a worker takes one job every 2 s (0.5 s at"
        " least): it fetches again at once only after a full batch. Node.js."
    ),
    recovery=(
        "The queue's heartbeat of 30 s (by default there is none, and a job expires after 15 minutes), checked every"
        " 5 s (superviseIntervalSeconds and monitorIntervalSeconds, by default 60)."
    ),
)

GRAPHILE_WORKER = Peer(
    name="graphile-worker",
    program="run_graphile_worker.mjs",
    interpreter=partial(environments.node, "graphile-worker"),
    working={
        "concurrency 1": {},
        "concurrency 24": {"jobs": "24"},
        "concurrency 24, local queue 500, batched": {"jobs": "24", "local": "500", "batched": "0"},
    },
    guarantees=(
        "Durable, at least once, up to 25 runs; part of the caller's transaction if it publishes with SQL. With the"
        " local queue, a worker locks 500 jobs at a time, and the jobs of a dead worker stay locked for four hours."
        " Each insert sends a NOTIFY in its transaction. Node.js."
    ),
    recovery="Locks of jobs end after four hours, which cannot be changed, or by hand with forceUnlockWorkers().",
)

PEERS = [
    RAW,
    OURS,
    PGQUEUER,
    PROCRASTINATE,
    DJANGO_TASKS_DB,
    PGMQ,
    CELERY_IN_MEMORY,
    CELERY_ON_DISK,
    PG_BOSS,
    GRAPHILE_WORKER,
]
