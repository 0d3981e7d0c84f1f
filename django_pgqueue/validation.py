"""Checks of arguments, which are done before any SQL is sent."""

import math
import unicodedata
from datetime import timedelta

from django_pgqueue.exceptions import InvalidQueueName

Seconds = float | timedelta

#: The longest queue name, in characters. The default dead-letter queue, NAME.dead, may have five more.
MAX_NAME_LENGTH = 250
DEAD_LETTER_SUFFIX = ".dead"

#: The longest allowed time in seconds: a hundred years. PostgreSQL's dates have a larger range than Python's, so an
#: unlimited delay could be stored but not read.
MAX_SECONDS = 100 * 365 * 86_400

#: The largest count of deliveries, messages and so on: the maximum of PostgreSQL's integer.
MAX_COUNT = 2**31 - 1


def check_name(name: object) -> str:
    """
    Return ``name`` if it is a valid name of a queue, else raise ``InvalidQueueName``.

    A name has 1 to 250 printable characters (255 if it ends in ``.dead``), without a space at either end. It is in
    Unicode normalization form C, so that two names which look the same are not two queues. The names "." and ".." are
    invalid, because no URL can contain them.
    """
    if not isinstance(name, str):
        raise InvalidQueueName(f"a queue name must be a str, not {type(name).__name__}")
    longest = MAX_NAME_LENGTH + (len(DEAD_LETTER_SUFFIX) if name.endswith(DEAD_LETTER_SUFFIX) else 0)
    if not name or len(name) > longest:
        raise InvalidQueueName(f"a queue name must have 1 to {longest} characters, not {len(name)}: {name[:40]!r}")
    if not name.isprintable() or name != name.strip():
        raise InvalidQueueName(f"a queue name must have printable characters only and no space at its ends: {name!r}")
    if name in {".", ".."}:
        raise InvalidQueueName(f"a queue name cannot be {name!r}, because a URL cannot contain it")
    if not unicodedata.is_normalized("NFC", name):
        raise InvalidQueueName(f"a queue name must be in Unicode normalization form C: {name!r}")
    return name


def check_seconds(value: object, what: str, *, zero: bool = True) -> float:
    """Return a number of seconds or a ``timedelta`` in seconds, else raise ``ValueError`` naming ``what``."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what} must be seconds (a number or a timedelta), not {type(value).__name__}")
    # Compared before isfinite(), which fails for an int beyond the range of float.
    if not -1 <= value <= MAX_SECONDS or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "from 0" if zero else "more than 0"
        raise ValueError(f"{what} must be {least} to {MAX_SECONDS} seconds, not {value!r:.40}")
    return value


def check_ttl(value: object) -> float | None:
    """Return a TTL in seconds; None (the default) and infinity (never) unchanged. Otherwise like ``check_seconds``."""
    if value is None or value == math.inf:
        return None if value is None else math.inf
    return check_seconds(value, "ttl", zero=False)


def check_rate(value: object) -> float:
    """Return a number per second from 0.001 to a million, else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 1_000_000:
        raise ValueError(f"rate must be a number per second from 0.001 to 1000000, not {value!r:.40}")
    return value


def check_bool(value: object, what: str) -> bool:
    """Return True or False, else raise ``ValueError`` naming ``what``."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, not {value!r:.40}")
    return value


def check_count(value: object, what: str, *, most: int = MAX_COUNT) -> int:
    """Return a whole number from 1 to ``most``, else raise ``ValueError`` naming ``what``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{what} must be a whole number from 1 to {most}, not {value!r}")
    return value
