"""Figures: interleaved rounds, their ratios and spreads, and what is printed and kept of them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.serving import ROOT

RESULTS = ROOT / "benchmarks" / "results"

#: A course over time: seconds and value.
Points = Sequence[tuple[float, float]]


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
    ``notes`` are what has to be known of a way to read its figures.
    """

    name: str
    question: str
    rounds: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    series: dict[str, dict[str, Points]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

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
            **({"notes": self.notes} if self.notes else {}),
        }


# --- Rounds ---------------------------------------------------------------------------------------


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


# --- Showing --------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table; the columns are all of their keys."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[show(row.get(column, "")) for column in columns] for row in rows]
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
    for name, note in result.get("notes", {}).items():
        print(f"{name}: {note}\n")
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
