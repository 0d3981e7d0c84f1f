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
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueue
from django_pgqueue.monitoring import queue_numbers
from django_pgqueue.services import consumers, minutes
from django_pgqueue.services.minutes import Tally
from tests.support.processes import ROOT, command, environment, run
from tests.support.rows import delete_queue, make_message, make_queue
from tests.support.sessions import fetch
from tests.support.waiting import DEADLINE, wait_until

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
    assert rows[2].split()[1:12] == ["2", "1", "1", "1", "1", "0", "2.0min", "-", "-", "0", "0"]


def test_it_tells_what_the_admin_tells(capsys: pytest.CaptureFixture[str]) -> None:
    """Rates, dead letters wherever they wait, consumers, owners, dead-letter queues, and when queues may be reaped."""
    queue = Queue("orders", dead_letter="late")
    queue.publish_many(range(303))
    queue.reject(*queue.claim(3), reason="no")
    minutes_ago = "date_trunc('minute', statement_timestamp()) - interval '3 min'"
    fetch(f"UPDATE django_pgqueue_messagequeueitem SET published_at = {minutes_ago}")
    minutes.count_minute({"orders": Tally(handled=600)}, "default")
    fetch(f"UPDATE django_pgqueue_queueminute SET minute = {minutes_ago}, published = 300")
    consumers.beat(uuid4(), "host", 1, ["orders"], "default")
    owner = uuid4()
    make_queue("owned", exclusive=True, exclusive_consumer_id=owner)
    make_queue("free", exclusive=True)
    make_queue("replies", auto_deleted=True, idle=600)
    make_queue("full", auto_deleted=True, idle=7200)
    make_message("full")
    found = inspect(capsys)
    orders = found["orders"]
    assert (orders["publish_rate"], orders["publish_rate_at_least"], orders["handle_rate"]) == (2.0, True, 2.0)
    assert (orders["dead_letters"], orders["dead"], orders["dead_letter"], orders["consumers"]) == (3, 0, "late", 1)
    assert not inspect(capsys, "orders")["orders"]["publish_rate_at_least"]
    assert (found["owned"]["exclusive"], found["owned"]["owner"]) == (True, str(owner))
    assert found["owned"]["dead_letter"] == "owned.dead"
    assert (found["free"]["exclusive"], found["free"]["owner"]) == (True, None)
    assert 2990 < found["replies"]["reapable_in"] <= 3000 and not found["replies"]["reapable"]
    assert found["full"]["reapable_in"] is None and not found["full"]["reapable"]
    call_command("inspect_queues")
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["orders"][8:12] == ["2.0+/s", "2.0/s", "3", "1"]
    assert rows["orders"][-4:] == ["dead", "letters", "to", "late"]
    assert rows["owned"][-3:] == ["owned", "by", str(owner)] and rows["free"][-1] == "exclusive"
    assert rows["replies"][-3:] == ["reapable", "in", "50.0min"] and rows["full"][-1] == "0"


def test_many_messages_are_counted_only_when_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it says "at least"."""
    monkeypatch.setattr(queue_numbers, "SAMPLE_SIZE", 5)
    Queue("long").publish_many(range(9))
    orphaned = Queue("orphaned")
    orphaned.publish_many(range(7))
    delete_queue("orphaned")
    found = inspect(capsys)
    assert (found["long"]["ready"], found["long"]["at_least"]) == (5, True)
    assert (found["orphaned"]["orphaned"], found["orphaned"]["orphaned_at_least"]) == (5, True)
    call_command("inspect_queues", "long", "orphaned")
    text = capsys.readouterr().out
    assert re.search(r"^long +5\+ +0 ", text, re.MULTILINE) and re.search(
        r"^orphaned( +0){5} +5\+ ", text, re.MULTILINE
    )
    call_command("inspect_queues", "long", "orphaned", "--exact", "--format", "json")
    long, orphans = json.loads(capsys.readouterr().out)
    assert (long["ready"], long["at_least"]) == (9, False)
    assert (orphans["orphaned"], orphans["orphaned_at_least"], orphans["orphans_expire_in"]) == (7, False, "never")


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


@pytest.mark.parametrize(
    "arguments", [("inspect_queues", "--watch", "--interval", "0.1"), ("reap_queues", "--interval", "0.1", "-v2")]
)
def test_a_loop_ends_when_nobody_reads_it_any_more(queues: None, arguments: tuple[str, ...]) -> None:
    """As in a pipe to head: with status 0, and no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "django", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE) == 0
        told = process.stderr.read()
        assert b"BrokenPipe" not in told and b"Traceback" not in told
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def read_until(terminal: IO[bytes], condition: Callable[[str], bool]) -> str:
    """Read what a terminal is sent until it fulfils a condition."""
    deadline = time.monotonic() + DEADLINE
    text = ""
    while not condition(text):
        assert time.monotonic() < deadline, text
        text += terminal.read(4096).decode()
    return text
