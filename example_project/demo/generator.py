"""Where payloads come from: a file of JSON lines, or plausible webhook events."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = ("queue", "order", "invoice", "customer", "retry", "deploy", "branch", "review", "refund", "parcel", "label")
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
    makers = (push, payment, parcel)
    for number in itertools.count(1):
        event = chance.choice(makers)(chance, number)
        event["id"] = f"evt_{seed}_{number}"
        # Small ones are more frequent than large ones.
        size = int(SMALLEST * (LARGEST / SMALLEST) ** chance.random() ** 1.5)
        missing = size - len(json.dumps(event))
        if missing > 0:
            event["notes"] = prose(chance, missing)
        yield event


def push(chance: random.Random, number: int) -> dict[str, Any]:
    commits = [
        {"id": f"{chance.getrandbits(160):040x}", "message": prose(chance, 60), "author": chance.choice(WORDS)}
        for _ in range(chance.randint(1, 5))
    ]
    return {"event": "push", "payload": {"ref": "refs/heads/main", "commits": commits, "forced": number % 7 == 0}}


def payment(chance: random.Random, number: int) -> dict[str, Any]:
    amount = chance.randint(100, 500_000)
    lines = [{"sku": f"SKU-{chance.randint(1, 9999):04}", "count": chance.randint(1, 9)} for _ in range(4)]
    return {
        "event": "payment",
        "payload": {
            "action": chance.choice(["captured", "refunded"]),
            "cents": amount,
            "order": number,
            "lines": lines,
        },
    }


def parcel(chance: random.Random, number: int) -> dict[str, Any]:
    place = {"lat": round(chance.uniform(-90, 90), 5), "lon": round(chance.uniform(-180, 180), 5)}
    return {"event": "parcel", "payload": {"action": "moved", "parcel": number, "place": place, "to": "Zürich ☃"}}


def prose(chance: random.Random, size: int) -> str:
    return " ".join(chance.choices(WORDS, k=size // 7 + 1))[:size]
