"""
Which charts are drawn from which benchmark's JSON.

The shapes are read here and nowhere else: the first columns of a row that hold text name it (the last of
them is the way that was measured, those before it the part of the benchmark), and a cell is a number
or a spread. A benchmark with ``series`` gets a chart of their course unless something else is said here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.charts import TONES, Bars, Chart, Line, Lines

Result = Mapping[str, Any]
Parts = dict[str, list[tuple[str, Mapping[str, Any]]]]

# Of which measures there is a bar for each way, and whether their orders of magnitude differ.
BARS: Mapping[str, Mapping[str, bool]] = {
    "publish": {"messages/s": False, "lock wait %": False},
    "publish_one": {"of raw": False},
    "wakeup": {"p50 ms": False, "p99 ms": False},
}

# Of which measures the course is shown; without an entry, of all.
COURSES: Mapping[str, Sequence[str]] = {
    "growth": ("handled/s", "claim p95 ms", "dead rows", "table MB"),
}

# In which part of the course something else went on.
SPANS: Mapping[str, tuple[float, float, str]] = {
    "growth": (0.25, 0.75, "snapshot held"),
}

# The measures of a curve over the number of publishers.
CURVES: Mapping[str, Sequence[str]] = {
    "publishers": ("messages/s", "lock wait %"),
}

OURS = re.compile(r"\bours\b|\bQueue\.|consume_queues|django_pgqueue")
OLD = re.compile(r"ensure")
LIMIT = re.compile(r"raw|without")


def charts(result: Result) -> list[Chart]:
    """Return the charts of one benchmark."""
    name = result["benchmark"]
    if name in CURVES:
        return [curve(result, part, ways) for part, ways in parts(result).items()]
    if name in BARS:
        return [by_way(result)]
    return [course(result)] if result.get("series") else []


def headline(results: Mapping[str, Result]) -> Chart:
    """Return README's chart: the old way and ours."""
    ways = parts(results["publish"])["held open 5 ms"]
    panels = bars_of({"": ways}, BARS["publish"])
    heading = "32 publishers to one queue, each transaction held open 5 ms"
    return Chart("headline", heading, alt(heading, panels), panels)


def by_way(result: Result) -> Chart:
    """Return bars: a panel for each part and measure."""
    panels = bars_of(parts(result), BARS[result["benchmark"]])
    return Chart(result["benchmark"], title(result), alt(title(result), panels), panels)


def bars_of(found: Parts, measures: Mapping[str, bool]) -> list[Bars]:
    return [
        Bars(
            titled(part, measure),
            [(way, number(row[measure]), tone(way)) for way, row in ways if row[measure] != ""],
            logarithmic,
            top_of(measure),
        )
        for part, ways in found.items()
        for measure, logarithmic in measures.items()
    ]


def curve(result: Result, part: str, ways: Iterable[tuple[str, Mapping[str, Any]]]) -> Chart:
    """Return each measure over the number of publishers."""
    rows = list(ways)
    counts = sorted({row["publishers"] for _, row in rows})
    panels = []
    for measure in CURVES[result["benchmark"]]:
        points: dict[str, list[tuple[float, float]]] = {}
        for way, row in rows:
            points.setdefault(way, []).append((row["publishers"], number(row[measure])))
        panels.append(Lines(measure, lines(points), "publishers", x_ticks=counts, top=top_of(measure)))
    name = "-".join([result["benchmark"], *re.findall(r"\w+", part)])
    heading = titled(part, title(result))
    return Chart(name, heading, alt(heading, panels), panels)


def course(result: Result) -> Chart:
    """Return each measure over time: a panel for each measure, in it a line for each kind of run."""
    name, series = result["benchmark"], result["series"]
    known = dict.fromkeys(measure for run in series.values() for measure in run)
    measures = [measure for measure in COURSES.get(name, known) if measure in known]
    longest = max(seconds for run in series.values() for points in run.values() for seconds, _ in points)
    unit, factor = ("minutes", 60) if longest > 180 else ("seconds", 1)
    span = SPANS.get(name)
    panels = [
        Lines(
            measure,
            lines(
                {
                    run: [(seconds / factor, value) for seconds, value in found[measure]]
                    for run, found in series.items()
                    if measure in found
                }
            ),
            unit,
            span=(span[0] * longest / factor, span[1] * longest / factor, span[2]) if span else None,
        )
        for measure in measures
    ]
    return Chart(name, title(result), alt(title(result), panels), panels)


# --- Reading rows ---------------------------------------------------------------------------------


def parts(result: Result) -> Parts:
    """Return the ways and their rows, by the part of the benchmark."""
    found: Parts = {}
    for row in result["rows"]:
        names = []
        for value in row.values():
            if not isinstance(value, str):
                break
            names.append(value)
        found.setdefault(", ".join(names[:-1]), []).append((names[-1], row))
    return found


def top_of(measure: str) -> float | None:
    return 100 if measure.endswith("%") else None


def number(cell: Any) -> float:
    """Return a cell's number: of a spread the median."""
    return float(cell["median"] if isinstance(cell, Mapping) else cell)


def lines(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    """Give each line its colour: to those whose name says nothing, in order."""
    free = iter([*TONES] * len(points))
    return [Line(name, found, tone(name, "") or next(free)) for name, found in points.items()]


def tone(way: str, otherwise: str = "limit") -> str:
    """Return the colour of a way by its name."""
    for pattern, found in ((OLD, "old"), (LIMIT, "limit"), (OURS, "ours")):
        if pattern.search(way):
            return found
    return otherwise


# --- Words ----------------------------------------------------------------------------------------


def title(result: Result) -> str:
    question: str = result["question"]
    return question[:1].upper() + question[1:]


def titled(part: str, measure: str) -> str:
    return f"{part}: {measure}" if part else measure


def alt(heading: str, panels: Sequence[Lines | Bars]) -> str:
    """Say in words what the chart shows."""
    return f"{heading}: {'; '.join(panel.title for panel in panels)}"
