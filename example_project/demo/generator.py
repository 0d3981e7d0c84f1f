"""Where payloads come from: a file of JSON lines, or plausible webhook events."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = ("queue", "order", "invoice", "customer", "retry", "deploy", "branch", "review", "refund", "parcel", "label")
SAMPLES: tuple[dict[str, Any], ...] = (
    {"event": "push", "ref": "refs/heads/main", "forced": False, "author": {"name": "Ada", "email": None}},
    {"event": "payment", "action": "refunded", "order": 4711, "rates": [0.19, 0.07]},
    {"event": "parcel", "action": "moved", "place": {"lat": 47.37689, "lon": -8.54169}, "to": "Zürich ☃"},
)
SMALLEST, LARGEST = 500, 30_000  # bytes of JSON, about


class InputError(ValueError):
    """The input file is not what it should be."""


def check(path: str) -> int:
    """Return the number of payloads in a file, or raise ``InputError`` naming the line that is wrong."""
    count = 0
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise InputError(f"{path}, line {number}, is not JSON: {error}") from error
                    count += 1
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not count:
        raise InputError(f"{path} contains no payload")
    return count


def payloads(path: str | None, first: int, step: int) -> Iterator[Any]:
    """Yield every ``step``-th payload without end: those of a file, over and over, or events."""
    endless = events(seed=first) if path is None else itertools.islice(cycled(path), first, None, step)
    yield from endless


def cycled(path: str) -> Iterator[Any]:
    """Yield the lines of a file, from the start again at its end."""
    while True:
        with Path(path).open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def events(seed: int) -> Iterator[dict[str, Any]]:
    """Yield webhook events as a shop's payment, shipping and hosting services might send them."""
    chance = random.Random(seed)
    for number in itertools.count(1):
        event = {"id": f"evt_{seed}_{number}", **chance.choice(SAMPLES), "lines": [item(chance) for _ in range(4)]}
        # Small ones are more frequent than large ones.
        size = int(SMALLEST * (LARGEST / SMALLEST) ** chance.random() ** 1.5)
        missing = size - len(json.dumps(event))
        if missing > 0:
            event["notes"] = " ".join(chance.choices(WORDS, k=missing // 7 + 1))[:missing]
        yield event


def item(chance: random.Random) -> dict[str, Any]:
    return {"sku": f"SKU-{chance.randint(1, 9999):04}", "cents": chance.randint(100, 500_000), "off": chance.random()}
