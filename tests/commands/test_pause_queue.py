"""`pause_queue` and `resume_queue`: stop and start claims from the shell."""

import json

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueue
from tests.support.processes import run
from tests.support.rows import make_queue

pytestmark = pytest.mark.django_db(transaction=True)


def paused() -> set[str]:
    return set(MessageQueue.objects.exclude(paused_at=None).values_list("name", flat=True))


def test_queues_are_paused_and_resumed() -> None:
    """As real processes: status 0, a line for each, and each named twice only once."""
    for name in ("a", "b", "c"):
        make_queue(name)
    done = run("pause_queue", "a", "b", "a")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "paused a\npaused b\n",
        "queue paused queue=a\nqueue paused queue=b\n",
    )
    assert paused() == {"a", "b"}
    done = run("resume_queue", "a")
    assert (done.returncode, done.stdout) == (0, "resumed a\n")
    assert paused() == {"b"}


def test_pausing_twice_keeps_the_first_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Since when it stands still is what an operator asks; neither is a failure, nor is resuming what runs."""
    make_queue("a")
    call_command("pause_queue", "a")
    before = MessageQueue.objects.get(name="a").paused_at
    call_command("pause_queue", "a")
    assert MessageQueue.objects.get(name="a").paused_at == before
    call_command("resume_queue", "a")
    call_command("resume_queue", "a")
    assert capsys.readouterr().out == "paused a\npaused a\nresumed a\nresumed a\n"


@pytest.mark.parametrize("command", ["pause_queue", "resume_queue"])
def test_a_missing_queue_fails_after_the_others(command: str) -> None:
    """Status 1 and the missing ones; declared in this process or not, no queue is made."""
    make_queue("a")
    done = run(command, "nobody", "a", "no one", queues=["nobody"])
    assert done.returncode == 1
    assert done.stdout == f"{command.split('_')[0]}d a\n"
    assert done.stderr.splitlines()[-1] == "CommandError: queue 'nobody' does not exist; queue 'no one' does not exist"
    assert not MessageQueue.objects.filter(name__startswith="no").exists()


@pytest.mark.parametrize("command", ["pause_queue", "resume_queue"])
@pytest.mark.parametrize(("arguments", "message"), [([], "NAME"), (["bad\nname"], "queue name"), ([""], "queue name")])
def test_wrong_arguments_are_told_in_one_line(command: str, arguments: list[str], message: str) -> None:
    """As every command does."""
    with pytest.raises(CommandError) as raised:
        call_command(command, *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_paused_queue_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """In the table and in JSON."""
    Queue("a").declare()
    call_command("pause_queue", "a")
    capsys.readouterr()
    call_command("inspect_queues", "a")
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "paused"
    call_command("inspect_queues", "a", "--format", "json")
    assert json.loads(capsys.readouterr().out)[0]["paused"] is True
