"""Format durations for people."""

from __future__ import annotations

EMPTY = "-"


def duration(seconds: float | None) -> str:
    """Return a duration as readable text, for example "2.0 min". A dash stands for None and for infinity."""
    if seconds is None or abs(seconds) == float("inf"):
        return EMPTY
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
