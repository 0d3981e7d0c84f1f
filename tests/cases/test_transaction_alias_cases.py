"""Real failures of other systems over transactions: B56, the message and the data are in different databases."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from django.db import transaction

from django_pgqueue import Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import notifying
from django_pgqueue.services.beliefs import beliefs
from tests.support.databases import alias, empty, migrated_database
from tests.support.rows import make_queue
from tests.support.sessions import fetch, second_session

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(scope="module")
def other_database(django_db_setup, django_db_blocker) -> Iterator[str]:
    with django_db_blocker.unblock(), migrated_database() as name:
        yield name


@pytest.fixture
def queue(other_database) -> Iterator[Queue]:
    """A queue on the alias "q", a database of its own; what the business writes is in the default one."""
    beliefs.warned.clear()
    with alias("q", NAME=other_database):
        empty("q")
        beliefs.forget()
        queue = Queue("orders", using="q")
        queue.declare()
        yield queue


PUBLISH = {
    "publish": lambda queue: queue.publish({"n": 1}),
    "publish_many": lambda queue: queue.publish_many([{"n": 1}]),
}


@pytest.fixture(params=PUBLISH)
def publish(request):
    return PUBLISH[request.param]


def stored() -> int:
    """Count the messages that another session sees, which are the committed ones."""
    with second_session(dbname=fetch("SELECT current_database()", using="q")[0][0]) as session:
        return session.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchone()[0]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_b56_a_queue_tells_which_database_it_publishes_to(queue):
    """By `using`, which is PGQUEUE["DATABASE"] where nothing else was said."""
    assert queue.using == "q"
    assert Queue("other").using == "default"
    assert "transaction on another database" in " ".join(Queue.publish.__doc__.split())


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_b56_a_publish_inside_another_databases_transaction_is_not_part_of_it_and_warns(queue, publish, caplog, ends):
    """It is there at once and stays, whatever becomes of that transaction; the log says so, once a process."""
    with transaction.atomic(using="default"):
        make_queue("business row")
        publish(queue)
        publish(queue)
        assert stored() == 2
        if ends == "rollback":
            transaction.set_rollback(True, using="default")
    assert stored() == 2
    assert MessageQueue.objects.filter(name="business row").exists() == (ends == "commit")
    assert warnings(caplog) == [
        "publish is not part of the open transaction transaction=default queue_database=q",
    ]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_b56_inside_transactions_of_both_it_is_part_of_its_own_databases(queue, publish, caplog, ends):
    """Seen by others after that commit, and never after its rollback."""
    with transaction.atomic(using="default"):
        make_queue("business row")
        with transaction.atomic(using="q"):
            publish(queue)
            assert stored() == 0
            if ends == "rollback":
                transaction.set_rollback(True, using="q")
        assert stored() == (1 if ends == "commit" else 0)
    assert stored() == (1 if ends == "commit" else 0)
    assert warnings(caplog) == []


@pytest.mark.parametrize("block", ["none", "its own"])
def test_b56_outside_of_other_transactions_nothing_is_warned_of(queue, publish, caplog, block):
    """Neither in autocommit, nor in a transaction of the queue's own database."""
    with transaction.atomic(using="q") if block == "its own" else nullcontext():
        publish(queue)
    assert stored() == 1
    assert warnings(caplog) == []


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_b56_on_commit_of_the_datas_database_publishes_after_that_commit_only(queue, publish, caplog, ends):
    """Django's own hook ties the message to the data: never before the commit, never after a rollback."""
    with transaction.atomic(using="default"):
        make_queue("business row")
        transaction.on_commit(lambda: publish(queue), using="default")
        assert stored() == 0
        if ends == "rollback":
            transaction.set_rollback(True, using="default")
    assert stored() == (1 if ends == "commit" else 0)
    assert warnings(caplog) == []


def test_b56_what_follows_a_commit_is_tied_to_the_queues_own_database(queue):
    """The wake-up and the refresh of a publish wait for that commit, not for the default database's."""
    beliefs.notified.clear()
    with second_session(dbname=fetch("SELECT current_database()", using="q")[0][0]) as listener:
        listener.execute(f'LISTEN "{notifying.channel("orders")}"')
        with transaction.atomic(using="q"):
            with transaction.atomic(using="default"):
                queue.publish({"n": 1})
            assert list(listener.notifies(timeout=0.1)) == []
        assert len(list(listener.notifies(timeout=20, stop_after=1))) == 1
    seen: list = []
    assert Consumer([make_handler(queue, lambda message: seen.append(message.payload))], drain=True).run() == 1
    assert seen == [{"n": 1}]
