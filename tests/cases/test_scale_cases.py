"""Real failures of other systems at scale: B85 (admin on a big table), B87 (small counters), B88 (stale forms)."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.apps import apps
from django.db import connection, models
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pgqueue import Queue
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.reaper import Reaper
from tests.support.processes import ROOT, drain, environment
from tests.support.rows import backdate, delete_queue
from tests.support.sessions import connect, fetch

pytestmark = pytest.mark.django_db(transaction=True)

ITEM = MessageQueueItem._meta.db_table

# --- B85: admin pages on a big table ---

ROWS = 100_000
QUEUES = 2_000

# Of what a page may read: twice the paginator's probe, the page itself, and room.
MAX_READ = 25_000


@pytest.fixture
def big_tables() -> None:
    fetch(
        "INSERT INTO django_pgqueue_messagequeue (name)"
        " SELECT 'queue.' || number FROM generate_series(1, %s) AS number",
        [QUEUES],
    )
    fetch(
        f"INSERT INTO {ITEM} (queue_id, payload)"
        " SELECT 'queue.' || least(1 + number %% 10000, %s), '{\"secret\": 1}' FROM generate_series(1, %s) AS number",
        [QUEUES, ROWS],
    )
    with connect() as admin:
        admin.execute(f"VACUUM ANALYZE {ITEM}")


def rows_read() -> int:
    """Return how many messages were read, ever, in whatever way."""
    fetch("SELECT pg_stat_force_next_flush()")
    with connect() as admin:
        ((read,),) = admin.execute(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = %s", [ITEM]
        ).fetchall()
    return int(read)


def item_url(page: str, *args: Any) -> str:
    return reverse(f"admin:django_pgqueue_messagequeueitem_{page}", args=args)


def queue_url(page: str, *args: Any) -> str:
    return reverse(f"admin:django_pgqueue_messagequeue_{page}", args=args)


@pytest.mark.full
def test_b85_every_page_of_the_admin_reads_little_however_big_the_tables_are(
    admin_client: Client, big_tables: None
) -> None:
    """Lists, filters, search, the second, a deep and the last page, details: few queries, no count, no payload."""
    last = MessageQueueItem.objects.order_by("id").last()
    items, queues = item_url("changelist"), queue_url("changelist")
    pages = [
        *(items + query for query in ("", "?p=2", "?p=50", "?p=100", "?o=0", "?o=-0", "?q=secret", "?all=")),
        item_url("change", last.pk),
        *(queues + query for query in ("", "?p=2", "?p=20", "?q=queue.19", "?auto_deleted__exact=0", "?o=-1", "?o=8")),
        # Holds four fifths of the messages.
        queue_url("change", f"queue.{QUEUES}"),
        f"{reverse('admin:autocomplete')}?app_label=django_pgqueue&model_name=messagequeueitem&field_name=queue&term=9",
    ]
    fetch("SET statement_timeout = '2s'")
    try:
        for page in pages:
            before = rows_read()
            with CaptureQueriesContext(connection) as queries:
                assert admin_client.get(page).status_code == 200, page
            assert rows_read() - before <= MAX_READ, page
            assert len(queries) <= 15, page
            about_items = [query["sql"] for query in queries if f'FROM "{ITEM}"' in query["sql"]]
            assert not [sql for sql in about_items if "COUNT(" in sql.upper()], page
            if "change/" not in page:
                assert not [sql for sql in about_items if '"payload"' in sql], page
    finally:
        fetch("RESET statement_timeout")


@pytest.mark.full
def test_b85_the_list_offers_nothing_that_would_read_it_all(admin_client: Client, big_tables: None) -> None:
    """No sorting but by id, no actions, and no claim to have counted."""
    page = admin_client.get(item_url("changelist")).content.decode()
    assert set(re.findall(r"\?o=-?(\d+)", page)) == {"0"}
    assert 'name="action"' not in page
    # As an id it may be there.
    assert not re.search(rf"({ROWS}|{ROWS:,}) [a-z]", page)


@pytest.mark.full
def test_b85_a_big_queue_cannot_be_deleted_by_the_admin(admin_client: Client, big_tables: None) -> None:
    """So no confirmation page lists its messages."""
    before = rows_read()
    assert admin_client.get(queue_url("delete", f"queue.{QUEUES}")).status_code == 403
    answer = admin_client.post(
        queue_url("changelist"), {"action": "delete_selected", "_selected_action": [f"queue.{QUEUES}"], "post": "yes"}
    )
    assert answer.status_code in (200, 302, 403)
    # The list is shown again, and counts within its bounds.
    assert rows_read() - before <= MAX_READ
    assert MessageQueue.objects.filter(name__startswith="queue.").count() == QUEUES


# --- B87: 32-bit ids, small counters and burnt sequences ---

EDGE = 2**31 - 8


@pytest.fixture
def at_the_edge() -> Iterator[None]:
    """The next ids of every table are the last that fit 32 bits."""
    before = drawn()
    for sequence in sequences():
        fetch("SELECT setval(%s, %s)", [sequence, EDGE])
    yield
    for sequence, value in before.items():
        fetch("SELECT setval(%s, %s)", [sequence, value + 1])


def sequences() -> list[str]:
    """Return the sequences of this app's tables."""
    rows = fetch(
        "SELECT relname FROM pg_class WHERE relkind = 'S' AND relname LIKE 'django_pgqueue%%' AND relnamespace ="
        " (SELECT relnamespace FROM pg_class WHERE oid = %s::regclass)",
        [ITEM],
    )
    return [name for (name,) in rows]


def test_b87_every_operation_works_beyond_two_billion_messages(admin_client: Client, at_the_edge: None) -> None:
    """Publish, bulk, claim, extend, ack, nack, dead-letter, replay, orphan, adopt, expire, reap, admin, numbers."""
    queue = Queue("q", max_deliveries=3)
    ids = [queue.publish(0), *queue.publish_many(range(1, 30))]
    assert ids[0] < 2**31 < ids[-1]
    assert ids == sorted(ids)
    messages = queue.claim(30)
    assert [message.id for message in messages] == ids
    queue.extend(*messages)
    queue.ack(*messages[:10])
    queue.nack(*messages[10:15], delay=0)
    queue.reject(*messages[15:20])
    assert queue.redrive() == 5
    delete_queue("q")
    assert MessageQueueItem.objects.filter(queue=None).count() == 20
    queue.declare()
    assert Reaper("default").run_once().adopted == 20
    queue.ack(*messages[20:])
    late = queue.publish("late", ttl=5)
    fetch(f"UPDATE {ITEM} SET expires_at = statement_timestamp() WHERE id = %s", [late])
    fetch(f"UPDATE {ITEM} SET lease_expires_at = statement_timestamp() WHERE id = %s", [ids[10]])
    assert Reaper("default").run_once().expired == 1
    newest = queue.publish("newest")
    assert newest > 2**31
    assert admin_client.get(item_url("changelist")).status_code == 200
    page = admin_client.get(item_url("change", newest))
    assert page.status_code == 200 and "newest" in page.content.decode()
    assert queue.stats().ready == 11
    assert sorted(map(str, drain(queue))) == sorted(map(str, [*range(10, 20), "newest"]))
    for url in ("queueevent", "topicbinding", "queueconsumer"):
        assert admin_client.get(reverse(f"admin:django_pgqueue_{url}_changelist")).status_code == 200


def test_b87_a_topic_s_copies_have_ids_beyond_two_billion_too(at_the_edge: None) -> None:
    """Bound queues get theirs in one statement."""
    from django_pgqueue import Topic

    queues = [Queue("a"), Queue("b")]
    topic = Topic("prices")
    for queue in queues:
        topic.bind(queue)
    for number in range(10):
        topic.publish(number)
    assert [drain(queue) for queue in queues] == [list(range(10))] * 2
    (newest,) = [queue.publish("x") for queue in queues[:1]]
    assert newest > 2**31


def test_b87_keys_are_of_64_bits() -> None:
    """In the models as in the tables."""
    for model in apps.get_app_config("django_pgqueue").get_models():
        assert not isinstance(model._meta.pk, models.AutoField) or isinstance(model._meta.pk, models.BigAutoField)
    small = fetch(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
        " AND table_name LIKE 'django_pgqueue%%' AND is_identity = 'YES' AND data_type <> 'bigint'"
    )
    assert small == []
    assert [
        limit for (limit,) in fetch("SELECT max_value FROM pg_sequences WHERE sequencename = ANY (%s)", [sequences()])
    ] == [2**63 - 1] * len(sequences())


MAKEMIGRATIONS = """
import sys
import tests.settings
tests.settings.DEFAULT_AUTO_FIELD = sys.argv[1]
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "makemigrations", "django_pgqueue", "--check", "--dry-run"])
"""


@pytest.mark.parametrize("field", ["AutoField", "SmallAutoField", "BigAutoField"])
def test_b87_whatever_the_project_s_default_key_is_there_is_no_migration_to_make(field: str) -> None:
    """DEFAULT_AUTO_FIELD is not asked."""
    done = subprocess.run(
        [sys.executable, "-c", MAKEMIGRATIONS, f"django.db.models.{field}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "No changes detected" in done.stdout


def test_b87_publishing_to_an_existing_queue_burns_no_numbers() -> None:
    """Queues have no numbers; each message draws one, and neither declaring nor healing draws any."""
    queue = Queue("q", auto_deleted=True)
    queue.declare()
    before = drawn()
    for _ in range(100):
        queue.publish({})
    queue.publish_many([{}] * 9_800)
    delete_queue("q")
    Queue("q", auto_deleted=True).declare()
    Heartbeat("default", names=["q"]).run_once()
    for _ in range(100):
        queue.publish({})
    after = drawn()
    assert after[f"{ITEM}_id_seq"] - before[f"{ITEM}_id_seq"] == 10_000
    assert not [name for name in after if name.startswith("django_pgqueue_messagequeue_")]
    # Events (a healed queue) are few.
    assert all(after[name] - before[name] <= 2 for name in after if name != f"{ITEM}_id_seq")


def drawn() -> dict[str, int]:
    """Return how many numbers each sequence has given out."""
    rows = fetch(
        "SELECT sequencename::text, coalesce(last_value, 0) FROM pg_sequences WHERE sequencename = ANY (%s)",
        [sequences()],
    )
    return dict(rows)


# --- B88: the admin's form writes back old values ---


def acked_by_a_consumer(queue: Queue) -> None:
    assert drain(queue) == [{"n": 1}]


def claimed_by_a_consumer(queue: Queue) -> None:
    assert len(queue.claim()) == 1


def failed_in_a_consumer(queue: Queue) -> None:
    queue.nack(*queue.claim(), reason="no such customer")


MEANWHILE: list[Callable[[Queue], None]] = [acked_by_a_consumer, claimed_by_a_consumer, failed_in_a_consumer]


@pytest.mark.parametrize("meanwhile", MEANWHILE, ids=lambda function: function.__name__)
def test_b88_a_message_s_page_that_was_opened_before_changes_nothing(
    admin_client: Client, meanwhile: Callable[[Queue], None]
) -> None:
    """It has no form; what a form would send is refused, and an acked message does not come back."""
    queue = Queue("q", backoff={"base": 1_000})
    message_id = queue.publish({"n": 1})
    url = item_url("change", message_id)
    page = admin_client.get(url).content.decode()
    assert 'name="_save"' not in page
    assert not re.findall(r'<(?:input|textarea|select)[^>]* name="(?:payload|read_after|lease|delivery|queue)', page)
    meanwhile(queue)
    before = list(MessageQueueItem.objects.values())
    form = {
        "queue": "q",
        "payload": "{}",
        "delivery_count": 0,
        "read_after_0": "",
        "lease_expires_at_0": "",
        "_save": "Save",
    }
    # Of what is gone, Django's newer admin says so and sends the user away.
    assert admin_client.post(url, form).status_code in ((403,) if before else (403, 302))
    for action in ("delete_selected", "retry", "requeue"):
        admin_client.post(
            item_url("changelist"), {"action": action, "_selected_action": [message_id], "post": "yes", "index": 0}
        )
    assert list(MessageQueueItem.objects.values()) == before


def test_b88_a_queue_s_page_that_was_opened_before_changes_nothing(admin_client: Client) -> None:
    """Neither when it was last active nor what an operator has paused since."""
    queue = Queue("q")
    queue.declare()
    backdate("q", 5_000)
    page = admin_client.get(queue_url("change", "q")).content.decode()
    assert 'name="_save"' not in page
    Heartbeat("default", names=["q"]).run_once()
    queue.pause()
    before = MessageQueue.objects.filter(name="q").values().get()
    form = {
        "name": "q",
        "durable": "on",
        "max_deliveries": 99,
        "last_active_0": "2020-01-01",
        "paused_at_0": "",
        "_save": "x",
    }
    assert admin_client.post(queue_url("change", "q"), form).status_code == 403
    assert MessageQueue.objects.filter(name="q").values().get() == before


def test_b88_what_an_operator_set_outlives_a_declaration() -> None:
    """The code's own attributes are written where they differ; a pause is no attribute of the code."""
    queue = Queue("q", max_deliveries=7)
    queue.declare()
    queue.pause()
    queue.declare()
    row = MessageQueue.objects.get(name="q")
    assert row.paused_at is not None and row.max_deliveries == 7
