"""The listener: one connection a process, which hears, comes back, and is never in a transaction."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction

from django_pgqueue import Queue
from django_pgqueue.runtime.listener import ChannelSet, Receive, listener_of
from django_pgqueue.services import notifying
from tests.support.processes import worker
from tests.support.rows import payloads
from tests.support.sessions import connect
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

LISTENERS = """
SELECT pid, state, xact_start
FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'django_pgqueue listener'
"""


def listeners() -> list[tuple[Any, ...]]:
    with connect() as admin:
        return admin.execute(LISTENERS).fetchall()


def terminate(pid: int) -> None:
    with connect() as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])


@contextmanager
def listening(*names: str) -> Iterator[list[str | None]]:
    """Listen to queues' channels. Gives the list of what was heard: None for each when listening begins or ends."""
    heard: list[str | None] = []
    channel_set = ChannelSet({notifying.channel(name): receiver(heard, name) for name in names})
    listener = listener_of("default")
    listener.add(channel_set)
    try:
        wait_until(lambda: channel_set.listening.is_set() and len(heard) == len(names))
        yield heard
    finally:
        listener.remove(channel_set)
    wait_until(lambda: not listeners())
    assert not channel_set.listening.is_set()


def receiver(heard: list[str | None], name: str) -> Receive:
    return lambda text: heard.append(None if text is None else name)


def test_a_notification_names_the_queue() -> None:
    """Each wake-up is for the queue that was published to; at the start all are looked at."""
    with listening("a", "b") as heard:
        assert heard == [None, None]
        Queue("b").publish(1)
        wait_until(lambda: heard == [None, None, "b"])
        Queue("other").publish(1)
        Queue("a").publish(1)
        wait_until(lambda: heard == [None, None, "b", "a"])


@pytest.mark.parametrize("name", ["q" * 250, "Größe/ünïcödé-" * 5, 'quote"s and spaces', "UPPER"])
def test_every_queue_name_has_a_channel(name: str) -> None:
    """Names that do not fit a channel's 63 bytes, or that need quoting, are heard as well."""
    with listening(name, name[:-1] + "x") as heard:
        Queue(name).publish(1)
        wait_until(lambda: heard == [None, None, name])


def test_a_message_inside_a_transaction_is_heard_after_the_commit() -> None:
    """Not before, and not at all when it is rolled back."""
    with listening("q") as heard:
        with transaction.atomic():
            Queue("q").publish(1)
            time.sleep(0.2)  # A wake-up would come at once.
            assert heard == [None]
        wait_until(lambda: heard == [None, "q"])


def test_all_users_of_a_process_share_one_connection() -> None:
    """Ears come and go over one LISTEN session; each hears its own channels, and all of a shared one."""
    with listening("a") as first:
        ((pid, *_),) = listeners()
        second: list[str | None] = []
        channel_set = ChannelSet({notifying.channel(name): receiver(second, name) for name in ("a", "b")})
        listener_of("default").add(channel_set)
        wait_until(lambda: second == [None, None])
        assert [row[0] for row in listeners()] == [pid]
        Queue("b").publish(1)
        Queue("a").publish(1)
        wait_until(lambda: second[2:] == ["b", "a"] and first == [None, "a"])
        listener_of("default").remove(channel_set)
        time.sleep(0.06)  # A wake-up within NOTIFY_INTERVAL is not sent again.
        Queue("a").publish(1)
        wait_until(lambda: first == [None, "a", "a"])
        assert second == [None, None, "b", "a"]
        assert [row[0] for row in listeners()] == [pid]


def test_the_listener_comes_back_and_asks_for_a_look() -> None:
    """Terminated, it listens again by itself; what was sent in between is covered by a look at all queues."""
    with listening("q") as heard:
        ((pid, *_),) = listeners()
        terminate(pid)
        # Told when it became deaf, and when it hears again.
        wait_until(lambda: heard == [None, None, None])
        Queue("q").publish(1)
        wait_until(lambda: heard == [None, None, None, "q"])


def test_the_listener_is_never_in_a_transaction() -> None:
    """An open one would hold back vacuum and the notification queue for ever."""
    with listening("q") as heard:
        for number in range(3):
            Queue("q").publish(number)
            wait_until(lambda number=number: len(heard) >= number + 1)  # type: ignore[misc]
            ((_, state, transaction_start),) = listeners()
            assert (state, transaction_start) == ("idle", None)
            time.sleep(0.06)


def test_a_limit_on_idle_sessions_does_not_end_the_listener() -> None:
    """A listener is idle by trade."""
    with connect() as admin:
        (name,) = admin.execute("SELECT current_database()").fetchone() or ("",)
        admin.execute(f'ALTER DATABASE "{name}" SET idle_session_timeout = 300')
        try:
            with listening("q") as heard:
                ((pid, *_),) = listeners()
                time.sleep(0.8)
                with connect(options="-c idle_session_timeout=0") as other:
                    assert [row[0] for row in other.execute(LISTENERS).fetchall()] == [pid]
                assert heard == [None]
        finally:
            with connect() as other:
                other.execute(f'ALTER DATABASE "{name}" RESET idle_session_timeout')


def test_a_worker_has_one_listening_connection_for_all_its_queues() -> None:
    """
    Three queues, six handlers at once, one LISTEN.

    With a minute of polling interval each queue is woken by its own publish; after the listener's
    backend is terminated they are woken again, and what was published in between is found by the
    look that follows.
    """
    names = ["one", "two", "three"]
    queues = [{"name": name, "handler": {"concurrency": 2}} for name in names]
    with worker(queues=queues, settings={"POLL_INTERVAL": 60}):
        ((pid, state, transaction_start),) = wait_until(listeners)
        for number, name in enumerate(names):
            time.sleep(0.2)  # Let it fall asleep.
            Queue(name).publish({})
            wait_until(lambda number=number: Seen.objects.count() == number + 1, 8)  # type: ignore[misc]
        assert [row[0] for row in listeners()] == [pid]

        terminate(pid)
        with connect() as admin:
            # Without any wake-up, as by another program.
            admin.execute("INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('two', '{}')")
        wait_until(lambda: Seen.objects.count() == 4, 8)
        wait_until(lambda: [row[0] for row in listeners()] not in ([], [pid]))
        assert len(listeners()) == 1
        time.sleep(0.2)
        Queue("three").publish({})
        wait_until(lambda: Seen.objects.count() == 5, 8)
        # Acks follow a moment later, and the worker is killed at the end.
        wait_until(lambda: [payloads(name) for name in names] == [[], [], []])
    wait_until(lambda: not listeners())
