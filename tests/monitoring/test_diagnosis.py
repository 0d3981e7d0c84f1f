"""
Each finding is found where its trouble is, made on a real server, and not where it is not.

`provokes` says which finding a test is for; docs/findings.md is made of these and of `FINDINGS`.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import override_settings

from django_pgqueue import Queue
from django_pgqueue.devdb import throwaway
from django_pgqueue.models import MessageQueueItem, ReaperRun
from django_pgqueue.monitoring import diagnosis
from django_pgqueue.monitoring.diagnosis import Limits
from django_pgqueue.monitoring.findings import FINDINGS
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import consumers, diagnosing, minutes, reaping
from django_pgqueue.services.minutes import Tally
from tests.docs.findings import provokes
from tests.support.databases import alias, database, migrate
from tests.support.pgbouncer import pgbouncer
from tests.support.processes import run
from tests.support.rows import delete_queue, make_message, make_queue, seconds
from tests.support.sessions import Session, connect, fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

QUEUES, ITEMS = "django_pgqueue_messagequeue", "django_pgqueue_messagequeueitem"
INDEX = "django_pgqueue_item_claim_idx"


def numbers(messages: list[Any]) -> set[str]:
    return {str(message.id).rpartition(".")[2] for message in messages}


def examined(using: str = "default", **limits: Any) -> dict[str, str]:
    """Return what an examination finds: texts by number. The reaper has run."""
    reaping.record_run(0.1, {}, using)
    return texts(diagnosis.examine(using, Limits(**limits)))


def texts(messages: list[Any]) -> dict[str, str]:
    return {str(message.id).rpartition(".")[2]: str(message.msg) for message in messages}


@contextmanager
def altered(*statements: str) -> Iterator[None]:
    """Let the schema be another one meanwhile."""
    with transaction.atomic():
        for statement in statements:
            fetch(statement)
        yield
        transaction.set_rollback(True)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    """Queues in use, a reaper that ran, a server as it comes."""
    queue = Queue("orders")
    queue.publish(1)
    make_message("orders", due_in=3600, expires_in=7200)
    assert examined() == {}
    assert diagnosis.examine_schema("default") == []


# --- The schema ---


@provokes("E005")
def test_a_foreign_key_of_another_kind() -> None:
    """As `check --database` reports it; tests/services/test_schema.py has all the ways in which it can differ."""
    for statement in (
        f"ALTER TABLE {ITEMS} DROP CONSTRAINT django_pgqueue_item_queue_fk",
        f"ALTER TABLE {ITEMS} DISABLE TRIGGER ALL",
        f"ALTER TABLE {QUEUES} DISABLE TRIGGER ALL",
    ):
        with altered(statement):
            assert "E005" in numbers(run_checks(databases=["default"])), statement


@provokes("E006")
@pytest.mark.parametrize(
    ("statements", "state"),
    [
        ([f"DROP INDEX {INDEX}"], "is missing"),
        ([f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = to_regclass('{INDEX}')"], "is invalid"),
        ([f"DROP INDEX {INDEX}", f"CREATE INDEX {INDEX} ON {ITEMS} (queue_id, id)"], "has other columns"),
        (
            [f"DROP INDEX {INDEX}", f"CREATE INDEX {INDEX} ON {ITEMS} (queue_id, read_after DESC, id)"],
            "has other columns",
        ),
    ],
)
def test_a_claim_index_that_claims_cannot_use(statements: list[str], state: str) -> None:
    """Missing, left behind invalid, or made by somebody else's idea."""
    with altered(*statements):
        (found,) = diagnosis.examine_schema("default")
        assert found.id == "django_pgqueue.E006" and state in found.msg


def test_the_remedy_makes_the_index_that_the_migration_made() -> None:
    """Pasted, it mends the table."""
    remedy = FINDINGS["E006"].remedy
    ((before,),) = fetch("SELECT indexdef FROM pg_indexes WHERE indexname = %s", [INDEX])
    drop, create = remedy.split("`")[1::2]
    with connect() as admin:
        admin.execute(drop)
        admin.execute(create)
    assert fetch("SELECT indexdef FROM pg_indexes WHERE indexname = %s", [INDEX]) == [(before,)]
    assert diagnosis.examine_schema("default") == []


@provokes("E007")
@pytest.mark.parametrize(
    ("statement", "state"),
    [
        (f"DROP TRIGGER django_pgqueue_orphan_messages ON {QUEUES}", "missing"),
        (f"ALTER TABLE {QUEUES} DISABLE TRIGGER USER", "disabled"),
        (f"ALTER TABLE {QUEUES} ENABLE REPLICA TRIGGER django_pgqueue_orphan_messages", "disabled"),
    ],
)
def test_a_trigger_that_does_not_fire(statement: str, state: str) -> None:
    """Dropped, or left disabled by somebody's bulk load."""
    with altered(statement):
        (found,) = diagnosis.examine_schema("default")
        assert found.id == "django_pgqueue.E007" and state in found.msg


@provokes("W008")
@pytest.mark.parametrize(
    ("statement", "where"),
    [
        (f"ALTER TABLE {ITEMS} SET (autovacuum_enabled = off)", ITEMS),
        (f"ALTER TABLE {QUEUES} SET (autovacuum_enabled = 0)", QUEUES),
        ("SET LOCAL track_counts = off", "whole server"),
    ],
)
def test_autovacuum_that_is_off(statement: str, where: str) -> None:
    """For a table, in any spelling, or for all."""
    with altered(statement):
        (found,) = diagnosis.examine_schema("default")
        assert found.id == "django_pgqueue.W008" and where in found.msg


@provokes("E009")
def test_a_server_of_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse statements; it is not asked any further."""
    old = diagnosing.server("default")._replace(version=130_011)
    monkeypatch.setattr(diagnosing, "server", lambda using: old)
    (found,) = diagnosis.examine_schema("default")
    assert found.id == "django_pgqueue.E009" and "13" in found.msg


def test_check_database_reports_the_schema_and_not_how_it_is_run() -> None:
    """A deployment does not fail because messages wait."""
    make_queue("orders")
    make_message("orders", published_at="2026-01-01T00:00:00Z")
    assert "W021" in examined()
    ours = {number for number in numbers(run_checks(databases=["default"])) if number in FINDINGS}
    assert ours == set()
    with altered(f"ALTER TABLE {QUEUES} DISABLE TRIGGER USER"):
        assert "E007" in numbers(run_checks(databases=["default"]))
        assert "E007" not in numbers(run_checks())


def test_an_unmigrated_database_has_no_findings() -> None:
    """`check --database` runs before the first `migrate`, too."""
    with database("empty") as using:
        migrate(using, "django_pgqueue", "zero")
        with override_settings(PGQUEUE={"DATABASE": using}):
            assert not numbers(run_checks(databases=[using])) & FINDINGS.keys()


# --- How it is run ---


@provokes("W020")
def test_a_reaper_that_does_not_run() -> None:
    """Never, or not for ten minutes; a run, by the command too, is noted."""
    assert texts(diagnosis.examine("default"))["W020"] == "The reaper has never run."
    Reaper("default").run_once()
    assert "W020" not in texts(diagnosis.examine("default"))
    ReaperRun.objects.update(finished_at=F("finished_at") - seconds(3 * 3600))
    assert texts(diagnosis.examine("default"))["W020"] == "The reaper ran 3.0 h ago."
    call_command("reap_queues")
    assert "W020" not in texts(diagnosis.examine("default"))
    run_ = ReaperRun.objects.get()
    assert run_.report["expired"] == 0 and run_.report["queues"] == 0 and run_.seconds > 0


@provokes("W021")
def test_messages_that_nobody_consumes() -> None:
    """Due for long on a queue that no living consumer names; other states and other queues are no trouble."""
    long_ago = Now() - seconds(3600)
    make_queue("late")
    make_message("late", published_at=long_ago)
    make_queue("retried")
    make_message("retried", due_in=-1800, published_at=long_ago)
    make_queue("fine")
    for columns in (
        {"due_in": 60},
        {"lease": 60},
        {"expires_in": -1},
        {"dead_lettered_from": "late", "dead_lettered_at": long_ago},
    ):
        make_message("fine", published_at=long_ago, **columns)
    assert queues_in("W021") == {"late", "retried"}
    # Infinity is no time: what somebody's SQL wrote does not hide the others.
    fetch(f"UPDATE {ITEMS} SET published_at = '-infinity' WHERE queue_id = 'fine' AND lease_expires_at IS NOT NULL")
    assert queues_in("W021") == {"late", "retried"}
    consumer = uuid4()
    consumers.beat(consumer, "host", 1, ["late"], "default")
    assert queues_in("W021") == {"retried"}
    fetch("UPDATE django_pgqueue_queueconsumer SET last_heartbeat = '2026-01-01'")
    Queue("late").pause()
    assert queues_in("W021") == {"late", "retried"}
    assert any("paused" in str(message.msg) for message in diagnosis.examine("default"))
    consumers.forget_consumer(consumer, "default")


def queues_in(number: str) -> set[str]:
    """Return the queues that the findings of a number name."""
    found = [str(message.msg) for message in diagnosis.examine("default") if str(message.id).endswith(number)]
    return {text.split("'")[1] for text in found}


@provokes("W022")
def test_dead_letters_of_the_last_hour() -> None:
    """By the queue that gave them up; older ones are known by now."""
    for name in ("orders", "mails"):
        queue = Queue(name)
        queue.publish_many(range(3))
        queue.reject(*queue.claim(3), reason="no")
    found = [str(message.msg) for message in diagnosis.examine("default") if "W022" in str(message.id)]
    assert [text.partition(" were")[0] for text in found] == [
        "3 messages of queue 'mails'",
        "3 messages of queue 'orders'",
    ]
    MessageQueueItem.objects.filter(dead_lettered_from="orders").update(dead_lettered_at=Now() - seconds(7200))
    assert queues_in("W022") == {"mails"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosing, "SAMPLE_SIZE", 2)
        assert "At least 2 messages" in examined()["W022"]


@provokes("W022")
@pytest.mark.parametrize(
    ("hours", "usual"),
    [
        # So many in each hour before, of which consumers told: twenty within the last hour are more, or are usual.
        ([4, 0, 5], 3.0),
        ([13, 13], 13.0),
        ([14, 14], None),
        ([300, 0, 0, 0], None),
        # Not known for an hour.
        ([], 0.0),
    ],
)
def test_dead_letters_that_grow(hours: list[int], usual: float | None) -> None:
    """Compared with the hours before, where those are known; a queue that loses some each hour is known to."""
    queue = Queue("mails")
    queue.publish_many(range(20))
    queue.reject(*queue.claim(20), reason="no")
    for ago, count in enumerate(hours, start=1):
        told("mails", 60 * ago + 59, Tally(handled=1, dead_lettered=count))
    # Of when a message was published that was settled since, nobody told then.
    told("mails", 1200, Tally(published={}), published=5)
    text = examined().get("W022", "")
    assert text.startswith("20 messages of queue 'mails' were dead-lettered within 1.0 h") == (usual is not None)
    told_before = re.findall(r", ([\d.]+) in the same time before", text)
    # A minute may have passed meanwhile.
    assert [float(number) for number in told_before] == ([pytest.approx(usual, rel=0.02)] if usual else [])


@provokes("W022")
def test_more_dead_letters_than_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted by the minutes, where those know more."""
    monkeypatch.setattr(diagnosing, "SAMPLE_SIZE", 2)
    queue = Queue("mails")
    queue.publish_many(range(3))
    queue.reject(*queue.claim(3), reason="no")
    for ago, count in ((90, 10), (150, 10), (5, 100)):
        told("mails", ago, Tally(dead_lettered=count))
    assert examined()["W022"].startswith("100 messages of queue 'mails' were dead-lettered within 1.0 h")


def told(name: str, ago: int, tally: Tally, published: int = 0) -> None:
    """Let consumers have told something so many minutes ago."""
    minutes.count_minute({name: tally}, "default")
    fetch(
        f"UPDATE django_pgqueue_queueminute SET minute = minute - interval '{ago} min', published = {published}"
        " WHERE minute > now() - interval '2 min'"
    )


@provokes("W023")
def test_queues_that_vanished() -> None:
    """Deleted by hand under a publisher; what the reaper deletes is no trouble."""
    queue = Queue("replies", auto_deleted=True)
    queue.publish(1)
    delete_queue("replies")
    with transaction.atomic():
        queue.publish(2)
    assert "'replies' vanished 1 times" in examined()["W023"]
    fetch("UPDATE django_pgqueue_queueevent SET at = at - interval '2 days'")
    assert "W023" not in examined()


@provokes("E024")
def test_two_databases_that_are_not_one(settings: Any) -> None:
    """LISTEN_DATABASE leads elsewhere: nothing that is sent is heard."""
    with database("elsewhere") as other:
        settings.PGQUEUE = {"LISTEN_DATABASE": other}
        assert "is not heard on 'elsewhere'" in examined()["E024"]


@provokes("E024")
def test_notifications_through_a_transaction_pooler(settings: Any) -> None:
    """Found by trying, not by guessing; a direct LISTEN_DATABASE mends it."""
    with pgbouncer() as pooler, alias("pooled", HOST=str(pooler.folder), PORT="5432") as pooled:
        assert "is not heard on 'pooled'" in examined(pooled)["E024"]
        settings.PGQUEUE = {"LISTEN_DATABASE": "default"}
        assert "E024" not in examined(pooled)


@provokes("E024")
def test_a_database_to_listen_on_that_is_not_there(settings: Any) -> None:
    """It is a finding like others, and does not hide them."""
    with alias("away", HOST="127.0.0.1", PORT="1", OPTIONS={"pool": False}) as away:
        settings.PGQUEUE = {"LISTEN_DATABASE": away}
        make_queue("late")
        make_message("late", published_at=Now() - seconds(3600))
        found = examined()
        assert found["E024"].startswith("Listening on 'away' fails:") and "W021" in found


@provokes("W025")
def test_a_session_that_holds_back_vacuum() -> None:
    """An open transaction that has written, or has a snapshot; not one that has just begun, and not this one."""
    with Session() as writer, Session() as reader:
        writer.begin()
        writer.sql("SELECT pg_current_xact_id()")
        reader.begin()
        reader.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.sql("SELECT 1")
        assert "W025" not in examined()
        found = {holder.name.split(",")[0] for holder in diagnosing.holders(0.0, "default")}
        assert {f"pid {writer.pid}", f"pid {reader.pid}"} <= found
        assert "held back for" in examined(holder=0.0)["W025"]
    assert not {f"pid {writer.pid}", f"pid {reader.pid}"} & {
        holder.name.split(",")[0] for holder in diagnosing.holders(0.0, "default")
    }


@pytest.fixture(scope="module")
def other_server() -> Iterator[str]:
    """A server on which transactions may be prepared: an alias for it, migrated."""
    with throwaway(options={"max_prepared_transactions": "4"}) as cluster:
        info = psycopg.conninfo.conninfo_to_dict(cluster.url)
        yield json.dumps(info)


@contextmanager
def on(info: str) -> Iterator[str]:
    parts = json.loads(info)
    changed = {
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": parts.get("port", ""),
    }
    with alias("other", **changed, OPTIONS={"pool": False}) as using:
        migrate(using)
        yield using


@provokes("W026")
def test_a_prepared_transaction(other_server: str) -> None:
    """Nobody ended it."""
    with on(other_server) as using:
        fetch("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'forgotten'", using=using)
        assert "W026" not in examined(using)
        assert "prepared transaction forgotten" in examined(using, holder=0.0)["W026"]
        fetch("ROLLBACK PREPARED 'forgotten'", using=using)
        assert "W026" not in examined(using, holder=0.0)


@provokes("W027")
def test_a_replication_slot_that_nobody_reads(other_server: str) -> None:
    """A standby told what it needs, and is gone. One that is connected is no trouble."""
    with on(other_server) as using:
        fetch("SELECT pg_create_physical_replication_slot('standby', true)", using=using)
        parts = json.loads(other_server)
        standby = psycopg.pq.PGconn.connect(
            psycopg.conninfo.make_conninfo("", **{**parts, "replication": "true"}).encode()
        )
        xmin = int(fetch("SELECT pg_current_xact_id()::text", using=using)[0][0])
        started = standby.exec_(b"START_REPLICATION SLOT standby PHYSICAL 0/1000000")
        assert started.status == psycopg.pq.ExecStatus.COPY_BOTH, standby.error_message
        # Hot standby feedback: the time, the oldest transaction and its epoch, the same for catalogs.
        standby.put_copy_data(
            b"h" + (0).to_bytes(8, "big") + xmin.to_bytes(4, "big") + bytes(4) + xmin.to_bytes(4, "big") + bytes(4)
        )
        standby.flush()
        held = "SELECT active, xmin IS NOT NULL FROM pg_replication_slots"
        wait_until(lambda: fetch(held, using=using) == [(True, True)])
        assert "W027" not in examined(using)
        standby.finish()
        wait_until(lambda: fetch(held, using=using) == [(False, True)])
        assert "replication slot standby" in examined(using)["W027"]
        fetch("SELECT pg_drop_replication_slot('standby')", using=using)
        assert "W027" not in examined(using)


@provokes("W028")
def test_many_dead_rows() -> None:
    """As the server's statistics have it: many, and many more than live ones."""
    make_queue("orders")
    with connect() as other:
        other.execute(f"INSERT INTO {ITEMS} (queue_id, payload) SELECT 'orders', '{{}}' FROM generate_series(1, 900)")
        other.execute(f"DELETE FROM {ITEMS} WHERE id % 9 > 0")
    wait_until(lambda: {row[0]: row[1] for row in diagnosing.dead_rows("default")}[ITEMS] >= 700)
    assert "dead rows" in examined(dead_rows=500)["W028"]
    assert "W028" not in examined(dead_rows=500, dead_ratio=1_000.0)
    assert "W028" not in examined()


@provokes("W029")
def test_old_multixacts() -> None:
    """Real ones, of two publishers that overlap, and a limit that they pass."""
    make_queue("orders")
    before = diagnosing.server("default").multixact_age
    with Session() as first, Session() as second:
        for session in (first, second):
            session.begin()
            session.run(Queue("orders").publish, 1)
    assert diagnosing.server("default").multixact_age > before
    assert "Autovacuum freezes it at 400,000,000" in examined(multixact_age=before)["W029"]
    assert "W029" not in examined()


@provokes("W030")
def test_a_queue_of_notifications_that_fills_up() -> None:
    """Somebody LISTENs and does not read."""
    with Session() as deaf:
        deaf.sql("LISTEN everything")
        deaf.begin()
        deaf.sql("SELECT 1")
        for number in range(50):
            fetch("SELECT pg_notify('everything', %s)", [f"{number:07000}"])
        assert diagnosing.server("default").notification_queue > 0
        assert "W030" in examined(notification_queue=0.0)
        assert "W030" not in examined()


@provokes("W031")
@pytest.mark.parametrize(("shift", "word"), [(-90.0, "ahead"), (90.0, "behind")])
def test_clocks_that_differ(shift: float, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application's is the one that is set wrong here."""
    monkeypatch.setattr(diagnosis.time, "time", lambda real=time.time: real() + shift)
    assert f"The server's clock is 1.5 min {word}." == examined()["W031"]


@provokes("W032")
def test_requests_that_are_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the alias says."""
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    assert "ATOMIC_REQUESTS" in examined()["W032"]


@provokes("W033")
def test_more_workers_than_connections() -> None:
    """As the handlers are declared, and for each process that lives."""
    queue = Queue("busy")
    enough = diagnosing.server("default").connections // 2
    queue.handler(concurrency=enough)(lambda message: None)
    assert "W033" not in examined()
    for number in range(2):
        consumers.beat(uuid4(), "host", number, ["busy"], "default")
    assert "2 consumer processes need up to" in examined()["W033"]


@provokes("I034")
def test_a_role_that_sees_little() -> None:
    """It is told what is left out."""
    with connect() as admin:
        admin.execute("CREATE ROLE short_sighted; GRANT ALL ON ALL TABLES IN SCHEMA public TO short_sighted")
        try:
            with Session() as session:
                session.sql("SET ROLE short_sighted")
                assert "I034" in numbers(session.run(diagnosis.examine, "default"))
        finally:
            admin.execute("DROP OWNED BY short_sighted; DROP ROLE short_sighted")
    assert "I034" not in examined()


@provokes("W035")
def test_tables_that_somebody_has_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be looked at in time is told; the rest is found all the same."""
    monkeypatch.setattr(diagnosis, "STATEMENT_TIMEOUT", 0.3)
    with Session() as locker:
        locker.begin()
        locker.sql(f"LOCK TABLE {ITEMS} IN ACCESS EXCLUSIVE MODE")
        found = [str(message.msg) for message in diagnosis.examine("default")]
        assert "Looking at the backlogs took longer than 0.3 seconds." in found
        assert "The reaper has never run." in found
    assert "W035" not in examined()


@provokes("E010")
def test_a_database_that_is_not_migrated(capsys: pytest.CaptureFixture[str]) -> None:
    """One finding, and what to do."""
    with database("empty") as using:
        migrate(using, "django_pgqueue", "zero")
        with override_settings(PGQUEUE={"DATABASE": using}):
            assert status("--format", "json") == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert found["id"] == "E010" and "migrate" in found["remedy"]


def test_many_findings_of_a_kind_are_cut() -> None:
    """Thousands of queues that nobody consumes are one trouble."""
    for number in range(diagnosis.MAX_FINDINGS + 5):
        make_queue(f"q{number:02}")
        make_message(f"q{number:02}", published_at=Now() - seconds(3600))
    late = [str(message.msg) for message in diagnosis.examine("default") if str(message.id).endswith("W021")]
    assert len(late) == diagnosis.MAX_FINDINGS + 1 and late[-1] == "… and 5 more."


# --- The command ---


def test_the_exit_status_tells(capsys: pytest.CaptureFixture[str]) -> None:
    """0: nothing, or warnings that are let pass; 1: warnings; 2: errors, whatever is let pass."""
    assert status() == 0 and status("--fail-level", "warning") == 1  # The reaper has never run.
    call_command("reap_queues")
    assert status("--fail-level", "warning") == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")
    with altered(f"ALTER TABLE {QUEUES} DISABLE TRIGGER USER"):
        assert status() == status("--fail-level", "warning") == 2


def test_an_error_does_not_hide_what_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt setting, say."""
    with override_settings(PGQUEUE={"LEESE": 1}):
        assert status("--format", "json") == 2
    assert [found["id"] for found in json.loads(capsys.readouterr().out)] == ["E002", "W020"]


def status(*arguments: str) -> int:
    try:
        call_command("diagnose_queues", *arguments)
    except SystemExit as exit:
        return int(str(exit.code))
    return 0


def test_the_text_says_what_and_how_to_mend_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each finding, and beneath it the remedy and where to read more."""
    call_command("diagnose_queues", no_color=True)
    finding, remedy, page, count = capsys.readouterr().out.splitlines()
    assert finding == "W020  The reaper has never run."
    assert remedy.strip() == FINDINGS["W020"].remedy
    assert page.strip() == "docs/findings.md#w020" and count == "1 finding"


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs."""
    call_command("diagnose_queues", format="json")
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["id"], found["level"], found["hint"]) == ("W020", "warning", "docs/findings.md#w020")
    assert found["text"] == "The reaper has never run." and "reap_queues" in found["remedy"]


@provokes("E001")
@provokes("E002")
@provokes("E003")
@provokes("W004")
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"DATABASE": "nowhere"}, "E001"),
        ({"LEESE": 5}, "E002"),
        ({"LEASE": "long"}, "E003"),
        ({"REAP_IDLE_AFTER": 1}, "W004"),
    ],
)
def test_settings_are_looked_at_as_well(settings: dict[str, Any], number: str) -> None:
    """By a real process, which starts with them."""
    done = run("diagnose_queues", "--format", "json", settings=settings)
    assert number in {found["id"] for found in json.loads(done.stdout)}
    assert done.returncode == (2 if number.startswith("E") else 0)


def test_a_database_that_is_away_is_one_line() -> None:
    """And not a traceback."""
    done = run("diagnose_queues", url="postgres://nobody@127.0.0.1:1/nothing?connect_timeout=2")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "the database refuses" in done.stderr


def test_the_page_is_made_of_the_findings() -> None:
    """And each has a test that makes its trouble."""
    from tests.docs import findings

    assert findings.PAGE.read_text() == findings.page()
    assert all(findings.tests_of(number) for number in FINDINGS)
