"""What an operator sees of the queues in the admin, and does to them there."""

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.urls import reverse

from django_pgqueue import Queue
from django_pgqueue.admin import messages as admin_messages
from django_pgqueue.admin.charts import chart
from django_pgqueue.admin.operations import OPERATIONS
from django_pgqueue.models import MessageQueue, MessageQueueItem, ReaperRun
from django_pgqueue.monitoring import queue_numbers
from django_pgqueue.monitoring.queue_numbers import Numbers
from django_pgqueue.services import consumers, reaping
from django_pgqueue.services import minutes as minutes_services
from django_pgqueue.services.minutes import Minute, Newest, Tally
from tests.support.rows import delete_queue, make_message, make_queue, seconds
from tests.support.sessions import fetch

pytestmark = pytest.mark.django_db(transaction=True)

ITEM = MessageQueueItem._meta.db_table
LIST = "admin:django_pgqueue_messagequeue_changelist"
ITEMS = "admin:django_pgqueue_messagequeueitem_changelist"


def page(name: str) -> str:
    return reverse("admin:django_pgqueue_messagequeue_change", args=[quote(name)])


def operation(name: str, verb: str) -> str:
    return reverse("admin:django_pgqueue_messagequeue_operate", args=[quote(name), verb])


def text_of(answer: Any) -> str:
    """Return what a page says, without tags."""
    assert answer.status_code == 200
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def told(answer: Any) -> list[str]:
    """Return the messages that a page begins with."""
    assert answer.status_code == 200
    return [str(message) for message in answer.context["messages"]]


def row_of(client: Client, name: str) -> dict[str, str]:
    """Return the row of a queue on the queues page, by column."""
    answer = client.get(reverse(LIST))
    assert answer.status_code == 200
    (row,) = re.findall(rf"<tr[^>]*>(?:(?!</tr>).)*>{re.escape(name)}</a>.*?</tr>", answer.content.decode(), re.DOTALL)
    cells = re.findall(r'class="(?:field-|column-)?([\w-]+?)(?: nowrap)?"[^>]*>(.*?)</t[dh]>', row, re.DOTALL)
    return {column.removeprefix("field-"): re.sub(r"<[^>]+>", " ", cell).strip() for column, cell in cells}


@pytest.fixture
def viewer() -> Iterator[Client]:
    """Somebody who may look, and no more."""
    return client_with("view_messagequeue", "view_messagequeueitem")


@pytest.fixture
def operator() -> Client:
    """Somebody who may operate."""
    return client_with("view_messagequeue", "view_messagequeueitem", "change_messagequeue")


def client_with(*permissions: str) -> Any:
    user = User.objects.create_user(f"user-{uuid4().hex[:8]}", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


# --- The queues page ---


def test_each_queue_is_shown_in_numbers(viewer: Client) -> None:
    """By state, with the oldest due age, its dead letters wherever they wait, orphans, consumers, heals."""
    queue = Queue("orders")
    queue.publish_many(range(3))
    queue.reject(*queue.claim(1), reason="no")
    queue.claim(1)
    make_message("orders", due_in=-120)
    make_message("orders", due_in=60)
    consumers.beat(uuid4(), "host", 1, ["orders"], "default")
    row = row_of(viewer, "orders")
    assert (row["ready"], row["delayed"], row["leased"], row["dead"]) == ("2", "1", "1", "1")
    assert (row["oldest_due"], row["consumers"]) == ("2.0 min", "1")
    assert row_of(viewer, "orders.dead")["ready"] == "0"
    make_queue("gone")
    make_message("gone")
    delete_queue("gone")
    Queue("gone").declare()
    fetch(f"UPDATE {ITEM} SET queue_id = NULL, orphaned_from = 'gone' WHERE queue_id = 'gone'")
    assert row_of(viewer, "gone")["condition"] == "1 orphans"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_numbers, "SAMPLE_SIZE", 1)
        assert row_of(viewer, "gone")["condition"] == "1+ orphans"


def test_a_queue_that_is_special_says_so(viewer: Client) -> None:
    """Paused, owned, and when it may be reaped."""
    make_queue("paused", paused_at=Now())
    make_queue("owned", exclusive=True, exclusive_consumer_id=uuid4())
    make_queue("idle", auto_deleted=True, idle=7200)
    make_queue("used", auto_deleted=True, idle=600)
    make_queue("full", auto_deleted=True, idle=7200)
    make_message("full")
    assert "paused" in row_of(viewer, "paused")["condition"]
    assert "owned by" in row_of(viewer, "owned")["condition"]
    assert row_of(viewer, "idle")["condition"].endswith("reapable now")
    assert row_of(viewer, "used")["condition"].endswith("reapable in 50.0 min")
    assert row_of(viewer, "full")["condition"] == "auto-deleted"
    queue = Queue("replies", auto_deleted=True)
    queue.publish(1)
    delete_queue("replies")
    queue.declare()
    assert "1 vanished in the last day" in row_of(viewer, "replies")["condition"]


def test_many_messages_are_not_counted(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says "at least"."""
    monkeypatch.setattr(queue_numbers, "SAMPLE_SIZE", 5)
    Queue("long").publish_many(range(9))
    Queue("short").publish_many(range(4))
    assert (row_of(viewer, "long")["ready"], row_of(viewer, "short")["ready"]) == ("5+", "4")


def test_a_page_of_queues_takes_as_many_statements_as_one_queue(viewer: Client) -> None:
    """All are counted at once, and none with COUNT(*) of the table."""
    taken = []
    for count in (1, 20):
        for number in range(count):
            Queue(f"q{number}").declare()
        with CaptureQueriesContext(connection) as captured:
            assert viewer.get(reverse(LIST)).status_code == 200
        taken.append(len(captured))
        assert not [query for query in captured if f'COUNT(*) AS "__count" FROM "{ITEM}"' in query["sql"]]
    assert taken[0] == taken[1]


def test_the_reaper_is_told_of(viewer: Client) -> None:
    """In red where it does not run."""
    assert "The reaper has never run." in text_of(viewer.get(reverse(LIST)))
    reaping.record_run(1.0, {}, "default")
    assert re.search(r"The reaper ran \d\.\d s ago\.", text_of(viewer.get(reverse(LIST))))
    ReaperRun.objects.update(finished_at=Now() - seconds(7200))
    answer = viewer.get(reverse(LIST))
    assert "The reaper ran 2.0 h ago." in text_of(answer) and "pgqueue-late" in answer.content.decode()


def test_the_last_hour_is_a_chart(viewer: Client) -> None:
    """Of what consumers told and of what waits; a queue in which nothing happened has none."""
    Queue("busy").publish_many(range(300))
    fetch(f"UPDATE {ITEM} SET published_at = date_trunc('minute', statement_timestamp()) - interval '3 minutes'")
    Queue("quiet").declare()
    minutes_services.count_minute({"busy": Tally(handled=600, failed=2)}, "default")
    fetch(
        "UPDATE django_pgqueue_queueminute SET published = 900,"
        " minute = date_trunc('minute', statement_timestamp()) - interval '3 minutes'"
    )
    html = viewer.get(reverse(LIST)).content.decode()
    assert html.count('<svg class="pgqueue-chart"') == 1
    label = "In the last hour at least 1,200 published, 600 handled, 2 failed; peak: 1,200 a minute"
    assert f'aria-label="{label}"' in html
    row = row_of(viewer, "busy")
    assert (row["published"], row["handled"]) == ("4.0+/s", "2.0/s")
    assert 'title="At least this many."' in html
    quiet = row_of(viewer, "quiet")
    assert (quiet["published"], quiet["handled"], quiet["activity"]) == ("-", "-", "-")
    # The page of one queue looks at more of its messages.
    detail = viewer.get(page("busy"))
    assert re.search(r"Published 4.0/s Handled 2.0/s", text_of(detail))
    assert f'aria-label="{label.replace("at least ", "")}"' in detail.content.decode()


def test_a_chart_is_drawn_to_scale() -> None:
    """The busiest minute is as high as the picture, the present one at its right end; it is told of later."""
    minutes = [Minute(59, 10, 0, 0, published=5), Minute(57, 0, 0, 0, published=10), Minute(0, 5, 4, 1, published=7)]
    paths = dict(re.findall(r'<path class="pgqueue-(\w+)" d="([^"]*)"/>', chart(Numbers("q", minutes=minutes))))
    assert paths["handled"] == "M0 24v-24h1.2v24zM88.5 24v-12h1.2v12z" and paths["bad"] == "M88.5 12v-12h1.2v12z"
    assert paths["published"] == "M0 12V12h1.5V24h1.5V0h1.5" + "V24h1.5" * 55


def test_rates_are_of_the_last_minutes_that_are_over_and_told() -> None:
    """What was handled: of the last five; what was published: of the five of which all consumers have told."""
    assert Numbers("q", minutes=[Minute(0, 9, 0, 0), Minute(1, 150, 0, 0), Minute(5, 150, 0, 0)]).handle_rate == (
        1.0,
        False,
    )
    assert Numbers("q", minutes=[Minute(6, 9, 0, 0)]).handle_rate == (0.0, False)
    told = [Minute(ago, 0, 0, 0, published=150) for ago in (1, 2, 6, 7)]
    assert Numbers("q", minutes=told).publish_rate == (1.0, False)
    with override_settings(PGQUEUE={"HEARTBEAT_INTERVAL": 30}):
        assert Numbers("q", minutes=told).publish_rate == (1.0, False)
    with override_settings(PGQUEUE={"HEARTBEAT_INTERVAL": 61}):
        assert Numbers("q", minutes=told).publish_rate == (1.0, False)
        assert Numbers("q", minutes=told[1:2]).publish_rate == (0.0, False)


@pytest.mark.parametrize(
    ("newest", "told", "shown"),
    [
        # All that wait were seen, or all of the last minutes.
        (Newest({3: 300}, 200.0), 0, "1.0/s"),
        (Newest({3: 270, 7: 30}, 430.0, more=True), 30, "1.0/s"),
        # Some of them: as many as they are in the time of which they are, or as in the minutes that are told.
        (Newest({0: 300}, 30.0, more=True), 0, "10.0+/s"),
        (Newest({0: 300}, 0.1, more=True), 0, "30.0+/s"),
        (Newest({6: 300}, 400.0, more=True), 600, "3.0+/s"),
        (Newest({0: 1}, 0.0), 0, "-"),
        (Newest({3: 1}, 200.0), 0, "<0.1/s"),
    ],
)
def test_a_publish_rate_that_is_not_exact_says_so(newest: Newest, told: int, shown: str) -> None:
    """It is at least so many."""
    assert str(Numbers("q", minutes=[Minute(2, 0, 0, 0, published=told)], newest=newest).publish_rate) == shown


# --- Operations ---


@pytest.mark.parametrize("verb", OPERATIONS)
def test_who_may_only_look_can_do_nothing(viewer: Client, verb: str) -> None:
    """Neither sees the links, nor gets anywhere by hand; the same for who is nobody."""
    Queue("orders").publish(1)
    html = viewer.get(page("orders")).content.decode()
    assert operation("orders", verb) not in html and "Reap now" not in viewer.get(reverse(LIST)).content.decode()
    assert viewer.get(operation("orders", verb)).status_code == 403
    assert viewer.post(operation("orders", verb), {"name": "orders", "limit": 1, "payload": "1"}).status_code == 403
    assert Client().post(operation("orders", verb)).status_code == 302
    reap = reverse("admin:django_pgqueue_messagequeue_reap")
    assert viewer.post(reap).status_code == 403
    release = reverse("admin:django_pgqueue_messagequeueitem_release", args=[1])
    assert viewer.post(release).status_code == 403
    assert Queue("orders").stats().ready == 1 and not LogEntry.objects.exists()


def test_a_queue_is_paused_and_resumed(operator: Client) -> None:
    """Through the library: it asks, does it, tells, and writes it down."""
    queue = Queue("orders / daily?")
    queue.publish(1)
    assert "Consumers claim no more messages" in text_of(operator.get(operation("orders / daily?", "pause")))
    assert queue.claim() != []
    answer = operator.post(operation("orders / daily?", "pause"), follow=True)
    assert told(answer) == ['"orders / daily?": Paused.'] and answer.redirect_chain[-1][0] == page("orders / daily?")
    queue.publish(2)
    assert queue.claim() == []
    operator.post(operation("orders / daily?", "resume"))
    assert len(queue.claim()) == 1
    entries = [(entry.object_id, entry.get_change_message()) for entry in LogEntry.objects.order_by("id")]
    assert entries == [("orders / daily?", "Paused."), ("orders / daily?", "Resumed.")]


def test_several_are_paused_and_resumed_at_once(operator: Client, viewer: Client) -> None:
    """By an action on the list, for who may."""
    for name in ("a", "b", "c"):
        make_queue(name)
    chosen = {"action": "pause_selected", "_selected_action": ["a", "b"]}
    offered = operator.get(reverse(LIST)).context["action_form"].fields["action"].choices
    assert {("pause_selected", "Pause selected queues"), ("resume_selected", "Resume selected queues")} <= set(offered)
    viewer.post(reverse(LIST), chosen)
    assert not MessageQueue.objects.filter(paused_at__isnull=False).exists()
    assert told(operator.post(reverse(LIST), chosen, follow=True)) == ['"a": Paused.', '"b": Paused.']
    assert set(MessageQueue.objects.filter(paused_at__isnull=False).values_list("name", flat=True)) == {"a", "b"}
    operator.post(reverse(LIST), {**chosen, "action": "resume_selected"})
    assert not MessageQueue.objects.filter(paused_at__isnull=False).exists()


def test_dead_letters_are_redriven(operator: Client) -> None:
    """One that was looked at, those with a reason, all."""
    queue = Queue("orders")
    queue.publish_many(range(4))
    for message, reason in zip(queue.claim(4), ("no", "no", "never", "no"), strict=True):
        queue.reject(message, reason=reason)
    first = MessageQueueItem.objects.order_by("id")[0]
    detail = operator.get(reverse("admin:django_pgqueue_messagequeueitem_change", args=[first.pk]))
    (link,) = re.findall(r'href="([^"]*redrive[^"]*)"', detail.content.decode())
    assert f'value="{first.pk}"' in operator.get(link).content.decode()
    redrive = operation("orders", "redrive")
    assert told(operator.post(redrive, {"ids": str(first.pk), "limit": 10}, follow=True)) == [
        '"orders": Redriven: 1 messages.'
    ]
    assert told(operator.post(redrive, {"reason": "never", "limit": 10}, follow=True))[-1].endswith("1 messages.")
    assert told(operator.post(redrive, {"limit": 1}, follow=True))[-1].endswith("1 messages.")
    assert (queue.stats().ready, Queue("orders.dead").stats().dead) == (3, 1)
    answer = operator.post(redrive, {"ids": "1, x", "limit": 10})
    assert answer.context["form"].errors["ids"] == ["Enter numbers separated by commas."]


def test_a_canary_that_dies_keeps_the_others(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody handles it in time: the page says so, and the others are where they were."""
    monkeypatch.setattr("django_pgqueue.admin.operations.CANARY_TIMEOUT", 0.3)
    queue = Queue("orders")
    queue.publish_many(range(5))
    for message in queue.claim(5):
        queue.reject(message, reason="no")
    (text,) = told(operator.post(operation("orders", "redrive"), {"limit": 10, "canary": 2}))
    assert text.startswith("orders: ") and "not settled in time" in text
    assert (queue.stats().ready, Queue("orders.dead").stats().dead) == (2, 3)
    assert not LogEntry.objects.exists()


def test_a_purge_wants_the_name_typed(operator: Client) -> None:
    """Exactly; and what a consumer holds stays."""
    queue = Queue("orders")
    queue.publish_many(range(5))
    queue.claim(1)
    purge = operation("orders", "purge")
    for typed in ("", "order", " orders", "ORDERS"):
        assert "name" in operator.post(purge, {"name": typed, "limit": 10}).context["form"].errors
    assert queue.stats().ready == 4
    assert told(operator.post(purge, {"name": "orders", "limit": 3}, follow=True)) == ['"orders": Purged: 3 messages.']
    assert (queue.stats().ready, queue.stats().leased) == (1, 1)


def test_a_message_is_published(operator: Client) -> None:
    """As any other; the queue's attributes stay what they are, also where this process declares none."""
    make_queue("orders", max_deliveries=9, durable=False, idle=60)
    publish = operation("orders", "publish")
    assert "payload" in operator.post(publish, {"payload": "{", "delay": 0}).context["form"].errors
    assert "Published: message" in told(operator.post(publish, {"payload": '{"a": [1]}', "delay": 5}, follow=True))[0]
    item = MessageQueueItem.objects.get()
    assert (item.queue_id, item.payload, item.read_after is None) == ("orders", {"a": [1]}, False)
    row = MessageQueue.objects.get(name="orders")
    assert (row.max_deliveries, row.durable) == (9, False)
    # What the library refuses is told, too.
    answer = operator.post(publish, {"payload": json.dumps("\0"), "delay": 0})
    assert "NUL" in " ".join(told(answer)) and MessageQueueItem.objects.count() == 1


def test_the_reaper_runs_after_a_preview(operator: Client) -> None:
    """The same that the command does."""
    make_queue("idle", auto_deleted=True, idle=7200)
    make_queue("orders")
    make_message("orders", expires_in=-1)
    reap = reverse("admin:django_pgqueue_messagequeue_reap")
    preview = text_of(operator.get(reap))
    assert "Messages to expire: 1" in preview and "idle" in preview
    assert MessageQueue.objects.filter(name="idle").exists()
    assert told(operator.post(reap, follow=True)) == [
        "Queues deleted: 1. Messages expired: 1, dead-lettered: 0, returned to their queues: 0."
    ]
    assert not MessageQueue.objects.filter(name="idle").exists() and not MessageQueueItem.objects.exists()


def test_a_queue_or_an_operation_that_is_not_there_is_not_found(operator: Client) -> None:
    make_queue("orders")
    assert operator.get(operation("orders", "explode")).status_code == 404
    assert operator.get(operation("nothing", "pause")).status_code == 404


# --- Messages ---


def test_a_lease_is_released(operator: Client) -> None:
    """The message is ready at once, and its consumer's ack is refused."""
    queue = Queue("orders")
    queue.publish(1)
    (message,) = queue.claim()
    detail = reverse("admin:django_pgqueue_messagequeueitem_change", args=[message.id])
    release = reverse("admin:django_pgqueue_messagequeueitem_release", args=[message.id])
    assert release in operator.get(detail).content.decode()
    assert operator.get(release).status_code == 403
    assert "The message is ready" in told(operator.post(release, follow=True))[0]
    assert queue.stats().ready == 1
    with pytest.raises(Exception, match="lease"):
        queue.ack(message)
    (again,) = queue.claim()
    assert (again.delivery_count, again.suspect) == (1, False)
    queue.nack(again, delay=0)
    assert "already expired" in told(operator.post(release, follow=True))[0]
    assert release not in operator.get(detail).content.decode()


def test_messages_are_found_by_queue_origin_and_state(viewer: Client) -> None:
    """The names are typed: there may be thousands."""
    for name in ("a", "b"):
        make_queue(name)
    ids = {
        "ready": make_message("a").pk,
        "delayed": make_message("a", due_in=60).pk,
        "leased": make_message("a", lease=60).pk,
        "dead": make_message("a", dead_lettered_from="b", dead_lettered_at="2026-01-01T00:00:00Z").pk,
        "expired": make_message("a", expires_in=-1).pk,
    }
    make_message("b")
    for state, pk in ids.items():
        assert shown(viewer, queue="a", state=state) == [pk], state
    assert sorted(shown(viewer, queue="a")) == sorted(ids.values())
    assert shown(viewer, dead_from="b") == [ids["dead"]]
    assert shown(viewer, queue="nothing") == []
    html = viewer.get(reverse(ITEMS), {"queue": "a", "state": "ready"}).content.decode()
    assert '<input type="hidden" name="state" value="ready">' in html and 'name="queue" value="a"' in html


def test_what_is_held_of_a_long_queue_is_looked_for_at_its_head(viewer: Client, monkeypatch: Any) -> None:
    """In both walks; a lease that is further behind is not found, and nothing behind is read."""
    monkeypatch.setattr(admin_messages, "SCAN_LIMIT", 3)
    make_queue("a")
    held = [make_message("a", lease=60).pk, make_message("a", lease=60, due_in=-60).pk]
    for _ in range(3):
        make_message("a")
    make_message("a", lease=60)
    assert sorted(shown(viewer, queue="a", state="leased")) == sorted(held)


def shown(client: Client, **query: str) -> list[int]:
    answer = client.get(reverse(ITEMS), query)
    assert answer.status_code == 200
    return [row.pk for row in answer.context["cl"].result_list]


def test_a_list_that_takes_too_long_is_given_up(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, instead of keeping the server busy; a really slow statement, not a pretended one."""
    make_queue("orders")
    make_message("orders")
    monkeypatch.setattr(admin_messages, "STATEMENT_TIMEOUT", 0.1)
    with connection.cursor() as cursor:
        cursor.execute(
            f"CREATE POLICY slow ON {ITEM} USING (pg_sleep(1) IS NOT NULL);"
            f"ALTER TABLE {ITEM} ENABLE ROW LEVEL SECURITY; ALTER TABLE {ITEM} FORCE ROW LEVEL SECURITY;"
            f"CREATE ROLE slow_reader; GRANT ALL ON ALL TABLES IN SCHEMA public TO slow_reader; SET ROLE slow_reader"
        )
        try:
            answer = viewer.get(reverse(ITEMS))
            assert answer.status_code == 200 and "was cancelled" in told(answer)[0]
            assert answer.context["cl"].result_list == []
        finally:
            cursor.execute(
                f"RESET ROLE; DROP POLICY slow ON {ITEM}; ALTER TABLE {ITEM} DISABLE ROW LEVEL SECURITY;"
                f"ALTER TABLE {ITEM} NO FORCE ROW LEVEL SECURITY; DROP OWNED BY slow_reader; DROP ROLE slow_reader"
            )
    assert shown(viewer) != []


def test_a_payload_is_shown_as_a_whole_or_in_part(viewer: Client) -> None:
    """Pretty, escaped, and cut; also what this Python cannot hold."""
    make_queue("orders")
    small = make_message("orders", {"html": "<script>", "n": [1, {"deep": True}]})
    html = viewer.get(reverse("admin:django_pgqueue_messagequeueitem_change", args=[small.pk])).content.decode()
    assert "&lt;script&gt;" in html and "<script>" not in html.split("pgqueue-json")[1].split("</pre>")[0]
    assert "&quot;deep&quot;: true" in html
    large = make_message("orders", "x" * (admin_messages.MAX_SHOWN_CHARS + 100))
    html = viewer.get(reverse("admin:django_pgqueue_messagequeueitem_change", args=[large.pk])).content.decode()
    assert "Only the first 20,000 characters are shown." in html and len(html) < 100_000
    ((undecodable,),) = fetch(
        f"INSERT INTO {ITEM} (queue_id, payload) SELECT 'orders', ('[' || repeat('7', 5000) || ']')::jsonb RETURNING id"
    )
    assert viewer.get(reverse("admin:django_pgqueue_messagequeueitem_change", args=[undecodable])).status_code == 200


def test_the_history_of_failures_is_a_table(viewer: Client) -> None:
    """The last one first, escaped."""
    queue = Queue("orders", max_deliveries=3)
    queue.publish(1)
    for reason in ("first", "<b>second</b>"):
        queue.nack(*queue.claim(), delay=0, reason=reason)
    pk = MessageQueueItem.objects.get().pk
    html = viewer.get(reverse("admin:django_pgqueue_messagequeueitem_change", args=[pk])).content.decode()
    table = html.split("pgqueue-failures")[1]
    assert table.index("&lt;b&gt;second") < table.index("first") and "<b>second" not in html


@pytest.mark.parametrize("parameter", ["queue", "dead_from"])
def test_a_name_that_no_text_can_be_finds_nothing(viewer: Client, parameter: str) -> None:
    """A zero character is no error of the page."""
    make_queue("q")
    make_message("q")
    answer = viewer.get(reverse("admin:django_pgqueue_messagequeueitem_changelist"), {parameter: "q\0"})
    assert answer.status_code == 200 and list(answer.context["cl"].result_list) == []
