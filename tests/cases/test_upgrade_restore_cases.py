"""Real failures of other systems over upgrades: B98, dump, restore and copy to another server. B95 has its own file."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connections, transaction

from django_pgqueue import LeaseLost, Queue, QueueNotFound
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.devdb import find_pg_bindir
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import diagnosing, notifying
from tests.support import cluster
from tests.support.databases import alias, database, empty_database, migrate, url_of
from tests.support.rows import payloads
from tests.support.sessions import fetch, second_session

pytestmark = pytest.mark.django_db(transaction=True)

PENDING, CLAIMED, DEAD, FUTURE = 500, 50, 20, 30
LEASE = 3.0
ITEM = "django_pgqueue_messagequeueitem"


def pg(program: str, *arguments: str) -> str:
    """Run a client program of the tests' server."""
    path = find_pg_bindir() / program
    if cluster.cluster is None and not path.exists():
        pytest.skip(f"DATABASE_URL was given, and there is no {program} beside a server on this machine")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60)
    if cluster.cluster is None and "server version mismatch" in done.stderr:
        pytest.skip(f"DATABASE_URL was given, and {program} is older than that server")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def source() -> Iterator[str]:
    """A database with messages in every state; lost in a moment, it is to be restored."""
    with database("source") as using:
        queue = Queue("work", lease=LEASE, using=using)
        queue.publish_many([{"n": n} for n in range(DEAD + CLAIMED + PENDING)])
        dead = queue.claim(DEAD)
        queue.reject(*dead, reason="no use")
        assert len(queue.claim(CLAIMED)) == CLAIMED
        queue.publish_many([{"n": DEAD + CLAIMED + PENDING + n} for n in range(FUTURE)], delay=LEASE)
        yield using


@pytest.fixture
def dump(source: str, tmp_path: Path) -> str:
    path = str(tmp_path / "dump")
    pg("pg_dump", "--format=custom", f"--file={path}", f"--dbname={url_of(source)}")
    return path


@pytest.fixture
def target() -> Iterator[str]:
    """An alias for an empty database."""
    with empty_database() as name, alias("target", NAME=name) as using:
        yield using


def comes_through(using: str) -> None:
    """Assert that publishing works at once, and that all which was not dead is delivered, once."""
    queue = Queue("work", lease=LEASE, using=using)
    before = queue.stats()
    assert before.ready + before.leased + before.delayed == PENDING + CLAIMED + FUTURE
    assert before.ready >= PENDING
    assert Queue("work.dead", using=using).stats().dead == DEAD
    highest = fetch(f"SELECT max(id) FROM {ITEM}", using=using)[0][0]
    assert queue.publish({"n": "new"}) > highest
    seen: dict[object, int] = {}
    handler = make_handler(queue, lambda message: seen.update({message.payload["n"]: message.delivery_count}))
    assert Consumer([handler], max_messages=PENDING + CLAIMED + FUTURE + 1).run() == PENDING + CLAIMED + FUTURE + 1
    assert seen.keys() == {"new", *range(DEAD, DEAD + CLAIMED + PENDING + FUTURE)}
    # What was claimed when the dump was made is a second delivery; nothing else is.
    assert {n for n, delivery in seen.items() if delivery != 1} == set(range(DEAD, DEAD + CLAIMED))
    assert queue.stats().ready == 0


def test_b98_a_dump_is_restored_with_all_that_the_queue_needs(dump, target):
    """Rows, foreign key, trigger, the function's rights, storage; every message that was not dead is delivered."""
    pg("pg_restore", "--exit-on-error", f"--dbname={url_of(target)}", dump)
    comes_through(target)
    assert diagnosing.foreign_key_state(target) == (True, True, True, True)
    Queue("work", using=target).publish({})
    fetch("DELETE FROM django_pgqueue_messagequeue WHERE name = 'work'", using=target)
    assert fetch(f"SELECT DISTINCT orphaned_from FROM {ITEM} WHERE queue_id IS NULL", using=target) == [("work",)]
    function = "SELECT proacl::text FROM pg_proc WHERE proname = 'django_pgqueue_orphan_messages'"
    ((rights,),) = fetch(function, using=target)
    # Nothing before the "=" would be everybody.
    assert not re.search(r"[{,]=", rights)
    # The migrations came along, so there is nothing to do.
    migrate(target)


@pytest.mark.parametrize("options", [["--disable-triggers"], []], ids=["triggers disabled", "triggers enabled"])
def test_b98_the_data_alone_is_restored_into_migrated_tables(dump, target, options):
    """The order of the tables does not matter with triggers disabled, and is right without."""
    migrate(target)
    relations = fetch(
        "SELECT relname FROM pg_class WHERE starts_with(relname, 'django_pgqueue') AND relkind IN ('r', 'S')",
        using=target,
    )
    tables = [f"--table={name}" for (name,) in relations]
    pg("pg_restore", "--exit-on-error", "--data-only", *options, *tables, f"--dbname={url_of(target)}", dump)
    comes_through(target)


def test_b98_a_sequence_that_starts_anew_is_loud_and_is_mended_by_djangos_own_command(dump, target, capsys):
    """Further on is no trouble; at ids that exist the publish fails, changes nothing, and says which constraint."""
    pg("pg_restore", "--exit-on-error", f"--dbname={url_of(target)}", dump)
    fetch(f"ALTER SEQUENCE {ITEM}_id_seq RESTART WITH 1000000", using=target)
    queue = Queue("work", using=target)
    assert queue.publish({"n": "far"}) == 1_000_000
    fetch(f"ALTER SEQUENCE {ITEM}_id_seq RESTART WITH 1", using=target)
    before = fetch(f"SELECT count(*), sum(id) FROM {ITEM}", using=target)
    for publish in (lambda: queue.publish({}), lambda: queue.publish_many([{}, {}])):
        with pytest.raises(IntegrityError, match=f"{ITEM}_pkey"):
            publish()
    assert fetch(f"SELECT count(*), sum(id) FROM {ITEM}", using=target) == before
    capsys.readouterr()
    call_command("sqlsequencereset", "django_pgqueue", database=target, no_color=True)
    for statement in capsys.readouterr().out.split(";"):
        if "setval" in statement:
            fetch(statement, using=target)
    assert queue.publish({"n": "mended"}) == 1_000_001


def test_b98_a_payload_that_is_null_stops_loaddata_before_anything_is_loaded(target, tmp_path):
    """Django's fixtures cannot tell JSON's null from SQL's: pg_dump can. Loud, and nothing is half loaded."""
    Queue("work").publish_many([{"n": 1}, None])
    path = tmp_path / "queues.json"
    call_command("dumpdata", "django_pgqueue", output=str(path), verbosity=0)
    migrate(target)
    with pytest.raises(IntegrityError, match="payload"):
        call_command("loaddata", str(path), database=target, verbosity=0)
    assert fetch("SELECT count(*) FROM django_pgqueue_messagequeue", using=target) == [(0,)]


def test_b98_dumpdata_and_loaddata_carry_it_too(source, target, tmp_path):
    """Django's own way, into migrated tables, sequences included."""
    path = tmp_path / "queues.json"
    call_command("dumpdata", "django_pgqueue", database=source, output=str(path), verbosity=0)
    assert len(json.loads(path.read_text())) == PENDING + CLAIMED + DEAD + FUTURE + 2
    migrate(target)
    call_command("loaddata", str(path), database=target, verbosity=0)
    comes_through(target)


def test_b98_a_restore_wakes_nobody(dump, target):
    """No trigger notifies: a million restored messages are no million notifications."""
    with second_session(dbname=connections.settings[target]["NAME"]) as listener:
        for queue in ("work", "work.dead"):
            listener.execute(f'LISTEN "{notifying.channel(queue)}"')
        pg("pg_restore", "--exit-on-error", f"--dbname={url_of(target)}", dump)
        assert list(listener.notifies(timeout=0.1)) == []


def test_b98_nothing_that_is_stored_refers_to_a_transaction_a_row_version_or_a_backend():
    """No column is of a type that means something on one server only."""
    types = fetch(
        "SELECT DISTINCT atttypid::regtype::text FROM pg_attribute"
        " WHERE starts_with(attrelid::regclass::text, 'django_pgqueue') AND attnum > 0 AND NOT attisdropped"
    )
    assert ("text",) in types
    assert not {name for (name,) in types} & {"xid", "xid8", "tid", "cid", "oid", "pg_lsn", "pg_snapshot"}


# --- TRUNCATE ---


def test_b98_truncating_the_messages_leaves_a_queue_that_works():
    """What a consumer still holds is lost to it, also when ids begin at 1 again: the lease's token fences it."""
    queue = Queue("work")
    fetch(f"TRUNCATE {ITEM} RESTART IDENTITY")
    queue.publish_many([{"n": 1}, {"n": 2}])
    (held,) = queue.claim()
    fetch(f"TRUNCATE {ITEM} RESTART IDENTITY")
    assert queue.publish({"n": 3}) == held.id
    for settle in (queue.ack, queue.nack, queue.reject, queue.extend):
        with pytest.raises(LeaseLost):
            settle(held)
    assert [message.payload for message in queue.claim(10)] == [{"n": 3}]


def test_b98_truncating_the_queues_takes_the_messages_along_or_is_refused():
    """PostgreSQL refuses it without CASCADE; with it both tables are empty, and no message is left without a queue."""
    Queue("work").publish({"n": 1})
    with pytest.raises(Exception, match="foreign key constraint"), transaction.atomic():
        fetch("TRUNCATE django_pgqueue_messagequeue")
    assert payloads("work") == [{"n": 1}]
    fetch("TRUNCATE django_pgqueue_messagequeue CASCADE")
    assert not MessageQueueItem.objects.exists()


@pytest.mark.parametrize("auto_deleted", [False, True], ids=["standing", "auto-deleted"])
def test_b98_after_a_truncate_queues_come_back(auto_deleted):
    """Auto-deleted ones at the next publish; standing ones stay loud until the process looks again."""
    queue = Queue("work", auto_deleted=auto_deleted)
    queue.publish({"n": 1})
    fetch("TRUNCATE django_pgqueue_messagequeue CASCADE")
    if not auto_deleted:
        with pytest.raises(QueueNotFound):
            queue.publish({"n": 2})
    queue.publish({"n": 3})
    assert payloads("work") == [{"n": 3}]
    assert MessageQueue.objects.get(name="work").auto_deleted is auto_deleted
