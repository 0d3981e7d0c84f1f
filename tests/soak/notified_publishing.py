"""
Case B31 in its full number: what wake-ups cost publishers, and that settling sends none.

`python -m tests.soak.notified_publishing`: 16 processes publish 2,000 messages each, with and without
wake-ups in turn, then 100,000 messages are claimed, acked and deleted.
"""

import time
from collections.abc import Callable
from typing import Any, Self

from django.test import override_settings
from psycopg import sql

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.services import notifying
from tests.soak import main
from tests.support.crew import Crew, crew
from tests.support.sessions import connect
from tests.support.waiting import DEADLINE

NAME = "q"
# NOTIFY_INTERVAL: as it is by default, a wake-up for each publish, and as good as none.
INTERVALS = {"coalesced": 0.05, "each": 0.0, "none": 1e9}


class ChannelSet:
    """A session that hears what is sent to a queue's consumers."""

    def __init__(self, name: str) -> None:
        self._channel = notifying.channel(name)
        self._session = connect()
        self._session.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.close()

    def hears(self, call: Callable[[], object]) -> int:
        """Return how many notifications a call sent."""
        call()
        with connect() as other:
            # It comes after all that was sent before.
            other.execute("SELECT pg_notify(%s, 'end')", [self._channel])
        count = 0
        while True:
            for notify in self._session.notifies(timeout=DEADLINE, stop_after=1):
                if notify.payload == "end":
                    return count
                count += 1


def publish(number: int, count: int, interval: float) -> None:
    """Publish as a member of the crew."""
    queue = Queue(NAME)
    with override_settings(PGQUEUE={"NOTIFY_INTERVAL": interval}):
        for each in range(count):
            queue.publish({"publisher": number, "number": each})


def run(
    seconds: float = 0, *, publishers: int = 16, messages: int = 2_000, bulk: int = 100_000, share: float = 0.6
) -> dict[str, Any]:
    """
    Measure until `share` of the rate without wake-ups is seen to be kept, for so many seconds at the most.

    Once at the least. The best of each counts: what else the machine does only ever makes it less.
    """
    Queue(NAME).declare()
    rates = dict.fromkeys(INTERVALS, 0.0)
    ends = time.monotonic() + seconds
    with ChannelSet(NAME) as channel_set, crew(publishers, "tests.soak.notified_publishing:publish") as members:
        # A process sends its first one whatever the interval.
        assert channel_set.hears(lambda: members.each(50, INTERVALS["none"])) == publishers
        is_kept = False
        while not all(rates.values()) or (not is_kept and time.monotonic() < ends):
            for name, interval in INTERVALS.items():
                rate, heard = _measure(members, channel_set, publishers * messages, messages, interval)
                rates[name] = max(rates[name], rate)
                assert bool(heard) == (name != "none"), (name, heard)
            is_kept = rates["coalesced"] >= share * rates["none"]
        assert is_kept, rates
        settling = _settle(channel_set, bulk)
    return {**{f"{name}_per_second": round(rate) for name, rate in rates.items()}, **settling}


def _measure(members: Crew, channel_set: ChannelSet, total: int, messages: int, interval: float) -> tuple[float, int]:
    MessageQueueItem.objects.all().delete()
    began = time.monotonic()
    took = 0.0

    def work() -> None:
        nonlocal took
        members.each(messages, interval)
        took = time.monotonic() - began

    heard = channel_set.hears(work)
    assert MessageQueueItem.objects.count() == total
    return total / took, heard


def _settle(channel_set: ChannelSet, bulk: int) -> dict[str, Any]:
    """Claim, extend and ack half of many messages, and delete the rest: nobody is woken for it."""
    queue = Queue(NAME)
    MessageQueueItem.objects.all().delete()
    assert channel_set.hears(lambda: queue.publish_many([{}] * bulk)) == 1
    held = queue.claim(limit=bulk // 2)
    assert len(held) == bulk // 2
    took = {}
    for name, call in (
        ("extend", lambda: queue.extend(*held)),
        ("ack", lambda: queue.ack(*held)),
        ("delete", lambda: MessageQueueItem.objects.all().delete()),
    ):
        began = time.monotonic()
        assert channel_set.hears(call) == 0, name
        took[f"{name}_{bulk // 2}_seconds"] = round(time.monotonic() - began, 2)
    assert not MessageQueueItem.objects.exists()
    return took


if __name__ == "__main__":
    main(run, seconds=120)
