"""`consume_queues`: which handlers, how many, and what is said when that cannot be."""

from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_pgqueue import Message, Queue, registry
from django_pgqueue.models import MessageQueue
from tests.support.processes import run
from tests.support.rows import payloads
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)

seen: list[Any] = []


@pytest.fixture(autouse=True)
def only_ours() -> None:
    """Forget what other tests saw, and the handlers of the example project; conftest.py restores these."""
    seen.clear()
    registry._handlers.clear()


def note(message: Message) -> None:
    """The handler that is named by its path."""
    seen.append((message.queue, message.payload))


NOTE = f"{__name__}.note"


def test_a_handler_is_given_by_its_path() -> None:
    """For each queue that is named, in place of a registered one, also for queues that nobody declared."""
    registered = Queue("registered")
    registered.handler(lambda message: seen.append("wrong"))
    registered.publish(1)
    Queue("unknown").publish(2)
    call_command("consume_queues", "registered", "unknown", handler=NOTE, drain=True)
    assert sorted(seen) == [("registered", 1), ("unknown", 2)]


def test_without_names_all_registered_queues_are_consumed() -> None:
    """And with names only those."""
    for name in ("a", "b"):
        queue = Queue(name)
        queue.handler(note)
        queue.publish(name)
    call_command("consume_queues", "b", drain=True)
    assert seen == [("b", "b")]
    call_command("consume_queues", drain=True)
    assert sorted(seen) == [("a", "a"), ("b", "b")]


def test_a_name_given_twice_is_one_queue() -> None:
    """With one lane of its concurrency, not two."""
    Queue("a").publish_many([1, 2])
    call_command("consume_queues", "a", "a", handler=NOTE, max_messages=2)
    assert sorted(seen) == [("a", 1), ("a", 2)]


def test_max_messages_and_verbosity(capsys: pytest.CaptureFixture[str]) -> None:
    """It ends after so many, and says so only when asked."""
    Queue("a").publish_many([1, 2, 3])
    call_command("consume_queues", "a", handler=NOTE, max_messages=2)
    assert capsys.readouterr().out == ""
    call_command("consume_queues", "a", handler=NOTE, max_messages=1, verbosity=2)
    assert capsys.readouterr().out == "handled 1 messages\n"
    assert payloads("a") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "--concurrency: must be a number of at least 1, not '0'"),
        (["--concurrency", "many"], "--concurrency: must be a number of at least 1, not 'many'"),
        (["--prefetch", "-3"], "--prefetch: must be"),
        (["--max-messages", "1.5"], "--max-messages: must be"),
        (["--grace", "nan"], "--grace: must be"),
        (["--grace", "-1"], "--grace: must be"),
        (["nobody"], "no handler is registered for nobody"),
        ([], "no handler is registered; declare one"),
        (["--handler", NOTE], "--handler needs the names of queues"),
        (["a", "--handler", "nowhere.at.all"], "nowhere"),
        (["a", "--handler", f"{__name__}.nothing"], "nothing"),
        (["a", "--handler", f"{__name__}.NOTE"], "is not callable"),
        ([" bad name", "--handler", NOTE], "queue name"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], message: str) -> None:
    """And no queue is made for them."""
    with pytest.raises(CommandError) as raised:
        call_command("consume_queues", *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not MessageQueue.objects.filter(name__in=arguments).exists()


def test_an_error_ends_the_process_with_a_status() -> None:
    """Status 1 and one line on stderr, no traceback."""
    done = run("consume_queues", "nobody", queues=["work"])
    assert done.returncode == 1
    assert done.stderr.startswith("CommandError: no handler is registered for nobody; registered: ")
    assert "work" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_database_that_was_not_migrated_is_told_in_one_line() -> None:
    """Waiting would not help: it needs a person."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_pgqueue_messagequeue RENAME TO away")
    try:
        done = run("consume_queues", queues=["work"])
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE away RENAME TO django_pgqueue_messagequeue")
    assert done.returncode == 1
    assert done.stderr.startswith("CommandError: the database refuses: relation")
    assert done.stderr.count("\n") == 1


def test_options_reach_the_worker() -> None:
    """As a real process: two at once, no more than three held, ended when drained."""
    Queue("work").publish_many([{}] * 7)
    done = run("consume_queues", "work", "--drain", "--concurrency=2", "--prefetch=3", "-v2", queues=["work"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "handled 7 messages\n", "")
    assert Seen.objects.count() == 7
