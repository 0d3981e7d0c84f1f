"""
Case B57: what a handler does to its database session ends with its message.

Each broken handler is followed by five normal messages in the same worker thread. These are handled
first time, with the session's settings as they were at the start.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.db.backends.signals import connection_created
from psycopg import sql

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from tests.support.rows import payloads
from tests.support.sessions import connect, fetch
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

# All that a session is asked for: its user, settings, locks, temporary tables, channels, statements.
STATE = """
SELECT current_user::text, session_user::text, current_setting('search_path'), current_setting('TimeZone'),
    current_setting('work_mem'), current_setting('statement_timeout'), current_setting('default_transaction_read_only'),
    (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'),
    (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()),
    (SELECT count(*) FROM pg_listening_channels()),
    (SELECT count(*) FROM pg_cursors WHERE is_holdable)
"""
NORMAL = 5


def swallow_inside_atomic() -> None:
    """The transaction is lost at the swallowed error, and nothing of it is kept."""
    with transaction.atomic():
        Seen.objects.create(id=1, msg_id=1, worker=1, attempt=1)
        with suppress(IntegrityError):
            Seen.objects.create(id=1, msg_id=2, worker=1, attempt=1)


def swallow_inside_a_savepoint() -> None:
    with transaction.atomic(), suppress(IntegrityError), transaction.atomic():
        Seen.objects.create(id=1, msg_id=1, worker=1, attempt=1)
        Seen.objects.create(id=1, msg_id=2, worker=1, attempt=1)


def swallow_in_autocommit() -> None:
    with suppress(DatabaseError):
        execute("SELECT 1/0")


def leave_autocommit_off() -> None:
    transaction.set_autocommit(False)
    Seen.objects.create(msg_id=1, worker=1, attempt=1)


def leave_a_savepoint() -> None:
    transaction.set_autocommit(False)
    transaction.savepoint()
    Seen.objects.create(msg_id=1, worker=1, attempt=1)


def leave_a_block_entered() -> None:
    transaction.atomic().__enter__()
    Seen.objects.create(msg_id=1, worker=1, attempt=1)


def leave_a_cursor_open() -> None:
    cursor = connection.cursor()
    cursor.execute("SELECT generate_series(1, 1000)")
    cursor.fetchone()
    LEFT.append(cursor)


def leave_a_server_side_cursor_open() -> None:
    Seen.objects.create(msg_id=1, worker=1, attempt=1)
    next(Seen.objects.iterator(chunk_size=1))


def end_its_backend() -> None:
    with connect() as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [fetch("SELECT pg_backend_pid()")[0][0]])
    with suppress(DatabaseError):
        execute("SELECT 1")


def compose_a_set() -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql.SQL("SET {} = '77MB'").format(sql.Identifier("work_mem")))


# What handlers left open, so that it is not closed for want of a reference.
LEFT: list[Any] = []


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def executing(statement: str) -> Callable[[], None]:
    return lambda: execute(statement)


# What the handler does, and whether it counts as done.
BREAKAGES: dict[str, tuple[Callable[[], Any], bool]] = {
    "swallowed IntegrityError inside atomic": (swallow_inside_atomic, True),
    "swallowed IntegrityError inside a savepoint": (swallow_inside_a_savepoint, True),
    "swallowed error in autocommit": (swallow_in_autocommit, True),
    "set_autocommit(False)": (leave_autocommit_off, False),
    "savepoint": (leave_a_savepoint, False),
    "atomic entered": (leave_a_block_entered, False),
    "BEGIN by hand": (executing("BEGIN"), False),
    "cursor": (leave_a_cursor_open, True),
    "server-side cursor": (leave_a_server_side_cursor_open, True),
    "close()": (lambda: connection.close(), True),
    "close_all()": (connections.close_all, True),
    "terminated backend": (end_its_backend, True),
    "SET ROLE": (executing("SET ROLE pg_monitor"), True),
    "SET SESSION AUTHORIZATION": (executing("SET SESSION AUTHORIZATION pg_monitor"), True),
    "SET search_path": (executing("SET search_path = pg_catalog"), True),
    "SET timezone": (executing("SET timezone = 'Asia/Kathmandu'"), True),
    "SET TIME ZONE after a comment": (executing("-- local time\nSET TIME ZONE 'Asia/Kathmandu'"), True),
    "SET after another statement": (executing("SELECT 1; SET statement_timeout = 1"), True),
    "SET composed": (compose_a_set, True),
    "set_config": (executing("SELECT set_config('work_mem', '77MB', false)"), True),
    "read-only from now on": (executing("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"), True),
    "RESET ALL": (executing("RESET ALL"), True),
    "advisory lock": (executing("SELECT pg_advisory_lock(57)"), True),
    "advisory lock, tried": (executing("SELECT pg_try_advisory_lock_shared(57)"), True),
    "temporary table": (executing("CREATE TEMP TABLE django_pgqueue_messagequeueitem (id int)"), True),
    "cursor WITH HOLD": (executing("DECLARE held CURSOR WITH HOLD FOR SELECT 1"), True),
    "LISTEN": (executing("LISTEN broken"), True),
    "SET inside DO": (executing("DO $$ BEGIN SET work_mem = '77MB'; END $$"), True),
}

# The handler's transaction is the ack's: what breaks it, or takes the ack's table from it, undoes both.
UNDONE_IF_ATOMIC = {
    "swallowed error in autocommit",
    "close()",
    "close_all()",
    "terminated backend",
    "SET ROLE",
    "SET SESSION AUTHORIZATION",
    "SET search_path",
    "temporary table",
}


def undone(ack: str) -> set[str]:
    """Return the breakages that count as failures of their handler."""
    if ack == "early":
        # Acked before: nothing comes back.
        return set()
    left_open = {name for name, (_, is_done) in BREAKAGES.items() if not is_done}
    if ack == "late":
        return left_open
    # A BEGIN inside the transaction that there is does nothing.
    return left_open - {"BEGIN by hand"} | UNDONE_IF_ATOMIC


@pytest.fixture(params=["plain", "pool"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let the default alias connect plainly, or through a pool of two: one for the test, one for the handlers."""
    settings = connections.settings["default"]
    before = settings["OPTIONS"]
    pool = {"pool": {"min_size": 0, "max_size": 2, "timeout": 10}} if request.param == "pool" else {}
    close()
    settings["OPTIONS"] = {**{key: value for key, value in before.items() if key != "pool"}, **pool}
    try:
        yield request.param
    finally:
        LEFT.clear()
        close()
        settings["OPTIONS"] = before


def close() -> None:
    connection.close()
    if connection.alias in connection._connection_pools:
        connection.close_pool()


@pytest.mark.parametrize("ack", ["late", "early", "atomic"])
def test_no_breakage_outlives_its_message(ack: str, kind: str) -> None:
    """Every way of breaking a session, one after the other in one worker thread, each before five normal messages."""
    queue = Queue("work", max_deliveries=1)
    strange: list[tuple[str, Any]] = []
    errors: list[str] = []

    def handle(message: Message) -> None:
        if message.payload != "normal":
            BREAKAGES[message.payload][0]()
            return
        try:
            if (state := fetch(STATE)[0]) != expected:
                strange.append((message.headers["after"], state))
            Seen.objects.create(msg_id=message.id, worker=0, attempt=message.delivery_count)
        except Exception as error:
            errors.append(str(error))
            raise

    expected = fetch(STATE)[0]
    connection.close()
    for name in BREAKAGES:
        queue.publish(name)
        queue.publish_many(["normal"] * NORMAL, headers={"after": name})
    connection.close()
    handler = make_handler(queue, handle, ack=ack)
    assert Consumer([handler], concurrency=1, drain=True).run() == len(BREAKAGES) * (1 + NORMAL)
    assert errors == []
    assert strange == []
    assert list(Seen.objects.filter(worker=0).values_list("attempt", flat=True)) == [1] * NORMAL * len(BREAKAGES)
    assert payloads("work") == []
    assert set(payloads("work.dead")) == undone(ack)
    assert idle_in_transaction() == []


def idle_in_transaction() -> list[Any]:
    with connect() as admin:
        return admin.execute(
            "SELECT pid, query FROM pg_stat_activity"
            " WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
        ).fetchall()


def test_an_async_handlers_session_is_guarded_too() -> None:
    """Its synchronous parts share one thread: what one of them sets, none after its message sees."""
    queue = Queue("work")
    seen: list[str] = []

    async def handle(message: Message) -> None:
        seen.append((await sync_to_async(fetch)("SELECT current_user || ' ' || current_setting('TimeZone')"))[0][0])
        await sync_to_async(execute)("SET ROLE pg_monitor; SET timezone = 'Asia/Kathmandu'")

    queue.publish_many([1, 2, 3])
    assert Consumer([make_handler(queue, handle)], concurrency=1, drain=True).run() == 3
    ((expected,),) = fetch("SELECT current_user || ' ' || current_setting('TimeZone')")
    assert seen == [expected] * 3


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_an_untouched_session_is_kept(kind: str) -> None:
    """
    A reconnect follows a message that changed the session, and no other.

    What a receiver of connection_created sets is part of the session's start, and SET LOCAL ends by itself.
    """
    queue = Queue("work")
    seen: list[tuple[int, str]] = []

    def set_up(connection: Any, **_: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET work_mem = '5MB'")

    def handle(message: Message) -> None:
        seen.append(fetch("SELECT pg_backend_pid(), current_setting('work_mem')")[0])
        with transaction.atomic():
            execute("SET LOCAL work_mem = '6MB'")
            execute("SELECT set_config('work_mem', '7MB', true), pg_advisory_xact_lock(57)")
        if message.payload == 3:
            execute("SET work_mem = '8MB'")

    queue.publish_many([1, 2, 3, 4, 5, 6])
    connection_created.connect(set_up)
    try:
        assert Consumer([make_handler(queue, handle)], concurrency=1, drain=True).run() == 6
    finally:
        connection_created.disconnect(set_up)
    assert [work_mem for _, work_mem in seen] == ["5MB"] * 6
    pids = [pid for pid, _ in seen]
    assert pids == [pids[0]] * 3 + [pids[3]] * 3
    assert pids[0] != pids[3]
