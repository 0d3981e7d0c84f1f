"""Assertions whose failures show what was published instead."""

from __future__ import annotations

import difflib
import pprint
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from django_pgqueue.queues import Queue
from django_pgqueue.testing.journal import Published, published
from django_pgqueue.testing.names import alias_of, name_of

# In the text of a failed assertion.
MAX_LISTED = 10
MAX_SHOWN_CHARS = 300


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]  # it equals everything

    def __repr__(self) -> str:
        return "ANYTHING"


#: Equals everything. Use it for a value in a payload that the test does not know.
ANYTHING: Any = _Anything()


def assert_published(
    queue: Queue | str,
    payload: Any = ANYTHING,
    *,
    headers: Mapping[str, Any] | None = None,
    delay: Any = ANYTHING,
    ttl: Any = ANYTHING,
    count: int | None = None,
    since: int = 0,
    using: str | None = None,
) -> list[Published]:
    """
    Assert that a matching message was published to the queue, and return the matching messages.

    ``count`` is the exact number of matching messages (0: none; None: at least one). ``payload`` is compared with the
    payload that a handler receives, so a published tuple is compared as a list. ``headers`` must be present with these
    values, and others may be present too. ``delay`` and ``ttl`` are in seconds; a ``ttl`` of None means that the
    message never expires. Omitted arguments match anything, and ``ANYTHING`` matches any value inside a payload.
    ``since`` and ``using`` have the same meaning as in ``published()``.

    Raises ``AssertionError`` with the messages that were published instead, and how the closest one differs.
    """
    __tracebackhide__ = True
    expected = {"payload": payload, "headers": ANYTHING if headers is None else headers, "delay": delay, "ttl": ttl}
    asked = {key: value for key, value in expected.items() if value is not ANYTHING}
    everything = published(since=since, using=alias_of(queue, using))
    name = name_of(queue)
    there = [message for message in everything if message.queue == name]
    matching = [message for message in there if _matches(message, asked)]
    if len(matching) == count or (count is None and matching):
        return matching
    lines = [*_summary(name, count, len(matching), asked), *_listing(name, there, everything)]
    if there and not matching:
        lines += _closest(there, asked)
    raise AssertionError("\n".join(lines))


def _matches(message: Published, asked: Mapping[str, Any]) -> bool:
    asked = dict(asked)
    headers = asked.pop("headers", {})
    return all(key in message.headers and value == message.headers[key] for key, value in headers.items()) and all(
        value == getattr(message, key) for key, value in asked.items()
    )


def _summary(name: str, count: int | None, found: int, asked: Mapping[str, Any]) -> list[str]:
    if count is None:
        first = f"no message like this was published to {name!r}:"
    else:
        first = f"{found} messages like this were published to {name!r}, expected {count}:"
    return [first, f"    {_shown(asked) or 'any message'}"]


def _listing(name: str, there: Sequence[Published], everything: Sequence[Published]) -> list[str]:
    lines = [f"published to {name!r}: {len(there)}"]
    for message in there[:MAX_LISTED]:
        values = {"payload": message.payload, "headers": message.headers, "delay": message.delay, "ttl": message.ttl}
        lines.append(
            f"    #{message.id} {_shown({key: value for key, value in values.items() if value or key == 'payload'})}"
        )
    if len(there) > MAX_LISTED:
        lines.append(f"    and {len(there) - MAX_LISTED} more")
    others = Counter(message.queue for message in everything if message.queue != name)
    if others:
        lines.append(f"to other queues: {', '.join(f'{other!r} ({count})' for other, count in sorted(others.items()))}")
    return lines


def _shown(values: Mapping[str, Any]) -> str:
    text = " ".join(f"{key}={value!r}" for key, value in values.items())
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _closest(there: Sequence[Published], asked: Mapping[str, Any]) -> list[str]:
    """Return how the most similar message differs from the expected one."""
    wanted = _lines(asked)
    found = [(message.id, _lines({key: getattr(message, key) for key in asked})) for message in there]
    id, lines = max(
        found, key=lambda each: difflib.SequenceMatcher(None, "\n".join(wanted), "\n".join(each[1])).ratio()
    )
    return [f"the closest, #{id} (- expected, + published):", *(line.rstrip() for line in difflib.ndiff(wanted, lines))]


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [line for key, value in values.items() for line in f"{key}: {pprint.pformat(value)}".splitlines()]
