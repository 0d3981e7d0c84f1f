"""`inspect_queues`: queues in numbers, for people and for programs."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue.models import MessageQueue
from tests.support import DEADLINE, delete_queue, make_message, make_queue, wait_until
from tests.workers import ROOT, command, environment, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queues() -> None:
    """A queue with a message in each state, an idle one, and one that only orphans remember."""
    make_queue("q")
    make_message("q")
    make_message("q", due_in=-120)
    make_message("q", due_in=60)
    make_message("q", lease=60)
    make_message("q", expires_in=-1)
    make_message("q", dead_lettered_from="x", dead_lettered_at="2026-01-01T00:00:00Z")
    make_queue("idle", auto_deleted=True, idle=7200)
    make_queue("gone")
    make_message("gone")
    delete_queue("gone")


def inspect(capsys: pytest.CaptureFixture[str], *names: str) -> dict[str, dict[str, Any]]:
    call_command("inspect_queues", *names, format="json")
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_json_has_every_queue_and_every_state(queues: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Depth by state, the oldest due age, and what the reaper may remove."""
    found = inspect(capsys)
    assert set(found) >= {"q", "idle", "gone"}
    q = found["q"]
    states = ("ready", "delayed", "leased", "dead", "expired", "orphaned")
    assert [q[state] for state in states] == [2, 1, 1, 1, 1, 0]
    assert 115 < q["oldest_due_age"] < 125
    assert (q["exists"], q["reapable"]) == (True, False)
    assert (found["idle"]["reapable"], found["idle"]["oldest_due_age"]) == (True, None)
    assert 7190 < found["idle"]["last_active_age"] < 7210
    assert (found["gone"]["exists"], found["gone"]["orphaned"], found["gone"]["reapable"]) == (False, 1, False)


def test_names_choose(queues: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Only those."""
    assert set(inspect(capsys, "q", "gone")) == {"q", "gone"}


def test_text_is_a_table(queues: None, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each queue, under one header."""
    call_command("inspect_queues", "q", "idle", "gone")
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:7] == ["queue", "ready", "delayed", "leased", "dead", "expired", "orphaned"]
    assert [row.split()[0] for row in rows] == ["gone", "idle", "q"]
    assert "no row" in rows[0]
    assert rows[1].split()[-5:] == ["2.0h", "-", "0", "0", "reapable"]
    assert rows[2].split()[1:8] == ["2", "1", "1", "1", "1", "0", "2.0m"]


def test_no_queues_are_an_empty_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Valid JSON all the same."""
    MessageQueue.objects.all().delete()
    assert inspect(capsys) == {}


def test_an_unknown_name_fails_after_the_others_are_shown() -> None:
    """As a real process: JSON on stdout, one line on stderr, status 1."""
    make_queue("a")
    done = run("inspect_queues", "a", "nobody", "--format", "json")
    assert done.returncode == 1
    assert [row["name"] for row in json.loads(done.stdout)] == ["a"]
    assert done.stderr == "CommandError: no such queue: nobody\n"


def test_an_unknown_database_is_told_in_one_line() -> None:
    """Before any query."""
    with pytest.raises(CommandError, match="--database: invalid choice: 'nowhere'"):
        call_command("inspect_queues", "--database", "nowhere")


def test_watch_shows_them_again_and_again(queues: None) -> None:
    """Through a pipe one table after the other, as JSON one line each, until SIGTERM, which is no failure."""
    for form, count in (("text", "queue "), ("json", "[{")):
        with command("inspect_queues", "--watch", "--interval", "0.1", "--format", form) as running:
            wait_until(lambda count=count, running=running: running.output.count(count) >= 3)
            make_message("q")
            assert running.stop() == 0
            shown = running.output
            assert "\033" not in shown and "Traceback" not in shown
    for line in shown.splitlines():
        assert {row["name"] for row in json.loads(line)} >= {"q", "idle"}


def test_watch_on_a_terminal_draws_over_what_is_there(queues: None) -> None:
    """Cleared once; then each line over the last one, so that nothing flickers; what changed is seen."""
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", buffering=0) as terminal, os.fdopen(follower, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", "inspect_queues", "--watch", "q", "--interval", "0.1"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
        try:
            shown = read_until(terminal, lambda text: text.count("\033[H") >= 4)
            assert shown.count("\033[H\033[J") == 1
            make_message("q", dead_lettered_from="x", dead_lettered_at="2026-01-01T00:00:00Z")
            read_until(terminal, lambda text: re.search(r"q +2 +1 +1 +2 ", text) is not None)
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
            process.wait()


def read_until(terminal: IO[bytes], condition: Callable[[str], bool]) -> str:
    """Read what a terminal is sent until it fulfils a condition."""
    deadline = time.monotonic() + DEADLINE
    text = ""
    while not condition(text):
        assert time.monotonic() < deadline, text
        text += terminal.read(4096).decode()
    return text
