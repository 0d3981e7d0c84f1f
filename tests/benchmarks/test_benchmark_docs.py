"""docs/benchmarks.md, the blocks of other pages and the charts are what the committed figures give."""

import copy
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import charts, docs, figures, harness
from benchmarks.__main__ import NAMES
from benchmarks.targets import TARGETS


def stale(made: dict[Path, str]) -> list[str]:
    """Return the files that are not as they should be."""
    return [
        path.name for path, content in made.items() if not path.exists() or path.read_text(encoding="utf-8") != content
    ]


def test_docs_are_what_the_figures_give() -> None:
    """Nobody edited them by hand, or changed figures, docstrings or notes and left them as they were."""
    made = docs.made(NAMES)
    assert stale(made) == [], "run python -m benchmarks docs"
    assert set(docs.CHARTS.iterdir()) <= made.keys()


def test_changed_figures_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: one figure of one benchmark changes the page and its chart."""
    for path in harness.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    result = json.loads((tmp_path / "publish.json").read_text())
    result["rows"][0]["messages/s"]["median"] *= 2
    (tmp_path / "publish.json").write_text(json.dumps(result))
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    changed = stale(docs.made(NAMES))
    assert {"benchmarks.md", "publish-dark.svg", "publish-light.svg"} <= set(changed)


def test_it_works_without_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was not run yet the page says so."""
    (tmp_path / "publish.json").write_text((harness.RESULTS / "publish.json").read_text())
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    page = docs.made(NAMES)[docs.PAGE]
    assert page.count("(Not measured yet.)") == len(NAMES) - 1
    assert "| not measured yet | wakeup: not measured yet | [`wakeup`](#wakeup) |" in page


def test_each_target_is_on_the_page() -> None:
    """In order."""
    assert list(TARGETS) == [f"T{number}" for number in range(1, 16)]
    assert re.findall(r"^\| \*\*(T\d+)\*\* \|", docs.PAGE.read_text(encoding="utf-8"), re.MULTILINE) == list(TARGETS)


def test_each_judged_figure_belongs_to_a_target() -> None:
    """Its text begins with the id of one that names its benchmark."""
    for name, result in docs.read(NAMES).items():
        for target in result["targets"]:
            assert name in TARGETS[target["what"].partition(":")[0]].benchmarks, target["what"]


def test_each_benchmark_is_on_the_page_and_has_a_section() -> None:
    """And the links of the targets' table lead to sections."""
    text = docs.PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert [name for name in sections if name in NAMES] == list(NAMES)
    assert {name for asked in TARGETS.values() for name in asked.benchmarks} <= set(NAMES)


def test_each_missed_target_has_a_note() -> None:
    """What was tried and what the limit is."""
    results = docs.read(NAMES)
    missed = {name for name in TARGETS if not all(docs.met(results, name))}
    assert {name for name in missed if not (docs.NOTES / f"{name}.md").exists()} == set()


def test_the_closest_figure_is_shown() -> None:
    """Of those that are met the one with the least to spare, of those that are missed the one furthest beyond."""
    spread = {"median": 3, "min": 1, "max": 9}
    found = [
        {"what": "T1: a", "value": 0.5, "sign": "<=", "bound": 1},
        {"what": "T1: b", "value": 0.0, "sign": ">=", "bound": 0},
        {"what": "T1: c", "value": 30, "sign": ">=", "bound": 25},
        {"what": "T1: d", "value": spread, "sign": "<=", "bound": 2},
        {"what": "T1: e", "value": 1, "sign": "<=", "bound": 0},
    ]
    assert [target["what"][-1] for target in sorted(found, key=docs.strain)] == ["b", "a", "c", "d", "e"]
    assert docs.measured(found[3]) == "d: **3 (1-9)**, asked ≤ 2"


def test_blocks_go_between_their_markers(tmp_path: Path) -> None:
    """What stands there is replaced, what stands around it stays; a marker too few or too many is an error."""
    page = tmp_path / "page.md"
    text = "before\n<!-- benchmark: one -->\nold\n<!-- /benchmark -->\nafter\n"
    page.write_text(text)
    made = docs.with_block(page, "one", "new")
    assert made == text.replace("old", "new")
    page.write_text(made)
    assert docs.with_block(page, "one", "new") == made
    with pytest.raises(ValueError, match="markers"):
        docs.with_block(page, "two", "new")
    page.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        docs.with_block(page, "one", "new")


# --- Charts ---------------------------------------------------------------------------------------


def a_result(**changes: Any) -> dict[str, Any]:
    return {"benchmark": "growth", "question": "is it?", "rows": [], "targets": [], **changes}


def texts(document: str) -> list[str]:
    root = ElementTree.fromstring(document)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_series_becomes_a_panel_for_each_measure() -> None:
    """In it a line for each run, named where it ends; minutes when it is long, with what went on meanwhile."""
    points = [(float(second), 100.0) for second in range(601)]
    series = {run: {"handled/s": points, "claim p95 ms": points} for run in ("plain", "held")}
    (chart,) = figures.charts(a_result(series={run: dict(found) for run, found in series.items()}))
    shown = texts(charts.svg(chart, "light"))
    assert [panel.title for panel in chart.panels] == ["handled a second", "claim p95 ms"]
    assert shown.count("plain") == shown.count("held") == shown.count("minutes") == shown.count("snapshot held") == 2


def test_labels_keep_apart() -> None:
    """Those of lines that end at the same place do not cover each other, nor leave the panel."""
    places = charts.apart([100, 100, 100], [14, 28, 14], bottom=100)
    assert max(places) <= 100
    ordered = sorted(zip(places, [14, 28, 14], strict=True))
    assert all(
        lower[0] - upper[0] >= (upper[1] + lower[1]) / 2 for upper, lower in zip(ordered, ordered[1:], strict=False)
    )


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(10, [0, 2, 4, 6, 8, 10]), (4_900, [0, 1_000, 2_000, 3_000, 4_000, 5_000]), (0, [0, 0.2, 0.4, 0.6, 0.8, 1])],
)
def test_ticks_are_round_and_reach_the_greatest(most: float, ticks: list[float]) -> None:
    """Whatever the figures are, also when all are zero."""
    assert charts.nice_ticks(most) == ticks


def test_both_themes_draw_the_same() -> None:
    """But for the colours."""
    (chart,) = figures.charts(copy.deepcopy(docs.read(NAMES)["publish"]))
    light, dark = (charts.svg(chart, theme) for theme in charts.THEMES)
    assert texts(light) == texts(dark)
    assert re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark) != light
