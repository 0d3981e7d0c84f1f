"""
Draw charts as SVG, 720 pixels wide, for a light and for a dark page.

Drawn here and not by a plotting library because the same figures must give the same bytes on every
machine: a test compares the committed files with what the figures give. What a library writes
changes with its version and with the fonts that it finds. pygal needs no fonts, but it has no panels side by
side, no labels at the ends of lines, no marked span of the axis and no dots on a logarithmic scale, cuts labels
off in panels of this size, and writes three to nine times as many bytes.

Each line or bar is labelled where it stands, so there is no legend. The colours are told apart by
those who see no red or no green.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH = 720
PADDING = 16
GAP = 28
TITLE, LABEL, TICK = 15, 12, 11
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

THEMES = {
    "light": {
        "page": "#ffffff",
        "ink": "#1f2328",
        "muted": "#59636e",
        "grid": "#e1e5ea",
        "span": "#f0f2f5",
        "ours": "#0072b2",
        "old": "#d0480c",
        "limit": "#6e7781",
        "third": "#00805f",
        "fourth": "#9b4f96",
    },
    "dark": {
        "page": "#0d1117",
        "ink": "#e6edf3",
        "muted": "#9198a1",
        "grid": "#2a313a",
        "span": "#1b222b",
        "ours": "#58b4ee",
        "old": "#ff8c4b",
        "limit": "#9198a1",
        "third": "#40c79d",
        "fourth": "#dd9bd6",
    },
}

#: The colours of lines, in the order in which they are given out.
TONES = ("ours", "old", "third", "fourth", "limit")

Points = Sequence[tuple[float, float]]

# More points than this do not show in a panel; those beside each other become their median.
MAX_POINTS = 150


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    tone: str


@dataclass(frozen=True)
class Lines:
    """
    A panel of lines over one axis. ``x_ticks`` given: the axis is logarithmic and marked there.

    ``top`` is the end of the other axis if the figures do not tell, as 100 of per cent. ``span`` is a part
    of the axis in which something else went on: from, to, and what.
    """

    title: str
    lines: Sequence[Line]
    x_label: str
    x_ticks: Sequence[float] = ()
    top: float | None = None
    span: tuple[float, float, str] | None = None

    height = 230


@dataclass(frozen=True)
class Bars:
    """
    A panel of horizontal bars: name, value, tone.

    On a logarithmic scale they are dots, because the length of a bar would mean nothing. ``top`` is the end
    of the scale if the figures do not tell.
    """

    title: str
    bars: Sequence[tuple[str, float, str]]
    logarithmic: bool = False
    top: float | None = None

    @property
    def height(self) -> int:
        return 34 + 22 * len(self.bars)


@dataclass(frozen=True)
class Chart:
    """Panels, ``columns`` in a row. ``name`` is the file's, ``alt`` says what is to be seen."""

    name: str
    title: str
    alt: str
    panels: Sequence[Lines | Bars]
    columns: int = 2


def svg(chart: Chart, theme: str) -> str:
    """Return the chart as an SVG document."""
    colors = THEMES[theme]
    columns = min(chart.columns, len(chart.panels))
    width = (WIDTH - 2 * PADDING - GAP * (columns - 1)) / columns
    parts = [text(PADDING, PADDING + 12, chart.title, colors["ink"], size=TITLE, weight=600)]
    y = PADDING + 34.0
    for start in range(0, len(chart.panels), columns):
        row = chart.panels[start : start + columns]
        for column, panel in enumerate(row):
            x = PADDING + column * (width + GAP)
            draw = lines if isinstance(panel, Lines) else bars
            parts += draw(panel, x, y, width, colors)  # type: ignore[operator]
        y += max(panel.height for panel in row) + 18
    height = round(y - 4)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
            f' height="{height}" font-family="{FONT}" role="img">',
            f"<title>{escape(chart.alt)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="{colors["page"]}"/>',
            *parts,
            "</svg>\n",
        ]
    )


# --- Lines ----------------------------------------------------------------------------------------


def lines(panel: Lines, x: float, y: float, width: float, colors: dict[str, str]) -> Iterator[str]:
    yield text(x, y + 11, panel.title, colors["muted"], size=LABEL)
    drawn = [Line(line.name, thinned(line.points), line.tone) for line in panel.lines if line.points]
    # Where two lines meet, ours is to be seen.
    drawn.sort(key=lambda line: ("limit", "old").index(line.tone) if line.tone in ("limit", "old") else 2)
    names = [wrapped(line.name, 15) for line in drawn]
    values = [value for line in drawn for _, value in line.points]
    ticks = nice_ticks(panel.top or max(values, default=1))
    marks = [f"{tick / 1e6:g} M" if tick and ticks[-1] >= 1e6 else short(tick) for tick in ticks]
    left = x + 8 + max(width_of(mark, TICK) for mark in marks)
    right = x + width - 8 - max((width_of(part, LABEL, bold=True) for name in names for part in name), default=0)
    top, bottom = y + 30, y + panel.height - 34
    places = [place for line in drawn for place, _ in line.points]
    to_x = scale(panel.x_ticks or [0, *places], left, right, logarithmic=bool(panel.x_ticks))
    to_y = scale([0, ticks[-1]], bottom, top)
    if panel.span:
        start, end, what = panel.span
        yield block(to_x(start), top, to_x(end) - to_x(start), bottom - top, colors["span"])
        yield text(to_x(start), top - 5, what, colors["muted"], size=TICK)
    for tick, mark in zip(ticks, marks, strict=True):
        yield rule(left, to_y(tick), right, colors["muted" if tick == 0 else "grid"])
        yield text(left - 6, to_y(tick) + 4, mark, colors["muted"], size=TICK, anchor="end")
    for tick in panel.x_ticks or nice_ticks(max(places, default=1)):
        if to_x(tick) < right + 1:
            yield text(to_x(tick), bottom + 16, short(tick), colors["muted"], size=TICK, anchor="middle")
    yield text((left + right) / 2, bottom + 32, panel.x_label, colors["muted"], size=TICK, anchor="middle")
    for line in drawn:
        yield path([(to_x(place), to_y(value)) for place, value in line.points], colors[line.tone], line.tone)
        if panel.x_ticks or len(line.points) == 1:
            yield from (dot(to_x(place), to_y(value), colors[line.tone]) for place, value in line.points)
    ends = [to_y(line.points[-1][1]) for line in drawn]
    for line, name, middle in zip(drawn, names, apart(ends, [14 * len(name) for name in names], bottom), strict=True):
        for number, part in enumerate(name):
            offset = middle + 4 + 14 * (number - (len(name) - 1) / 2)
            yield text(right + 8, offset, part, colors[line.tone], size=LABEL, weight=600)


def thinned(points: Points) -> Points:
    """Return no more points than show: each the median of those that it stands for."""
    size = -(-len(points) // MAX_POINTS)
    if size < 2:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (statistics.mean(place for place, _ in group), statistics.median(value for _, value in group))
        for group in groups
    ]


def apart(middles: Sequence[float], heights: Sequence[float], bottom: float) -> list[float]:
    """Move labels as little as needed so that none covers another, nor stands below the axis."""
    order = sorted(range(len(middles)), key=lambda index: middles[index])
    places = list(middles)
    for upper, lower in pairwise(order):
        least = places[upper] + (heights[upper] + heights[lower]) / 2
        places[lower] = max(places[lower], least)
    most = bottom + 6
    for index in reversed(order):
        places[index] = min(places[index], most - heights[index] / 2)
        most = places[index] - heights[index] / 2
    return places


# --- Bars -----------------------------------------------------------------------------------------


def bars(panel: Bars, x: float, y: float, width: float, colors: dict[str, str]) -> Iterator[str]:
    title = f"{panel.title} (logarithmic)" if panel.logarithmic else panel.title
    yield text(x, y + 11, title, colors["muted"], size=LABEL)
    values = [value for _, value, _ in panel.bars]
    left = x + 8 + max(width_of(name, LABEL, bold=tone == "ours") for name, _, tone in panel.bars)
    right = x + width - 8 - max(width_of(short(value), LABEL, bold=True) for value in values)
    low = 10 ** math.floor(math.log10(min(values))) if panel.logarithmic else 0
    to_x = scale([low, panel.top or max(values)], left, right, logarithmic=panel.logarithmic)
    for number, (name, value, tone) in enumerate(panel.bars):
        middle = y + 34 + 22 * number
        weight = 600 if tone == "ours" else 400
        yield text(left - 8, middle + 4, name, colors["ink"], size=LABEL, weight=weight, anchor="end")
        end = to_x(value)
        if panel.logarithmic:
            yield rule(left, middle, end, colors["grid"])
            yield dot(end, middle, colors[tone], radius=5)
        else:
            yield block(left, middle - 7, max(end - left, 1), 14, colors[tone])
        yield text(end + 9, middle + 4, short(value), colors["ink"], size=LABEL, weight=weight)


# --- Pieces ---------------------------------------------------------------------------------------


def scale(values: Sequence[float], start: float, end: float, *, logarithmic: bool = False) -> Callable[[float], float]:
    """Return where a value stands between ``start`` and ``end``, which the least and the greatest get."""
    turn = math.log10 if logarithmic else float
    low, high = (turn(value) for value in (min(values, default=0), max(values, default=1)))
    return lambda value: start + (end - start) * ((turn(value) - low) / ((high - low) or 1))


def nice_ticks(most: float) -> list[float]:
    """Return round numbers from zero, four to seven of them, the last not below ``most``."""
    most = most or 1
    unit = 10 ** math.floor(math.log10(most / 5))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= most / 5)
    return [round(step * number, 9) for number in range(math.ceil(round(most / step, 9)) + 1)]


def short(value: float) -> str:
    """Return a number with as many digits as a chart needs."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2g}"


def width_of(line: str, size: float, *, bold: bool = False) -> float:
    """Guess how wide a text is; no browser is there to ask, so rather too much."""
    return (
        size
        * (1.18 if bold else 1)
        * sum(0.32 if char in " .,:;'|!()ijlt-" else 0.9 if char in "mwMW%" else 0.6 for char in line)
    )


def wrapped(line: str, most: int) -> list[str]:
    """Break a name into lines of about ``most`` characters."""
    found = [""]
    for word in line.split():
        if found[-1] and len(found[-1]) + len(word) >= most:
            found.append(word)
        else:
            found[-1] = f"{found[-1]} {word}".strip()
    return found


def text(x: float, y: float, content: str, color: str, *, size: int, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
        f' fill="{color}">{escape(content)}</text>'
    )


def rule(left: float, y: float, right: float, color: str) -> str:
    return f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{color}"/>'


def block(left: float, top: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{color}"/>'


def path(points: Points, color: str, tone: str) -> str:
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    # What is a measure for others, and not a way to publish, is dashed.
    dashed = ' stroke-dasharray="4 4"' if tone == "limit" else ""
    return f'<path d="M{steps}" fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"{dashed}/>'


def dot(x: float, y: float, color: str, *, radius: float = 3) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'
