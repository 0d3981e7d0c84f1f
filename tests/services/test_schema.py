"""The tables as PostgreSQL has them, and the system checks that watch over them and the settings."""

from contextlib import contextmanager

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test.utils import override_settings

from django_pgqueue import checks
from django_pgqueue.models import MessageQueue, MessageQueueItem
from tests.support.rows import make_queue
from tests.support.sessions import fetch
from tests.support.statements import STATEMENTS

pytestmark = pytest.mark.django_db(transaction=True)

ITEM = "django_pgqueue_messagequeueitem"


@contextmanager
def altered(*statements: str):
    """Change the schema for the length of a block."""
    with transaction.atomic():
        for statement in statements:
            fetch(statement)
        yield
        transaction.set_rollback(True)


# --- Tables ---


def test_the_migrations_are_those_of_the_models():
    """`makemigrations` has nothing to write, on every Django of the matrix."""
    call_command("makemigrations", "django_pgqueue", check=True, dry_run=True, verbosity=0)


def test_the_messages_have_these_indexes_and_no_others():
    """Each further index is a cost on every publish, and one on a column that a claim writes ends HOT updates."""
    indexes = dict(fetch("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s", [ITEM]))
    assert {name: definition.partition(" btree ")[2] for name, definition in indexes.items()} == {
        f"{ITEM}_pkey": "(id)",
        "django_pgqueue_item_claim_idx": "(queue_id, read_after, id) WHERE (queue_id IS NOT NULL)",
        "django_pgqueue_item_expiry_idx": "(expires_at) WHERE (expires_at IS NOT NULL)",
        "django_pgqueue_item_orphan_idx": "(orphaned_from, id) WHERE (orphaned_from IS NOT NULL)",
        "django_pgqueue_item_dead_idx": "(dead_lettered_from, id) WHERE (dead_lettered_from IS NOT NULL)",
    }


def test_the_foreign_key_is_immediate_validated_and_sets_null():
    """The one that the publish paths are built on, and the only one of the table."""
    assert fetch(
        "SELECT conname, confdeltype, condeferrable, convalidated FROM pg_constraint"
        " WHERE contype = 'f' AND conrelid = %s::regclass",
        [ITEM],
    ) == [("django_pgqueue_item_queue_fk", "n", False, True)]


def test_a_violation_comes_at_the_insert():
    """Raw SQL too: 23503 is raised by the statement, long before COMMIT."""
    with connection.cursor() as cursor, pytest.raises(Exception) as failure, transaction.atomic():
        cursor.execute(f"INSERT INTO {ITEM} (queue_id, payload) VALUES ('gone', '1')")
        pytest.fail("the INSERT went through")
    assert failure.value.__cause__.sqlstate == "23503"
    assert failure.value.__cause__.diag.constraint_name == "django_pgqueue_item_queue_fk"


def test_every_column_but_two_has_a_default():
    """So that `INSERT (queue_id, payload)` is a valid publish."""
    make_queue("raw")
    fetch(f"INSERT INTO {ITEM} (queue_id, payload) VALUES ('raw', '[]')")
    item = MessageQueueItem.objects.get()
    assert (item.headers, item.delivery_count, item.payload) == ({}, 0, [])
    assert item.published_at is not None
    fetch("INSERT INTO django_pgqueue_messagequeue (name) VALUES ('raw too')")
    queue = MessageQueue.objects.get(name="raw too")
    assert (queue.durable, queue.auto_deleted, queue.exclusive, queue.max_deliveries) == (True, False, False, 5)
    assert queue.last_active is not None and queue.created_at is not None


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\nb", "a" * 256], ids=repr)
def test_the_database_refuses_names_that_python_would_refuse(name):
    """Rows made by SQL or another program keep to the rules too."""
    with pytest.raises(Exception, match="django_pgqueue_queue_name"):
        make_queue(name)


def test_the_queue_table_is_vacuumed_early():
    """Each concurrent publish makes a MultiXact on the queue's row; a few rows are cheap to freeze often."""
    ((options,),) = fetch("SELECT reloptions FROM pg_class WHERE relname = 'django_pgqueue_messagequeue'")
    assert {"autovacuum_vacuum_scale_factor=0", "autovacuum_multixact_freeze_min_age=0"} <= set(options)


def test_the_migration_can_be_reversed_and_run_again():
    """Nothing is left behind that stands in the way of the next one."""
    try:
        call_command("migrate", "django_pgqueue", "zero", verbosity=0)
        assert not [table for table in connection.introspection.table_names() if table.startswith("django_pgqueue")]
        assert fetch("SELECT count(*) FROM pg_proc WHERE proname = 'django_pgqueue_orphan_messages'") == [(0,)]
    finally:
        call_command("migrate", "django_pgqueue", verbosity=0)
    assert checks.check_foreign_key(None, ["default"]) == []


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_uses_a_clock_other_than_the_statements(name):
    """`now()` lags by the transaction's age; `clock_timestamp()` cannot be used with an index."""
    statement = STATEMENTS[name].lower()
    assert "now()" not in statement and "clock_timestamp" not in statement and "current_timestamp" not in statement


# --- Checks ---


def foreign_key_problems() -> list[str]:
    return [f"{message.id}: {message.msg}" for message in checks.check_foreign_key(None, ["default"])]


DROP = f"ALTER TABLE {ITEM} DROP CONSTRAINT django_pgqueue_item_queue_fk"
ADD = (
    f"ALTER TABLE {ITEM} ADD CONSTRAINT django_pgqueue_item_queue_fk FOREIGN KEY (queue_id)"
    " REFERENCES django_pgqueue_messagequeue (name)"
)


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        ([DROP], "is missing"),
        ([DROP, f"{ADD} ON DELETE SET NULL DEFERRABLE"], "is deferrable"),
        ([DROP, f"{ADD} ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED"], "is deferrable"),
        ([DROP, f"{ADD} ON DELETE SET NULL NOT VALID"], "is not validated"),
        ([DROP, f"{ADD} ON DELETE CASCADE"], "is not ON DELETE SET NULL"),
        ([DROP, ADD], "is not ON DELETE SET NULL"),
    ],
    ids=["missing", "deferrable", "deferred", "not validated", "cascade", "no action"],
)
def test_a_wrong_foreign_key_is_an_error(statements, problem):
    """E005 says what is wrong with it, and how to put it right."""
    with altered(*statements):
        (found,) = foreign_key_problems()
        assert found.startswith("django_pgqueue.E005:") and problem in found
        hint = checks.check_foreign_key(None, ["default"])[0].hint
        # The hint is what it says: pasted, it mends the table.
        if problem != "is missing":
            fetch(DROP)
        fetch(hint[hint.index("ALTER TABLE") :])
        assert foreign_key_problems() == []
    assert foreign_key_problems() == []


def test_the_foreign_key_is_looked_at_where_the_database_is_asked_for():
    """`check --database default` finds it, `check` alone runs no SQL."""
    with altered(DROP):
        assert "django_pgqueue.E005" in {message.id for message in run_checks(databases=["default"])}
        assert "django_pgqueue.E005" not in {message.id for message in run_checks()}


def test_the_project_as_it_is_passes_its_checks():
    """Settings, engine and foreign key."""
    assert [message for message in run_checks(databases=["default"]) if message.id.startswith("django_pgqueue")] == []


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ({"DATABASE": "nowhere"}, ["E001"]),
        ({"LEESE": 5}, ["E002"]),
        ({"LEASE": "5"}, ["E003"]),
        ({"LEASE": 0}, ["E003"]),
        ({"LEASE": -1, "PREFETCH": 1.5}, ["E003", "E003"]),
        ({"MAX_DELIVERIES": True}, ["E003"]),
        ({"MAX_DELIVERIES": 2**31}, ["E003"]),
        ({"MAX_DELIVERIES": 2**31 - 1, "LEASE": 2**31}, []),
        ({"LEASE": None}, ["E003"]),
        ({"LEASE": 1e30}, ["E003"]),
        ({"BACKOFF": 5}, ["E003"]),
        ({"BACKOFF": {"bass": 1}}, ["E003"]),
        ({"BACKOFF": {"factor": 0.5}}, ["E003"]),
        (["LEASE"], ["E003"]),
        ({"CHANNEL_PREFIX": "a:b"}, ["E003"]),
        ({"CHANNEL_PREFIX": "x" * 25}, ["E003"]),
        ({"CHANNEL_PREFIX": "shop-2.staging_x"}, []),
        ({"REAP_IDLE_AFTER": 100}, ["W004"]),
        ({"REAP_IDLE_AFTER": 44, "HEARTBEAT_INTERVAL": 1}, ["W004"]),
        ({"REAP_IDLE_AFTER": 45, "HEARTBEAT_INTERVAL": 1}, []),
        ({"EPHEMERAL_TTL": None, "DEFAULT_TTL": 5, "NOTIFY_INTERVAL": 0, "BACKOFF": {"base": 2}}, []),
        ({}, []),
    ],
    ids=repr,
)
def test_wrong_settings_are_found(configured, expected):
    """Unknown keys, wrong types and ranges, and an idle time that would reap queues in use."""
    with override_settings(PGQUEUE=configured):
        found = checks.check_settings(None)
        if isinstance(configured, dict):
            found += checks.check_engine(None)
    assert [message.id for message in found] == [f"django_pgqueue.{number}" for number in expected]


def test_another_engine_is_an_error():
    """E001: the queue's database must be PostgreSQL; the other checks keep quiet about it."""
    default = connections.settings["default"]
    connections.settings["lite"] = {
        **default,
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {},
    }
    try:
        with override_settings(PGQUEUE={"DATABASE": "lite"}):
            (message,) = checks.check_engine(None)
            assert checks.check_foreign_key(None, ["lite"]) == []
    finally:
        del connections["lite"]
        del connections.settings["lite"]
    assert message.id == "django_pgqueue.E001" and "sqlite" in message.msg


@pytest.mark.parametrize("key", ["DATABASE", "LISTEN_DATABASE"])
def test_an_alias_that_is_not_there_is_an_error(key):
    """E001 names the setting."""
    with override_settings(PGQUEUE={key: "nowhere"}):
        (message,) = checks.check_engine(None)
    assert message.id == "django_pgqueue.E001" and f"{key} is not a database alias" in message.msg


def test_an_unknown_setting_names_the_nearest():
    """A slip of the pen is answered with the right key."""
    with override_settings(PGQUEUE={"LEESE": 5}):
        (message,) = checks.check_settings(None)
    assert "'LEESE'" in message.msg and message.hint == "Did you mean LEASE?"
