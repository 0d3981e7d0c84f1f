"""Real failures of other systems over names: B12 (long), B14 (blank, alike), B15 (channels are the database's)."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest
from django.contrib.admin.utils import quote
from django.core.management import CommandError, call_command
from django.db import DatabaseError, IntegrityError, connections
from django.test import Client, override_settings
from django.urls import reverse

from django_pgqueue import InvalidQueueName, Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import claiming, declaring, notifying
from tests.support.databases import alias, migrate
from tests.support.processes import command, consuming, drain, worker
from tests.support.rows import make_queue, payloads
from tests.support.sessions import connect, second_session
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

# --- B12: names longer than 63 bytes collide or are cut ---

LONG = ("a" * 70 + "1", "a" * 70 + "2", "😀" * 32)


@pytest.mark.full
def test_b12_names_that_differ_only_at_the_end_have_workers_of_their_own() -> None:
    """Each message wakes the worker of its queue, long before that would poll, and no other."""
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(worker(queues=[name], settings={"POLL_INTERVAL": 60, "HEARTBEAT_INTERVAL": 60}))
            for name in LONG
        }
        # One at a time: each has to be woken for.
        for number, name in enumerate([LONG[0]] * 5 + [LONG[2]] * 2, start=1):
            message_id = Queue(name).publish({})
            wait_until(lambda number=number: Seen.objects.count() == number)  # type: ignore[misc]
            assert Seen.objects.get(msg_id=message_id).worker == workers[name].pid
        assert not payloads(LONG[1])
        assert {running.stop() for running in workers.values()} == {0}
        assert {running.output for running in workers.values()} == {""}


@pytest.mark.parametrize("name", [*LONG, "x" * 48, "x" * 49, "€" * 250, "x" * 250 + ".dead"], ids=lambda name: name[:9])
def test_b12_the_server_cuts_no_channel(name: str) -> None:
    """Listening is answered without a notice, and the channel is the one that was asked for."""
    notices: list[str | None] = []
    with second_session() as session:
        session.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        session.execute(f'LISTEN "{notifying.channel(name)}"')
        assert session.execute("SELECT pg_listening_channels()").fetchall() == [(notifying.channel(name),)]
        Queue(name).publish({})
        (heard,) = session.notifies(timeout=20, stop_after=1)
    assert heard.channel == notifying.channel(name)
    assert notices == []


@pytest.mark.parametrize("length", [251, 255, 256, 1_000])
def test_b12_a_name_beyond_the_maximum_is_refused_and_not_cut(length: int) -> None:
    """By the class, by the commands that could make a queue, and beyond 255 by the database."""
    refused_everywhere("a" * length)
    if length > 255:
        with pytest.raises(DatabaseError, match="django_pgqueue_queue_name"):
            make_queue("a" * length)
    assert not MessageQueue.objects.filter(name__startswith="a").exists()


def refused_everywhere(name: str) -> None:
    """Every entrance that could make a queue of this name refuses it, in the same words."""
    with pytest.raises(InvalidQueueName) as refusal:
        Queue(name)
    calls: list[Callable[[], object]] = [
        lambda: Queue("good", dead_letter=name),
        lambda: call_command("publish_messages", name, "/dev/null"),
        lambda: call_command("consume_queues", name, handler="tests.testapp.handlers.do_nothing", drain=True),
    ]
    for call in calls:
        with pytest.raises((InvalidQueueName, CommandError)) as same:
            call()
        assert str(same.value) == str(refusal.value)


# --- B14: empty, blank, control and look-alike names ---

BLANK = ["", " ", " a", "a ", "\t", "a\tb", "a\n", "\r\na", "\x7f"]
UNSEEN = ["\u200b", "a\u200b", "a\u00ad", "\ufeffa", "\u2003a", "a\u00a0b", "a\u2028b", "\u202eabc"]
NO_PATH = [".", ".."]
DECOMPOSED = ["e\u0301", "A\u030angstro\u0308m"]
GOOD = ["\u00e9", "שלום", "مرحبا", "a/b", "../..", "...", "a b", "😀" * 200, "a?b&c=%2F#d", "_2E_2F", "注文"]


@pytest.mark.parametrize("name", [*BLANK, "\0", "a\0b", *UNSEEN, *NO_PATH, *DECOMPOSED], ids=ascii)
def test_b14_names_that_cannot_be_told_apart_are_refused(name: str) -> None:
    """One rule and one message at all entrances; nothing is trimmed."""
    before = set(MessageQueue.objects.values_list("name", flat=True))
    refused_everywhere(name)
    assert set(MessageQueue.objects.values_list("name", flat=True)) == before


@pytest.mark.parametrize("name", [*BLANK, "\0", "a" * 256], ids=ascii)
def test_b14_the_database_refuses_blank_and_control_characters_too(name: str) -> None:
    """Whoever sends the INSERT. (NUL is no text for PostgreSQL at all.)"""
    with connect() as session, pytest.raises((psycopg.errors.CheckViolation, psycopg.DataError)):
        session.execute("INSERT INTO django_pgqueue_messagequeue (name) VALUES (%s)", [name])


@pytest.mark.parametrize("name", [*GOOD, "a" * 250], ids=lambda name: ascii(name)[:20])
def test_b14_every_other_name_works_and_can_be_opened_in_the_admin(admin_client: Client, name: str) -> None:
    """The list links to each queue and to each message."""
    queue = Queue(name)
    queue.publish_many([1, 2])
    (message, other) = queue.claim(2)
    queue.nack(message, delay=0)
    queue.reject(other)
    page = admin_client.get(reverse("admin:django_pgqueue_messagequeue_changelist")).content.decode()
    link = reverse("admin:django_pgqueue_messagequeue_change", args=[quote(name)])
    assert f'href="{link}"' in page
    # What a browser makes of a path before it sends it.
    assert ".." not in link.split("/") and "." not in link.split("/")
    assert admin_client.get(link).status_code == 200
    assert drain(queue) == [1]
    assert payloads(f"{name}.dead") == [2]


@pytest.mark.parametrize("name", [*UNSEEN, *NO_PATH, *DECOMPOSED], ids=ascii)
def test_b14_a_row_with_such_a_name_made_by_somebodys_sql_disturbs_nothing(
    capsys: pytest.CaptureFixture[str], admin_client: Client, name: str
) -> None:
    """It is shown, and reaped as any other. (Which of them the database takes depends on its locale.)"""
    with contextlib.suppress(IntegrityError):
        make_queue(name, idle=9999, auto_deleted=True)
    if not MessageQueue.objects.filter(name=name).exists():
        return
    call_command("inspect_queues", name)
    assert capsys.readouterr().out.count("\n") == 2
    assert admin_client.get(reverse("admin:django_pgqueue_messagequeue_changelist")).status_code == 200
    call_command("reap_queues")
    assert not MessageQueue.objects.filter(name=name).exists()


# --- B15: channels are per database, not per schema or app ---


@contextmanager
def installation(name: str) -> Iterator[str]:
    """Give an alias for a schema of its own, with the queue's tables, in the database of the tests."""
    with connect() as admin:
        admin.execute(f"CREATE SCHEMA {name}")
        try:
            with alias(name, OPTIONS={"options": f"-c search_path={name} -c lock_timeout=20s"}):
                migrate(name)
                yield name
        finally:
            admin.execute(f"DROP SCHEMA {name} CASCADE")


class Watched:
    """A consumer of the queue "q" of one installation, and what it claimed and handled."""

    def __init__(self, using: str) -> None:
        self.handled: list[Any] = []
        self.consumer = Consumer([make_handler(Queue("q", using=using), self.handle)])

    def handle(self, message: Message) -> None:
        self.handled.append(message.payload)


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The alias of each claim, as they come."""
    seen: list[str] = []
    claim = claiming.claim

    def watched(declaration: declaring.Declaration, using: str, **options: Any) -> claiming.Claim:
        seen.append(using)
        return claim(declaration, using, **options)

    monkeypatch.setattr(claiming, "claim", watched)
    return seen


@pytest.fixture
def polling_is_too_slow(settings: Any) -> None:
    """What happens within the test was woken."""
    settings.PGQUEUE = {"POLL_INTERVAL": 60}


def heard_by(session: psycopg.Connection[Any]) -> int:
    return len(list(session.notifies(timeout=0.5)))


def quiet(claims: list[str]) -> bool:
    """Tell whether all consumers have gone to sleep: no claim for a while."""
    before = len(claims)
    time.sleep(0.3)
    return len(claims) == before


def test_b15_another_schema_is_woken_in_vain_and_handles_nothing(
    claims: list[str], polling_is_too_slow: None, caplog: pytest.LogCaptureFixture
) -> None:
    """With one prefix for both: at most two short looks for each notification, and no error."""
    with installation("s1") as s1, installation("s2") as s2, second_session() as session:
        one, two = Watched(s1), Watched(s2)
        session.execute(f'LISTEN "{notifying.channel("q")}"')
        with consuming(one.consumer), consuming(two.consumer):
            wait_until(lambda: {s1, s2} <= set(claims) and quiet(claims))
            before = claims.count(s2)
            queue = Queue("q", using=s1)
            for number in range(200):
                queue.publish(number)
            wait_until(lambda: len(one.handled) == 200)
            wait_until(lambda: quiet(claims))
            notifications = heard_by(session)
        # Publishers throttle: 200 messages are not 200 notifications.
        assert 1 <= notifications < 200
        # One look for the notification, one more in case that the next one was throttled away.
        assert claims.count(s2) - before <= 2 * notifications
        assert two.handled == []
        assert sorted(one.handled) == list(range(200))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


LAST_STATEMENT = """
SELECT pid, query_start FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'django_pgqueue consumer'
"""


def last_statements() -> dict[int, Any]:
    """Return when each consumer's session began its last statement."""
    with connect() as admin:
        return dict(admin.execute(LAST_STATEMENT).fetchall())


def is_asleep(pid: int) -> bool:
    """Tell whether this session began no statement for a second."""
    before = last_statements()[pid]
    time.sleep(1)
    return bool(last_statements()[pid] == before)


def test_b15_with_a_prefix_of_its_own_an_installation_is_not_woken_at_all(
    monkeypatch: pytest.MonkeyPatch, claims: list[str], polling_is_too_slow: None
) -> None:
    """The other one's 200 messages cost it not one statement; its own wake it."""
    prefix = {"CHANNEL_PREFIX": "other.shop-2"}
    with installation("s1") as s1, installation("s2") as s2:
        monkeypatch.setenv("PGQUEUE_TEST_OPTIONS", json.dumps(connections.settings[s2]["OPTIONS"]))
        with command(
            "consume_queues",
            queues=[{"name": "q", "function": "do_nothing"}],
            settings={**prefix, "POLL_INTERVAL": 60, "HEARTBEAT_INTERVAL": 60},
        ) as other:
            wait_until(lambda: QueueConsumer.objects.using(s2).exists())
            ((pid, _),) = last_statements().items()
            one = Watched(s1)
            with consuming(one.consumer):
                wait_until(lambda: quiet(claims) and is_asleep(pid))
                before = last_statements()[pid]
                queue = Queue("q", using=s1)
                for number in range(200):
                    queue.publish(number)
                wait_until(lambda: len(one.handled) == 200 and quiet(claims))
                assert last_statements()[pid] == before
                with override_settings(PGQUEUE=prefix):
                    Queue("q", using=s2).publish("mine")
                wait_until(lambda: not MessageQueueItem.objects.using(s2).exists())
            assert other.stop() == 0
            assert other.output == ""


@pytest.mark.parametrize("garbage", ["", "not json", "x" * 7_000, '{"id": 1}', "\u2028"], ids=lambda text: text[:9])
def test_b15_notifications_that_are_not_ours_do_no_harm(
    claims: list[str], polling_is_too_slow: None, caplog: pytest.LogCaptureFixture, garbage: str
) -> None:
    """Sent by hand on a queue's channel, many, also while the consumer claims and handles."""
    watched = Watched("default")
    queue = Queue("q")
    with second_session() as session, consuming(watched.consumer):
        wait_until(lambda: claims)
        for number in range(50):
            session.execute("SELECT pg_notify(%s, %s)", [notifying.channel("q"), garbage])
            queue.publish(number)
        wait_until(lambda: len(watched.handled) == 50)
        session.execute("SELECT pg_notify(%s, %s)", [notifying.channel("q"), garbage])
        queue.publish("last")
        wait_until(lambda: watched.handled[-1] == "last")
    assert not MessageQueueItem.objects.filter(queue="q").exists()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_b15_two_prefixes_never_share_a_channel() -> None:
    """Nor a queue with a topic, nor a plain channel with the hash of a long name."""
    names = ["q", "a" * 70 + "1", "a" * 70 + "2", "a:b", "a#b"]
    channels = set()
    for prefix in ("django_pgqueue", "other", "x" * 24):
        with override_settings(PGQUEUE={"CHANNEL_PREFIX": prefix}):
            channels |= {channel(name) for name in names for channel in (notifying.channel, notifying.topic_channel)}
    assert len(channels) == 30
    assert all(len(channel.encode()) <= 63 for channel in channels)
