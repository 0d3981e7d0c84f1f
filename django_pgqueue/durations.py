"""Ages and deadlines for people."""

from __future__ import annotations

# What stands where there is nothing to measure.
NONE = "-"


def duration(seconds: float | None) -> str:
    """Return seconds as people read them: 2.0 min. Of none, and of infinitely many, a dash."""
    if seconds is None or abs(seconds) == float("inf"):
        return NONE
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
