"""A queue's last hour as a small picture: SVG without a script, in the colours of the admin's theme."""

from collections.abc import Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_pgqueue.services import Minute

MINUTES = 60
WIDTH, HEIGHT = 120, 24
BAR = WIDTH / MINUTES


def chart(minutes: Sequence[Minute]) -> SafeString:
    """Return a bar for each minute: what was handled, and above it what failed or was given up."""
    busiest = max((each.handled + each.failed + each.dead_lettered for each in minutes), default=0)
    if not busiest:
        return format_html('<span class="pgqueue-quiet">{}</span>', "-")
    total = sum(each.handled for each in minutes)
    return format_html(
        '<svg class="pgqueue-chart" viewBox="0 0 {} {}" width="{}" height="{}" role="img"'
        ' aria-label="{} handled in the last hour, {} in the busiest minute">{}</svg>',
        WIDTH,
        HEIGHT,
        WIDTH,
        HEIGHT,
        total,
        busiest,
        format_html_join("", "{}", ((_bar(each, busiest),) for each in minutes)),
    )


def _bar(minute: Minute, busiest: int) -> SafeString:
    left = WIDTH - (minute.ago + 1) * BAR
    bad = minute.failed + minute.dead_lettered
    handled_height, bad_height = HEIGHT * minute.handled / busiest, HEIGHT * bad / busiest
    return format_html(
        '<rect class="pgqueue-handled" x="{}" y="{}" width="{}" height="{}"/>'
        '<rect class="pgqueue-bad" x="{}" y="{}" width="{}" height="{}"/>',
        *(round(number, 2) for number in (left, HEIGHT - handled_height, BAR * 0.8, handled_height)),
        *(round(number, 2) for number in (left, HEIGHT - handled_height - bad_height, BAR * 0.8, bad_height)),
    )


def rate(minutes: Sequence[Minute], over: int = 5) -> float:
    """Return how many were handled a second, in the last full minutes."""
    return sum(each.handled for each in minutes if 1 <= each.ago <= over) / (over * 60)
