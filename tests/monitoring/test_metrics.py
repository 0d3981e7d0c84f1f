"""What Prometheus is told, by a real scrape of a real process, and by the registry of this one."""

import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from django.db import transaction
from django.http import HttpRequest
from django.test import RequestFactory
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_pgqueue import Message, Queue, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.devdb import DevCluster
from django_pgqueue.monitoring import gauges, prometheus
from django_pgqueue.monitoring.gauges import COUNTS
from django_pgqueue.monitoring.prometheus import QueueCollector, counter_of, name_of
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import consumers
from django_pgqueue.services.counting import DEPTH_STATES
from tests.consumer.test_health import free_port
from tests.support.processes import command, drain, environment, run, worker
from tests.support.rows import delete_queue, make_message, make_queue
from tests.support.sessions import Session, connect
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parent.parent.parent
Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(text: str) -> Samples:
    """Return values by name and labels, as Prometheus reads them."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped() -> Samples:
    """Return what the tables give, from a registry that has nothing else."""
    registry = CollectorRegistry()
    registry.register(QueueCollector())
    return samples(generate_latest(registry).decode())


class Counted:
    """How far the counters have come since."""

    def __init__(self) -> None:
        self._before = self._now()

    def __call__(self, name: str, *labels: str) -> float:
        return self._now().get((name, labels), 0.0) - self._before.get((name, labels), 0.0)

    def _now(self) -> Samples:
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for count in COUNTS.values()
            for family in counter_of(count).collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }


@pytest.fixture
def counted() -> Iterator[Counted]:
    """Count in this process, and stop it afterwards."""
    prometheus.install()
    try:
        yield Counted()
    finally:
        for signal in COUNTS:
            signal.disconnect(dispatch_uid="django_pgqueue.metrics")
        gauges._names.clear()


# --- Gauges ---


def test_depth_by_state_and_what_else_the_tables_hold() -> None:
    """One message in each state; a queue that is paused, and one that has a consumer."""
    make_queue("q")
    make_message("q")
    make_message("q", due_in=-120)
    make_message("q", due_in=60)
    make_message("q", lease=60)
    make_message("q", expires_in=-1)
    make_message("q", dead_lettered_from="x", dead_lettered_at="2026-01-01T00:00:00Z")
    make_queue("gone")
    make_message("gone")
    delete_queue("gone")
    Queue("q").pause()
    consumers.beat(uuid4(), "host", 1, ["q"], "default")
    found = scraped()
    assert found["pgqueue_up", ()] == 1
    states = {state: found["pgqueue_messages", ("q", state)] for state in DEPTH_STATES}
    assert states == {"ready": 2, "delayed": 1, "leased": 1, "dead": 1, "expired": 1}
    assert 115 < found["pgqueue_oldest_due_age_seconds", ("q",)] < 125
    assert found["pgqueue_consumers", ("q",)] == found["pgqueue_paused", ("q",)] == 1
    assert found["pgqueue_messages_uncounted", ("q",)] == 0
    assert found["pgqueue_orphans", ()] == 1
    assert ("pgqueue_reaper_last_run_age_seconds", ()) not in found
    Reaper("default").run_once()
    assert scraped()["pgqueue_reaper_last_run_age_seconds", ()] < 20


def test_a_scrape_looks_at_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says where there are more."""
    monkeypatch.setattr(gauges, "SAMPLE_SIZE", 5)
    Queue("long").publish_many(range(8))
    Queue("short").publish_many(range(4))
    found = scraped()
    assert (found["pgqueue_messages", ("long", "ready")], found["pgqueue_messages_uncounted", ("long",)]) == (5, 1)
    assert (found["pgqueue_messages", ("short", "ready")], found["pgqueue_messages_uncounted", ("short",)]) == (4, 0)


def test_auto_deleted_queues_are_one() -> None:
    """Their names would make ever new series."""
    for number in range(3):
        Queue(f"reply-{number}", auto_deleted=True).publish(number)
    found = scraped()
    assert found["pgqueue_messages", (gauges.AUTO_DELETED, "ready")] == 3
    assert not [labels for _, labels in found if "reply-0" in labels]


def test_a_database_that_is_away_is_a_metric(server: DevCluster) -> None:
    """The scrape works, and says so."""
    server.stop()
    assert scraped() == {("pgqueue_up", ()): 0}
    server.start()
    assert scraped()["pgqueue_up", ()] == 1


def test_a_scrape_of_locked_tables_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no session behind that waits: scrapes come every few seconds."""
    monkeypatch.setattr(gauges, "STATEMENT_TIMEOUT", 0.3)
    with Session() as locker:
        locker.begin()
        locker.sql("LOCK TABLE django_pgqueue_reaperrun IN ACCESS EXCLUSIVE MODE")
        assert scraped() == {("pgqueue_up", ()): 0}
    assert scraped()["pgqueue_up", ()] == 1
    with connect() as admin:
        statement = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'django_pgqueue metrics'"
        wait_until(lambda: admin.execute(statement).fetchone() == (0,))


# --- Counters ---


def test_publishes_count_once_they_are_committed(counted: Counted) -> None:
    """One by one, many, inside a transaction, rolled back, healed, to a topic."""
    queue = Queue("orders")
    published = ("pgqueue_messages_published_total", "orders")
    queue.publish(1)
    queue.publish_many(range(3))
    assert counted(*published) == 4
    with transaction.atomic():
        queue.publish(1)
        queue.publish_many(range(2))
        assert counted(*published) == 4
    assert counted(*published) == 7
    with transaction.atomic():
        queue.publish(1)
        transaction.set_rollback(True)
    assert counted(*published) == 7
    with transaction.atomic():
        queue.publish(1)
        with transaction.atomic():
            queue.publish(1)
            transaction.set_rollback(True)
        queue.publish(1)
        Queue("mails").publish(1)
    # The one of the savepoint may count, or not.
    assert counted(*published) in (9, 10) and counted("pgqueue_messages_published_total", "mails") == 1
    before = counted(*published)
    Topic("prices").bind(queue)
    Topic("prices").publish(1)
    assert counted(*published) == before + 1


def test_a_hook_that_publishes_counts_as_well(counted: Counted) -> None:
    """What others' hooks publish after the commit is another transaction."""
    queue = Queue("orders")

    def again() -> None:
        with transaction.atomic():
            queue.publish_many(range(5))

    with transaction.atomic():
        transaction.on_commit(again)
        queue.publish_many(range(3))
    assert counted("pgqueue_messages_published_total", "orders") == 8


def test_what_becomes_of_messages_is_counted(counted: Counted) -> None:
    """Handled, failed, given up, expired, purged, redriven, lost."""
    queue = Queue("orders", max_deliveries=1)
    queue.publish_many(range(4))
    assert drain(queue) == [0, 1, 2, 3]
    assert counted("pgqueue_messages_handled_total", "orders") == 4

    def fail(message: Message) -> None:
        raise ValueError

    fragile = Queue("fragile", max_deliveries=2, backoff={"base": 0, "jitter": 0})
    fragile.publish(1)
    Consumer([make_handler(fragile, fail)], drain=True).run()
    assert counted("pgqueue_messages_failed_total", "fragile") == 2
    assert counted("pgqueue_messages_handled_total", "fragile") == 0
    queue.publish_many(range(2))
    queue.reject(*queue.claim(2), reason="no")
    assert counted("pgqueue_messages_dead_lettered_total", "orders") == 2
    assert queue.redrive() == 2
    assert counted("pgqueue_messages_redriven_total", "orders") == 2
    assert queue.purge() == 2
    assert counted("pgqueue_messages_purged_total", "orders") == 2
    make_message("orders", expires_in=-1)
    Reaper("default").run_once()
    assert counted("pgqueue_messages_expired_total", "orders") == 1


def test_heals_are_counted_by_cause(counted: Counted) -> None:
    """One alert is about `vanished` alone."""
    queue = Queue("replies", auto_deleted=True)
    queue.publish(1)
    delete_queue("replies")
    with transaction.atomic():
        queue.publish(2)
    assert counted("pgqueue_queues_healed_total", "replies", "vanished") == 1
    assert counted("pgqueue_queues_healed_total", "replies", "revived") == 0


def test_names_without_end_are_one(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that publishes to ever new queues does not grow for ever."""
    monkeypatch.setattr(gauges, "MAX_NAMES", 2)
    for number in range(5):
        Queue(f"q{number}").publish(1)
    assert counted("pgqueue_messages_published_total", gauges.OTHERS) == 3


# --- Scrapes ---


def test_a_consumer_answers_scrapes() -> None:
    """Gauges and its own counters, at the port that it was told."""
    port = free_port()
    Queue("work").publish_many(range(3))
    arguments = ("--metrics-port", str(port), "--metrics-host", "127.0.0.1")
    with worker(*arguments) as running:

        def scrape() -> Samples:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                return samples(answer.read().decode())

        wait_until(lambda: scrape().get(("pgqueue_messages_handled_total", ("work",))) == 3)
        found = scrape()
        assert found["pgqueue_consumers", ("work",)] == 1 and found["pgqueue_messages", ("work", "ready")] == 0
        assert running.stop() == 0


def test_a_port_that_is_taken_is_one_line() -> None:
    """Before anything is consumed."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = ("--metrics-host", "127.0.0.1", "--metrics-port", str(taken.getsockname()[1]))
        with command("consume_queues", *arguments, queues=["work"]) as running:
            assert running.wait() == 1
            assert "--metrics-port" in running.output and "Traceback" not in running.output


def test_without_the_extra_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `--metrics-port` needs it, and says how to get it."""
    (tmp_path / "prometheus_client.py").write_text("raise ModuleNotFoundError('no', name='prometheus_client')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert run("consume_queues", "--drain", queues=["work"]).returncode == 0
    done = run("consume_queues", "--drain", "--metrics-port", "0", queues=["work"])
    assert done.returncode == 1 and "django-pg-messagequeue[prometheus]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_view_answers_a_scrape(counted: Counted, rf: RequestFactory) -> None:
    """For processes that serve HTTP anyway."""
    Queue("orders").publish(1)
    request: HttpRequest = rf.get("/metrics")
    answer = prometheus.metrics(request)
    assert answer["Content-Type"].startswith("text/plain")
    found = samples(answer.content.decode())
    assert found["pgqueue_up", ()] == 1 and found["pgqueue_messages_published_total", ("orders",)] >= 1
    prometheus.install()  # Calling it again is harmless: nothing counts twice, nothing is registered twice.
    counts = Counted()
    Queue("orders").publish(1)
    assert counts("pgqueue_messages_published_total", "orders") == 1


SHARED = """
import django
django.setup()
from django.test import RequestFactory
from django_pgqueue import Queue
from django_pgqueue.monitoring import prometheus
prometheus.install()
Queue("shared").publish(1)
print(prometheus.metrics(RequestFactory().get("/metrics")).content.decode())
"""


def test_several_processes_are_one_where_they_share_a_folder(tmp_path: Path) -> None:
    """prometheus-client's multiprocess mode: whichever is asked tells of all."""
    variables = {**environment(), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for number in range(1, 4):
        done = subprocess.run(
            [sys.executable, "-c", SHARED], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = samples(done.stdout)
        assert found["pgqueue_messages_published_total", ("shared",)] == number and found["pgqueue_up", ()] == 1


# --- Docs ---


def exported() -> set[str]:
    """Return the names of all metrics."""
    Queue("q").declare()
    Reaper("default").run_once()
    return {name for name, _ in scraped()} | {f"{name_of(count)}_total" for count in COUNTS.values()}


def test_the_page_lists_all_metrics_and_no_other() -> None:
    """With their labels."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(pgqueue_\w+)`", text, re.MULTILINE)) == exported()


def test_the_rules_use_metrics_that_there_are() -> None:
    """As Prometheus reads the file; every rule has a name, an expression, a severity and a summary."""
    document: Any = yaml.safe_load((ROOT / "docs" / "ops" / "alerts.yml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 7
    for rule in rules:
        used = set(re.findall(r"pgqueue_\w+", rule["expr"]))
        assert used and used <= exported(), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
    # Never on one that was revived.
    assert not [rule for rule in rules if "revived" in rule["expr"]]


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    """Each panel has a title and a place of its own, and its expressions use nothing that is not exported."""
    dashboard: Any = json.loads((ROOT / "docs" / "ops" / "grafana.json").read_text())
    places = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert panel["title"] and not cells & places and max(x for x, _ in cells) < 24
        places |= cells
        for target in panel["targets"]:
            used = set(re.findall(r"pgqueue_\w+", target["expr"]))
            assert used and used <= exported(), panel["title"]
            assert target["expr"].count("(") == target["expr"].count(")")
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "queue"}
