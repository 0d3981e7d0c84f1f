"""What goes on while a benchmark runs: lock waits, courses over time, and what the work costs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psycopg

from django_pgqueue.devdb import DevCluster

# Seconds between two looks at what the server's sessions wait for.
LOCK_WAIT_INTERVAL = 0.02
# Seconds until sessions whose clients have gone have ended.
SESSIONS_END = 10.0

Connection = psycopg.Connection[Any]


class Sampler:
    """Within the ``with`` block, call ``sample`` every ``interval`` seconds, on a thread and connection of its own."""

    def __init__(self, url: str, sample: Callable[[Connection], object], interval: float) -> None:
        self._url = url
        self._sample = sample
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.wait(self._interval):
                self._sample(connection)


class LockWaits(Sampler):
    """Within the ``with`` block, sample how many of the sessions at work wait for a lock."""

    def __init__(self, url: str) -> None:
        super().__init__(url, self._count, LOCK_WAIT_INTERVAL)
        self._waiting = self._for_rows = self._active = 0

    @property
    def share(self) -> float:
        """Share of the database's time that was lock wait, of whatever kind."""
        return self._waiting / self._active if self._active else 0.0

    @property
    def row_share(self) -> float:
        """Share of it that was wait for a row, or for the transaction that has locked one."""
        return self._for_rows / self._active if self._active else 0.0

    def _count(self, connection: Connection) -> None:
        waiting, for_rows, active = connection.execute(
            "SELECT count(*) FILTER (WHERE wait_event_type = 'Lock'),"
            " count(*) FILTER (WHERE wait_event_type = 'Lock' AND wait_event IN ('tuple', 'transactionid')),"
            " count(*)"
            " FROM pg_stat_activity"
            " WHERE state = 'active' AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchone() or (0, 0, 0)
        self._waiting += waiting
        self._for_rows += for_rows
        self._active += active


class Series(Sampler):
    """Within the ``with`` block, take measures. ``points`` has, of each, seconds since the start and value."""

    def __init__(self, url: str, measures: Mapping[str, Callable[[Connection], float]], interval: float = 1.0) -> None:
        super().__init__(url, self._measure, interval)
        self._measures = measures
        self._began = time.monotonic()
        self.points: dict[str, list[tuple[float, float]]] = {name: [] for name in measures}

    def _measure(self, connection: Connection) -> None:
        for name, measure in self._measures.items():
            self.points[name].append((time.monotonic() - self._began, measure(connection)))


# --- Cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What a piece of work took: seconds, also of processor time, and what the server wrote."""

    seconds: float
    client_cpu: float
    server_cpu: float
    wal_bytes: float
    #: Those that wrote something.
    transactions: float
    multixacts: float
    multixact_members: float

    def per(self, count: float) -> Cost:
        """Return what each of so many messages took."""
        return Cost(**{name: value / count for name, value in asdict(self).items()})


class Meter:
    """
    Within the ``with`` block, meter what clients and server use; ``cost`` has it afterwards.

    The clients are this process and all that it started. There is a checkpoint before the block and one
    behind it, because the server tells of its MultiXacts only then. So the first change of each page in the
    block logs the whole page.
    """

    cost: Cost

    def __init__(self, cluster: DevCluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> Self:
        # Open all the time, or its start would count.
        self._connection = psycopg.connect(self._cluster.url, autocommit=True)
        multixacts = self._multixacts()
        self._before = [*self._used(), *multixacts]
        return self

    def __exit__(self, *exc_info: object) -> None:
        after = [*self._used(), *self._multixacts()]
        self._connection.close()
        self.cost = Cost(*(late - early for early, late in zip(self._before, after, strict=True)))

    def _used(self) -> list[float]:
        row = self._connection.execute(
            "SELECT pg_current_wal_insert_lsn() - '0/0', pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        ).fetchone()
        times = [time.monotonic(), cpu_seconds(os.getpid()), cpu_seconds(self._cluster.pid or 0)]
        return times + [float(value) for value in row or ()]

    def _multixacts(self) -> list[float]:
        self._connection.execute("CHECKPOINT")
        row = self._connection.execute(
            "SELECT next_multixact_id::text::bigint, next_multi_offset::text::bigint FROM pg_control_checkpoint()"
        ).fetchone()
        return [float(value) for value in row or ()]


def cpu_seconds(root: int) -> float:
    """Return the processor time that a process and its descendants have used, those that ended included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            # Behind the name in parentheses, which may hold anything, come state, parent and so on. The times
            # are of the process and of those children that it has waited for, in user and in system mode.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


# --- Tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableFigures:
    """
    A table, as the server's statistics have it: row versions, updates so far, bytes.

    A session tells of its changes within a second, at the latest at its end.
    """

    live: int
    dead: int
    updates: int
    hot_updates: int
    table_bytes: int
    index_bytes: int


def wait_until_gone(connection: Connection, application: str) -> None:
    """Wait until no session of this ``application_name`` is left, so that the statistics have all of theirs."""
    deadline = time.monotonic() + SESSIONS_END
    while connection.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = %s", [application]).fetchone():
        if time.monotonic() > deadline:
            raise TimeoutError(f"sessions of {application} do not end")
        time.sleep(0.01)


def table_figures(connection: Connection, name: str) -> TableFigures:
    row = connection.execute(
        "SELECT n_live_tup, n_dead_tup, n_tup_upd, n_tup_hot_upd, pg_table_size(relid), pg_indexes_size(relid)"
        " FROM pg_stat_user_tables WHERE relid = %s::regclass",
        [name],
    ).fetchone()
    assert row is not None
    return TableFigures(*row)


def multixact_bytes(connection: Connection) -> int:
    """Return the size of the files that hold the members of MultiXacts. One may be removed meanwhile."""
    row = connection.execute(
        "SELECT coalesce(sum((pg_stat_file('pg_multixact/members/' || name, true)).size), 0)::bigint"
        " FROM pg_ls_dir('pg_multixact/members') AS name"
    ).fetchone()
    assert row is not None
    return int(row[0])
