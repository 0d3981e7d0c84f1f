"""The columns of the list of queues, computed from the numbers attached to each row."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_pgqueue.admin.charts import chart
from django_pgqueue.durations import EMPTY, duration
from django_pgqueue.monitoring.queue_numbers import Numbers, Rate, at_least, is_cut

HEAL_CAUSES = ("revived", "vanished")

# The columns that the page of one queue also shows, with their labels.
NUMBERS = (
    ("published", "Published"),
    ("handled", "Handled"),
    ("ready", "Ready"),
    ("delayed", "Delayed"),
    ("leased", "Leased"),
    ("dead", "Dead letters"),
    ("oldest_due", "Oldest due"),
    ("consumers", "Consumers"),
    ("last_used", "Last active"),
)


class QueueColumns:
    """The columns, as methods of the admin class."""

    @admin.display(description="state")
    def condition(self, row: Any) -> SafeString:
        return format_html_join(" ", '<span class="pgqueue-mark pgqueue-{}">{}</span>', conditions(row))

    @admin.display(description="ready")
    def ready(self, row: Any) -> str:
        return count_of(row.numbers, "ready")

    @admin.display(description="delayed")
    def delayed(self, row: Any) -> str:
        return count_of(row.numbers, "delayed")

    @admin.display(description="leased")
    def leased(self, row: Any) -> str:
        return count_of(row.numbers, "leased")

    @admin.display(description="dead letters")
    def dead(self, row: Any) -> str:
        count: int = row.numbers.dead_letters
        return at_least(count, more=is_cut(count))

    @admin.display(description="oldest due")
    def oldest_due(self, row: Any) -> str:
        return duration(row.numbers.depth.oldest_due_age if row.numbers.depth else None)

    @admin.display(description="consumers")
    def consumers(self, row: Any) -> str:
        return str(row.numbers.depth.consumers) if row.numbers.depth else EMPTY

    @admin.display(description="last hour")
    def activity(self, row: Any) -> SafeString:
        return chart(row.numbers)

    @admin.display(description="published")
    def published(self, row: Any) -> SafeString | str:
        rate: Rate = row.numbers.publish_rate
        return format_html('<span title="At least this many.">{}</span>', rate) if rate.is_at_least else str(rate)

    @admin.display(description="handled")
    def handled(self, row: Any) -> str:
        return str(row.numbers.handle_rate)

    @admin.display(description="last active", ordering="last_active")
    def last_used(self, row: Any) -> str:
        return duration(max((row.now - row.last_active).total_seconds(), 0.0))


def conditions(row: Any) -> list[tuple[str, str]]:
    """Return a queue's special conditions, each as a CSS class and a text."""
    found = []
    if row.paused_at is not None:
        found.append(("paused", "paused"))
    if row.exclusive:
        owner = row.exclusive_consumer_id
        found.append(("exclusive", "exclusive" if owner is None else f"exclusive, owned by {str(owner)[:8]}"))
    if row.auto_deleted:
        found.append(("auto-deleted", _reapable(row)))
    if orphans := row.numbers.orphans.messages:
        found.append(("orphans", f"{at_least(orphans, more=is_cut(orphans))} orphans"))
    events = row.numbers.events
    found += [(cause, f"{events[cause]} {cause} in the last day") for cause in HEAL_CAUSES if cause in events]
    return found


def _reapable(row: Any) -> str:
    left = row.numbers.reapable_in
    if left is None:
        return "auto-deleted"
    return f"reapable {f'in {duration(left)}' if left else 'now'}"


def count_of(numbers: Numbers, state: str) -> str:
    return EMPTY if numbers.depth is None else at_least(getattr(numbers.depth, state), more=numbers.is_more)
