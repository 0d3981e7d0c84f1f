"""The times of a claimed message are those of its row, to the microsecond, as Django would read them."""

from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import pytest

from django_pgqueue import Message, Queue
from django_pgqueue.models import MessageQueueItem
from tests.support.databases import alias
from tests.support.sessions import fetch

pytestmark = pytest.mark.django_db(transaction=True)

SET_PUBLISHED = "UPDATE django_pgqueue_messagequeueitem SET published_at = %s WHERE id = %s"

TIMES = [
    "2026-02-03 04:05:06.789012+00",
    "2026-02-03 04:05:06.000001+00",
    "2026-12-31 23:59:59.999999+00",
    "2026-02-03 04:05:06+00",
    # In Berlin this hour comes twice.
    "2026-10-25 00:30:00.123457+00",
    "2026-10-25 01:30:00.123457+00",
    "1969-12-31 23:59:59.999999+00",
    "0001-06-01 00:00:00+00",
]


def zoned(settings: Any, use_tz: bool, time_zone: str | None) -> AbstractContextManager[str]:
    """Give an alias of this zone: the database's own with USE_TZ, else the project's."""
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "America/New_York" if use_tz or time_zone is None else time_zone
    return alias("zoned", TIME_ZONE=time_zone if use_tz else None)


def claimed(using: str, published_at: str) -> tuple[Message, MessageQueueItem]:
    """Claim a message that was published then. Returns it, and its row as Django reads it."""
    queue = Queue("q", using=using)
    message_id = queue.publish(1)
    fetch(SET_PUBLISHED, [published_at, message_id], using=using)
    (message,) = queue.claim(1)
    return message, MessageQueueItem.objects.using(using).get(pk=message_id)


@pytest.mark.parametrize("time_zone", [None, "Asia/Kathmandu", "Europe/Berlin", "America/St_Johns"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_they_are_those_of_the_row(use_tz: bool, time_zone: str | None, settings: Any) -> None:
    """With and without USE_TZ, in the database's TIME_ZONE or the project's."""
    with zoned(settings, use_tz, time_zone) as using:
        for time in TIMES:
            message, row = claimed(using, time)
            for name in ("published_at", "lease_expires_at"):
                mine, stored = getattr(message, name), getattr(row, name)
                assert (mine, mine.utcoffset()) == (stored, stored.utcoffset()), (name, time)
            if use_tz:
                assert message.published_at.astimezone(UTC) == datetime.fromisoformat(time)


def test_each_message_of_a_claim_has_its_own() -> None:
    """Many that differ by a microsecond."""
    queue = Queue("q")
    ids = queue.publish_many(list(range(50)))
    fetch(
        "UPDATE django_pgqueue_messagequeueitem"
        " SET published_at = '2026-02-03 04:05:06+00'::timestamptz + (payload::text)::int * interval '1 microsecond'"
    )
    messages = queue.claim(50)
    assert [message.id for message in messages] == ids
    assert [message.published_at.microsecond for message in messages] == list(range(50))
    assert len({message.lease_expires_at for message in messages}) == 1


@pytest.mark.parametrize("time_zone", ["Pacific/Kiritimati", "Etc/GMT+12", "UTC"])
@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize(
    ("time", "nearest"),
    [
        ("infinity", datetime(9999, 12, 30, tzinfo=UTC)),
        ("-infinity", datetime(1, 1, 2, tzinfo=UTC)),
        ("20000-01-01 00:00:00+00", datetime(9999, 12, 30, tzinfo=UTC)),
        ("9999-12-31 23:59:59.999999+00", datetime(9999, 12, 30, tzinfo=UTC)),
        ("4000-01-01 00:00:00+00 BC", datetime(1, 1, 2, tzinfo=UTC)),
        ("0001-01-01 00:00:00+00", datetime(1, 1, 2, tzinfo=UTC)),
    ],
)
def test_what_python_cannot_hold_is_brought_into_range(
    time: str, nearest: datetime, use_tz: bool, time_zone: str, settings: Any
) -> None:
    """A day short of its first and last moment, which are other days elsewhere."""
    with zoned(settings, use_tz, time_zone) as using:
        queue = Queue("q", using=using)
        message_id = queue.publish(1)
        fetch(SET_PUBLISHED, [time, message_id], using=using)
        (message,) = queue.claim(1)
        if use_tz:
            assert message.published_at == nearest
        else:
            assert abs(message.published_at - nearest.replace(tzinfo=None)).total_seconds() <= 14 * 3600
            assert message.published_at.tzinfo is None
        queue.ack(message)


def test_a_long_lease_is_told_as_it_is() -> None:
    """A hundred years."""
    queue = Queue("q", lease=3600 * 24 * 365 * 100)
    message_id = queue.publish(1)
    (message,) = queue.claim(1)
    assert message.lease_expires_at == MessageQueueItem.objects.get(pk=message_id).lease_expires_at
