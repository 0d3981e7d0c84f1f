"""A queue's last hour as a small picture: SVG without a script, in the colours of the admin's theme."""

from collections.abc import Sequence

from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from django_pgqueue.services import Minute

MINUTES = 60
WIDTH, HEIGHT = 120, 24
BAR = WIDTH / MINUTES


def chart(minutes: Sequence[Minute]) -> SafeString:
    """Return a bar for each minute: what was handled, and above it what failed or was given up."""
    busiest = max((each.handled + each.failed + each.dead_lettered for each in minutes), default=0)
    if not busiest:
        return mark_safe("-")
    scale = HEIGHT / busiest
    handled = "".join(_bar(each.ago, 0.0, each.handled * scale) for each in minutes)
    bad = "".join(_bar(each.ago, each.handled * scale, (each.failed + each.dead_lettered) * scale) for each in minutes)
    return format_html(
        '<svg class="pgqueue-chart" viewBox="0 0 {} {}" width="{}" height="{}" role="img"'
        ' aria-label="{} handled in the last hour, {} in the busiest minute">'
        '<path class="pgqueue-handled" d="{}"/><path class="pgqueue-bad" d="{}"/></svg>',
        WIDTH,
        HEIGHT,
        WIDTH,
        HEIGHT,
        sum(each.handled for each in minutes),
        busiest,
        handled,
        bad,
    )


def _bar(ago: int, above: float, height: float) -> str:
    """Return the outline of a bar that stands ``above`` the ground. Nothing for one without a height."""
    if not height:
        return ""
    return f"M{WIDTH - (ago + 1) * BAR:g} {HEIGHT - above:.4g}v-{height:.4g}h{BAR * 0.8:g}v{height:.4g}z"


def rate(minutes: Sequence[Minute], over: int = 5) -> float:
    """Return how many were handled a second, in the last full minutes."""
    return sum(each.handled for each in minutes if 1 <= each.ago <= over) / (over * 60)
