"""The reference in docs/: made of the code, complete, and true of a real database."""

import ast
import contextlib
import dataclasses
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FunctionType
from typing import Any
from uuid import UUID

import pytest
from django.apps import apps
from django.core.management import call_command
from django.dispatch import Signal
from django.test import override_settings

import django_pgqueue
from django_pgqueue import Message, Queue, Topic, TopicMessage, checks, conf, signals
from django_pgqueue.conf import SETTING_TYPES, Settings
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.health import Health
from django_pgqueue.models import MessageQueueItem, QueueConsumer
from django_pgqueue.monitoring.findings import FINDINGS
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import notifying, session
from django_pgqueue.services.counting import QueueStats
from django_pgqueue.subscriptions import LiveMessages, Subscription
from tests.reference import DOCS, PAGES, command_words, commands, made, settings, tables
from tests.reference import signals as signals_page
from tests.support import delete_queue, fetch, make_message, make_queue, wait_until
from tests.workers import consuming, drain

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = DOCS.parent
API = DOCS / "api.md"


# --- Made of the code -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_made_of_the_code(name: str) -> None:
    """When this fails: `python -m tests.reference`, and words where it asks for them."""
    assert (DOCS / f"{name}.md").read_text() == made(name)


def test_what_there_is_stands_in_the_reference() -> None:
    """Every setting, command, signal, table and finding has a heading of its own."""
    headings = {
        page: re.findall(r"^## (\S+)", (DOCS / f"{page}.md").read_text(), re.MULTILINE) for page in (*PAGES, "findings")
    }
    assert headings["settings"] == list(SETTING_TYPES)
    assert headings["commands"] == commands.names()
    assert len(commands.names()) >= 10
    assert headings["signals"] == [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    found = [model._meta.db_table for model in apps.get_app_config("django_pgqueue").get_models()]
    assert headings["tables"][: len(found)] == found
    assert headings["findings"] == list(FINDINGS)


def test_a_thing_without_words_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new command, setting, column or index cannot come without them, and none outlives what it is about."""
    for words, key, page in (
        (command_words.COMMANDS, "reap_queues", "commands"),
        (command_words.OPTIONS, "purge_queue NAME", "commands"),
        (command_words.UNITS, "--grace", "commands"),
        (settings.EXAMPLES, "LEASE", "settings"),
        (signals_page.TESTS, "lease_lost", "signals"),
        (tables.COLUMNS, "queueconsumer.pid", "tables"),
        (tables.INDEXES, "django_pgqueue_item_claim_idx", "tables"),
    ):
        with monkeypatch.context() as patch:
            patch.delitem(words, key)
            with pytest.raises((AssertionError, KeyError), match=re.escape(key)):
                made(page)
    for words, page in ((command_words.COMMANDS, "commands"), (tables.COLUMNS, "tables"), (tables.INDEXES, "tables")):
        with monkeypatch.context() as patch:
            patch.setitem(words, "gone", next(iter(words.values())))
            with pytest.raises(AssertionError, match="gone"):
                made(page)


# --- Settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", SETTING_TYPES)
def test_an_example_of_a_setting_is_allowed_and_takes_effect(key: str) -> None:
    """The line that shows how to change it, read live."""
    with override_settings(PGQUEUE={key: settings.EXAMPLES[key]}):
        assert checks.check_settings(None) == []
        assert getattr(conf.settings, key) == settings.EXAMPLES[key]
    assert getattr(conf.settings, key) == getattr(Settings, key) != settings.EXAMPLES[key]


@pytest.mark.parametrize(
    ("backoff", "is_allowed"),
    [
        ({"base": 0, "max": 0, "factor": 1, "jitter": 0}, True),
        ({"jitter": 1}, True),
        ({"jitter": 1.01}, False),
        ({"factor": 0.99}, False),
        ({"base": -1}, False),
        ({"max": -1}, False),
        ({"other": 1}, False),
    ],
    ids=repr,
)
def test_the_back_off_is_bounded_as_the_page_says(backoff: dict[str, float], is_allowed: bool) -> None:
    """The words for it are written by hand."""
    assert settings.is_allowed("BACKOFF", backoff) == is_allowed


# --- Commands -------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, **options: Any) -> str:
    """Return what a command writes to stdout, whatever its exit status."""
    with contextlib.suppress(SystemExit):
        call_command(*arguments, **options)
    return capsys.readouterr().out


@pytest.fixture
def work() -> None:
    """Queues with something of everything to find."""
    make_queue("q")
    make_message("q")
    make_message("q", expires_in=-1)
    make_queue("idle", auto_deleted=True, idle=7200)


@pytest.mark.parametrize(
    "arguments", [["inspect_queues"], ["diagnose_queues"], ["reap_queues"], ["reap_queues", "--dry-run"]], ids=" ".join
)
def test_json_has_the_keys_of_the_page(work: None, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """All of them, in their order, and no other."""
    found = json.loads(printed(capsys, *arguments, "--format", "json"))
    assert found
    for each in found if isinstance(found, list) else [found]:
        assert list(each) == list(command_words.COMMANDS[arguments[0]].keys)


def test_a_command_with_a_format_must_say_what_its_json_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the page is not made."""
    silent = dataclasses.replace(command_words.COMMANDS["reap_queues"], json="")
    monkeypatch.setitem(command_words.COMMANDS, "reap_queues", silent)
    with pytest.raises(AssertionError, match="reap_queues: say what"):
        made("commands")


def test_a_probe_answers_with_the_keys_of_the_page() -> None:
    """/livez, /readyz and the file."""
    report = Health(Consumer([make_handler(Queue("q"), print)])).report()
    assert list(dataclasses.asdict(report)) == list(command_words.COMMANDS["consume_queues"].keys)


def test_commands_print_what_the_page_says(work: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word, but for numbers and names."""
    Queue("q", max_deliveries=1).publish(1)
    for arguments in (
        ["pause_queue", "q"],
        ["resume_queue", "q"],
        ["reap_queues", "--dry-run"],
        ["reap_queues"],
        ["redrive_queue", "q", "--dry-run"],
        ["redrive_queue", "q"],
        ["purge_queue", "q", "--dry-run"],
        ["purge_queue", "q"],
    ):
        line = printed(capsys, *arguments).splitlines()[0]
        said = re.sub(r" q$", " NAME", re.sub(r"\d+", "N", line))
        assert f"`{said}`" in command_words.COMMANDS[arguments[0]].prints, arguments
    assert printed(capsys, "diagnose_queues").splitlines()[-1].rpartition(" ")[2] in ("findings", "finding", "wrong")


def test_an_exit_status_is_on_the_page() -> None:
    """Those that are written as numbers in the commands."""
    for name in commands.names():
        source = inspect.getsource(commands.load_command_class("django_pgqueue", name).__class__)
        for status in re.findall(r"returncode=(\d+)", source):
            assert int(status) in command_words.COMMANDS[name].exits, f"{name}: {status}"
        assert ("progress_line" in source) == (130 in command_words.COMMANDS[name].exits), name
    assert set(command_words.COMMANDS["diagnose_queues"].exits) == {0, 1, 2}


# --- Signals --------------------------------------------------------------------------------------


@contextlib.contextmanager
def heard(signal: Signal) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Give what a signal is sent with: senders and arguments."""
    told: list[tuple[Any, dict[str, Any]]] = []

    def note(sender: Any, **kwargs: Any) -> None:
        told.append((sender, {key: value for key, value in kwargs.items() if key != "signal"}))

    signal.connect(note)
    try:
        yield told
    finally:
        signal.disconnect(note)


def fail(message: Message) -> None:
    raise ValueError("no")


def lose_a_lease() -> None:
    queue = Queue("q")
    queue.publish(1)
    (message,) = queue.claim()
    queue.ack(message)
    with pytest.raises(django_pgqueue.LeaseLost):
        queue.ack(message)


def lag() -> None:
    go_on = threading.Event()
    with Topic("q").subscribe(lambda message: go_on.wait(60), buffer=1) as subscription:
        for number in range(3):
            Topic("q").publish(number)
        wait_until(lambda: subscription.dropped)
        go_on.set()


def reap() -> None:
    make_queue("q", auto_deleted=True, idle=7200)
    Reaper("default").run_once()


def heal() -> None:
    queue = Queue("q", auto_deleted=True)
    queue.publish(1)
    delete_queue("q")
    queue.publish(2)


def adopt() -> None:
    make_queue("q")
    make_message("q")
    delete_queue("q")
    make_queue("q")
    Reaper("default").run_once()


def expire() -> None:
    make_queue("q")
    make_message("q", expires_in=-1)
    Reaper("default").run_once()


def reject() -> Queue:
    queue = Queue("q")
    queue.publish(1)
    queue.reject(*queue.claim())
    return queue


def handle(function: Callable[[Message], Any]) -> None:
    queue = Queue("q", max_deliveries=1)
    queue.publish(1)
    Consumer([make_handler(queue, function)], drain=True).run()


#: What sends each signal, on queue "q".
CAUSES: dict[str, Callable[[], object]] = {
    "queue_created": lambda: Queue("q").declare(),
    "queue_healed": heal,
    "queue_reaped": reap,
    "queue_paused": lambda: (make_queue("q"), Queue("q").pause()),
    "queue_resumed": lambda: (make_queue("q"), Queue("q").resume()),
    "queue_taken_over": lambda: (Queue("q", exclusive=True).publish(1), Queue("q", exclusive=True).claim()),
    "messages_published": lambda: Queue("q").publish(1),
    "messages_handled": lambda: handle(lambda message: None),
    "message_failed": lambda: handle(fail),
    "messages_dead_lettered": reject,
    "messages_expired": expire,
    "messages_redriven": lambda: reject().redrive(),
    "messages_purged": lambda: (Queue("q").publish(1), Queue("q").purge()),
    "orphans_adopted": adopt,
    "subscription_lagged": lag,
    "lease_lost": lose_a_lease,
    "consumer_started": lambda: handle(lambda message: None),
    "consumer_stopped": lambda: handle(lambda message: None),
}


@pytest.mark.parametrize("name", signals_page.names())
def test_a_signal_is_sent_with_the_arguments_of_the_page(name: str) -> None:
    """And with its sender, by what really happens."""
    with heard(getattr(signals, name)) as told:
        CAUSES[name]()
    told = [(sender, sent) for sender, sent in told if sender == "q" or isinstance(sender, UUID)]
    assert told
    sender, sent = told[0]
    assert isinstance(sender, UUID if "UUID" in signals_page.SENDERS.get(name, "") else str)
    assert list(sent) == signals_page.arguments()[name]


def test_a_sender_is_compared_as_an_object() -> None:
    """So that a receiver has to look for itself, as the page says."""
    told: list[str] = []

    def note(sender: str, **kwargs: Any) -> None:
        told.append(sender)

    name = "".join(["ord", "ers"])
    signals.messages_published.connect(note, sender=name)
    try:
        Queue("".join(["ord", "ers"])).publish(1)
    finally:
        signals.messages_published.disconnect(note, sender=name)
    assert told == []
    with heard(signals.messages_published) as all_of_them:
        Queue("orders").publish(1)
    assert [sender for sender, _ in all_of_them] == [name]


def test_a_consumer_tells_of_its_start_and_end() -> None:
    """Its row is there at the start, and gone at the end; in between it handles."""
    order: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        order.append((what, QueueConsumer.objects.exists()))

    def started(sender: UUID, *, using: str, queues: list[str], **kwargs: Any) -> None:
        assert (using, queues) == ("default", ["q"])
        note("started")

    def stopped(sender: UUID, **kwargs: Any) -> None:
        note("stopped")

    signals.consumer_started.connect(started)
    signals.consumer_stopped.connect(stopped)
    try:
        Queue("q").publish(1)
        Consumer([make_handler(Queue("q"), lambda message: note("handled"))], drain=True).run()
    finally:
        signals.consumer_started.disconnect(started)
        signals.consumer_stopped.disconnect(stopped)
    assert order == [("started", True), ("handled", True), ("stopped", False)]


@pytest.mark.parametrize("test", sorted(set(signals_page.TESTS.values())))
def test_the_tests_that_the_page_names_are_there(test: str) -> None:
    """In their files."""
    path, _, name = test.partition("::")
    functions = {
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert name in functions


def test_the_docstring_of_the_signals_has_their_arguments() -> None:
    """The table that `help(django_pgqueue.signals)` shows."""
    text = " ".join((signals.__doc__ or "").partition("===\n")[2].split())
    rows = re.split(rf"\b({'|'.join(signals_page.names())})\b(?= using)", text)
    told = dict(zip(rows[1::2], rows[2::2], strict=True))
    assert list(told) == signals_page.names()
    for name, arguments in signals_page.arguments().items():
        assert all(re.search(rf"\b{argument}\b", told[name]) for argument in arguments), name


# --- Tables ---------------------------------------------------------------------------------------


def test_the_columns_are_those_of_the_database() -> None:
    """Name, type, null and default of each."""
    found = fetch(
        "SELECT table_name, column_name, data_type || CASE is_nullable WHEN 'YES' THEN ', null' ELSE '' END,"
        " CASE WHEN is_identity = 'YES' THEN 'identity'"
        "      ELSE coalesce('`' || trim(both '''' from split_part(column_default, '::', 1)) || '`', '') END"
        " FROM information_schema.columns WHERE table_schema = 'public' AND starts_with(table_name, 'django_pgqueue_')"
    )
    told = {
        (model._meta.db_table, field.column, *tables.column(field)[1:3])
        for model in apps.get_app_config("django_pgqueue").get_models()
        for field in model._meta.local_fields
    }
    assert told == set(found)


def normal(definition: str) -> str:
    """Return SQL without what PostgreSQL adds to it."""
    return re.sub(r"[()\s\"]|::text|::double precision|\.0\b", "", definition).lower()


def test_the_indexes_and_constraints_are_those_of_the_database() -> None:
    """But for primary keys, NOT NULL, and what the page says of Django's own."""
    indexes = dict(
        fetch(
            "SELECT indexname, regexp_replace(indexdef, '.* USING btree ', '') FROM pg_indexes"
            " WHERE starts_with(tablename, 'django_pgqueue_') AND indexname !~ '_pkey$|_like$'"
        )
    )
    constraints = dict(
        fetch(
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE starts_with(conrelid::regclass::text, 'django_pgqueue_') AND contype IN ('c', 'u', 'f')"
        )
    )
    models = list(apps.get_app_config("django_pgqueue").get_models())
    told = {each.name: tables.definition(model, each) for model in models for each in model._meta.indexes}
    rules = {each.name: tables.rule(model, each) for model in models for each in model._meta.constraints}
    assert {name: normal(each) for name, each in told.items()} == {
        name: normal(each) for name, each in indexes.items() if name not in rules
    }
    assert {name: normal(each).replace("notdeferrable", "") for name, each in rules.items()} == {
        name: normal(each) for name, each in constraints.items()
    }
    ((triggers,),) = fetch(
        "SELECT array_agg(tgname::text) FROM pg_trigger WHERE NOT tgisinternal AND tgname ~ 'pgqueue'"
    )
    assert all(f"`{trigger}`" in made("tables") for trigger in triggers)


def test_each_message_is_in_the_state_of_its_condition_and_in_no_other() -> None:
    """As `MessageQueueItem.objects.ready()` and so on, and as `state()`."""
    make_queue("q")
    for due_in in (None, -60, 60):
        for expires_in in (None, -30, 30):
            for lease in (None, -10, 10):
                make_message("q", due_in=due_in, expires_in=expires_in, lease=lease)
                make_message(
                    "q",
                    due_in=due_in,
                    expires_in=expires_in,
                    lease=lease,
                    dead_lettered_from="x",
                    dead_lettered_at="2026-01-01T00:00:00Z",
                )
    make_queue("gone")
    make_message("gone")
    make_message("gone", lease=10)
    delete_queue("gone")
    seen: list[int] = []
    now = session.now("default") + timedelta(0)
    for state in tables.STATES:
        ids = sorted(message_id for (message_id,) in fetch(tables.query(state)))
        assert ids, state
        assert ids == sorted(getattr(MessageQueueItem.objects, state)().values_list("id", flat=True))
        assert {item.state(now) for item in MessageQueueItem.objects.filter(id__in=ids)} == {state}
        seen += ids
    assert sorted(seen) == sorted(MessageQueueItem.objects.values_list("id", flat=True))


def test_the_bare_insert_is_a_publish() -> None:
    """A consumer handles it. Without its queue it fails at once."""
    with pytest.raises(Exception, match="violates foreign key"):
        fetch(tables.INSERT)
    queue = Queue("orders")
    queue.declare()
    fetch(tables.INSERT)
    assert drain(queue) == [{"order_id": 42}]


def test_the_notification_of_the_page_wakes_a_consumer(settings: Any) -> None:
    """One that would look again in an hour."""
    settings.PGQUEUE = {"POLL_INTERVAL": 3600}
    assert notifying.channel("orders") in tables.NOTIFY
    queue, seen = Queue("orders"), []
    with consuming(Consumer([make_handler(queue, seen.append)])) as consumer:
        wait_until(lambda: consumer.condition().listening and consumer.condition().claim_age)
        queue.declare()
        # What it looks for again after it was woken by the connect.
        wait_until(lambda: (consumer.condition().claim_age or 0) > 0.5)
        fetch(tables.INSERT)
        fetch(tables.NOTIFY)
        wait_until(lambda: seen)


# --- The Python API -------------------------------------------------------------------------------


def test_the_api_page_has_all_that_is_exported() -> None:
    """In its table, and each with a block of its own."""
    text = API.read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\]", text, re.MULTILINE)) == sorted(django_pgqueue.__all__)
    blocks = re.findall(r"^\.\. auto(?:class|exception):: (\w+)", text, re.MULTILINE)
    assert sorted(name for name in blocks if name != "django_pgqueue") == sorted(django_pgqueue.__all__)


def public_members(kind: type) -> dict[str, Any]:
    """Return what a class defines itself without an underscore."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


EXPORTED = [getattr(django_pgqueue, name) for name in django_pgqueue.__all__]


@pytest.mark.parametrize("kind", [*EXPORTED, QueueStats, Subscription, LiveMessages], ids=lambda kind: kind.__name__)
def test_what_is_public_is_documented(kind: type) -> None:
    """Each class, method and property has a docstring of its own."""
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")
    for name, value in public_members(kind).items():
        if isinstance(value, FunctionType | property):
            assert value.__doc__, f"{kind.__name__}.{name}"


@pytest.mark.parametrize("kind", [Message, TopicMessage, QueueStats], ids=lambda kind: kind.__name__)
def test_each_field_of_what_comes_back_has_a_comment(kind: type) -> None:
    """One that Sphinx shows."""
    source = inspect.getsource(kind)
    for field in dataclasses.fields(kind):
        if field.name not in ("name",):
            assert re.search(rf"(#:[^\n]*\n)\s+{field.name}:", source), field.name


def test_the_settings_that_docstrings_name_are_there() -> None:
    """In capitals, between backquotes."""
    for kind in EXPORTED:
        texts = [kind.__doc__ or "", *(getattr(value, "__doc__", "") or "" for value in public_members(kind).values())]
        for name in re.findall(r"``([A-Z]+(?:_[A-Z]+)+)``", " ".join(texts)):
            assert name in {*SETTING_TYPES, "USE_TZ"}, f"{kind.__name__}: {name}"
