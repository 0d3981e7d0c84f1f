"""The delay of a retry."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from django_pgqueue.validation import check_seconds


def check_backoff(backoff: Mapping[str, float]) -> dict[str, float]:
    """Return a back-off with all keys, or raise ``ValueError`` naming the invalid key."""
    complete = {"base": 1.0, "factor": 2.0, "max": 3600.0, "jitter": 0.1}
    if not isinstance(backoff, Mapping):
        raise ValueError(f"backoff must be a mapping or a callable, not {type(backoff).__name__}")
    for key, value in backoff.items():
        if key not in complete:
            raise ValueError(f"backoff has no key {key!r}; its keys are {', '.join(complete)}")
        # As float, because an int raised to the two-billionth power would take minutes and gigabytes.
        complete[key] = float(check_seconds(value, f"backoff[{key!r}]"))
    if complete["factor"] < 1 or complete["jitter"] > 1:
        raise ValueError("backoff: factor must be at least 1 and jitter at most 1")
    return complete


def backoff_delay(backoff: Mapping[str, float] | Callable[[int], float], delivery_count: int) -> float:
    """Return the delay in seconds: ``base * factor ** (delivery_count - 1)`` up to ``max``, plus or minus jitter."""
    if callable(backoff):
        return check_seconds(backoff(delivery_count), "the delay that backoff returned")
    parts = check_backoff(backoff)
    try:
        delay = min(parts["base"] * parts["factor"] ** (delivery_count - 1), parts["max"])
    except OverflowError:
        delay = parts["max"]
    # Jitter spreads the retries of messages that failed together.
    return delay * (1 + parts["jitter"] * random.uniform(-1, 1))
