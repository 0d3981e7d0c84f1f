"""Real failures of other systems over logs: B110. B108 (the query log under DEBUG) is tests/soak/debug_memory.py."""

import logging
import time

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import transaction
from django.test import Client
from django.urls import reverse

from django_pgqueue import LeaseLost, PayloadError, Queue, QueueNotFound, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.devdb import DevCluster
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.runtime.loop import Outage
from tests.support import cluster
from tests.support.databases import alias
from tests.support.processes import command, run, worker
from tests.support.rows import delete_queue
from tests.support.sessions import fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

PASSWORD = "hunter2-marker"
TOKEN = "sk-live-marker"
SECRET = {"user": "ada", "password": PASSWORD, "nested": [{"token": TOKEN}]}
HEADERS = {"authorization": TOKEN}


def marked(text: str) -> list[str]:
    return [line for line in text.splitlines() if "-marker" in line]


@pytest.fixture
def logged(caplog, capfd):
    """Give what was logged, at the level of production, and what was written to the streams."""
    caplog.set_level(logging.INFO, "django_pgqueue")
    caplog.handler.setLevel(logging.INFO)

    def read() -> str:
        captured = capfd.readouterr()
        assert "django_pgqueue" in caplog.text, "nothing was logged at all"
        return caplog.text + captured.out + captured.err

    return read


def fail(message) -> None:
    """As careless as handlers are: the exception quotes what it was given."""
    raise ValueError(f"cannot log in with {message.payload}")


# --- In one process ---


def test_b110_no_outcome_of_a_message_puts_it_into_the_logs(logged):
    """Handled, retried, dead-lettered, rejected, undecodable, its lease lost: ids and names are logged, no contents."""
    queue = Queue("work", max_deliveries=2, backoff={"base": 0})
    queue.publish(SECRET, headers=HEADERS)
    # A drain does not wait for what is retried later.
    wait_until(
        lambda: (
            Consumer([make_handler(queue, fail)], drain=True).run() >= 0
            and MessageQueueItem.objects.filter(queue="work.dead").exists()
        )
    )
    dead = MessageQueueItem.objects.get(queue="work.dead")
    # It is kept where people look for it.
    assert PASSWORD in dead.failures[-1]["reason"]
    queue.publish(SECRET, headers=HEADERS)
    Consumer([make_handler(queue, lambda message: None)], drain=True).run()
    queue.publish(SECRET)
    (message,) = queue.claim()
    assert PASSWORD not in str(message.id) and PASSWORD not in str(MessageQueueItem.objects.get(pk=message.id))
    queue.ack(message)
    for settle in (queue.ack, queue.nack, queue.reject, queue.extend):
        with pytest.raises(LeaseLost) as lost:
            settle(message)
        assert marked(str(lost.value) + repr(lost.value)) == []
    queue.publish(SECRET)
    queue.reject(*queue.claim(), reason=f"ValueError: {SECRET}")
    # What no Python decodes: a number of more digits than it takes.
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " VALUES ('work', jsonb_build_object('password', %s::text, 'n', repeat('9', 5000)::numeric))",
        [PASSWORD],
    )
    assert queue.claim() == []
    assert marked(logged()) == []


@pytest.mark.parametrize("ack", ["late", "atomic"])
def test_b110_reaping_healing_and_orphans_log_no_contents(logged, ack):
    """Expired, adopted, exhausted, healed."""
    queue = Queue("work", auto_deleted=True, dead_letter="late", max_deliveries=1, lease=0.01)
    queue.publish(SECRET, headers=HEADERS, ttl=0.001)
    queue.publish(SECRET, headers=HEADERS)
    delete_queue("work")
    queue.publish(SECRET, headers=HEADERS)
    queue.claim()
    time.sleep(0.02)
    Reaper("default").run_once()
    Consumer([make_handler(queue, lambda message: None, ack=ack)], drain=True).run()
    assert marked(logged()) == []


def test_b110_a_refused_publish_names_the_place_and_not_the_contents():
    """One payload, one of many, headers, too large, a queue that is gone."""
    queue = Queue("work")
    queue.declare()
    wrong = {**SECRET, "when": {1, 2}}
    for publish in (
        lambda: queue.publish(wrong),
        lambda: queue.publish_many([SECRET, wrong]),
        lambda: queue.publish({}, headers=wrong),
        lambda: queue.publish({"password": f"{PASSWORD}{chr(0)}"}),
    ):
        with pytest.raises(PayloadError) as refused:
            publish()
        assert marked(str(refused.value)) == []
    delete_queue("work")
    for publish in (lambda: queue.publish(SECRET), lambda: queue.publish_many([SECRET])):
        queue.declare()
        delete_queue("work")
        with pytest.raises(QueueNotFound) as gone:
            publish()
        assert marked(str(gone.value) + str(gone.value.__cause__)) == []


def test_b110_topics_log_no_contents(logged, caplog):
    """Also where a subscriber is slow, and messages are dropped."""
    topic = Topic("prices")
    Queue("bound").declare()
    topic.bind(Queue("bound"))
    held = topic.subscribe(lambda message: time.sleep(0.3), buffer=1)
    for _ in range(5):
        topic.publish(SECRET, headers=HEADERS)
    topic.publish({**SECRET, "long": "x" * 9_000})
    wait_until(lambda: "subscription lagged" in caplog.text)
    held.close()
    assert marked(logged()) == []


def test_b110_a_lost_database_is_logged_without_its_address(caplog):
    """The text of a connection error may hold the host, the user and more: only its class and SQLSTATE are told."""
    with alias("gone", HOST="127.0.0.1", PORT="1", USER="ada", PASSWORD=PASSWORD, OPTIONS={"pool": False}) as using:
        try:
            Queue("work", using=using).publish({})
        except Exception as error:
            assert marked(str(error)) == []
            Outage("consumer").failed(error)
    assert "database lost loop=consumer error=django.db.utils.OperationalError" in caplog.text
    assert "127.0.0.1" not in caplog.text and "ada" not in caplog.text


# --- Commands, streams, the server's log, the admin ---


def test_b110_a_worker_at_its_most_talkative_tells_no_contents(tmp_path):
    """-v 3: success, retries, a dead letter, a rejection; and the other commands."""
    queue = Queue("work")
    for orders in ({}, {"fail": f"no {PASSWORD}", "times": 1}, {"nack": "later", "delay": 0, "times": 1}):
        queue.publish({**SECRET, **orders}, headers=HEADERS)
    queue.publish({**SECRET, "fail": f"no {PASSWORD}"})
    queues = [{"name": "work", "queue": {"max_deliveries": 2}}]
    with worker("-v", "3", queues=queues) as running:
        wait_until(lambda: not MessageQueueItem.objects.filter(queue="work").exists(), what="all to be settled")
        assert running.stop() == 0
        assert "message failed" in running.output and "dead-lettered" in running.output
        assert marked(running.output) == []
    for arguments in (["inspect_queues"], ["reap_queues"], ["redrive_queue", "work"], ["pause_queue", "work"]):
        done = run(*arguments, "-v", "3")
        assert done.returncode == 0, done.stderr
        assert marked(done.stdout + done.stderr) == []
    lines = tmp_path / "lines"
    lines.write_text(f'{{"password": "{PASSWORD}"}}\n{{"password": "{PASSWORD}",}}\n')
    done = run("publish_messages", "work", str(lines), "-v", "3")
    assert done.returncode != 0 and "line 2 is not JSON" in done.stderr
    assert marked(done.stdout + done.stderr) == []


@pytest.mark.parametrize("arguments", [["reap_queues"], ["publish_messages", "work"], ["inspect_queues"]], ids=" ".join)
def test_b110_a_command_that_cannot_connect_tells_no_password(arguments):
    """Also with a traceback and at the highest verbosity."""
    url = f"postgres://ada:{PASSWORD}@127.0.0.1:1/none"
    done = run(*arguments, "--traceback", "-v", "3", url=url, stdin='{"n": 1}\n')
    assert done.returncode != 0
    assert marked(done.stdout + done.stderr) == []


def test_b110_a_worker_that_cannot_connect_tells_no_password():
    """It waits for the database, and says so without the address."""
    with command("consume_queues", "-v", "3", queues=["work"], url=f"postgres://ada:{PASSWORD}@127.0.0.1:1/none") as it:
        wait_until(lambda: "database lost" in it.output)
        assert it.stop() == 0
        assert marked(it.output) == []


@pytest.mark.parametrize("binding", [True, False], ids=["bound by the server", "put in by the client"])
def test_b110_the_servers_log(pg: DevCluster, binding):
    """
    What the server logs of a publish that failed holds no content, however the project binds parameters.

    Django's default puts the values into the statement's text, and the server logs the text of a failing statement:
    an autocommit publish to a queue that vanished under the process is one. The library binds by the server.
    """
    if cluster.cluster is None:
        pytest.skip("DATABASE_URL was given: its server's log is not at hand")
    log = pg.pgdata / "server.log"
    size = log.stat().st_size
    with alias("bound", OPTIONS={"server_side_binding": binding, "pool": False}) as using:
        queue = Queue("work", auto_deleted=True, using=using)
        queue.declare()
        delete_queue("work")
        queue.publish(SECRET)
        # In a transaction no statement fails: the queue that is gone gives no row.
        delete_queue("work")
        with transaction.atomic(using=using):
            queue.publish({**SECRET, "password": "in-transaction-marker"})
    with log.open("rb") as stream:
        stream.seek(size)
        written = stream.read().decode(errors="replace")
    assert "django_pgqueue_item_queue_fk" in written
    assert "in-transaction-marker" not in written
    assert PASSWORD not in written


@pytest.mark.parametrize("may_view", [True, False])
def test_b110_the_admin_shows_contents_to_those_who_may_view_messages(client: Client, django_user_model, may_view):
    """And writes none of it into its own log."""
    message_id = Queue("work").publish(SECRET)
    user = django_user_model.objects.create_user("ada", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_messagequeue"))
    if may_view:
        user.user_permissions.add(Permission.objects.get(codename="view_messagequeueitem"))
    client.force_login(user)
    answer = client.get(reverse("admin:django_pgqueue_messagequeueitem_change", args=[message_id]))
    assert (answer.status_code == 200 and PASSWORD in answer.content.decode()) is may_view
    listed = client.get(reverse("admin:django_pgqueue_messagequeueitem_changelist")).content.decode()
    assert PASSWORD not in listed
    assert PASSWORD not in client.get(reverse("admin:django_pgqueue_messagequeue_changelist")).content.decode()
    assert not LogEntry.objects.exists()
