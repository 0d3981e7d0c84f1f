"""Real failures of other systems over queues that go: B62 (removed and made anew), B65 (no index for SET NULL)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import override_settings

from django_pgqueue import Queue, QueueNotFound
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.reaper import Reaper
from tests.support.processes import drain, run
from tests.support.rows import backdate, delete_queue, make_queue, payloads, truncate_messages
from tests.support.sessions import connect, fetch

pytestmark = pytest.mark.django_db(transaction=True)

# --- B62: a cached queue after the queue was recreated ---


def in_atomic(publish: Callable[[Queue], Any]) -> Callable[[Queue], None]:
    def inside(queue: Queue) -> None:
        with transaction.atomic():
            publish(queue)

    return inside


FORMS: dict[str, Callable[[Queue], Any]] = {
    "autocommit": lambda queue: queue.publish("new"),
    "atomic": in_atomic(lambda queue: queue.publish("new")),
    "bulk": lambda queue: queue.publish_many(["new"]),
    "bulk in atomic": in_atomic(lambda queue: queue.publish_many(["new"])),
}
each_form = pytest.mark.parametrize("form", FORMS)
each_kind = pytest.mark.parametrize("auto_deleted", [True, False], ids=["auto-deleted", "standing"])


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Collect the statements that are sent meanwhile."""
    sent: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        sent.append(sql)
        return execute(sql, *rest)

    with connection.execute_wrapper(note):
        yield sent


# No refresh and no wake-up comes between.
CALM = override_settings(PGQUEUE={"NOTIFY_INTERVAL": 3600, "DECLARE_TTL": 3600})


def statements(publish: Callable[[Queue], Any], queue: Queue) -> list[str]:
    """Publish, and return the statements that it took; wake-ups and refreshes are not counted in."""
    with CALM:
        queue.publish("first")
        fetch("DELETE FROM django_pgqueue_messagequeueitem WHERE payload = '\"first\"'")
        with recorded() as sent:
            publish(queue)
    return sent


def known(name: str, auto_deleted: bool) -> Queue:
    """Return a queue that this process has just published to: it believes to know it."""
    queue = Queue(name, auto_deleted=auto_deleted)
    with CALM:
        queue.publish("old")
    return queue


def recreate_by_hand(name: str, auto_deleted: bool) -> None:
    delete_queue(name)
    with connect() as admin:
        admin.execute(
            "INSERT INTO django_pgqueue_messagequeue (name, auto_deleted) VALUES (%s, %s)", [name, auto_deleted]
        )


@each_form
@each_kind
def test_b62_a_queue_that_was_deleted_and_made_anew_is_published_to_as_before(auto_deleted: bool, form: str) -> None:
    """
    In one statement: queues are referred to by name, so that there is no stale id.

    What was on it comes back, and goes nowhere else.
    """
    queue = known("q", auto_deleted)
    known("other", auto_deleted)
    recreate_by_hand("q", auto_deleted)
    assert len(statements(FORMS[form], queue)) == 1
    assert payloads("q") == ["new"]
    assert MessageQueueItem.objects.get(orphaned_from="q").payload == "old"
    assert Reaper("default").run_once().adopted == 1
    assert sorted(drain(queue)) == ["new", "old"]
    assert payloads("other") == ["old"]


@each_form
def test_b62_a_queue_that_was_reaped_and_made_anew_by_another_process(form: str) -> None:
    """The other process publishes first, the one that believes to know the queue afterwards."""
    queue = known("q", auto_deleted=True)
    assert drain(queue) == ["old"]
    backdate("q", 9999)
    # Its default dead-letter queue is as idle; it is none of this test's business.
    assert "q" in Reaper("default").run_once().queues
    done = run("publish_messages", "q", "--auto-deleted", stdin='"theirs"\n')
    assert (done.returncode, done.stderr) == (0, "")
    assert len(statements(FORMS[form], queue)) == 1
    assert drain(queue) == ["theirs", "new"]


# Statements in all: what found nothing, the heal, and for several messages the same once more.
HEALING = {"autocommit": 2, "atomic": 2, "bulk": 3, "bulk in atomic": 3}


@each_form
@pytest.mark.parametrize("how", ["deleted", "reaped"])
def test_b62_an_auto_deleted_queue_that_is_gone_is_healed_by_the_next_publish(how: str, form: str) -> None:
    """With one statement more than usual, two for several messages; and the publish after that is plain again."""
    queue = known("q", auto_deleted=True)
    queue.ack(*queue.claim())
    with CALM:
        queue.publish("first")
        queue.ack(*queue.claim())
        backdate("q", 9999)
        if how == "deleted":
            delete_queue("q")
        else:
            assert "q" in Reaper("default").run_once().queues
        with recorded() as sent:
            FORMS[form](queue)
        about_messages = [sql for sql in sent if "messagequeueitem" in sql or "ON CONFLICT (name) DO UPDATE" in sql]
        assert len(about_messages) <= HEALING[form], sent
    assert payloads("q") == ["new"]
    assert len(statements(FORMS[form], queue)) == 1
    assert payloads("q") == ["new", "new"]


@each_form
def test_b62_a_standing_queue_that_is_gone_is_loud_once_and_then_declared_anew(form: str) -> None:
    """This process had just seen it; the error drops that belief, so the next publish succeeds."""
    queue = known("q", auto_deleted=False)
    queue.ack(*queue.claim())
    with CALM:
        delete_queue("q")
        with pytest.raises(QueueNotFound):
            FORMS[form](queue)
        FORMS[form](queue)
        assert payloads("q") == ["new"]
        assert not MessageQueueItem.objects.filter(queue=None).exists()


@each_form
@each_kind
def test_b62_a_message_never_follows_a_queue_that_was_renamed(auto_deleted: bool, form: str) -> None:
    """A row renamed by SQL is another queue; the old name is as good as deleted."""
    queue = known("q", auto_deleted)
    queue.ack(*queue.claim())
    with CALM:
        with connect() as admin:
            admin.execute("UPDATE django_pgqueue_messagequeue SET name = 'renamed' WHERE name = 'q'")
        if not auto_deleted:
            with pytest.raises(QueueNotFound):
                FORMS[form](queue)
        FORMS[form](queue)
    assert (payloads("q"), payloads("renamed")) == (["new"], [])
    assert set(MessageQueue.objects.filter(name__in=["q", "renamed"]).values_list("name", flat=True)) == {
        "q",
        "renamed",
    }


def test_b62_a_queue_that_holds_messages_cannot_be_renamed() -> None:
    """The foreign key refuses it: nothing is cut loose, nothing moves along unseen."""
    known("q", auto_deleted=False)
    with pytest.raises(IntegrityError, match="django_pgqueue_item_queue_fk"), transaction.atomic():
        fetch("UPDATE django_pgqueue_messagequeue SET name = 'renamed' WHERE name = 'q'")
    assert payloads("q") == ["old"]


# --- B65: SET NULL without a usable index on the child side ---

ROWS = 100_000
IDLE = 100

INDEXES = """
SELECT index.indexrelid::regclass::text
FROM pg_index AS index
JOIN pg_attribute AS first ON first.attrelid = index.indrelid AND first.attnum = index.indkey[0]
WHERE index.indrelid = 'django_pgqueue_messagequeueitem'::regclass
  AND first.attname = 'queue_id'
  AND (index.indpred IS NULL OR pg_get_expr(index.indpred, index.indrelid) = '(queue_id IS NOT NULL)')
  AND index.indisvalid
"""

# The action of the foreign key, and what the trigger does before it.
LOOK_UPS = {
    "foreign key": "UPDATE ONLY django_pgqueue_messagequeueitem SET queue_id = NULL WHERE queue_id = $1",
    "trigger": "SELECT id FROM django_pgqueue_messagequeueitem WHERE queue_id = $1 ORDER BY id + 0 FOR UPDATE",
}


def test_b65_an_index_that_leads_with_the_queue_and_covers_all_messages() -> None:
    """No condition but one that follows from any search by queue: the foreign key's knows nothing of others."""
    assert fetch(INDEXES) == [("django_pgqueue_item_claim_idx",)]


def empty_the_table() -> None:
    """Leave pages without a row, and statistics that say so: what a table of queues mostly is."""
    make_queue("short")
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " SELECT 'short', '{}' FROM generate_series(1, 1000)"
    )
    fetch("DELETE FROM django_pgqueue_messagequeueitem")
    truncate_messages()
    fetch("ANALYZE django_pgqueue_messagequeueitem")


@pytest.fixture
def big_queue() -> None:
    fill_big_queue()


def fill_big_queue() -> None:
    """A hundred thousand messages in one queue, and a hundred idle queues."""
    make_queue("big")
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " SELECT 'big', '{}' FROM generate_series(1, %s)",
        [ROWS],
    )
    fetch(
        "INSERT INTO django_pgqueue_messagequeue (name, auto_deleted, last_active)"
        " SELECT 'idle.' || number, true, statement_timestamp() - interval '1 day'"
        " FROM generate_series(1, %s) AS number",
        [IDLE],
    )


@pytest.mark.parametrize("statistics", ["fresh", "of an empty table", "of an emptied table"])
@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_b65_the_messages_of_a_deleted_queue_are_found_by_that_index(look_up: str, statistics: str) -> None:
    """Also while the planner knows nothing of the table yet, or saw pages without a row."""
    if statistics == "of an emptied table":
        empty_the_table()
    fill_big_queue()
    if statistics == "fresh":
        fetch("ANALYZE django_pgqueue_messagequeueitem")
    plan = fetch(f"EXPLAIN {LOOK_UPS[look_up].replace('$1', '%s')}", ["idle.1"])
    assert "django_pgqueue_item_claim_idx" in str(plan), plan
    assert "Seq Scan" not in str(plan)


def rows_read_by_scans() -> int:
    """Return how many messages were read by walking through the whole table, ever."""
    with connect() as admin:
        ((read,),) = admin.execute(
            "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'django_pgqueue_messagequeueitem'"
        ).fetchall()
    return int(read)


def test_b65_reaping_idle_queues_does_not_read_the_messages_of_others(big_queue: None) -> None:
    """A hundred deletions beside a hundred thousand messages: within the statement limit, and without one scan."""
    fetch("SET statement_timeout = '5s'")
    try:
        fetch("SELECT pg_stat_force_next_flush()")
        before = rows_read_by_scans()
        reaped = Reaper("default").run_once()
        fetch("SELECT pg_stat_force_next_flush()")
        read = rows_read_by_scans() - before
    finally:
        fetch("RESET statement_timeout")
    assert len(reaped.queues) == IDLE
    # One such scan for each queue would be ten million.
    assert read <= ROWS
    assert MessageQueueItem.objects.filter(queue="big").count() == ROWS
