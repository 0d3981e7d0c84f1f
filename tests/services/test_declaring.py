"""Declaring: the row is made, kept fresh without making anyone wait, and written no more than needed."""

import subprocess
import sys

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.models.functions import Now
from django.test import TestCase
from django.test.utils import CaptureQueriesContext, override_settings

from django_pgqueue import Queue
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.services import declaring as declaring_services
from django_pgqueue.services.beliefs import beliefs
from tests.support.locks import is_waiting, lock_waits
from tests.support.processes import ROOT, environment
from tests.support.rows import age_of, backdate, delete_queue, locker, make_queue, payloads, version
from tests.support.sessions import Session, connect, fetch, in_threads, sessions
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def let_the_cache_grow_stale() -> None:
    """As when DECLARE_TTL has passed: the queue is known, but not believed to be fresh."""
    beliefs.declared.clear()


# --- Explicit ---


def test_declare_makes_the_queue_with_its_attributes_and_its_dead_letter_queue():
    """All that was declared is in the row; NAME.dead is auto-deleted if NAME is."""
    Queue("one", durable=False, auto_deleted=True, exclusive=True, max_deliveries=3).declare()
    Queue("two", dead_letter="graveyard").declare()
    row = MessageQueue.objects.get(name="one")
    assert (row.durable, row.auto_deleted, row.exclusive, row.max_deliveries) == (False, True, True, 3)
    assert row.dead_letter is None
    assert MessageQueue.objects.get(name="one.dead").auto_deleted
    assert MessageQueue.objects.get(name="two").dead_letter == "graveyard"
    assert not MessageQueue.objects.get(name="graveyard").auto_deleted
    assert not MessageQueue.objects.filter(name__in=["two.dead", "one.dead.dead"]).exists()


def test_declaring_refreshes_last_active():
    """By the database's clock, every time it is asked for explicitly."""
    queue = Queue("orders")
    queue.declare()
    backdate("orders", 7200)
    queue.declare()
    assert age_of("orders") < 5


def test_declare_writes_attributes_that_changed_and_leaves_the_operators_columns():
    """What was declared differently is corrected; a pause and the owner are not the declaration's."""
    make_queue("orders", max_deliveries=2, auto_deleted=True, durable=False)
    owner = "4c1f1b9e-8b5d-4f51-9b7e-111111111111"
    MessageQueue.objects.update(paused_at=Now(), exclusive_consumer_id=owner)
    Queue("orders", max_deliveries=8, exclusive=True).declare()
    row = MessageQueue.objects.get(name="orders")
    assert (row.max_deliveries, row.auto_deleted, row.durable, row.exclusive) == (8, False, True, True)
    assert row.paused_at is not None and str(row.exclusive_consumer_id) == owner


def test_a_declare_inside_a_transaction_is_part_of_it():
    """Rolled back, nothing is left and nothing is believed."""
    queue = Queue("orders")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        queue.declare()
        raise ZeroDivisionError
    assert not MessageQueue.objects.filter(name__startswith="orders").exists()
    queue.publish({"n": 1})
    assert payloads("orders") == [{"n": 1}]


def test_everybody_may_declare_at_once():
    """Sixteen sessions declare one queue together: one row, no error."""
    in_threads(16, lambda _: Queue("orders", dead_letter="graveyard").declare())
    assert MessageQueue.objects.filter(name__in=["orders", "graveyard"]).count() == 2


def test_an_explicit_declare_waits_for_the_row():
    """It promises that the attributes are written, so it does not skip."""
    queue = Queue("orders", max_deliveries=8)
    make_queue("orders")
    with sessions(2) as (holder, declarer):
        holder.begin()
        holder.sql("SELECT FROM django_pgqueue_messagequeue WHERE name = 'orders' FOR NO KEY UPDATE")
        declaring = declarer.start(queue.declare)
        wait_until(lambda: is_waiting(declarer.pid))
        holder.commit()
        declaring.result(DEADLINE)
    assert MessageQueue.objects.get(name="orders").max_deliveries == 8


# --- Implicit: the refresh ---


def test_a_publish_with_a_stale_cache_refreshes_a_stale_row():
    """In autocommit before the insert, in a transaction after its commit."""
    queue = Queue("orders")
    queue.declare()
    for publish in (lambda: queue.publish(1), lambda: queue.publish_many([1])):
        backdate("orders", 60)
        let_the_cache_grow_stale()
        publish()
        assert age_of("orders") < 5
    backdate("orders", 60)
    let_the_cache_grow_stale()
    with transaction.atomic():
        queue.publish(1)
        assert age_of("orders") > 59
    assert age_of("orders") < 5


def test_the_cache_lasts_for_declare_ttl():
    """Within it a publish asks nothing, whatever became of the row."""
    queue = Queue("orders")
    with override_settings(PGQUEUE={"DECLARE_TTL": 0.3}):
        queue.publish(1)
        backdate("orders", 60)
        before = version("orders")
        queue.publish(2)
        unchanged = version("orders") == before
        wait_until(lambda: (queue.publish(3), age_of("orders") < 5)[1], timeout=5)
    # A slow machine may have needed more than DECLARE_TTL between the two.
    assert unchanged or age_of("orders") < 5


def test_a_fresh_row_is_not_even_locked():
    """A cold process finds a row that somebody refreshed a moment ago: no new version, no xmax, no write."""
    make_queue("orders", idle=3)
    before = version("orders"), locker("orders")
    assert before[1] == "0"
    queue = Queue("orders")
    declaring_services.refresh(connections["default"], declaration_of(queue), beliefs.key_of(connection, queue.name))
    assert beliefs.is_fresh(beliefs.key_of(connection, "orders"))
    assert declaring_services.touch(["orders"], "default") == {"orders"}
    assert (version("orders"), locker("orders")) == before


def test_the_refresh_never_waits_and_looks_again_at_the_next_publish():
    """A row that another session holds is skipped, not believed, and refreshed once it is free."""
    queue = Queue("orders")
    queue.declare()
    backdate("orders", 60)
    let_the_cache_grow_stale()
    with Session() as holder, lock_waits() as waits:
        holder.begin()
        holder.sql("SELECT FROM django_pgqueue_messagequeue WHERE name = 'orders' FOR NO KEY UPDATE")
        queue.publish(1)
        with transaction.atomic():
            queue.publish(2)
        assert declaring_services.touch(["orders"], "default") == {"orders"}
        holder.commit()
    assert waits == []
    assert age_of("orders") > 59
    queue.publish(3)
    assert age_of("orders") < 5
    assert payloads("orders") == [1, 2, 3]


def test_the_fleet_writes_the_row_at_most_once_per_declare_ttl():
    """Five processes with cold caches publish to a stale queue: one of them refreshes it, one write."""
    queue = Queue("orders")
    queue.declare()
    backdate("orders", 60)
    before, backdated = row_updates(), version("orders")
    run_processes(5, "from django_pgqueue import Queue; q = Queue('orders'); [q.publish(n) for n in range(5)]")
    assert version("orders") != backdated
    assert row_updates() - before == 1
    assert len(payloads("orders")) == 25


def row_updates() -> int:
    """Return how often rows of the queue table were updated until now."""
    fetch("SELECT pg_stat_force_next_flush()")
    with connect() as reader:
        (count,) = reader.execute(
            "SELECT pg_stat_get_tuples_updated('django_pgqueue_messagequeue'::regclass)"
        ).fetchone()
        return count


def run_processes(count: int, code: str) -> None:
    """Run `code` in processes of their own, with Django set up on the test database."""
    command = [sys.executable, "-c", f"import django; django.setup(); {code}"]
    cold = environment(settings={"DECLARE_TTL": 15})
    processes = [subprocess.Popen(command, cwd=ROOT, env=cold) for _ in range(count)]
    assert [process.wait(60) for process in processes] == [0] * count


def test_two_versions_of_the_code_cost_one_write_per_declare_ttl_and_one_log_line(caplog):
    """A fresh row that differs is left alone; a stale one takes the attributes; the mismatch is logged once."""
    old, new = Queue("orders", max_deliveries=2), Queue("orders", max_deliveries=7)
    old.declare()
    before = version("orders")
    for _ in range(5):
        for queue in (old, new):
            let_the_cache_grow_stale()
            queue.publish(1)
    assert version("orders") == before
    assert MessageQueue.objects.get(name="orders").max_deliveries == 2
    assert [record.message for record in caplog.records if "declared differently" in record.message] == [
        "queue declared differently queue=orders written=False"
    ]
    backdate("orders", 60)
    let_the_cache_grow_stale()
    new.publish(1)
    assert MessageQueue.objects.get(name="orders").max_deliveries == 7


def test_the_refresh_leaves_the_operators_columns():
    """A pause survives publishers, whose refresh writes the attributes along."""
    queue = Queue("orders")
    queue.declare()
    MessageQueue.objects.update(paused_at=Now(), exclusive_consumer_id="4c1f1b9e-8b5d-4f51-9b7e-111111111111")
    backdate("orders", 60)
    let_the_cache_grow_stale()
    queue.publish(1)
    row = MessageQueue.objects.get(name="orders")
    assert row.paused_at is not None and row.exclusive_consumer_id is not None
    assert age_of("orders") < 5


def test_the_cache_is_not_filled_inside_a_test_cases_transaction():
    """`captureOnCommitCallbacks(execute=True)` runs the hooks where nothing is committed: not believed."""
    queue = Queue("orders")
    with transaction.atomic():
        queue.publish(1)
        with TestCase.captureOnCommitCallbacks(execute=True):
            queue.publish(2)
        declaring_services.refresh(
            connections["default"], declaration_of(queue), beliefs.key_of(connection, queue.name)
        )
        assert not beliefs.is_fresh(beliefs.key_of(connection, "orders"))
        transaction.set_rollback(True)
    queue.publish(3)
    assert payloads("orders") == [3]


def test_a_declared_queue_costs_no_query_until_it_is_used():
    """Queue objects are declarations: no SQL at import, whatever the arguments."""
    with CaptureQueriesContext(connection) as queries:
        queue = Queue("orders", dead_letter="graveyard", exclusive=True)
        repr(queue), declaration_of(queue), queue.using
    assert len(queries) == 0


# --- post_migrate ---


def test_migrating_makes_the_standing_queues_and_their_dead_letter_queues():
    """Those of queues.py modules; auto-deleted ones are left to their first use."""
    standing, configured = Queue("standing"), Queue("configured", dead_letter="graveyard")
    ephemeral = Queue("ephemeral", auto_deleted=True)
    MessageQueueItem.objects.all().delete()
    MessageQueue.objects.all().delete()
    call_command("migrate", verbosity=0)
    names = set(MessageQueue.objects.values_list("name", flat=True))
    assert names >= {standing.name, "standing.dead", configured.name, "graveyard"}
    assert ephemeral.name not in names
    assert names >= {"inbox.webhooks", "inbox.webhooks.dead"}, "those of the example project's queues.py"


def test_migrating_drops_what_the_process_believed():
    """The tables may have been emptied: the next publish looks again."""
    queue = Queue("tmp", auto_deleted=True)
    queue.publish(1)
    assert beliefs.is_fresh(beliefs.key_of(connection, "tmp"))
    call_command("migrate", verbosity=0)
    assert not beliefs.is_fresh(beliefs.key_of(connection, "tmp"))


# --- Heartbeat ---


def test_a_heartbeat_keeps_queues_in_use_and_makes_declared_ones_again():
    """Undeclared ones that are gone are only reported, once."""
    declared = Queue("replies", auto_deleted=True, exclusive=True)
    make_queue("other", idle=3600, auto_deleted=True)
    heartbeat = Heartbeat("default", declared=[declaration_of(declared)], names=["other", "unknown"])
    assert heartbeat.run_once() == {"replies", "unknown"}
    assert MessageQueue.objects.get(name="replies").exclusive
    assert age_of("other") < 5
    assert not MessageQueue.objects.filter(name="unknown").exists()
    delete_queue("replies")
    assert heartbeat.run_once() == {"replies", "unknown"}
    assert heartbeat.run_once() == {"unknown"}


def test_threads_may_make_queues_at_the_same_time() -> None:
    """What a process keeps of its queues is walked by one thread while others add to it."""

    def make(number: int) -> int:
        kept = [Queue(f"made.{number}.{each}", dead_letter="made.dead") for each in range(300)]
        return len(kept)

    assert in_threads(8, make) == [300] * 8
