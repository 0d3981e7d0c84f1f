"""What publishes is prepared on a project's connection, where that is sound and nobody watches Django's cursors."""

import gc
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from django_pgqueue import Message, Queue, QueueNotFound
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.runtime import prepared
from django_pgqueue.runtime.connections import PREPARE_THRESHOLD
from tests.runtime.test_prepared import pooler
from tests.support.databases import alias
from tests.support.pgbouncer import pgbouncer
from tests.support.rows import payloads
from tests.support.sessions import connect, drop_connections, fetch, in_threads

pytestmark = pytest.mark.django_db(transaction=True)

# Those that publish. The refresh and the wake-up, which come now and then, are prepared as well.
PREPARED = """
SELECT statement FROM pg_prepared_statements
WHERE NOT from_sql AND position('INSERT INTO django_pgqueue_messagequeueitem' IN statement) > 0
"""


@pytest.fixture(autouse=True)
def fresh_connection() -> None:
    """No test inherits a connection that has been in use."""
    drop_connections()


def prepared_statements(using: str = "default") -> list[str]:
    """Return the statements that this thread's session has prepared by the protocol."""
    return [statement for (statement,) in fetch(PREPARED, using=using)]


def publish_often(queue: Queue, times: int = PREPARE_THRESHOLD + 1) -> None:
    for _ in range(times):
        queue.publish(1)


def warm(queue: Queue) -> None:
    """Let this thread's connection have all the statements of publishing prepared."""
    publish_often(queue)
    with transaction.atomic(using=queue.using):
        queue.publish(1)
    queue.publish_many([1])
    assert len(prepared_statements(queue.using)) == 3


# --- What is prepared when ---


def test_a_connection_that_publishes_often_prepares_it() -> None:
    """Not the first times, which may be all that it does; then each of the statements at its first use."""
    queue = Queue("work")
    queue.publish(1)
    assert prepared_statements() == []
    publish_often(queue)
    (insert,) = prepared_statements()
    assert insert.strip().startswith("INSERT INTO django_pgqueue_messagequeueitem")
    warm(queue)
    assert len(payloads("work")) == 1 + PREPARE_THRESHOLD + 1 + PREPARE_THRESHOLD + 3


def test_the_project_s_statements_are_not_prepared() -> None:
    """Its threshold is what it was; what it runs a hundred times is planned each time, and not remembered."""
    connection.ensure_connection()
    threshold = connection.connection.prepare_threshold
    queue = Queue("work")
    warm(queue)
    assert connection.connection.prepare_threshold == threshold
    for number in range(100):
        fetch("SELECT %s::int", [number])
    assert len(prepared_statements()) == 3
    if threshold is None:
        tracemalloc.start()
        for number in range(20):
            fetch("SELECT length(%s)", [f"{number}" + "x" * 1_000_000])
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 5_000_000


@pytest.mark.parametrize("failing", [False, True])
def test_the_threshold_is_the_project_s_also_where_a_publish_fails(failing: bool) -> None:
    """The one that OPTIONS set."""
    with alias("thresholded", OPTIONS={"prepare_threshold": 50}) as using:
        queue = Queue("work", using=using)
        warm(queue)
        if failing:
            fetch("DELETE FROM django_pgqueue_messagequeue", using=using)
            with pytest.raises(QueueNotFound):
                queue.publish(2)
        assert connections[using].connection.prepare_threshold == 50


def test_nothing_is_prepared_through_pgbouncer() -> None:
    """A session of the server is another's after each transaction, and publishing works."""
    with pgbouncer(pool_size=2) as bouncer, alias("pooled", HOST=str(bouncer.folder), PORT="5432") as using:
        queue = Queue("work", using=using)
        publish_often(queue, 20)
        with transaction.atomic(using=using):
            publish_often(queue, 20)
            assert prepared_statements(using) == []
        assert queue.publish_many([1]) and len(payloads("work")) == 41
        assert "prepared statement" not in bouncer.output


@pytest.mark.parametrize("threshold", [None, 1000])
def test_nothing_is_prepared_through_another_pooler(threshold: int | None) -> None:
    """Where the session's process id is not the one that the protocol told."""
    with pooler() as folder, alias("pooled", HOST=folder, PORT="5432", OPTIONS={"prepare_threshold": threshold}) as on:
        queue = Queue("work", using=on)
        publish_often(queue, 20)
        queue.publish_many([1])
        assert prepared_statements(on) == []
        assert connections[on].connection.prepare_threshold == threshold
        # It passes on one connection only.
        connections[on].close()
    assert len(payloads("work")) == 21


@pytest.mark.parametrize("server_side_binding", [False, True])
def test_either_way_of_binding_publishes_and_prepares(server_side_binding: bool) -> None:
    """Django's option is for the project's statements."""
    with alias("bound", OPTIONS={"server_side_binding": server_side_binding}) as using:
        queue = Queue("work", using=using)
        warm(queue)
        fetch("SELECT %s::int", [1], using=using)
        assert len(prepared_statements(using)) == 3


def test_a_pool_s_connections_stay_prepared() -> None:
    """Given back and taken again, a connection still has its statements."""
    with alias("pool", OPTIONS={"pool": {"min_size": 1, "max_size": 1}}) as using:
        queue = Queue("work", using=using)
        for _ in range(PREPARE_THRESHOLD + 3):
            queue.publish(1)
            connections[using].close()
        assert len(prepared_statements(using)) == 1
        connections[using].close()


def test_each_thread_prepares_for_itself() -> None:
    """Connections are not shared, and neither is what they have prepared."""
    queue = Queue("work")
    queue.declare()

    def publish(number: int) -> int:
        publish_often(queue, 20)
        return len(prepared_statements())

    assert in_threads(4, publish) == [1, 1, 1, 1]
    assert len(payloads("work")) == 80


# --- What is kept ---


def test_a_closed_connection_is_forgotten() -> None:
    """A process that opens one for each request keeps none of them in memory."""
    publish_often(Queue("work"))
    raw = weakref.ref(connection.connection)
    drop_connections()
    gc.collect()
    assert raw() is None


# --- Who watches Django's cursors sees it ---


def test_queries_are_captured(django_assert_num_queries: Any) -> None:
    """By Django's test tools, on a connection that has prepared its publishing too."""
    queue = Queue("work")
    warm(queue)
    with CaptureQueriesContext(connection) as queries:
        queue.publish(2)
        queue.publish_many([3])
        with transaction.atomic():
            queue.publish(4)
    assert sum(query["sql"].lstrip().startswith("INSERT") for query in queries) == 2
    assert sum("jsonb_array_elements" in query["sql"] for query in queries) == 1
    with transaction.atomic(), django_assert_num_queries(1):
        queue.publish(5)
    queue.publish(6)
    assert payloads("work")[-5:] == [2, 3, 4, 5, 6]


def test_an_execute_wrapper_sees_each_publish() -> None:
    """And may refuse it."""
    queue = Queue("work")
    warm(queue)
    seen: list[str] = []

    def watch(execute: Any, statement: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(statement)
        return execute(statement, params, many, context)

    def refuse(execute: Any, statement: str, params: Any, many: bool, context: Any) -> Any:
        raise RuntimeError("no queries here")

    with connection.execute_wrapper(watch):
        queue.publish(2)
    assert any("INSERT INTO django_pgqueue_messagequeueitem" in statement for statement in seen)
    with connection.execute_wrapper(refuse), pytest.raises(RuntimeError, match="no queries here"):
        queue.publish(3)
    assert payloads("work")[-1] == 2


def test_a_patched_cursor_sees_each_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tracers do it: the class's method replaced, or the connection's."""
    queue = Queue("work")
    warm(queue)
    seen: list[str] = []
    execute, cursor = CursorWrapper.execute, connection.cursor

    def traced(self: Any, statement: Any, params: Any = None) -> Any:
        seen.append(statement)
        return execute(self, statement, params)

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", traced)
        queue.publish(2)
    assert len([statement for statement in seen if "INSERT" in statement]) == 1
    opened: list[int] = []

    def opening(*args: Any, **options: Any) -> Any:
        opened.append(1)
        return cursor(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(connection, "cursor", opening)
        queue.publish(3)
    assert opened
    assert payloads("work")[-2:] == [2, 3]


def test_a_debug_mode_logs_each_publish(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """DEBUG fills connection.queries and django.db.backends' log."""
    queue = Queue("work")
    warm(queue)
    settings.DEBUG = True
    connection.queries_log.clear()
    with caplog.at_level("DEBUG", "django.db.backends"):
        queue.publish(2)
    assert any("INSERT INTO django_pgqueue_messagequeueitem" in query["sql"] for query in connection.queries)
    assert "INSERT INTO django_pgqueue_messagequeueitem" in caplog.text


@pytest.mark.parametrize("name", prepared.CURSORS)
def test_an_engine_that_makes_its_own_cursors_has_them_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that counts there, or that sets the search path of a tenant, sees each publish."""
    queue = Queue("work")
    warm(queue)
    kind = type(connections["default"])
    original = getattr(kind, name)
    calls: list[str] = []

    def own(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return original(self, *args, **options)

    monkeypatch.setattr(kind, name, own)
    queue.publish(2)
    assert calls


def test_a_cursor_factory_of_the_project_s_is_used() -> None:
    """Which is where metrics and tracers of psycopg sit."""
    queue = Queue("work")
    warm(queue)
    seen: list[Any] = []
    raw = connection.connection

    class Counting(raw.cursor_factory):  # type: ignore[misc, name-defined]
        def execute(self, statement: Any, *args: Any, **options: Any) -> Any:
            seen.append(statement)
            return super().execute(statement, *args, **options)

    factory, raw.cursor_factory = raw.cursor_factory, Counting
    try:
        queue.publish(2)
    finally:
        raw.cursor_factory = factory
    assert any("INSERT" in statement for statement in seen)


@pytest.fixture
def tenants() -> Iterator[list[str]]:
    """Two schemas, each with the queue's tables."""
    names = ["tenant_a", "tenant_b"]
    with connect() as admin:
        for name in names:
            admin.execute(f"CREATE SCHEMA {name}")
            for table in ("messagequeue", "messagequeueitem"):
                admin.execute(
                    f"CREATE TABLE {name}.django_pgqueue_{table} (LIKE public.django_pgqueue_{table} INCLUDING ALL)"
                )
    yield names
    with connect() as admin:
        for name in names:
            admin.execute(f"DROP SCHEMA {name} CASCADE")


def test_a_message_goes_where_the_search_path_points_now(tenants: list[str], settings: Any) -> None:
    """Changed between two publishes, the prepared statement is another table's."""
    settings.PGQUEUE = {"DECLARE_TTL": 0.001}
    queue = Queue("work")
    warm(queue)
    # Foreign keys are not copied, and PUBLISH relies on none here: the queue is declared in each.
    for number in range(3):
        for name in tenants:
            fetch("SELECT set_config('search_path', %s, false)", [name])
            queue.declare()
            queue.publish([name, number])
            with transaction.atomic():
                queue.publish([name, number])
    fetch("SELECT set_config('search_path', 'public', false)")
    with connect() as admin:
        for name in tenants:
            rows = admin.execute(f"SELECT payload FROM {name}.django_pgqueue_messagequeueitem ORDER BY id").fetchall()
            assert [payload for (payload,) in rows] == [[name, number] for number in range(3) for _ in range(2)]
    connection.close()


def test_a_handler_publishes_prepared() -> None:
    """What a worker's connections are watched for is the handler's doing, not what publishes."""
    source, target = Queue("source"), Queue("target")
    source.publish_many(range(PREPARE_THRESHOLD + 5))
    names: list[Any] = []

    def handle(message: Message) -> None:
        target.publish(message.payload)
        names.extend(prepared_statements())

    Consumer([make_handler(source, handle)], drain=True).run()
    assert names
