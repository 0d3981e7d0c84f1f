"""A small chart of a queue's last hour: SVG without a script, in the colors of the admin's theme."""

from collections.abc import Mapping

from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from django_pgqueue.monitoring.queue_numbers import MINUTES, Numbers, told_minutes

WIDTH, HEIGHT = 90, 24
BAR_WIDTH = WIDTH / MINUTES


def chart(numbers: Numbers) -> SafeString:
    """
    Return a chart of the last hour, or "-" if nothing happened.

    Each minute has a bar for the handled messages and, above it, one for those that failed or were dead-lettered. A
    line shows the published messages, up to the last minute that consumers have reported.
    """
    minutes = numbers.minutes
    published = {ago: count for ago, count in numbers.published.items() if ago >= told_minutes()}
    bars = [each.handled + each.failed + each.dead_lettered for each in minutes]
    highest = max(*bars, *published.values(), 0, 0)
    if not highest:
        return mark_safe("-")
    scale = HEIGHT / highest
    handled = "".join(_bar(each.ago, 0.0, each.handled * scale) for each in minutes)
    bad = "".join(_bar(each.ago, each.handled * scale, (each.failed + each.dead_lettered) * scale) for each in minutes)
    return format_html(
        '<svg class="pgqueue-chart" viewBox="0 -1 {} {}" width="{}" height="{}" role="img" aria-label="{}">'
        '<path class="pgqueue-handled" d="{}"/><path class="pgqueue-bad" d="{}"/>'
        '<path class="pgqueue-published" d="{}"/></svg>',
        WIDTH,
        HEIGHT + 2,
        WIDTH,
        HEIGHT + 2,
        _label(numbers, highest),
        handled,
        bad,
        _line(published, scale),
    )


def _label(numbers: Numbers, highest: int) -> str:
    published = sum(numbers.published.values())
    least = "at least " if numbers.exact_minutes < MINUTES else ""
    handled = sum(each.handled for each in numbers.minutes)
    bad = sum(each.failed + each.dead_lettered for each in numbers.minutes)
    return (
        f"In the last hour {least}{published:,} published, {handled:,} handled, {bad:,} failed;"
        f" peak: {highest:,} a minute"
    )


def _bar(ago: int, above: float, height: float) -> str:
    """Return the outline of a bar that starts ``above`` the base line, or an empty string if its height is 0."""
    if not height:
        return ""
    return f"M{WIDTH - (ago + 1) * BAR_WIDTH:g} {HEIGHT - above:.4g}v-{height:.4g}h{BAR_WIDTH * 0.8:g}v{height:.4g}z"


def _line(published: Mapping[int, int], scale: float) -> str:
    """Return a line with a step for each minute, or an empty string if nothing was published."""
    if not published:
        return ""
    steps = [HEIGHT - published.get(ago, 0) * scale for ago in range(MINUTES - 1, told_minutes() - 1, -1)]
    return f"M0 {steps[0]:.4g}" + "".join(f"V{step:.4g}h{BAR_WIDTH:g}" for step in steps)
