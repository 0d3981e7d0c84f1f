"""`publish_messages`: JSON lines, all or none."""

import gc
import io
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.registry import find_queue
from django_pgqueue.services.beliefs import beliefs
from tests.support.processes import run
from tests.support.rows import payloads

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def lines(tmp_path: Path) -> Any:
    """Return a function that writes lines to a file and returns its path."""

    def write(*texts: str, encoding: str = "utf-8") -> str:
        path = tmp_path / "lines.jsonl"
        path.write_text("\n".join(texts) + "\n", encoding=encoding)
        return str(path)

    return write


def test_each_line_of_a_file_is_a_message(lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order; blank lines are passed over; nothing is said in cron."""
    call_command("publish_messages", "q", lines('{"n": 1}', "", "[2]", '"drei ✓"', "null", "   "))
    assert payloads("q") == [{"n": 1}, [2], "drei ✓", None]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", [(), ("-",)])
def test_standard_input_is_read(name: tuple[str, ...]) -> None:
    """As a real process, with status 0 and without output."""
    done = run("publish_messages", "q", *name, stdin='{"n": 1}\n{"text": "ü"}\n')
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert payloads("q") == [{"n": 1}, {"text": "ü"}]


def test_one_bad_line_publishes_nothing_and_is_named() -> None:
    """Status 1 and one line; the queue is as if nothing had been tried."""
    good = "\n".join(f'{{"n": {number}}}' for number in range(2500))
    done = run("publish_messages", "q", stdin=f"{good}\n{{'n': 1}}\n{good}\n")
    assert done.returncode == 1
    assert done.stderr.startswith("CommandError: line 2501 is not JSON: ")
    assert done.stderr.count("\n") == 1
    assert not MessageQueueItem.objects.exists()
    assert not MessageQueue.objects.filter(name="q").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("NaN", "line 2 is not JSON: NaN is not JSON"),
        ('{"a": Infinity}', "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("9" * 5000, "line 2 is not JSON"),
        ('{"a": "\\u0000"}', "NUL"),
        ('{"a": ["\\ud800"]}', "surrogate"),
        ("[" * 600 + "]" * 600, "deeper than 500 levels"),
    ],
    ids=["broken", "nan", "infinity", "endless", "digits", "nul", "surrogate", "deep"],
)
def test_what_cannot_be_a_payload_is_refused(lines: Any, line: str, message: str) -> None:
    """With the line, or the first line of its batch and the position in it."""
    with pytest.raises(CommandError) as raised:
        call_command("publish_messages", "q", lines('{"good": 1}', line))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not MessageQueueItem.objects.exists()


def test_delay_and_ttl_are_given_to_each_message(lines: Any) -> None:
    """In seconds."""
    call_command("publish_messages", "q", lines("1", "2"), delay=60, ttl=30)
    rows = MessageQueueItem.objects.values("published_at", "read_after", "expires_at")
    for row in rows:
        assert 59 < (row["read_after"] - row["published_at"]).total_seconds() < 61
        assert 29 < (row["expires_at"] - row["read_after"]).total_seconds() < 31
    assert len(rows) == 2


def test_a_declared_queues_attributes_are_used(lines: Any) -> None:
    """What the project declares wins; an undeclared queue is standing unless told otherwise."""
    declared = Queue("declared", auto_deleted=True, max_deliveries=9)
    call_command("publish_messages", "declared", lines("1"))
    row = MessageQueue.objects.get(name=declared.name)
    assert (row.auto_deleted, row.max_deliveries) == (True, 9)
    call_command("publish_messages", "standing", lines("1"))
    assert not MessageQueue.objects.get(name="standing").auto_deleted
    call_command("publish_messages", "passing", lines("1"), auto_deleted=True)
    assert MessageQueue.objects.get(name="passing").auto_deleted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["q", "/no/such/file"], "No such file"),
        (["q", "--delay", "-1"], "--delay: must be"),
        (["q", "--ttl", "0"], "--ttl: must be"),
        (["bad\nname"], "queue name"),
        ([""], "queue name"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(CommandError) as raised:
        call_command("publish_messages", *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_utf_8_is_refused(lines: Any) -> None:
    """Instead of storing what nobody wrote."""
    with pytest.raises(CommandError):
        call_command("publish_messages", "q", lines('"grün"', encoding="latin-1"))
    assert not MessageQueueItem.objects.exists()


def test_a_queue_that_another_project_declared_stays_as_it_is(lines: Any) -> None:
    """Its attributes are those of its row, also for the TTL of what is published."""
    Queue("theirs", auto_deleted=True, max_deliveries=9, dead_letter="theirs.failed").declare()
    before = MessageQueue.objects.values("auto_deleted", "max_deliveries", "dead_letter").get(pk="theirs")
    forget_queues()
    call_command("publish_messages", "theirs", lines("1"))
    assert MessageQueue.objects.values("auto_deleted", "max_deliveries", "dead_letter").get(pk="theirs") == before
    assert MessageQueueItem.objects.get().expires_at is not None


def forget_queues() -> None:
    """Be a process that declares none of them."""
    gc.collect()
    assert find_queue("theirs") is None
    beliefs.forget()
