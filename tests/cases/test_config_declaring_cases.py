"""
Real failures of other systems over how a project is set up: B93, options changed in code and in the row.

The rule: the declaration in the code wins. It is written where it differs, along with a refresh that was due anyway
(so at most once in DECLARE_TTL, however many processes there are), or by an explicit declare. What operators set has
columns of its own, which no declaration writes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import transaction

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueue
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import declaring
from django_pgqueue.services.beliefs import beliefs
from tests.support.processes import Worker, command, worker
from tests.support.rows import backdate, make_queue, payloads
from tests.support.sessions import fetch, second_session
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

COUNT_WRITES = """
CREATE TABLE queue_write (name text, differs boolean);
CREATE FUNCTION note_queue_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queue_write VALUES (
        NEW.name,
        (OLD.durable, OLD.auto_deleted, OLD.exclusive, OLD.dead_letter, OLD.max_deliveries)
            IS DISTINCT FROM (NEW.durable, NEW.auto_deleted, NEW.exclusive, NEW.dead_letter, NEW.max_deliveries));
    RETURN NEW;
END $$;
CREATE TRIGGER note_queue_write AFTER UPDATE ON django_pgqueue_messagequeue
FOR EACH ROW EXECUTE FUNCTION note_queue_write();
"""
STOP_COUNTING = """
DROP TRIGGER note_queue_write ON django_pgqueue_messagequeue;
DROP FUNCTION note_queue_write();
DROP TABLE queue_write;
"""

PUBLISH_ON = """
import time
from django_pgqueue.registry import find_queue
queue = find_queue("q")
while True:
    queue.publish({})
    time.sleep(0.02)
"""

TTL = 1.0
MISMATCH = "queue declared differently queue=q"


@pytest.fixture
def writes() -> Iterator:
    """Count each UPDATE of a queue's row, and those that change what it was declared as."""
    with second_session() as admin:
        admin.execute(COUNT_WRITES)
        try:
            yield lambda: admin.execute(
                "SELECT count(*), count(*) FILTER (WHERE differs) FROM queue_write WHERE name = 'q'"
            ).fetchone()
        finally:
            admin.execute(STOP_COUNTING)


@contextmanager
def one_version(**declared) -> Iterator[list[Worker]]:
    """A publisher and a consumer whose code declares the queue so."""
    queues = [{"name": "q", "queue": declared}]
    # In the proportion of the defaults.
    settings = {"DECLARE_TTL": TTL, "HEARTBEAT_INTERVAL": 4 * TTL}
    with (
        worker(queues=queues, settings=settings) as consumer,
        command("shell", "-c", PUBLISH_ON, queues=queues, settings=settings) as publisher,
    ):
        yield [consumer, publisher]


OLD = {"max_deliveries": 5, "auto_deleted": False, "dead_letter": "old.dead"}
NEW = {"max_deliveries": 7, "auto_deleted": True, "dead_letter": "new.dead"}


def stored(name: str = "q") -> dict:
    return MessageQueue.objects.filter(name=name).values("max_deliveries", "auto_deleted", "dead_letter").get()


def test_b93_two_versions_side_by_side_write_once_a_ttl_and_the_last_one_wins(writes):
    """
    Four processes of two versions: the row is written once in DECLARE_TTL at most, each tells of it once.

    When the old version is gone the row says what the new one declares, and is not changed again.
    """
    with one_version(**NEW) as new_processes:
        with one_version(**OLD) as old_processes:
            began, before = time.monotonic(), writes()
            wait_until(lambda: any(MISMATCH in process.output for process in (*old_processes, *new_processes)))
            wait_until(lambda: time.monotonic() - began > 3 * TTL)
            after, took = writes(), time.monotonic() - began
            assert 1 <= after[0] - before[0] <= took / TTL + 1
            logs = [process.output for process in (*old_processes, *new_processes)]
        assert max(log.count(MISMATCH) for log in logs) == 1
        wait_until(lambda: stored() == NEW)
        settled, total = writes()[1], writes()[0]
        # Still refreshed, and no longer changed.
        wait_until(lambda: writes()[0] >= total + 2)
        assert writes()[1] == settled
        assert all(process.output.count(MISMATCH) <= 1 for process in new_processes)


CHANGED = {
    "max_deliveries": ({"max_deliveries": 5}, {"max_deliveries": 9}),
    "auto_deleted": ({"auto_deleted": False}, {"auto_deleted": True}),
    "dead_letter": ({"dead_letter": None}, {"dead_letter": "elsewhere"}),
}


@pytest.fixture
def new_process():
    """Let this process believe nothing, and have told nothing."""

    def start() -> None:
        beliefs.forget()
        beliefs.warned.clear()

    start()
    return start


@pytest.mark.parametrize("option", CHANGED)
def test_b93_what_somebody_wrote_into_the_row_is_written_back_and_told_once(writes, new_process, caplog, option):
    """At the next refresh that is due: a fresh row is left alone, so nothing flaps."""
    declared, by_hand = CHANGED[option]
    queue = Queue("q", **declared)
    queue.declare()
    MessageQueue.objects.filter(name="q").update(**by_hand)
    new_process()
    queue.publish({})
    assert stored()[option] == by_hand[option]
    for _ in range(3):
        backdate("q", 60)
        beliefs.forget()
        queue.publish({})
    assert stored()[option] == declared[option]
    assert caplog.text.count(MISMATCH) == 1
    assert writes()[1] == 2  # By hand, and back.


def test_b93_a_publish_inside_a_transaction_writes_no_attributes_there(new_process):
    """It is done after the commit: the row's lock is nobody's to wait for."""
    Queue("q", max_deliveries=5).declare()
    backdate("q", 60)
    new_process()
    with transaction.atomic():
        Queue("q", max_deliveries=7).publish({})
        assert stored()["max_deliveries"] == 5
    assert stored()["max_deliveries"] == 7


@pytest.mark.parametrize("how", ["declare", "refresh", "heal"])
def test_b93_what_operators_set_is_written_by_no_declaration(new_process, how):
    """Paused stays paused, and owned stays owned."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    fetch("UPDATE django_pgqueue_messagequeue SET paused_at = '2020-01-01', exclusive_consumer_id = gen_random_uuid()")
    backdate("q", 60)
    before = MessageQueue.objects.values("paused_at", "exclusive_consumer_id").get(name="q")
    new_process()
    if how == "declare":
        Queue("q", auto_deleted=True, max_deliveries=9).declare()
    elif how == "refresh":
        Queue("q", auto_deleted=True, max_deliveries=9).publish({})
    else:
        declaring.create(transaction.get_connection(), declaration_of(queue))
    assert MessageQueue.objects.values("paused_at", "exclusive_consumer_id").get(name="q") == before


def test_b93_a_queue_that_becomes_auto_deleted_says_so_and_is_not_reaped_with_its_messages(new_process, caplog):
    """The flip is a WARNING, never silent; while it is in use or holds a message it stays."""
    Queue("q").publish({"n": 1})
    new_process()
    backdate("q", 9999)
    Queue("q", auto_deleted=True).publish({"n": 2}, ttl=3600)
    assert stored()["auto_deleted"] is True
    assert [record.levelname for record in caplog.records if MISMATCH in record.getMessage()] == ["WARNING"]
    backdate("q", 9999)
    assert Reaper("default").run_once().queues == []
    assert payloads("q") == [{"n": 1}, {"n": 2}]


def test_b93_a_standing_queue_stays_standing_whoever_else_publishes_by_its_name(new_process):
    """A process that only consumes or publishes by name, and declares nothing else, makes nothing reapable."""
    make_queue("q", auto_deleted=False, idle=60)
    Queue("q").publish({})
    declaring.touch(["q"], "default")
    assert stored()["auto_deleted"] is False
