"""Wait for a condition, and how long."""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


#: Seconds after which a step that should have happened counts as not happening.
DEADLINE = 30.0


def busy() -> float:
    """
    Return how many programs want each core: 1 where none has to wait.

    What a test allows for something to happen is multiplied by it, so that a busy machine fails no test.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], T], timeout: float = DEADLINE, what: str = "") -> T:
    """Return the first true value of `condition()`, else fail after `timeout` seconds; a busy machine has more."""
    timeout *= busy()
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what or condition}"
        time.sleep(0.005)
    return value


def mostly_full(values: Iterable[T], *kept: T) -> list[Any]:
    """Return parameters for a test of which only the kept ones belong to the gate; the others are marked `full`."""
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.full)
        for value in values
    ]
