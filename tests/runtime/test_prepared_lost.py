"""What ends, breaks or changes a connection with prepared statements: the next publish works, or fails as Django's."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, close_old_connections, connection, connections, transaction
from django.db.transaction import TransactionManagementError

from django_pgqueue import Queue, QueueNotFound, signals
from django_pgqueue.runtime.connections import PREPARE_THRESHOLD
from tests.runtime.test_prepared_publish import prepared_statements, publish_often, warm
from tests.support.databases import alias
from tests.support.rows import delete_queue, payloads
from tests.support.sessions import connect, drop_connections, fetch, run_async

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def fresh_connection() -> None:
    """No test inherits a connection that has been in use."""
    drop_connections()


@pytest.fixture
def queue() -> Queue:
    """A queue that this thread's connection has prepared statements for."""
    queue = Queue("work", auto_deleted=True)
    warm(queue)
    return queue


def count() -> int:
    return len(payloads("work"))


# --- The statements are ended ---


def by_django(statement: str) -> None:
    fetch(statement)


def by_psycopg(statement: str) -> None:
    connection.connection.execute(statement)


@pytest.mark.parametrize("run", [by_django, by_psycopg])
@pytest.mark.parametrize("statement", ["DISCARD ALL", "DEALLOCATE ALL", "deallocate prepare all;"])
def test_publishing_survives_what_ends_prepared_statements(
    queue: Queue, run: Callable[[str], None], statement: str
) -> None:
    """In autocommit and as the first thing in a transaction, again and again."""
    before = count()
    for _ in range(3):
        run(statement)
        queue.publish(2)
        run(statement)
        with transaction.atomic():
            queue.publish(3)
            queue.publish_many([4])
        run(statement)
        queue.publish_many([5])
    assert count() == before + 12
    assert prepared_statements()


@pytest.mark.parametrize("statement", ["DISCARD ALL", "DEALLOCATE ALL"])
@pytest.mark.parametrize("in_transaction", [False, True], ids=["autocommit", "atomic"])
def test_each_request_may_begin_with_that(queue: Queue, statement: str, in_transaction: bool) -> None:
    """Also where some of them end with a rollback, which ends prepared statements by itself."""
    before = count()
    for request in range(12):
        fetch(statement)
        with suppress(ValueError), transaction.atomic() if in_transaction else nullcontext():
            queue.publish(2)
            with suppress(ValueError), transaction.atomic():
                queue.publish(3)
                if request % 4 == 1:
                    raise ValueError
            if request % 4 == 2:
                raise ValueError
    rolled_back = 6 if in_transaction else 0
    assert count() == before + 24 - 3 - rolled_back


@pytest.mark.parametrize("run", [by_django, by_psycopg])
def test_a_transaction_survives_that_in_its_middle(queue: Queue, run: Callable[[str], None]) -> None:
    """DEALLOCATE ALL between two publishes of one transaction: that is not aborted."""
    before = count()
    with transaction.atomic():
        queue.publish(2)
        run("DEALLOCATE ALL")
        queue.publish(3)
        run("DEALLOCATE ALL")
        queue.publish_many([4])
    assert count() == before + 3


def test_autocommit_survives_statements_that_were_ended_unseen(queue: Queue) -> None:
    """Inside a DO block nobody sees it; the publish finds out and goes on."""
    before = count()
    for _ in range(3):
        fetch("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
        queue.publish(2)
        fetch("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
        queue.publish_many([3])
    assert count() == before + 6


def test_statements_that_were_ended_unseen_cost_one_transaction_at_most(queue: Queue) -> None:
    """The publish inside it fails, loudly; the next transaction works."""
    before = count()
    fetch("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
    with pytest.raises(DatabaseError, match="prepared statement"), transaction.atomic():
        queue.publish(2)
    with transaction.atomic():
        queue.publish(3)
    assert payloads("work")[before:] == [3]


def test_a_pool_that_empties_sessions_is_no_problem() -> None:
    """Its reset is run where nobody looks: each connection comes back without its statements."""

    def reset(raw: Any) -> None:
        raw.execute("DISCARD ALL")

    with alias("pool", OPTIONS={"pool": {"min_size": 1, "max_size": 1, "reset": reset}}) as using:
        queue = Queue("work", using=using)
        for number in range(PREPARE_THRESHOLD + 10):
            if number % 2:
                queue.publish(number)
            else:
                with transaction.atomic(using=using):
                    queue.publish(number)
            connections[using].close()
    assert payloads("work") == list(range(PREPARE_THRESHOLD + 10))


def test_what_psycopg_prepares_for_the_project_is_its_own() -> None:
    """With a threshold in OPTIONS: its statements and ours are ended, by a rollback too, and prepared again."""
    with alias("thresholded", OPTIONS={"prepare_threshold": 2, "server_side_binding": True}) as using:
        queue = Queue("work", using=using)
        for statement in ("SELECT 1", "DISCARD ALL", "SELECT 1", "DEALLOCATE ALL"):
            for _ in range(10):
                queue.publish(1)
                fetch("SELECT %s::int", [1], using=using)
            fetch(statement, using=using)
            with suppress(ValueError), transaction.atomic(using=using):
                queue.publish(2)
                raise ValueError
    assert len(payloads("work")) == 40


# --- The queue is gone ---


def test_a_queue_that_is_gone_is_made_again(queue: Queue) -> None:
    """By a prepared INSERT that violates the foreign key, and by the one of a transaction that finds no row."""
    healed: list[str] = []

    def note(sender: str, **kwargs: Any) -> None:
        healed.append(sender)

    signals.queue_healed.connect(note)
    try:
        for number in range(3):
            delete_queue("work")
            queue.publish([number, "autocommit"])
            delete_queue("work")
            with transaction.atomic():
                queue.publish([number, "atomic"])
            delete_queue("work")
            queue.publish_many([[number, "many"]])
    finally:
        signals.queue_healed.disconnect(note)
    # What had been cut loose is adopted in time.
    assert payloads("work")[-1] == [2, "many"]
    assert healed == ["work"] * 9


def test_a_standing_queue_that_is_gone_stays_loud() -> None:
    """And the transaction stays usable."""
    queue = Queue("standing")
    warm(queue)
    delete_queue("standing")
    with pytest.raises(QueueNotFound):
        queue.publish(1)
    queue.declare()
    queue.publish(2)
    delete_queue("standing")
    with transaction.atomic():
        with pytest.raises(QueueNotFound):
            queue.publish(3)
        fetch("SELECT 1")


# --- Django's errors ---


def test_a_broken_transaction_is_told_as_django_does(queue: Queue) -> None:
    """TransactionManagementError, before anything is sent."""
    for mark in (True, False):
        with pytest.raises(TransactionManagementError), transaction.atomic():
            if mark:
                transaction.set_rollback(True)
            else:
                with suppress(DatabaseError):
                    fetch("SELECT 1 / 0")
                # A caught error is not known to Django; what the server says then is an error of its own.
                with pytest.raises(DatabaseError, match="aborted"):
                    queue.publish(2)
                connection.needs_rollback = True
            queue.publish(2)
    assert 2 not in payloads("work")


def test_a_dead_connection_is_django_s_error_and_is_replaced(queue: Queue) -> None:
    """As for any statement: the publish raises, the end of the request closes, the next one works."""
    with connect() as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", fetch("SELECT pg_backend_pid()")[0])
    with pytest.raises(OperationalError):
        queue.publish(2)
    assert connection.errors_occurred
    close_old_connections()
    queue.publish(3)
    assert payloads("work")[-1] == 3
    publish_often(queue, PREPARE_THRESHOLD + 1)
    assert prepared_statements()


def test_a_closed_connection_inside_a_transaction_is_django_s_error(queue: Queue) -> None:
    """Closed by somebody in the middle."""
    with pytest.raises(DatabaseError), transaction.atomic():
        connection.connection.close()
        queue.publish(2)
    close_old_connections()
    queue.publish(3)
    assert payloads("work")[-1] == 3


def test_health_checks_are_made() -> None:
    """With CONN_HEALTH_CHECKS the first statement of a request, a publish too, meets no dead connection."""
    with alias("checked", CONN_HEALTH_CHECKS=True, CONN_MAX_AGE=None, OPTIONS={"pool": None}) as using:
        queue = Queue("work", using=using)
        publish_often(queue)
        # What the end of a request does.
        connections[using].close_if_unusable_or_obsolete()
        pid = connections[using].connection.info.backend_pid
        with connect() as admin:
            admin.execute("SELECT pg_terminate_backend(%s)", [pid])
        connections[using].health_check_done = False
        queue.publish(2)
        assert connections[using].connection.info.backend_pid != pid
    assert payloads("work")[-1] == 2


def test_another_thread_s_connection_is_refused(queue: Queue) -> None:
    """As Django's cursor does: connections are not shared between threads."""
    wrapper = connections["default"]

    def publish_there() -> None:
        mine, connections["default"] = connections["default"], wrapper
        try:
            queue.publish(2)
        finally:
            connections["default"] = mine
            mine.close()

    async def elsewhere() -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(publish_there)()

    with pytest.raises(DatabaseError, match="thread"):
        run_async(elsewhere())


# --- The table changes ---


@pytest.fixture
def altered() -> Any:
    with connect() as admin:
        yield admin
        admin.execute("ALTER TABLE django_pgqueue_messagequeueitem DROP COLUMN IF EXISTS extra")


def test_a_column_that_is_added_is_no_problem(queue: Queue, altered: Any) -> None:
    """A migration beside a running process: its statements are planned anew."""
    before = count()
    for change in ("ADD COLUMN extra int DEFAULT 7", "ALTER COLUMN extra TYPE bigint", "DROP COLUMN extra"):
        altered.execute(f"ALTER TABLE django_pgqueue_messagequeueitem {change}")
        queue.publish(2)
        with transaction.atomic():
            queue.publish(3)
        queue.publish_many([4])
    assert count() == before + 9
