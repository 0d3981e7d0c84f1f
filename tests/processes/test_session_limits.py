"""Limits that an operator set on the role or on the database: they end sessions and statements, not consumers."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections
from psycopg import sql

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import consuming
from tests.support.rows import payloads
from tests.support.sessions import connect, fetch, second_session
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ROLE = sql.Identifier("pgq_limited")
LIMITS = {
    "idle_session_timeout": "300ms",
    "idle_in_transaction_session_timeout": "300ms",
    "statement_timeout": "2000ms",
    "lock_timeout": "200ms",
}
SESSIONS = """
SELECT application_name, pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'django_pgqueue %'
"""


@pytest.fixture(params=["role", "database"], autouse=True)
def limited(request: pytest.FixtureRequest, settings: Any) -> Iterator[None]:
    """Let threads that connect from now on find these limits; this one has its connection already."""
    fetch("SELECT 1")
    default = connections.settings["default"]
    before = {"USER": default["USER"], "OPTIONS": default["OPTIONS"]}
    # The tests' own lock_timeout, which the session asks for at its start, would win.
    default["OPTIONS"] = {key: value for key, value in before["OPTIONS"].items() if key != "options"}
    settings.PGQUEUE = {"POLL_INTERVAL": 60, "HEARTBEAT_INTERVAL": 1, "LEASE": 3, "BACKOFF": {"base": 0.1}}
    database = sql.Identifier(default["NAME"])
    target = sql.SQL("ROLE {}").format(ROLE) if request.param == "role" else sql.SQL("DATABASE {}").format(database)
    with connect() as admin:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN SUPERUSER").format(ROLE))
    try:
        with connect() as admin:
            for name, value in LIMITS.items():
                admin.execute(sql.SQL("ALTER {} SET {} = {}").format(target, sql.Identifier(name), value))
        if request.param == "role":
            default["USER"] = "pgq_limited"
        yield
    finally:
        default.update(before)
        # Not with this thread's connection: its user is the one that is dropped.
        connection.close()
        with connect() as admin:
            admin.execute(sql.SQL("ALTER {} RESET ALL").format(target))
            admin.execute(sql.SQL("DROP ROLE {}").format(ROLE))


def sessions() -> dict[str, int]:
    """Return the process id of each session of the library's own, by its name."""
    with connect() as admin:
        return dict(admin.execute(SESSIONS).fetchall())


def consumer_of(queue: Queue, function: Any, **options: Any) -> Any:
    return consuming(Consumer([make_handler(queue, function, **options)]))


def test_the_limits_are_really_there() -> None:
    """Else the tests below would prove nothing."""
    found: list[Any] = []

    def handle(message: Message) -> None:
        found.append(fetch("SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", [list(LIMITS)]))

    queue = Queue("q")
    queue.publish({})
    with consumer_of(queue, handle):
        wait_until(lambda: found)
    assert {name: f"{setting}ms" for name, setting in found[0]} == LIMITS


def test_what_is_idle_by_trade_is_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    """
    A quiet consumer keeps its sessions and is woken at once; nothing is told, for nothing happened.

    A handler's own session is ended while it is idle. Who comes next gets a fresh one.
    """
    queue = Queue("q")
    attempts: list[int] = []

    def handle(message: Message) -> None:
        fetch("SELECT 1")
        attempts.append(message.delivery_count)

    wait_until(lambda: not sessions())  # Those of the test before.
    with consumer_of(queue, handle):
        wait_until(lambda: len(sessions()) >= 2)
        before = sessions()
        for number in range(3):
            queue.publish({})
            wait_until(lambda number=number: len(attempts) == number + 1)  # type: ignore[misc]
            time.sleep(1.2)  # Longer than any limit on idleness.
        assert sessions().items() >= before.items()
    assert attempts == [1, 1, 1]
    assert "database lost" not in caplog.text


@pytest.mark.parametrize("ack", ["late", "atomic"])
def test_a_handler_that_meets_a_limit_fails_alone(ack: str, caplog: pytest.LogCaptureFixture) -> None:
    """
    Its statement is cancelled, or its session ended in mid-transaction: the message is retried.

    The consumer is not touched by it: it lost no database, and others are handled beside it.
    """
    queue = Queue("q", max_deliveries=10)
    handled: list[Any] = []

    def handle(message: Message) -> None:
        if message.delivery_count == 1 and message.payload == "slow statement":
            fetch("SELECT pg_sleep(5)")
        if message.delivery_count == 1 and message.payload == "idle":
            fetch("SELECT 1")
            time.sleep(1)
        fetch("SELECT 1")
        handled.append((message.payload, message.delivery_count))

    with consumer_of(queue, handle, ack=ack, concurrency=2):
        queue.publish_many(["slow statement", "idle", "harmless"])
        wait_until(lambda: not payloads("q"))
    idle = 1 if ack == "late" and ("idle", 1) in handled else 2
    assert sorted(handled) == [("harmless", 1), ("idle", idle), ("slow statement", 2)]
    assert "database lost" not in caplog.text


def test_a_lock_that_is_not_to_be_had_passes(caplog: pytest.LogCaptureFixture) -> None:
    """
    An ack that waits for somebody else's lock is cancelled, and done again until it can be had.

    It is told once, and once that it is over; the message was handled once.
    """
    queue = Queue("q")
    handled: list[int] = []
    locked = threading.Event()

    def handle(message: Message) -> None:
        handled.append(message.delivery_count)
        locked.wait(DEADLINE)

    with second_session(options="-c idle_in_transaction_session_timeout=0") as other, consumer_of(queue, handle):
        message = queue.publish({})
        wait_until(lambda: handled)
        with other.transaction():
            other.execute("SELECT id FROM django_pgqueue_messagequeueitem WHERE id = %s FOR UPDATE", [message])
            locked.set()
            wait_until(lambda: "database lost loop=consumer" in caplog.text)
            time.sleep(0.5)
        wait_until(lambda: not payloads("q"))
        wait_until(lambda: "database back loop=consumer" in caplog.text)
    assert handled == [1]
    assert caplog.text.count("database lost loop=consumer") == 1
    assert caplog.text.count("database back loop=consumer") == 1
