"""
What every benchmark stands on: a server of its own, interleaved rounds, a table and a JSON file.

The figures that count are ratios against a baseline measured in the same run on the same server,
round by round (A B A B ...). Absolute ones tell what one machine gave on one day.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from django_pgqueue.devdb import DevCluster, throwaway

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# Seconds between two looks at what the server's sessions wait for.
SAMPLE_INTERVAL = 0.02

# About 500 bytes of JSON, the size of a small webhook event.
PAYLOAD: dict[str, Any] = {
    "event": "order.paid",
    "order": {"id": 1_048_576, "currency": "EUR", "total": "129.90", "paid_at": "2026-11-29T12:00:00Z"},
    "customer": {"id": 4711, "name": "Ada Lovelace", "email": "ada@example.com", "country": "GB"},
    "items": [{"sku": f"SKU-{number:05}", "quantity": number, "price": "12.99"} for number in range(1, 5)],
    "note": "Leave it with the neighbours, please; the bell has been out of order since Monday.",
}


@dataclass(frozen=True)
class Spread:
    """The median of some values, and between what they lay."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Target:
    """
    A figure that is to be reached: ``sign`` is "<=" or ">=".

    ``what`` begins with the target's id ("T8: ..."). Of a spread it is the median that counts.
    """

    what: str
    value: float | Spread
    sign: str
    bound: float

    @property
    def met(self) -> bool:
        value = self.value.median if isinstance(self.value, Spread) else self.value
        return value <= self.bound if self.sign == "<=" else value >= self.bound


@dataclass
class Report:
    """
    What a benchmark found. ``rows`` are the table's, as dicts of text, numbers and spreads.

    ``series`` are courses over time, for the charts: of each way (or kind of run), by what was measured,
    pairs of seconds and value: ``{"snapshot held": {"messages/s": [(10.0, 2000.0), ...]}}``.
    """

    name: str
    question: str
    rounds: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    series: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)

    def as_dict(self, machine: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "question": self.question,
            "date": datetime.now(UTC).date().isoformat(),
            "quick": quick,
            "rounds": self.rounds,
            "machine": machine,
            "rows": [
                {key: asdict(value) if isinstance(value, Spread) else value for key, value in row.items()}
                for row in self.rows
            ],
            "targets": [{**asdict(target), "met": target.met} for target in self.targets],
            **({"series": self.series} if self.series else {}),
        }


# --- Server ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def server() -> Iterator[DevCluster]:
    """Start an empty server, as durable as in production, and set Django up on it. Once per process."""
    with throwaway(durable=True) as cluster:
        os.environ["DATABASE_URL"] = cluster.url
        set_up_django()
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", verbosity=0)
        try:
            yield cluster
        finally:
            connections.close_all()


def set_up_django() -> None:
    """Set Django up on ``DATABASE_URL``, also in child processes."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    # With DEBUG Django keeps and times every statement.
    os.environ.update(DEBUG="0", SECRET_KEY="only-for-benchmarks")
    import django

    django.setup()


class LockWaits:
    """Within the ``with`` block, sample how many of the sessions at work wait for a lock."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._waiting = self._active = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def share(self) -> float:
        """Share of the database's time that was lock wait."""
        return self._waiting / self._active if self._active else 0.0

    def __enter__(self) -> LockWaits:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.wait(SAMPLE_INTERVAL):
                waiting, active = connection.execute(
                    "SELECT count(*) FILTER (WHERE wait_event_type = 'Lock'), count(*) FROM pg_stat_activity"
                    " WHERE state = 'active' AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
                ).fetchone() or (0, 0)
                self._waiting += waiting
                self._active += active


# --- Figures --------------------------------------------------------------------------------------


def interleaved(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Measure each way once per round, one after the other, and return each one's results by round."""
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            found[name].append(measure())
    return found


def ratio(values: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Compare round by round, so that what slows a whole round down does not count."""
    return Spread.of([value / other for value, other in zip(values, baseline, strict=True)])


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that ``percent`` per cent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def machine(url: str) -> dict[str, Any]:
    """Describe what the figures were measured on."""
    import django

    with psycopg.connect(url) as connection:
        postgresql = connection.info.parameter_status("server_version")
        durability = {
            name: connection.execute("SELECT current_setting(%s)", [name]).fetchone()[0]  # type: ignore[index]
            for name in ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers")
        }
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "django": django.get_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "postgresql": postgresql,
        **durability,
    }


def cpu_model() -> str:
    """Return the processor's name, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- Showing --------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table whose columns are the keys of the first."""
    columns = list(rows[0])
    cells = [[show(row[column]) for column in columns] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True))} |"
        for line in [columns, rule, *cells]
    )


def show(value: Any) -> str:
    """Return a table cell: a spread as ``median (min-max)``."""
    if isinstance(value, Spread):
        value = asdict(value)
    if isinstance(value, dict):
        return f"{number(value['median'])} ({number(value['min'])}-{number(value['max'])})"
    return number(value) if isinstance(value, (int, float)) else str(value)


def number(value: float) -> str:
    """Return a number with about three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def print_result(result: Mapping[str, Any]) -> None:
    """Print what the JSON file holds, for people."""
    print(f"\n## {result['benchmark']}: {result['question']}\n")
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print(f"{result['rounds']} rounds; median (lowest-highest)\n")
    print(table(result["rows"]) + "\n")
    for target in result["targets"]:
        verdict = "quick, not judged" if result["quick"] else "met" if target["met"] else "MISSED"
        print(f"{target['what']}: {show(target['value'])}, target {target['sign']} {target['bound']}: {verdict}")


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write the JSON file and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}.json"
    text = json.dumps(result, indent=2) + "\n"
    # The pairs of a series on a line each.
    path.write_text(re.sub(r"\[\s+([-+.e\d]+),\s+([-+.e\d]+)\s+\]", r"[\1, \2]", text))
    return path
