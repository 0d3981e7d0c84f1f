"""docs/signals.md: every signal, with what it carries, when it is sent, how it is logged."""

import ast
import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from django.dispatch import Signal

import django_pgqueue
from django_pgqueue import signals
from tests.reference.markdown import code, demand, plain, table

HEAD = """\
# Signals

`django_pgqueue.signals` has them. A receiver is a function that takes the sender and keyword arguments:

```python
from django.dispatch import receiver
from django_pgqueue.signals import messages_dead_lettered


@receiver(messages_dead_lettered)
def alert(sender, *, ids, reason, **kwargs):
    if sender == "orders":
        ...
```

Take `**kwargs`: later releases may add arguments. Look at the sender inside the receiver and not by
`connect(sender=…)`, which compares objects and not texts.

A receiver runs in the thread in which it happens, which waits for it: a publisher's, a consumer's claiming thread, a
handler's (`message_failed` of an async handler: on its event loop), the listener's. What it raises is logged by Django
(`django.dispatch`) and changes nothing.

A signal is sent in the process that does it, and in no other. "Inside a transaction" is inside `atomic()`: what is
rolled back is not told. With `AUTOCOMMIT` off and outside `atomic()` it is told at once.

Signals are logged by the logger `django_pgqueue`, one line each. Of `error` and `reason` the line has what stands
before the first colon, which is the type of an exception: its text may quote the payload. The signal has all of it, and
so have the tracebacks that a consumer logs as DEBUG.
"""

#: Who sends it, where that is not the name of a queue.
SENDERS = {
    "subscription_lagged": "the topic's name",
    "consumer_started": "the consumer's id (`UUID`)",
    "consumer_stopped": "the consumer's id (`UUID`)",
}

#: What the arguments are: of one signal, or of all.
ARGUMENTS = {
    "using": "alias of the database",
    "count": "how many messages",
    "ids": "list of message ids",
    "queues": "list of the names of its queues",
    "queue_healed cause": '`"revived"`: the reaper had removed it, which is as it should be; `"vanished"`: this process'
    " had known it, and something else removed it",
    "queue_healed standing": "whether it is a standing queue",
    "queue_reaped idle_seconds": "seconds since it was in use",
    "queue_taken_over consumer": "id (`UUID`) of the new owner",
    "message_failed message": "the `Message`",
    "message_failed error": "the exception as text, or the reason of a `Nack`",
    "message_failed delay": "seconds until it is delivered again",
    "messages_dead_lettered target": "name of the dead-letter queue; `None`: parked where they are",
    "messages_dead_lettered reason": "the reason of the first of them",
    "subscription_lagged reason": '`"full"` (its buffer), `"disconnected"` (and is connected again), `"expired"` (a'
    " large message was removed before it was read)",
    "subscription_lagged dropped": "how many messages that were; `None`: not known",
}

#: What a receiver is given to see what it logs: several where the level depends on them.
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "queue_healed": [{"cause": "revived"}, {"cause": "vanished"}],
}
SAMPLE = {
    "using": "default",
    "count": 1,
    "ids": [1],
    "queues": ["q"],
    "cause": "vanished",
    "standing": True,
    "idle_seconds": 1.0,
    "consumer": "c",
    "message": SimpleNamespace(id=1, delivery_count=1),
    "error": "ValueError: x",
    "delay": 1.0,
    "target": "t",
    "reason": "full",
    "dropped": 1,
}

#: The tests that see each sent in the course of things.
TESTS = {
    "queue_created": "tests/test_events.py::test_a_first_use_is_no_event",
    "queue_healed": "tests/test_events.py::test_a_reaped_queue_is_revived",
    "queue_reaped": "tests/test_reaper.py::test_an_idle_empty_auto_deleted_queue_is_reaped",
    "queue_paused": "tests/test_pause.py::test_pause_and_resume_join_a_transaction",
    "queue_resumed": "tests/test_pause.py::test_pause_and_resume_join_a_transaction",
    "queue_taken_over": "tests/test_exclusive.py::test_the_new_owner_is_told_of",
    "messages_published": "tests/test_metrics.py::test_publishes_count_once_they_are_committed",
    "messages_handled": "tests/test_metrics.py::test_what_becomes_of_messages_is_counted",
    "message_failed": "tests/test_metrics.py::test_what_becomes_of_messages_is_counted",
    "messages_dead_lettered": "tests/test_metrics.py::test_what_becomes_of_messages_is_counted",
    "messages_expired": "tests/test_metrics.py::test_what_becomes_of_messages_is_counted",
    "messages_redriven": "tests/test_redrive.py::test_inside_a_transaction_all_of_it_is_part_of_that",
    "messages_purged": "tests/test_purge.py::test_inside_a_transaction_all_of_it_is_part_of_that",
    "orphans_adopted": "tests/test_orphans.py::test_adoption_is_told_and_wakes_the_consumers",
    "subscription_lagged": "tests/test_subscription_limits.py::"
    "test_beyond_its_buffer_a_slow_subscriber_loses_the_oldest_messages",
    "lease_lost": "tests/test_settling.py::test_losing_a_lease_is_signalled",
    "consumer_started": "tests/test_reference.py::test_a_consumer_tells_of_its_start_and_end",
    "consumer_stopped": "tests/test_reference.py::test_a_consumer_tells_of_its_start_and_end",
}


def names() -> list[str]:
    """Return the names of all signals, in their order."""
    return [name for name, value in vars(signals).items() if isinstance(value, Signal)]


def page() -> str:
    """Return what docs/signals.md should be."""
    meanings, sent = comments(), arguments()
    demand(meanings, names(), "signal with a comment in signals.py")
    demand(sent, names(), "signal that is sent")
    demand(TESTS, names(), "signal with a test")
    overview = table(
        ("signal", "arguments", "logged"),
        [
            (f"[{name}](#{name})", ", ".join(map(code, sent[name])), levels_of(logged(name, sent[name])))
            for name in names()
        ],
    )
    return "\n".join([HEAD, overview, *(section(name, meanings[name], sent[name]) for name in names())])


def section(name: str, meaning: str, sent: list[str]) -> str:
    """Return what the page says of one signal."""
    rows = [("`sender`", SENDERS.get(name, "the queue's name"))]
    rows += [(code(each), ARGUMENTS.get(f"{name} {each}") or ARGUMENTS[each]) for each in sent]
    log = "".join(f"* logged as {level}: `{line}`\n" for level, line in logged(name, sent)) or "* not logged\n"
    return f"## {name}\n\n{meaning}\n\n{table(('argument', 'what it is'), rows)}\n{log}* seen by `{TESTS[name]}`\n"


def comments() -> dict[str, str]:
    """Return what the comments of signals.py say of each."""
    found: dict[str, str] = {}
    lines: list[str] = []
    for line in inspect.getsource(signals).splitlines():
        if line.startswith("#:"):
            lines.append(line.removeprefix("#:"))
        elif line.endswith(" = Signal()") and lines:
            found[line.partition(" ")[0]] = plain(" ".join(lines))
            lines = []
    return found


def arguments() -> dict[str, list[str]]:
    """Return the arguments that each signal is sent with, as the calls in the code have them."""
    found: dict[str, list[str]] = {}
    for call in calls():
        match call.func:
            case ast.Attribute(value=ast.Attribute(value=ast.Name("signals"), attr=name), attr="send_robust"):
                sent = [str(keyword.arg) for keyword in call.keywords]
                assert found.setdefault(name, sent) == sent, f"{name} is sent with {sent} and {found[name]}"
    return found


def calls() -> Iterator[ast.Call]:
    """Yield all calls in the package."""
    for path in sorted(Path(django_pgqueue.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield node


def levels_of(lines: list[tuple[str, str]]) -> str:
    return ", ".join(level for level, _ in lines) or "no"


def logged(name: str, sent: list[str]) -> list[tuple[str, str]]:
    """Return level and line of what the signal's receivers log, found by calling them."""
    found = []
    for sample in SAMPLES.get(name, [{}]):
        given = {each: {**SAMPLE, **sample}[each] for each in sent}
        for record in records_of(name, given):
            found.append((record.levelname, line_of(record, sample)))
    return found


def records_of(name: str, given: Mapping[str, Any]) -> list[logging.LogRecord]:
    """Call the receiver that logs a signal, if there is one, and return what it logs."""
    receiver = getattr(signals, f"log_{name}", None)
    if receiver is None:
        return []
    found: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("django_pgqueue"), logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    level, handlers, propagate = logger.level, logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.DEBUG)
    try:
        receiver("q", **given)
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    return found


def line_of(record: logging.LogRecord, sample: Mapping[str, Any]) -> str:
    """Return a log line with dots for what changes, but for what chose it."""
    text = str(record.msg)
    for key, value in sample.items():
        text = text.replace(f"{key}=%s", f"{key}={value}")
    return " ".join(word.partition("=")[0] + "=…" if "=%" in word else word for word in text.split())
