"""
Which charts are drawn from which benchmark's JSON.

The shapes are read here and nowhere else. What was measured is named by a row's column "way", or else by the
last of the columns of text at its beginning; the text before it is the part of the benchmark. A cell is
a number or a spread. A benchmark with ``series`` gets a chart of their course unless something else is said here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, takewhile
from typing import Any

from benchmarks.charts import TONES, Bars, Chart, Line, Lines

Result = Mapping[str, Any]
Parts = dict[str, list[tuple[str, Mapping[str, Any]]]]

# Of which measures there is a bar for each way, and whether their orders of magnitude differ.
BARS: Mapping[str, Mapping[str, bool]] = {
    "publish": {"messages/s": False, "lock wait %": False},
    "publish_one": {"of raw": False},
    "publish_many": {"messages/s": False},
    "notify": {"messages/s": False, "lock wait %": False},
    "wakeup": {"p50 ms": False, "p99 ms": False},
    "drain": {"messages/s": False},
    "stale": {"messages/s": False, "writes to the row a second": False},
}

# Of which measures the course is shown; without an entry, of all.
COURSES: Mapping[str, Sequence[str]] = {
    "growth": ("handled/s", "claim p95 ms", "dead rows", "table MB"),
    "memory": ("resident MB",),
    "reaping": ("publish p99 ms", "reaper's memory MB"),
    "multixacts": ("member files MB", "oldest MultiXact of all databases, age"),
}

# In which part of the course something else went on.
SPANS: Mapping[str, tuple[float, float, str]] = {
    "growth": (0.25, 0.75, "snapshot held"),
}

# The measures of a curve over the number of publishers.
CURVES: Mapping[str, Sequence[str]] = {
    "publishers": ("publishes/s", "lock wait %"),
}

# What peers are compared by, each with those of its settings that are best for it: whether more is better.
BEST: Mapping[str, bool] = {
    "one by one/s": True,
    "in bulk/s": True,
    "drained/s, 1 process": True,
    "drained/s, 4 processes": True,
    "wake-up p50 ms": False,
    "wake-up p99 ms": False,
}

# What a chart calls a measure that a table has little room for.
WORDS: Mapping[str, str] = {
    "publishes/s": "publishes a second",
    "messages/s": "messages a second",
    "handled/s": "handled a second",
    "lock wait %": "lock waits, % of database time",
    "of raw": "of raw psycopg's messages a second",
    "one by one/s": "published one by one, a second",
    "in bulk/s": "published in bulk, a second",
    "drained/s, 1 process": "drained by one process, a second",
    "drained/s, 4 processes": "drained by four processes, a second",
    "wake-up p50 ms": "wake-up, p50 ms",
    "wake-up p99 ms": "wake-up, p99 ms",
}

# The first that fits a way's name decides its colour.
COLORS = (
    ("old", re.compile(r"^ensure on every publish")),
    ("limit", re.compile(r"\b(raw|without|plain|none|reaper held)\b")),
    ("ours", re.compile(r"\bours\b|\bQueue\.|consume_queues|django_pgqueue")),
)


def charts(result: Result) -> list[Chart]:
    """Return the charts of one benchmark."""
    name = result["benchmark"]
    if name in CURVES:
        return [
            curve(result, slug(f"{name} {part}"), f"1 to 64 publishers to one queue, {part}", ways)
            for part, ways in parts(result).items()
        ]
    if name in BARS:
        return [by_way(result)]
    if name == "peers":
        return [by_peer(result)]
    if name == "backlog":
        return [by_backlog(result)]
    if name == "reaping":
        return [by_run(result, run, found) for run, found in result["series"].items()]
    return [course(result)] if result.get("series") else []


def headline(results: Mapping[str, Result]) -> Chart | None:
    """Return the chart of how it works: the old way and ours, over the number of publishers."""
    if "publishers" not in results:
        return None
    result = results["publishers"]
    ways = [(way, row) for way, row in parts(result)["held open 5 ms"] if tone(way) in ("old", "ours")]
    return curve(result, "headline", "1 to 64 publishers to one queue, each transaction held open 5 ms", ways)


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


def by_backlog(result: Result) -> Chart:
    """Return a panel for each kind of statistics, of the consumer and size of claims that come first."""
    first = result["rows"][0]
    # The baseline is measured beside each kind of statistics, and shown once.
    bars: dict[str, dict[str, tuple[str, float, str]]] = {}
    for row in result["rows"]:
        if all(row[column] == first[column] for column in ("consumer", "of")):
            tone = "ours" if row["claim p99, of the baseline's"] else "limit"
            bars.setdefault(row["statistics"], {})[row["backlog"]] = (row["backlog"], number(row["claim p99 ms"]), tone)
    panels = [
        Bars(f"statistics {statistics}: claim p99 ms", list(found.values())) for statistics, found in bars.items()
    ]
    heading = f"Claims of {first['of']} by a {first['consumer']} consumer, with different backlogs"
    return Chart(result["benchmark"], heading, alt(heading, panels), panels, columns=1)


def by_peer(result: Result) -> Chart:
    """Return dots on a logarithmic scale: a panel for each measure, the best first."""
    peers = best_of_peers(result)
    panels = [
        Bars(
            titled("", measure),
            sorted(
                [(peer, found[measure], tone(peer)) for peer, found in peers.items() if measure in found],
                key=lambda bar: bar[1],
                reverse=more,
            ),
            logarithmic=True,
        )
        for measure, more in BEST.items()
    ]
    heading = "Beside other queues, each with its best settings"
    return Chart(result["benchmark"], heading, alt(heading, panels), [panel for panel in panels if panel.bars])


def best_of_peers(result: Result) -> dict[str, dict[str, float]]:
    """Return each peer's best figure of each measure. Its rows begin with its name, which the notes have."""
    found: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        peer = max((name for name in result["notes"] if f"{row['way']},".startswith(f"{name},")), key=len)
        best = found.setdefault(peer, {})
        for measure, more in BEST.items():
            if row.get(measure, "") != "":
                better = max if more else min
                best[measure] = better(number(row[measure]), best.get(measure, number(row[measure])))
    return found


def curve(result: Result, name: str, heading: str, ways: Iterable[tuple[str, Mapping[str, Any]]]) -> Chart:
    """Return each measure over the number of publishers, of those ways that have been measured at several."""
    rows = list(ways)
    panels = []
    for measure in CURVES[result["benchmark"]]:
        points: dict[str, list[tuple[float, float]]] = {}
        for way, row in rows:
            points.setdefault(way, []).append((row["publishers"], number(row[measure])))
        drawn = lines({way: found for way, found in points.items() if len(found) > 1})
        counts = sorted({place for line in drawn for place, _ in line.points})
        panels.append(Lines(titled("", measure), drawn, "publishers", x_ticks=counts, top=top_of(measure)))
    return Chart(name, heading, alt(heading, panels), panels)


def by_run(result: Result, run: str, found: Mapping[str, Any]) -> Chart:
    """Return the course of one run, whose measures are named "measure, of what": those of one in one panel."""
    series: dict[str, dict[str, Any]] = {}
    for name, points in found.items():
        measure, _, what = name.partition(", ")
        series.setdefault(what or "reaper", {})[measure] = points
    return replace(
        course({**result, "series": series}),
        name=slug(f"{result['benchmark']} {run}"),
        title=f"Publishers beside {run}",
    )


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
            titled("", measure),
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
        names = [value for _, value in takewhile(lambda column: isinstance(column[1], str), row.items())]
        way = row.get("way") or names[-1]
        found.setdefault(", ".join(name for name in names if name != way), []).append((way, row))
    return found


def top_of(measure: str) -> float | None:
    return 100 if measure.endswith("%") else None


def number(cell: Any) -> float:
    """Return a cell's number: of a spread the median."""
    return float(cell["median"] if isinstance(cell, Mapping) else cell)


def lines(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    """Give each line its colour: to those whose name says nothing, in order, what is left."""
    taken = [tone(name, "") for name in points]
    free = cycle([color for color in TONES if color not in taken])
    return [Line(name, found, color or next(free)) for (name, found), color in zip(points.items(), taken, strict=True)]


def tone(way: str, otherwise: str = "limit") -> str:
    """Return the colour of a way by its name."""
    return next((found for found, pattern in COLORS if pattern.search(way)), otherwise)


# --- Words ----------------------------------------------------------------------------------------


def title(result: Result) -> str:
    question: str = result["question"]
    return question[:1].upper() + question[1:]


def slug(words: str) -> str:
    """Return a name for a file."""
    return "-".join(re.findall(r"\w+", words.lower()))


def titled(part: str, measure: str) -> str:
    words = WORDS.get(measure, measure)
    return f"{part}: {words}" if part else words


def alt(heading: str, panels: Sequence[Lines | Bars]) -> str:
    """Say in words what the chart shows."""
    measures = dict.fromkeys(panel.title.rpartition(": ")[2] for panel in panels)
    return f"{heading.rstrip('?')}: {'; '.join(measures)}"
