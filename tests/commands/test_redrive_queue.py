"""`redrive_queue`: dead letters back from the shell, with a status that a script can go by."""

import os
import pty
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueue
from tests.support.processes import ROOT, command, environment, run, worker
from tests.support.rows import backdate, delete_queue, payloads
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def kill(*payloads: Any, reason: str = "bad", **options: Any) -> list[int]:
    """Publish messages to "work" and reject them. Returns their ids."""
    queue = Queue("work")
    ids = queue.publish_many(payloads, **options)
    queue.reject(*queue.claim(100), reason=reason)
    return ids


def redrive(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    call_command("redrive_queue", *arguments)
    return capsys.readouterr().out


def test_all_go_back() -> None:
    """As a real process: status 0, one line on stdout, nothing on stderr where that is no terminal."""
    kill(1, 2, 3)
    done = run("redrive_queue", "work")
    assert (done.returncode, done.stdout, done.stderr) == (0, "redriven 3 messages\n", "")
    assert payloads("work") == [1, 2, 3]


def test_nothing_to_redrive_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The queue is there, it has no dead letters."""
    Queue("work").declare()
    assert redrive("work", capsys=capsys) == "redriven 0 messages\n"


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--limit", "5"]], ids=str)
def test_a_queue_that_does_not_exist_is_a_failure(options: list[str]) -> None:
    """A mistyped name: status 1, one line, and no queue is made by it."""
    Queue("work").declare()
    done = run("redrive_queue", "wrok", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "CommandError: queue 'wrok' does not exist\n"
    assert not MessageQueue.objects.filter(name="wrok").exists()


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=str)
def test_a_queue_that_is_gone_and_has_dead_letters_is_made_again(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run counts them and makes nothing."""
    kill(1, 2)
    delete_queue("work")
    verb = "would redrive" if options else "redriven"
    assert redrive("work", *options, capsys=capsys) == f"{verb} 2 messages\n"
    assert MessageQueue.objects.filter(name="work").exists() is not bool(options)


def test_a_dry_run_counts_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """With the same choices as the real one."""
    ids = kill(1, 2, 3, reason="timeout", headers={"tenant": "a"})
    for options, count in (
        ([], 3),
        (["--limit", "2"], 2),
        (["--limit", "9"], 3),
        (["--id", str(ids[0]), "--id", str(ids[2])], 2),
        (["--reason", "time"], 3),
        (["--reason", "other"], 0),
        (["--header", "tenant=a"], 3),
        (["--header", "tenant=a", "--header", "other=b"], 0),
    ):
        assert redrive("work", "--dry-run", *options, capsys=capsys) == f"would redrive {count} messages\n"
        assert payloads("work.dead") == [1, 2, 3]
    for options, count in (
        (["--id", str(ids[1]), "--header", "tenant=a"], 1),
        (["--reason", "time", "--limit", "1"], 1),
    ):
        assert redrive("work", *options, capsys=capsys) == f"redriven {count} messages\n"
    assert sorted(payloads("work")) == [1, 2]


def test_a_dry_run_counts_parked_letters_and_not_what_somebody_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """What a redrive would take now."""
    kill(1, 2, 3)
    dead = Queue("work.dead")
    dead.reject(*dead.claim())
    dead.claim()
    assert redrive("work.dead", "--dry-run", capsys=capsys) == "would redrive 1 messages\n"
    assert redrive("work", "--dry-run", capsys=capsys) == "would redrive 2 messages\n"


def test_a_value_of_a_header_may_hold_an_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    """The first one ends the key; values are text."""
    kill(1, headers={"query": "a=b"})
    kill(2, headers={"query": "a"})
    assert redrive("work", "--header", "query=a=b", capsys=capsys) == "redriven 1 messages\n"
    assert payloads("work") == [1]


def test_declared_attributes_are_used_for_a_reaped_queue(capsys: pytest.CaptureFixture[str]) -> None:
    """What the project declares is made, not a standing queue of that name."""
    queue = Queue("work", auto_deleted=True, max_deliveries=7)
    kill(1)
    queue.declare()
    backdate("work", 7200)
    call_command("reap_queues")
    capsys.readouterr()
    assert redrive("work", capsys=capsys) == "redriven 1 messages\n"
    row = MessageQueue.objects.get(name="work")
    assert (row.auto_deleted, row.max_deliveries) == (True, 7)


def test_a_failed_canary_has_a_status_of_its_own() -> None:
    """2, and which message died again; the others stay where they are. A script tells it from a wrong argument."""
    ids = kill({"reject": "still bad"}, {}, {})
    with worker():
        done = run("redrive_queue", "work", "--canary", "1", "--canary-timeout", "15")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "CommandError: redrive of queue 'work' stopped after 1 messages:"
        f" died again [{ids[0]}], not settled in time []\n"
    )
    assert len(payloads("work.dead")) == 3


def test_a_canary_that_ends_well_lets_the_others_follow() -> None:
    """Through a worker in another process."""
    kill({}, {}, {})
    with worker():
        done = run("redrive_queue", "work", "--canary", "1", "--rate", "50")
    assert (done.returncode, done.stdout, done.stderr) == (0, "redriven 3 messages\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "NAME"),
        (["work", "--limit", "0"], "--limit: must be a number of at least 1"),
        (["work", "--rate", "0"], "--rate: must be"),
        (["work", "--rate", "nan"], "--rate: must be"),
        (["work", "--canary", "0"], "--canary: must be"),
        (["work", "--canary-timeout", "0"], "--canary-timeout: must be"),
        (["work", "--id", "x"], "--id: must be"),
        (["work", "--id", "-3"], "--id: must be"),
        (["work", "--header", "tenant"], "--header is KEY=VALUE, not 'tenant'"),
        (["work", "--header", "tenant=\0"], "NUL"),
        (["bad\nname"], "queue name"),
        ([""], "queue name"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], message: str) -> None:
    """And nothing is redriven."""
    kill(1)
    with pytest.raises(CommandError) as raised:
        call_command("redrive_queue", *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert payloads("work.dead") == [1]


def on_a_terminal(*arguments: str) -> tuple[int, str, str]:
    """Run a command whose stderr is a terminal. Returns its status, its stdout and what the terminal got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "django", *arguments],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    out, _ = process.communicate(timeout=60)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:
        # Linux's way to say that the other side is closed.
        pass
    finally:
        os.close(ours)
    return process.returncode, out.decode(), shown.decode()


@pytest.mark.parametrize(("command", "verb"), [("redrive_queue", "redriven"), ("purge_queue", "purged")])
def test_progress_is_shown_on_a_terminal_alone(command: str, verb: str) -> None:
    """One line that counts and is wiped at the end; the result goes to stdout as ever."""
    kill(1, 2)
    name = "work" if verb == "redriven" else "work.dead"
    status, out, shown = on_a_terminal(command, name)
    assert (status, out) == (0, f"{verb} 2 messages\n")
    assert shown.endswith(f"\r{verb} 2\r\x1b[K")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_slow_redrive_and_tells_how_far_it_came(number: int) -> None:
    """As a real process: one line, no traceback."""
    queue = Queue("slow")
    queue.publish_many(range(20))
    queue.reject(*queue.claim(20))
    with command("redrive_queue", "slow", "--rate", "1") as running:
        wait_until(lambda: queue.stats().ready)
        running.send(number)
        assert running.wait() == 130
        assert re.fullmatch(r"CommandError: stopped, redriven \d+ messages\n", running.output), running.output
    assert len(payloads("slow.dead")) > 10


def test_a_queue_of_another_database_is_named_with_it() -> None:
    """`--database` is there, as in the other commands; an alias that is none is refused."""
    done = run("redrive_queue", "slow", "--database", "nowhere")
    assert done.returncode == 2
    assert "--database" in done.stderr
