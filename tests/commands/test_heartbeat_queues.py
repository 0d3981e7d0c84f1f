"""`heartbeat_queues`: for consumers that are not ours."""

import signal

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueue
from tests.support.processes import command, run
from tests.support.rows import backdate, make_queue
from tests.support.sessions import fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def is_fresh(name: str) -> bool:
    return bool(
        fetch(
            "SELECT 1 FROM django_pgqueue_messagequeue"
            " WHERE name = %s AND last_active > statement_timestamp() - interval '30 seconds'",
            [name],
        )
    )


def test_once_touches_and_ends() -> None:
    """All queues that are named."""
    for name in ("a", "b", "c"):
        make_queue(name, idle=500)
    call_command("heartbeat_queues", "a", "b", once=True)
    assert [is_fresh(name) for name in ("a", "b", "c")] == [True, True, False]


def test_once_fails_for_an_unknown_queue() -> None:
    """As a real process: status 1 and one line that names it. Those that are there are touched all the same."""
    make_queue("a", idle=500)
    done = run("heartbeat_queues", "--once", "a", "nobody", "neither")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "CommandError: no such queue: neither, nobody"
    assert "Traceback" not in done.stderr
    assert is_fresh("a")
    assert not MessageQueue.objects.filter(name__in=["nobody", "neither"]).exists()


def test_a_declared_queue_is_made() -> None:
    """That is no failure: the project knows its attributes."""
    queue = Queue("declared", auto_deleted=True)
    call_command("heartbeat_queues", queue.name, once=True)
    assert MessageQueue.objects.get(name="declared").auto_deleted


def test_it_beats_until_a_signal() -> None:
    """Again and again, also for a queue that appears later; status 0 at the end."""
    make_queue("a", idle=500)
    settings = {"DECLARE_TTL": 0.1}
    with command("heartbeat_queues", "a", "later", "--interval", "0.2", settings=settings) as running:
        wait_until(lambda: is_fresh("a"))
        backdate("a", 500)
        make_queue("later", idle=500)
        wait_until(lambda: is_fresh("a") and is_fresh("later"))
        running.send(signal.SIGTERM)
        assert running.wait(10) == 0
        assert "Traceback" not in running.output
        assert running.output.count("queue not found") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "NAME"),
        (["a", "--interval", "0"], "--interval: must be"),
        (["a", "--interval", "nan"], "--interval: must be"),
        (["a", "--database", "nowhere"], "--database: invalid choice"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], message: str) -> None:
    """Before anything is touched."""
    with pytest.raises(CommandError) as raised:
        call_command("heartbeat_queues", *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
