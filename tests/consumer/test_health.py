"""What probes are told: alive while the claiming thread goes on, ready while the work gets done."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db.models.functions import Now
from django.test.utils import override_settings

from django_pgqueue import Queue
from django_pgqueue.consumer import health
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.health import Health
from django_pgqueue.devdb import DevCluster
from django_pgqueue.models import MessageQueue
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import consumers
from tests.support.processes import command, consuming, worker
from tests.support.rows import make_message, make_queue, seconds
from tests.support.sessions import Session
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def head(port: int, path: str) -> tuple[int, bytes]:
    """Ask as ``wget --spider`` does."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="HEAD")
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.status, answer.read()


def probe(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """Return status and body of an answer; status 0 while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()) if error.code == 503 else {}
    except OSError:
        return 0, {}


def test_a_process_answers_probes(tmp_path: Path) -> None:
    """By HTTP and by a file, from the start until the end; the file goes with the process."""
    port, file = free_port(), tmp_path / "health"
    Queue("work").publish_many(range(3))
    with worker("--health-port", str(port), "--health-host", "127.0.0.1", "--health-file", str(file)) as running:
        wait_until(lambda: probe(port, "/readyz")[0] == 200)
        status, told = probe(port, "/livez?verbose=1")
        assert status == 200 and told["alive"] and told["ready"]
        wait_until(lambda: probe(port, "/readyz")[1]["handled"] == 3)
        assert probe(port, "/readyz")[1]["last_claim_age"] < 5
        # As of the last look.
        wait_until(lambda: probe(port, "/readyz")[1]["oldest_due_age"] is None)
        assert probe(port, "/readyz")[1]["held"] == 0
        wait_until(lambda: probe(port, "/readyz")[1]["listening"])
        assert probe(port, "/")[0] == probe(port, "/admin")[0] == 404
        assert head(port, "/readyz") == (200, b"")
        before = file.stat().st_mtime_ns
        wait_until(lambda: file.stat().st_mtime_ns > before)
        assert json.loads(file.read_text())["alive"] is True
        assert running.stop() == 0
        assert "GET" not in running.output
    assert list(tmp_path.iterdir()) == []


def test_a_stopping_process_is_alive_and_not_ready() -> None:
    """It ends what it has begun; nobody should end it for that."""
    consumer = Consumer([make_handler(Queue("work"), lambda message: None)])
    consumer.stop()
    report = Health(consumer).report()
    assert (report.alive, report.ready) == (True, False)


def test_late_messages_make_it_not_ready() -> None:
    """With a target: the oldest due age of its own queues, and of no others."""
    # Another process owns it: what is due there waits for that one.
    make_queue("work", exclusive=True, exclusive_consumer_id=uuid4())
    consumers.beat(MessageQueue.objects.get(name="work").exclusive_consumer_id, "host", 1, ["work"], "default")
    make_queue("other")
    make_message("other", published_at=Now() - seconds(600))
    queue = Queue("work", exclusive=True)
    consumer = Consumer([make_handler(queue, lambda message: None)])
    with consuming(consumer), override_settings(PGQUEUE={"POLL_INTERVAL": 0.1}):
        wait_until(lambda: consumer.condition().connected)
        checked = Health(consumer, target=60)
        checked.look()
        assert checked.report().ready and checked.report().oldest_due_age is None
        make_message("work", published_at=Now() - seconds(600))
        checked.look()
        report = checked.report()
        assert (report.alive, report.ready) == (True, False) and 590 < report.oldest_due_age < 620  # type: ignore[operator]
        any_age = Health(consumer)
        any_age.look()
        assert any_age.report().ready
        # What somebody has paused is meant to wait.
        queue.pause()
        checked.look()
        assert checked.report().ready


@contextmanager
def impatient() -> Iterator[None]:
    """Let a claiming thread count as stuck soon."""
    with pytest.MonkeyPatch.context() as patch, override_settings(PGQUEUE={"POLL_INTERVAL": 0.1}):
        patch.setattr(health, "TURN_TIMEOUT", 0.5)
        patch.setattr(health, "LONGEST_RETRY", 0.1)
        yield


def test_a_claim_that_never_ends_is_not_alive() -> None:
    """The thread waits while the database answers others: so it is told, until it goes on."""
    queue = Queue("work")
    queue.declare()
    consumer = Consumer([make_handler(queue, lambda message: None)])
    checked = Health(consumer)
    with impatient(), Session() as holder, slow_claims(holder), consuming(consumer):
        wait_until(lambda: consumer.condition().claim_age is not None)
        checked.look()
        assert checked.report().alive
        holder.begin()
        holder.sql("SELECT pg_advisory_xact_lock(4711)")
        queue.publish(1)
        wait_until(lambda: not checked.report().alive)
        assert not checked.report().ready
        holder.rollback()
        wait_until(lambda: checked.report().alive)


@contextmanager
def slow_claims(session: Session) -> Iterator[None]:
    """Let a claim wait for a lock that nobody else needs."""
    session.sql(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NEW; END';"
        "CREATE TRIGGER wait BEFORE UPDATE ON django_pgqueue_messagequeueitem FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    try:
        yield
    finally:
        session.sql("DROP FUNCTION wait() CASCADE")


def test_a_database_that_stalls_for_everybody_is_no_reason_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has locked the table: a new process would wait as well. Nor is the last look told for ever."""
    monkeypatch.setattr(health, "STATEMENT_TIMEOUT", 0.3)
    queue = Queue("work")
    queue.declare()
    consumer = Consumer([make_handler(queue, lambda message: None)])
    checked = Health(consumer)
    with impatient(), Session() as locker, consuming(consumer):
        wait_until(lambda: consumer.condition().connected)
        checked.look()
        assert checked.report().ready
        locker.begin()
        locker.sql("LOCK TABLE django_pgqueue_messagequeueitem IN ACCESS EXCLUSIVE MODE")
        checked.look()
        wait_until(lambda: (consumer.condition().turn_age or 0.0) > 1.0)
        assert (checked.report().alive, checked.report().ready) == (True, False)
        locker.rollback()
        wait_until(lambda: (checked.look(), checked.report().ready)[1])
        monkeypatch.setattr(health, "INTERVAL", 0.01)
        wait_until(lambda: not checked.report().ready)


def test_without_the_database_it_is_alive_and_not_ready(server: DevCluster) -> None:
    """A restart of the process would not bring the database back."""
    consumer = Consumer([make_handler(Queue("work"), lambda message: None)])
    checked = Health(consumer)
    with consuming(consumer):
        wait_until(lambda: consumer.condition().connected)
        checked.look()
        assert checked.report().ready
        server.stop()
        checked.look()
        assert (checked.report().alive, checked.report().ready) == (True, False)
        wait_until(lambda: not consumer.condition().connected)
        assert checked.report().alive
        server.start()
        wait_until(lambda: consumer.condition().connected)
        checked.look()
        assert checked.report().ready


@pytest.mark.parametrize("what", ["taken", "beyond", "nowhere", "folder", "target alone"])
def test_what_cannot_be_told_is_an_error_at_the_start(what: str, tmp_path: Path) -> None:
    """One line, before anything is consumed."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = {
            "taken": ["--health-host", "127.0.0.1", "--health-port", str(taken.getsockname()[1])],
            "beyond": ["--health-port", "70000"],
            "nowhere": ["--health-file", str(tmp_path / "missing" / "health")],
            "folder": ["--health-file", str(tmp_path)],
            "target alone": ["--health-target", "5"],
        }[what]
        Queue("work").publish(1)
        with command("consume_queues", *arguments, queues=["work"]) as running:
            assert running.wait() == 1
            assert "--health-" in running.output and "Traceback" not in running.output
    assert list(tmp_path.parent.glob(f"{tmp_path.name}.*")) == []
    assert Queue("work").stats().ready == 1
