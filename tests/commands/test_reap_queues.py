"""`reap_queues`: once from cron, or every so many seconds until it is told to stop."""

import json
import signal

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue.models import MessageQueue, MessageQueueItem
from tests.support.processes import command, run
from tests.support.rows import make_message, make_queue
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def work() -> None:
    """One idle queue, one expired message, one that spent its deliveries."""
    make_queue("idle", auto_deleted=True, idle=7200)
    make_queue("busy")
    make_message("busy", expires_in=-1)
    make_message("busy", lease=-1, delivery_count=5)
    make_message("busy")


def test_a_run_does_all_there_is_to_do(work: None) -> None:
    """As a real process: one line of text when something was done."""
    done = run("reap_queues")
    assert (done.returncode, done.stdout) == (
        0,
        "expired 1, dead-lettered 1, adopted 0, queues reaped 1, topic bodies 0, tombstones 0\n",
    )
    assert {"busy", "busy.dead"} <= set(MessageQueue.objects.values_list("name", flat=True))
    assert not MessageQueue.objects.filter(name="idle").exists()
    assert MessageQueueItem.objects.filter(queue="busy").count() == 1


def test_nothing_is_printed_where_nothing_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    """Cron mails what is printed."""
    make_queue("busy", auto_deleted=True)
    call_command("reap_queues")
    assert capsys.readouterr() == ("", "")
    call_command("reap_queues", verbosity=2)
    assert "expired 0" in capsys.readouterr().out


def test_json_is_one_object(work: None, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs, also when nothing was done."""
    call_command("reap_queues", format="json")
    none = {"expired": 0, "dead_lettered": 0, "adopted": 0, "bodies": 0, "events": 0, "queues": []}
    assert json.loads(capsys.readouterr().out) == {**none, "expired": 1, "dead_lettered": 1, "queues": ["idle"]}
    call_command("reap_queues", format="json")
    assert json.loads(capsys.readouterr().out) == none


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_dry_run_tells_and_changes_nothing(work: None, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a row, not a column."""

    def everything() -> list[object]:
        return [
            *MessageQueue.objects.order_by("name").values_list(),
            *MessageQueueItem.objects.order_by("id").values_list(),
        ]

    before = everything()
    call_command("reap_queues", dry_run=True, format=form)
    out = capsys.readouterr().out
    assert everything() == before
    if form == "json":
        told = json.loads(out)
        assert (told["expired"], told["queues"]) == (1, ["idle"])
    else:
        assert "would expire 1" in out
        assert "  idle\n" in out


def test_idle_for_overrides_the_setting() -> None:
    """In seconds."""
    make_queue("tmp", auto_deleted=True, idle=100)
    call_command("reap_queues", idle_for=200)
    assert MessageQueue.objects.filter(name="tmp").exists()
    call_command("reap_queues", idle_for=50)
    assert not MessageQueue.objects.filter(name="tmp").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interval_runs_until_a_signal(number: int) -> None:
    """It reaps what falls idle meanwhile, and ends with status 0."""
    with command("reap_queues", "--interval", "0.2", "--idle-for", "60", "--format", "json") as running:
        wait_until(lambda: running.output.count("\n") >= 2)
        make_queue("tmp", auto_deleted=True, idle=120)
        wait_until(lambda: not MessageQueue.objects.filter(name="tmp").exists())
        running.send(number)
        assert running.wait(10) == 0
        reports = [json.loads(line) for line in running.output.splitlines()]
    assert [report["queues"] for report in reports if report["queues"]] == [["tmp"]]


def test_an_interval_waits_between_runs() -> None:
    """An hour is an hour: one run."""
    with command("reap_queues", "--interval", "3600", "--format", "json") as running:
        wait_until(lambda: running.output)
        running.send(signal.SIGTERM)
        assert running.wait(10) == 0
        assert running.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "-1"], "--interval: must be a number of at least 0.1, not '-1'"),
        (["--interval", "soon"], "--interval: must be"),
        (["--idle-for", "inf"], "--idle-for: must be"),
        (["--batch-size", "0"], "--batch-size: must be"),
        (["--format", "xml"], "--format: invalid choice"),
        (["--database", "nowhere"], "--database: invalid choice"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], message: str) -> None:
    """And nothing is reaped."""
    with pytest.raises(CommandError) as raised:
        call_command("reap_queues", *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_error_ends_the_process_with_a_status() -> None:
    """argparse's status, and a last line that says which argument."""
    done = run("reap_queues", "--idle-for=-5")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "error: argument --idle-for: must be a number of at least 0.0, not '-5'"
    )
