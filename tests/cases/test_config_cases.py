"""Real failures of other systems over how a project is set up: B89, B91. B93 and B94 have files of their own."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.test import Client
from django.urls import reverse

from django_pgqueue import Queue, checks
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import diagnosing
from django_pgqueue.services.beliefs import beliefs
from tests.support.databases import alias, empty_database, migrate
from tests.support.rows import delete_queue, payloads
from tests.support.sessions import Session, fetch, second_session

pytestmark = pytest.mark.django_db(transaction=True)


def drain(queue: Queue, **options) -> list:
    seen: list = []
    Consumer([make_handler(queue, lambda message: seen.append(message.payload), **options)], drain=True).run()
    return seen


# --- B89: a router sends the queue's reads to a replica ---


class ReplicaRouter:
    """What projects with a read replica have."""

    def db_for_read(self, model, **hints):
        return "replica" if model._meta.app_label == "django_pgqueue" else None

    def db_for_write(self, model, **hints):
        return "default"

    def allow_relation(self, one, other, **hints):
        return True


@pytest.fixture
def replica_connections(settings) -> Iterator[list[str]]:
    """
    A replica that is frozen, read-only, and knows of an old message on "frozen"; reads are routed to it.

    Gives the list of the connections that are made to it.
    """
    made: list[str] = []

    def note(connection, **kwargs) -> None:
        if connection.alias == "replica":
            made.append(connection.alias)

    with empty_database() as name:
        with alias("setup", NAME=name):
            migrate("setup")
            Queue("frozen", auto_deleted=True, using="setup").publish({"n": 0}, ttl=0.001)
        with alias("replica", NAME=name, OPTIONS={"options": "-c default_transaction_read_only=on"}):
            settings.DATABASE_ROUTERS = [ReplicaRouter()]
            connection_created.connect(note)
            try:
                yield made
            finally:
                connection_created.disconnect(note)


def test_b89_no_statement_of_ours_goes_to_the_replica(replica_connections):
    """Publish, heal, claim, settle, retry, consume, beat, reap, count: all on the queue's database, and all right."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    queue.publish({"n": 1})
    delete_queue("q")
    with transaction.atomic():
        queue.publish({"n": 2})
    queue.publish_many([{"n": 3}, {"n": 4}, {"n": 5}])
    two, three, four = queue.claim(3)
    queue.extend(two, three)
    queue.ack(two)
    queue.nack(three, delay=0)
    queue.reject(four, reason="no")
    stats = queue.stats()
    assert (stats.ready, stats.leased, stats.orphaned) == (2, 0, 1)
    # 1 is an orphan of the deleted row, which a consumer adopts at its next look.
    assert Reaper("default").run_once().adopted == 1
    assert sorted(payload["n"] for payload in drain(queue)) == [1, 3, 5]
    assert replica_connections == []


def test_b89_reaping_ends_and_goes_by_what_the_queues_database_holds(replica_connections):
    """A queue that is idle there is reaped once; the old message of the replica is never met."""
    Queue("idle", auto_deleted=True).declare()
    fetch("UPDATE django_pgqueue_messagequeue SET last_active = '2000-01-01' WHERE name = 'idle'")
    Queue("expired").publish({}, ttl=0.001)
    fetch("SELECT pg_sleep(0.01)")
    with Session() as session:
        # In a thread, so that a reaper that never ends fails the test.
        first = session.run(Reaper("default").run_once)
        assert (first.queues, first.expired) == (["idle"], 1)
        assert session.run(Reaper("default").run_once).queues == []
    assert replica_connections == []


def test_b89_the_commands_and_checks_see_the_queues_database(replica_connections):
    """Numbers that an operator looks at while the replica lags."""
    Queue("q").publish({"n": 1})
    out = io.StringIO()
    call_command("inspect_queues", format="json", stdout=out)
    assert {row["name"]: row["ready"] for row in json.loads(out.getvalue())}["q"] == 1
    out = io.StringIO()
    call_command("reap_queues", dry_run=True, format="json", stdout=out)
    call_command("reap_queues", stdout=io.StringIO())
    call_command("heartbeat_queues", "q", once=True)
    assert checks.check_foreign_key(None, ["default", "replica"]) == []
    assert replica_connections == []


@pytest.mark.parametrize("model", ["messagequeue", "messagequeueitem"])
def test_b89_the_admin_shows_the_queues_database(admin_client: Client, replica_connections, model):
    """A page that showed the replica would say that a stuck queue is empty."""
    message_id = Queue("stuck").publish({})
    page = admin_client.get(reverse(f"admin:django_pgqueue_{model}_changelist")).content.decode()
    assert "stuck" in page and "frozen" not in page
    pk = "stuck" if model == "messagequeue" else message_id
    assert admin_client.get(reverse(f"admin:django_pgqueue_{model}_change", args=[pk])).status_code == 200
    assert replica_connections == []


# --- B91: another schema, search_path, unqualified names in functions ---


@pytest.fixture(params=["app, public", "app"])
def schema(request) -> Iterator[str]:
    """An alias whose tables are in the schema "app", the first of its path, of a database of their own."""
    path = request.param.replace(" ", "")
    with empty_database() as name:
        with second_session(dbname=name) as admin:
            admin.execute("CREATE SCHEMA app")
        with alias("app", NAME=name, OPTIONS={"options": f"-c search_path={path}"}) as using:
            migrate(using)
            yield using


@contextmanager
def outsider(using: str, path: str) -> Iterator[psycopg.Connection]:
    """Give a session on that database whose search path does not hold the tables."""
    with second_session(dbname=connections.settings[using]["NAME"], options=f"-c search_path={path}") as session:
        yield session


PATHS = {"public": "public", "empty": "''"}


def test_b91_all_of_it_is_in_the_schema_that_comes_first(schema):
    """Nothing of ours in any other: tables, indexes, functions, types."""
    with outsider(schema, "public") as session:
        for catalogue, kind in (("pg_class", "rel"), ("pg_proc", "pro"), ("pg_type", "typ"), ("pg_constraint", "con")):
            found = session.execute(
                f"SELECT DISTINCT {kind}namespace::regnamespace::text FROM {catalogue}"
                f" WHERE {kind}name LIKE '%django_pgqueue%'"
            ).fetchall()
            assert found == [("app",)], catalogue


def test_b91_everything_works_there(schema):
    """Publish, heal, claim, settle, consume, reap, and the check of the foreign key."""
    queue = Queue("q", auto_deleted=True, using=schema)
    queue.publish_many([{"n": 1}, {"n": 2}])
    with transaction.atomic(using=schema):
        queue.publish({"n": 3})
    (message,) = queue.claim()
    queue.nack(message, delay=0)
    assert sorted(payload["n"] for payload in drain(queue)) == [1, 2, 3]
    fetch("UPDATE django_pgqueue_messagequeue SET last_active = '2000-01-01'", using=schema)
    # The dead-letter queue is idle, too.
    assert "q" in Reaper(schema).run_once().queues
    beliefs.forget()
    queue.publish({"n": 4})
    assert drain(queue) == [{"n": 4}]
    assert diagnosing.foreign_key_state(schema) == (True, True, True, True)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_b91_raw_inserts_and_deletes_work_from_a_session_with_another_path(schema, path):
    """The message is checked against its queue, and the orphan trigger stamps it: functions set their own path."""
    queue = Queue("q", using=schema)
    queue.declare()
    with outsider(schema, path) as session:
        session.execute("INSERT INTO app.django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('q', '1')")
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            session.execute("INSERT INTO app.django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('no', '1')")
        session.execute("DELETE FROM app.django_pgqueue_messagequeue WHERE name = 'q'")
        rows = session.execute("SELECT queue_id, orphaned_from FROM app.django_pgqueue_messagequeueitem").fetchall()
        assert rows == [(None, "q")]
    assert drain(queue) == [1]


def test_b91_a_table_of_the_same_name_earlier_in_the_deleters_path_is_not_touched(schema):
    """The trigger follows the schema of the queue's table, and no decoy."""
    Queue("q", using=schema).publish({"n": 1})
    with outsider(schema, "decoy,app") as session:
        session.execute("CREATE SCHEMA decoy")
        item = "django_pgqueue_messagequeueitem"
        session.execute(f"CREATE TABLE decoy.{item} AS TABLE app.{item}")
        session.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = 'q'")
        assert session.execute(f"SELECT queue_id FROM decoy.{item}").fetchall() == [("q",)]
        assert session.execute(f"SELECT orphaned_from FROM app.{item}").fetchall() == [("q",)]


def test_b91_two_installations_in_two_schemas_know_nothing_of_each_other(schema):
    """One database, one path each: the same queue name is two queues."""
    name = connections.settings[schema]["NAME"]
    with outsider(schema, "public") as session:
        session.execute("CREATE SCHEMA other")
    with alias("other", NAME=name, OPTIONS={"options": "-c search_path=other"}) as other:
        migrate(other)
        Queue("q", using=other).publish({"from": "other"})
        Queue("q", using=schema).publish({"from": "app"})
        assert drain(Queue("q", using=schema)) == [{"from": "app"}]
        assert drain(Queue("q", using=other)) == [{"from": "other"}]


@pytest.mark.parametrize("ack", ["late", "early"])
def test_b91_a_handler_that_changes_the_search_path_spoils_nothing(ack):
    """Not its own settling, not the next message of the same worker, which publishes as well."""
    queue, next_queue = Queue("q"), Queue("next")
    next_queue.declare()

    def handle(message) -> None:
        next_queue.publish(message.payload)
        fetch("SET search_path = nowhere")

    queue.publish_many([{"n": n} for n in range(3)])
    Consumer([make_handler(queue, handle, ack=ack)], drain=True).run()
    assert sorted(payload["n"] for payload in payloads("next")) == [0, 1, 2]
    assert not MessageQueueItem.objects.exclude(queue="next").exists()


def test_b91_an_atomic_handler_that_leaves_the_search_path_changed_fails_loudly():
    """Its ack is a statement of its own transaction, so it is rolled back each time, and dead in the end."""
    queue, next_queue = Queue("q", max_deliveries=2, backoff={"base": 0}), Queue("next")
    next_queue.declare()

    def handle(message) -> None:
        next_queue.publish(message.payload)
        if message.payload == "spoil":
            fetch("SET search_path = nowhere")

    queue.publish_many(["spoil", "good"])
    Consumer([make_handler(queue, handle, ack="atomic")], drain=True).run()
    assert payloads("next") == ["good"]
    (dead,) = MessageQueueItem.objects.filter(queue="q.dead")
    assert dead.payload == "spoil"
    assert "does not exist" in dead.failures[-1]["reason"]
