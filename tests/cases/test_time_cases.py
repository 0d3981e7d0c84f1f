"""Real failures of other systems over time: B49 (naive times, time zones), B51 (infinity, the year 20000)."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone as django_timezone

from django_pgqueue import Message, Queue
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer
from django_pgqueue.reaper import Reaper
from tests.support.processes import drain
from tests.support.rows import make_message, make_queue, payloads
from tests.support.sessions import connect, fetch

pytestmark = pytest.mark.django_db(transaction=True)

ITEM = MessageQueueItem._meta.db_table


# --- B49: naive datetimes and USE_TZ=False ---

ZONES = ("UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Auckland")


@contextmanager
def server_zone(zone: str) -> Iterator[None]:
    """Let the database's sessions start in this time zone."""
    name = connection.settings_dict["NAME"]
    with connect() as admin:
        admin.execute(f"ALTER DATABASE \"{name}\" SET timezone = '{zone}'")
        try:
            connection.close()
            yield
        finally:
            admin.execute(f'ALTER DATABASE "{name}" RESET timezone')
            connection.close()


@pytest.mark.parametrize("server", ZONES)
@pytest.mark.parametrize("project", ZONES)
@pytest.mark.parametrize("use_tz", [True, False], ids=["aware", "naive"])
def test_b49_delays_leases_and_ttls_are_exact_in_every_time_zone(
    settings: Any, use_tz: bool, project: str, server: str
) -> None:
    """Whatever USE_TZ, TIME_ZONE and the server's zone are: only the database's clock counts."""
    settings.USE_TZ, settings.TIME_ZONE = use_tz, project
    with server_zone(server):
        ((zone,),) = fetch("SELECT current_setting('TimeZone')")
        assert zone == ("UTC" if use_tz else project)
        queue = Queue("q", lease=30)
        queue.publish("delayed", delay=timedelta(seconds=2), ttl=timedelta(seconds=7))
        assert fetch(
            "SELECT extract(epoch FROM read_after - published_at)::float8,"
            f" extract(epoch FROM expires_at - published_at)::float8 FROM {ITEM}"
        ) == [(2.0, 9.0)]
        queue.publish("now")
        (message,) = queue.claim(10)
        assert message.payload == "now"
        assert django_timezone.is_aware(message.published_at) is use_tz
        assert 0 <= (message.lease_expires_at - message.published_at).total_seconds() - 30 < 20
        assert MessageQueueItem.objects.leased().count() == MessageQueueItem.objects.delayed().count() == 1
        # Nothing is due to go, and both consumers and reaper come to an end.
        reaped = Reaper("default", idle_for=3600).run_once()
        assert (reaped.expired, reaped.dead_lettered, reaped.queues) == (0, 0, [])
        fetch(f"UPDATE {ITEM} SET lease_expires_at = statement_timestamp() WHERE lease_token IS NOT NULL")
        fetch(f"UPDATE {ITEM} SET read_after = statement_timestamp() WHERE read_after IS NOT NULL")
        assert sorted(drain(queue)) == ["delayed", "now"]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("use_tz", [True, False], ids=["aware", "naive"])
def test_b49_the_admin_shows_the_projects_zone(admin_client: Client, settings: Any, use_tz: bool, zone: str) -> None:
    """A list's times are local ones."""
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    connection.close()
    make_queue("q")
    moment = datetime(2026, 7, 15, 20, 40, tzinfo=UTC)
    item = make_message("q")
    fetch(f"UPDATE {ITEM} SET published_at = %s WHERE id = %s", [moment.isoformat(), item.pk])
    page = admin_client.get(reverse("admin:django_pgqueue_messagequeueitem_changelist")).content.decode()
    local = moment.astimezone(ZoneInfo(zone))
    assert f"July {local.day}, 2026, {local.hour % 12 or 12}:{local:%M}" in page


@pytest.mark.parametrize("delay", [datetime(2030, 1, 1), datetime(2030, 1, 1, tzinfo=UTC)], ids=["naive", "aware"])
def test_b49_a_delay_is_a_duration_and_never_a_time(delay: Any) -> None:
    """So that nobody's clock and nobody's zone takes part: a datetime is refused before any SQL."""
    with pytest.raises(ValueError, match="not datetime"):
        Queue("q").publish({}, delay=delay)
    with pytest.raises(ValueError, match="not datetime"):
        Queue("q").publish({}, ttl=delay)
    assert not MessageQueue.objects.filter(name="q").exists()


# --- B51: infinity and years beyond 9999 ---

TIMES = ("infinity", "-infinity", "20000-01-01 00:00:00+00", "4000-01-01 00:00:00+00 BC")
each_time = pytest.mark.parametrize("time", TIMES)
COLUMNS = ("published_at", "read_after", "expires_at", "lease_expires_at", "dead_lettered_at")


def spoil(column: str, time: str) -> MessageQueueItem:
    """Make ten good messages, and in their midst one with this time."""
    queue = Queue("q")
    queue.publish_many(range(5))
    bad = make_message("q", "bad", dead_lettered_from="x" if column == "dead_lettered_at" else None)
    queue.publish_many(range(5, 10))
    token = uuid4() if column == "lease_expires_at" else None
    fetch(f"UPDATE {ITEM} SET {column} = %s, lease_token = %s WHERE id = %s", [time, token, bad.pk])
    return bad


def is_past(time: str) -> bool:
    return time.startswith("-") or time.endswith("BC")


def is_taken(column: str, time: str) -> bool:
    """Tell whether a claim is to bring the message that has this time."""
    if column in ("published_at", "dead_lettered_at"):
        return True
    return is_past(time) != (column == "expires_at")


@each_time
@pytest.mark.parametrize("column", COLUMNS)
def test_b51_the_neighbours_of_a_time_that_python_cannot_hold_are_handled(column: str, time: str) -> None:
    """
    And it is handled itself, once its time has come.

    A claim that raised would have leased all eleven, and would do so again until none is left.
    """
    spoil(column, time)
    expected = [*map(str, range(10)), *(["bad"] if is_taken(column, time) else [])]
    assert sorted(map(str, drain(Queue("q")))) == expected
    assert payloads("q") == ([] if is_taken(column, time) else ["bad"])
    assert MessageQueueItem.objects.count() == len(payloads("q"))


@each_time
@pytest.mark.parametrize("column", COLUMNS)
def test_b51_the_reaper_does_its_work_beside_such_a_time(column: str, time: str) -> None:
    """Expired by it is only what a time that has passed says so of."""
    spoil(column, time)
    Queue("q").publish("late", ttl=9)
    fetch(f"UPDATE {ITEM} SET expires_at = statement_timestamp() WHERE payload = '\"late\"'")
    make_queue("idle", idle=9999, auto_deleted=True)
    is_expired = column == "expires_at" and is_past(time)
    preview = Reaper("default").preview()
    reaped = Reaper("default").run_once()
    assert (reaped.expired, reaped.queues) == (1 + is_expired, ["idle"])
    assert (preview.expired, preview.queues) == (reaped.expired, reaped.queues)
    assert len(payloads("q")) == 11 - is_expired


@each_time
@pytest.mark.parametrize("column", COLUMNS)
def test_b51_the_admin_and_the_numbers_show_such_a_time(
    admin_client: Client, capsys: pytest.CaptureFixture[str], settings: Any, column: str, time: str
) -> None:
    """The nearest that Python can hold; the ten others are in the list too, and JSON stays JSON."""
    settings.TIME_ZONE = "UTC"
    bad = spoil(column, time)
    changelist = reverse("admin:django_pgqueue_messagequeueitem_changelist")
    page = admin_client.get(changelist).content.decode()
    assert "11 message queue items" in page
    year = 1 if is_past(time) else 9999
    if column != "dead_lettered_at":
        assert ("Jan. 2, 0001, midnight" if is_past(time) else "Dec. 30, 9999, midnight") in page
    detail = admin_client.get(reverse("admin:django_pgqueue_messagequeueitem_change", args=[bad.pk]))
    assert detail.status_code == 200
    assert getattr(MessageQueueItem.objects.get(pk=bad.pk), column).year == year

    call_command("inspect_queues", "q", format="json")
    (numbers,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert sum(numbers[state] for state in ("ready", "delayed", "leased", "dead", "expired")) == 11
    call_command("inspect_queues", "q")
    assert capsys.readouterr().out.count("\n") == 2


@each_time
@pytest.mark.parametrize("column", ["last_active", "created_at", "paused_at"])
def test_b51_a_queue_with_such_a_time_can_be_used_reaped_and_seen(
    admin_client: Client, capsys: pytest.CaptureFixture[str], column: str, time: str
) -> None:
    """Neither its own messages nor other queues suffer."""
    make_queue("q", auto_deleted=True)
    make_queue("idle", idle=9999, auto_deleted=True)
    fetch(f"UPDATE django_pgqueue_messagequeue SET {column} = %s WHERE name = 'q'", [time])
    assert MessageQueue.objects.get(name="q").name == "q"
    assert admin_client.get(reverse("admin:django_pgqueue_messagequeue_changelist")).status_code == 200
    assert admin_client.get(reverse("admin:django_pgqueue_messagequeue_change", args=["q"])).status_code == 200
    call_command("inspect_queues", "q", "idle", format="json")
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [numbers["name"] for numbers in found] == ["idle", "q"]
    is_idle = column == "last_active" and is_past(time)
    assert Reaper("default").run_once().queues == ["idle", *(["q"] if is_idle else [])]
    queue = Queue("q", auto_deleted=True)
    queue.publish(1)
    if column != "paused_at":
        assert drain(queue) == [1]


@each_time
def test_b51_a_consumer_with_such_a_heartbeat_can_be_seen_and_goes_when_it_is_old(time: str) -> None:
    """The reaper forgets it by the same rule as any other."""
    consumer = QueueConsumer.objects.create(id=uuid4(), host="h", pid=1, queues=[])
    fetch("UPDATE django_pgqueue_queueconsumer SET last_heartbeat = %s", [time])
    assert QueueConsumer.objects.get().pk == consumer.pk
    Reaper("default").run_once()
    assert QueueConsumer.objects.exists() is not is_past(time)


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))], ids=str)
@each_time
def test_b51_what_is_read_can_be_converted_to_any_zone(time: str, zone: timezone) -> None:
    """It overflows nowhere, in a handler or in a template."""
    spoil("published_at", time)
    ours = {message.payload: message for message in Queue("q").claim(11)}["bad"]
    for value in (ours.published_at, MessageQueueItem.objects.get(pk=ours.id).published_at):
        assert value.astimezone(zone) == value


def test_b51_times_that_python_can_hold_are_read_as_they_are() -> None:
    """Null as null, and to the microsecond, also in sums, aggregates and filters."""
    make_queue("q")
    item = make_message("q", due_in=1.5)
    ((stored,),) = fetch(f"SELECT read_after FROM {ITEM}")
    item.refresh_from_db()
    assert (item.read_after, item.expires_at) == (stored, None)
    assert MessageQueueItem.objects.values_list("read_after").get() == (stored,)
    assert MessageQueueItem.objects.get(read_after=stored) == item
    assert list(MessageQueueItem.objects.dates("read_after", "day")) == [django_timezone.localtime(stored).date()]


BEYOND = [timedelta.max, -1, -timedelta(microseconds=1), math.inf, math.nan, 1e300, 10**400, 101 * 366 * 86_400]


@pytest.mark.parametrize("value", BEYOND, ids=lambda value: f"{value!r:.30}")
def test_b51_delays_out_of_range_are_refused_before_any_sql(value: Any) -> None:
    """Publishing, giving back and extending alike; the message is still held afterwards."""
    queue = Queue("q")
    with pytest.raises(ValueError, match="delay must be seconds|delay must be from 0 to"):
        queue.publish({}, delay=value)
    with pytest.raises(ValueError, match="delay must be"):
        queue.publish_many([{}], delay=value)
    if value != math.inf:  # Which is a TTL: never.
        with pytest.raises(ValueError, match="ttl must be"):
            queue.publish({}, ttl=value)
    assert not MessageQueue.objects.filter(name="q").exists()
    queue.publish({})
    (message,) = queue.claim()
    assert isinstance(message, Message)
    with pytest.raises(ValueError, match="delay must be"):
        queue.nack(message, delay=value)
    with pytest.raises(ValueError, match="seconds must be"):
        queue.extend(message, seconds=value)
    queue.ack(message)


def test_b51_the_longest_delay_and_ttl_can_be_read_back() -> None:
    """A hundred years each."""
    century = timedelta(days=36_500)
    queue = Queue("q")
    queue.publish({}, delay=century, ttl=century)
    item = MessageQueueItem.objects.get()
    assert item.read_after is not None and item.expires_at is not None
    assert (item.read_after - item.published_at, item.expires_at - item.read_after) == (century, century)
    assert queue.claim() == []
