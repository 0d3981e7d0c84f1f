"""`purge_queue`: delete what waits, after asking where there is somebody to ask."""

import io
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue import Queue
from tests.support.processes import run
from tests.support.rows import make_message, make_queue, payloads

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def queue() -> None:
    make_queue("q")
    make_message("q", 1)
    make_message("q", 2, due_in=60)
    make_message("q", 3, lease=60)


def test_what_nobody_holds_is_deleted() -> None:
    """As a real process, from a script: it is not asked."""
    done = run("purge_queue", "q")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "purged 2 messages\n",
        "messages purged queue=q count=2\n",
    )
    assert payloads("q") == [3]


@pytest.mark.parametrize(("options", "count"), [([], 2), (["--limit", "1"], 1), (["--limit", "9"], 2)], ids=str)
def test_a_dry_run_counts_and_changes_nothing(
    options: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the limit, as the real one."""
    call_command("purge_queue", "q", "--dry-run", *options)
    assert capsys.readouterr().out == f"would purge {count} messages\n"
    assert payloads("q") == [1, 2, 3]
    call_command("purge_queue", "q", *options)
    assert capsys.readouterr().out == f"purged {count} messages\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "left"), [("y\n", [3]), ("YES\n", [3]), ("n\n", [1, 2, 3]), ("\n", [1, 2, 3]), ("yeah\n", [1, 2, 3])]
)
def test_somebody_at_a_terminal_is_asked(
    answer: str, left: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a yes is one; without it nothing is deleted, and the status says so."""
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    if len(left) == 1:
        call_command("purge_queue", "q")
    else:
        with pytest.raises(CommandError, match="not purged"):
            call_command("purge_queue", "q")
    assert "Permanently delete 2 messages of queue 'q'? [y/N]" in capsys.readouterr().out
    assert payloads("q") == left


def test_a_terminal_that_ends_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-D: one line, and nothing is deleted."""
    monkeypatch.setattr("sys.stdin", Terminal(""))
    with pytest.raises(CommandError, match="not purged"):
        call_command("purge_queue", "q")
    assert payloads("q") == [1, 2, 3]


@pytest.mark.parametrize("options", [["--no-input"], ["--dry-run"]], ids=str)
def test_nobody_is_asked_where_that_was_said(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for a dry run."""
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    call_command("purge_queue", "q", *options)
    assert payloads("q") == ([3] if "--no-input" in options else [1, 2, 3])


def test_a_queue_that_does_not_exist_is_a_failure() -> None:
    """Status 1 and one line; also where the process declares it."""
    done = run("purge_queue", "nobody", queues=["nobody"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "CommandError: queue 'nobody' does not exist\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "NAME"),
        (["q", "--limit", "0"], "--limit: must be a number of at least 1"),
        (["q", "--limit", "all"], "--limit: must be"),
        (["q", "--frobnicate"], "unrecognized arguments"),
        (["bad\nname"], "queue name"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], message: str) -> None:
    """And nothing is deleted."""
    with pytest.raises(CommandError) as raised:
        call_command("purge_queue", *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert payloads("q") == [1, 2, 3]


def test_the_queue_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """What is published after is handled as ever."""
    call_command("purge_queue", "q")
    queue = Queue("q")
    queue.publish(4)
    messages: list[Any] = queue.claim()
    assert [message.payload for message in messages] == [4]
