"""
A wrong clock for one process, as on a host whose time was set wrongly.

What reads the time of day in Python is replaced: `time.time`, `time.time_ns` and those of the datetime
module. `time.monotonic`, as everywhere, is not affected by the time of day.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

#: Seconds by which the process's clock is ahead.
VARIABLE = "CHAOS_CLOCK_SHIFT"


def shift(seconds: float) -> None:
    """Set this process's clock ahead. Called before anything but psycopg imports datetime."""
    # First, because its table of types is by class: it has to hold the real ones.
    import psycopg  # noqa: F401

    real_time, real_time_ns = time.time, time.time_ns
    time.time = lambda: real_time() + seconds
    time.time_ns = lambda: real_time_ns() + int(seconds * 1e9)
    ahead = datetime.timedelta(seconds=seconds)
    real_datetime, real_date = datetime.datetime, datetime.date

    class AsReal(type):
        """Let real objects be instances of the classes below, which make none of their own."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, cls.__mro__[1])

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, cls.__mro__[1])

    class ShiftedDatetime(real_datetime, metaclass=AsReal):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return real_datetime(*args, **kwargs)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return real_datetime.now(tz) + ahead

        @classmethod
        def utcnow(cls) -> Any:
            return real_datetime.now(datetime.UTC).replace(tzinfo=None) + ahead

        @classmethod
        def today(cls) -> Any:
            return real_datetime.now() + ahead

    class ShiftedDate(real_date, metaclass=AsReal):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return real_date(*args, **kwargs)

        @classmethod
        def today(cls) -> Any:
            return (real_datetime.now() + ahead).date()

    datetime.datetime = ShiftedDatetime  # type: ignore[misc]
    datetime.date = ShiftedDate  # type: ignore[misc]
