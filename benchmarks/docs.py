"""
Make docs/benchmarks.md, docs/capacity.md, the marked blocks of other pages and all charts from ``results/*.json``.

What people wrote is in ``notes/``: ``method.md``, ``capacity.md``, and for a target such as T5 ``T5.md``, which
one that is missed must have: what was tried, and what the limit is. The other words are the benchmarks'
docstrings.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, harness, sizing
from benchmarks.charts import THEMES, Chart, svg
from benchmarks.targets import TARGETS

README = harness.ROOT / "README.md"
DOCS = harness.ROOT / "docs"
PAGE = DOCS / "benchmarks.md"
CAPACITY = DOCS / "capacity.md"
COMPARISON = DOCS / "comparison.md"
HOW_IT_WORKS = DOCS / "how-it-works.md"
CHARTS = DOCS / "benchmarks"
NOTES = harness.ROOT / "benchmarks" / "notes"

MARKED = re.compile(r"(<!-- benchmark: (\w+) -->\n).*?(<!-- /benchmark -->)", re.DOTALL)
NOT_YET = "not measured yet"

Result = Mapping[str, Any]
Results = Mapping[str, Result]


def update(names: Sequence[str]) -> None:
    """Write all files, and delete charts that are no longer made."""
    files = made(names)
    CHARTS.mkdir(exist_ok=True)
    for path in set(CHARTS.glob("*.svg")) - files.keys():
        path.unlink()
    for path, content in files.items():
        path.write_text(content)


def made(names: Sequence[str]) -> dict[Path, str]:
    """Return each file as it should be by the committed figures of these benchmarks."""
    results = read(names)
    charts = {name: figures.charts(result) for name, result in results.items()}
    headline = figures.headline(results)
    return {
        README: with_block(README, "before_after", before_after(results.get("publishers"))),
        COMPARISON: with_block(COMPARISON, "peers", peers_table(results.get("peers"))),
        HOW_IT_WORKS: with_block(
            HOW_IT_WORKS, "headline", picture(headline, "benchmarks/") if headline else f"({NOT_YET})"
        ),
        PAGE: page(names, results, charts),
        CAPACITY: capacity_page(results.get("capacity")),
        **{
            CHARTS / f"{chart.name}-{theme}.svg": svg(chart, theme)
            for chart in (headline, *(chart for found in charts.values() for chart in found))
            if chart
            for theme in THEMES
        },
    }


def read(names: Sequence[str]) -> dict[str, Result]:
    """Return the figures of those benchmarks that were run in full."""
    paths = {name: harness.RESULTS / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def with_block(path: Path, name: str, block: str) -> str:
    """Return the text with a block between its markers, the only ones that it may have."""
    text = path.read_text()
    found = [match[2] for match in MARKED.finditer(text)]
    if found != [name]:
        raise ValueError(f"{path.name} must have the markers of {name} once, not of {found}")
    return MARKED.sub(lambda match: f"{match[1]}{block}\n{match[3]}", text)


# --- The page -------------------------------------------------------------------------------------


def page(names: Sequence[str], results: Results, charts: Mapping[str, Sequence[Chart]]) -> str:
    missed = [name for name in TARGETS if (NOTES / f"{name}.md").exists() or not all(met(results, name))]
    parts = [
        "# Benchmarks",
        "<!-- Made by `python -m benchmarks docs` from benchmarks/results/. Words: benchmarks/notes/, docstrings. -->",
        (NOTES / "method.md").read_text().strip(),
        "## Targets",
        unpadded([glance(results, name) for name in TARGETS]),
        "The column *measured* shows the median (lowest-highest) of the figure that is closest to its bound or, if the"
        " target is missed, furthest beyond it. The sections below show all figures.",
        *(["## Notes on targets"] if missed else []),
        *(note(results, name) for name in missed),
        *(part for name in names for part in section(name, results.get(name), charts.get(name, ()))),
    ]
    return "\n\n".join(parts) + "\n"


def glance(results: Results, name: str) -> dict[str, str]:
    """Return a target's row."""
    asked = TARGETS[name]
    closest = max(figures_of(results, name), key=strain, default=None)
    return {
        "": f"**{name}**",
        "question": asked.question,
        "target": asked.target,
        "measured": measured(closest) if closest else NOT_YET,
        "verdict": verdict(results, name),
        "`python -m benchmarks …`": ", ".join(f"[`{one}`](#{one})" for one in asked.benchmarks),
    }


def unpadded(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table whose long cells nobody reads in columns."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(results: Results, name: str) -> str:
    found = met(results, name)
    words = []
    if found:
        words.append(
            f"met ({len(found)} of {len(found)})"
            if all(found)
            else f"**missed** ({found.count(False)} of {len(found)})"
        )
    absent = [one for one in TARGETS[name].benchmarks if one not in results]
    if absent:
        words.append(f"{', '.join(absent)}: {NOT_YET}")
    return "; ".join(words)


def note(results: Results, name: str) -> str:
    path = NOTES / f"{name}.md"
    words = path.read_text().strip() if path.exists() else "Not investigated yet."
    return f"### {name}: {verdict(results, name)}\n\n{words}"


def figures_of(results: Results, name: str) -> list[Mapping[str, Any]]:
    """Return all judged figures of a target."""
    return [
        target for result in results.values() for target in result["targets"] if target["what"].startswith(f"{name}:")
    ]


def met(results: Results, name: str) -> list[bool]:
    return [target["met"] for target in figures_of(results, name)]


def strain(target: Mapping[str, Any]) -> float:
    """Return how close a figure is to its bound: beyond 1 the target is missed."""
    value, bound = figures.number(target["value"]), target["bound"]
    over, under = (value, bound) if target["sign"] == "<=" else (bound, value)
    return over / under if under else float(over > 0) * 2


def measured(target: Mapping[str, Any]) -> str:
    return f"{figure(target)}: **{harness.show(target['value'])}**, asked {bound(target)}"


def figure(target: Mapping[str, Any]) -> str:
    what: str = target["what"]
    return what.partition(":")[2].strip()


def bound(target: Mapping[str, Any]) -> str:
    return f"{'≤' if target['sign'] == '<=' else '≥'} {harness.number(target['bound'])}"


# --- A benchmark's section ------------------------------------------------------------------------


def section(name: str, result: Result | None, charts: Sequence[Chart]) -> Iterator[str]:
    yield f"## {name}"
    yield how(name)
    yield f"    python -m benchmarks {name}"
    if result is None:
        yield f"({NOT_YET[0].upper()}{NOT_YET[1:]}.)"
        return
    yield machine(result)
    for chart in charts:
        yield picture(chart, "benchmarks/")
    yield harness.table(result["rows"])
    if notes := result.get("notes"):
        yield "\n".join(f"* **{name}**: {note}" for name, note in notes.items())
    if result["targets"]:
        yield judged(result)


def judged(result: Result) -> str:
    return harness.table(
        [
            {
                "": target["what"].partition(":")[0],
                "figure": figure(target),
                "measured": harness.show(target["value"]),
                "target": bound(target),
                "verdict": "met" if target["met"] else "**missed**",
            }
            for target in result["targets"]
        ]
    )


def how(name: str) -> str:
    """Return the benchmark's docstring as Markdown, without importing it: that may take what is not installed."""
    path = harness.ROOT / "benchmarks" / f"{name}.py"
    source = path if path.exists() else path.with_suffix("") / "__init__.py"
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    return docstring.replace("``", "`")


def machine(result: Result) -> str:
    known = result["machine"]
    durability = ", ".join(f"{key} {known[key]}" for key in ("fsync", "synchronous_commit", "shared_buffers"))
    return (
        f"{result['date']}, rounds: {result['rounds']}, {known['cores']} cores of {known['cpu']},"
        f" {known['memory_gib']} GiB;"
        f" Python {known['python']}, Django {known['django']}, psycopg {known['psycopg']};"
        f" PostgreSQL {known['postgresql']} with {durability}. Median (lowest-highest)."
    )


def capacity_page(result: Result | None) -> str:
    """Return the page that ``notes/capacity.md`` has the words of."""
    made_by = "<!-- Made by `python -m benchmarks docs` from benchmarks/notes/capacity.md and results/. -->"
    words = {**sizing.words(result), "machine": machine(result)} if result else defaultdict(lambda: f"({NOT_YET})")
    return f"{made_by}\n\n{(NOTES / 'capacity.md').read_text().format_map(words)}"


def before_after(result: Result | None) -> str:
    """Return README's table: the usual way and ours, as publishers grow in number."""
    if result is None:
        return f"({NOT_YET})"
    ways = {(row["publishers"], way): row for way, row in figures.parts(result)["held open 5 ms"]}
    return harness.table(
        [
            {
                "publishers": publishers,
                "before: publishes/s": show(before, "publishes/s"),
                "p99 ms": show(before, "p99 ms"),
                "waiting for locks": f"{show(before, 'lock wait %')} %",
                "**after**: publishes/s": f"**{show(after, 'publishes/s')}**",
                "**p99 ms**": f"**{show(after, 'p99 ms')}**",
                "**waiting for locks**": f"**{show(after, 'lock wait %')} %**",
            }
            for publishers in (1, 8, 32, 64)
            for before, after in [(ways[publishers, "ensure on every publish"], ways[publishers, "ours"])]
        ]
    )


def show(row: Mapping[str, Any], measure: str) -> str:
    return harness.number(round(figures.number(row[measure])))


def peers_table(result: Result | None) -> str:
    """Return the comparison's table: of each queue its best figures."""
    if result is None:
        return f"({NOT_YET})"
    return harness.table(
        [
            {"queue": peer, **{measure: round(value, 1) for measure, value in found.items()}}
            for peer, found in figures.best_of_peers(result).items()
        ]
    )


def picture(chart: Chart, folder: str) -> str:
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{folder}{chart.name}-dark.svg">\n'
        f'  <img alt="{chart.alt}" src="{folder}{chart.name}-light.svg" width="720">\n'
        "</picture>"
    )
