"""The reference in docs/: made of the code, complete, and true of a real database."""

import ast
import contextlib
import dataclasses
import html
import inspect
import json
import re
import threading
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any
from uuid import UUID

import command_parsers
import pytest
from command_list import with_help
from django.apps import apps
from django.core.management import call_command, get_commands, load_command_class
from django.dispatch import Signal
from django.test import override_settings
from statement_list import modules, statements

import django_pgqueue
from django_pgqueue import Message, Queue, Topic, TopicMessage, checks, conf, signals
from django_pgqueue.admin.operations import OPERATIONS
from django_pgqueue.conf import SETTING_TYPES, Settings
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.health import Health
from django_pgqueue.management.verbs import QueuesCommand
from django_pgqueue.models import MessageQueueItem, QueueConsumer
from django_pgqueue.monitoring.findings import FINDINGS
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import notifying, session
from django_pgqueue.services.counting import QueueStats
from django_pgqueue.subscriptions import LiveMessages, Subscription
from django_pgqueue.validation import MAX_COUNT, MAX_SECONDS
from tests.docs.reference import DOCS, PAGES, tables
from tests.docs.reference import signals as signals_page
from tests.docs.reference.documented import build, documented
from tests.support.processes import consuming, drain
from tests.support.rows import delete_queue, make_message, make_queue
from tests.support.sessions import fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

API = DOCS / "api.md"


# --- Made of the code -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_made_of_the_code(name: str) -> None:
    """When this fails: `python -m tests.docs.reference`, and words where it asks for them."""
    assert (DOCS / f"{name}.md").read_text() == PAGES[name]()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages that Sphinx makes of the code, as HTML."""
    return build(tmp_path_factory.mktemp("html"), "settings", "signals", "commands", "statements", "admin")


def test_what_there_is_stands_in_the_reference(built: dict[str, str]) -> None:
    """Every setting, signal, command, option, operation, statement, table and finding, in its order."""
    assert re.findall(r'<dt .*? id="django_pgqueue\.conf\.Settings\.(\w+)"', built["settings"]) == list(SETTING_TYPES)
    assert re.findall(r'<dt .*? id="django_pgqueue\.signals\.(\w+)"', built["signals"]) == signals_page.names()
    assert re.findall(r"<h2>(\w+)<", built["commands"]) == COMMANDS
    assert len(COMMANDS) >= 10
    for name in COMMANDS:
        shown = built["commands"].partition(f"<h2>{name}<")[2].partition("<h2>")[0]
        for action in own_actions(name):
            assert f"<kbd>{', '.join(action.option_strings) or action.metavar}</kbd>" in shown, f"{name} {action.dest}"
    listed = [each.name for each in statements(modules())]
    assert re.findall(r"<h3>([A-Z_]+)<", built["statements"]) == listed
    headings = {
        page: re.findall(r"^## (\S+)", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
        for page in ("tables", "findings")
    }
    found = [model._meta.db_table for model in apps.get_app_config("django_pgqueue").get_models()]
    assert headings["tables"][: len(found)] == found
    assert headings["findings"] == list(FINDINGS)


def test_an_operation_is_in_the_table_of_the_admin_page(built: dict[str, str]) -> None:
    """With its explanation, the fields of its form, and whether it is done to several queues at once."""
    lines = re.findall(r"<tr.*?</tr>", built["admin"].partition("for several queues at once")[2], re.DOTALL)
    told = [re.findall(r"<td><p>(.*?)</p></td>", html.unescape(line), re.DOTALL) for line in lines]
    assert len(told) == len(OPERATIONS) >= 5
    for (title, explanation, fields, several), each in zip(told, OPERATIONS.values(), strict=True):
        assert (title, explanation) == (each.title, each.explanation)
        assert (several == "yes") == each.is_bulk
        assert (fields == "nothing") == (not each.form.base_fields)
        for field in each.form.base_fields.values():
            assert field.help_text in fields


def test_a_section_of_a_command_that_is_gone_fails() -> None:
    """So that the page keeps no words on it."""
    page = with_help("# Commands\n\n## reap_queues\n\nWords.\n")
    assert re.findall(r"^## (\w+)", page, re.MULTILINE) == COMMANDS
    assert re.search(r":func: reap_queues\n[^#]*Words\.\n", page)
    with pytest.raises(ValueError, match="gone_queue"):
        with_help("# Commands\n\n## gone_queue\n")


def test_a_default_and_an_option_are_seen_as_they_are(built: dict[str, str]) -> None:
    """Values and types of settings, and no options of Django's own."""
    page = re.sub(r"<[^>]+>", "", built["settings"])
    assert "LEASE: float = 60" in page
    assert "LISTEN_DATABASE: str | None = None" in page
    assert "--traceback" not in built["commands"].partition("<h2>")[2]


def test_a_thing_without_words_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new column or index cannot come without them, and none outlives what it is about."""
    for words, key in (
        (tables.COLUMNS, "queueconsumer.pid"),
        (tables.INDEXES, "django_pgqueue_item_claim_idx"),
    ):
        with monkeypatch.context() as patch:
            patch.delitem(words, key)
            with pytest.raises((AssertionError, KeyError), match=re.escape(key)):
                tables.page()
        with monkeypatch.context() as patch:
            patch.setitem(words, "gone", next(iter(words.values())))
            with pytest.raises(AssertionError, match="gone"):
                tables.page()


# --- Settings -------------------------------------------------------------------------------------

SETTINGS = documented("django_pgqueue.conf", "Settings")

#: What a project gets that sets nothing: a change of these changes what it does.
DEFAULTS = {
    "DATABASE": "default",
    "LISTEN_DATABASE": None,
    "DECLARE_TTL": 15,
    "HEARTBEAT_INTERVAL": 60,
    "REAP_IDLE_AFTER": 3600,
    "EPHEMERAL_TTL": 300,
    "DEFAULT_TTL": None,
    "LEASE": 60,
    "MAX_DELIVERIES": 5,
    "BACKOFF": {"base": 1, "factor": 2, "max": 3600, "jitter": 0.1},
    "PREFETCH": 100,
    "POLL_INTERVAL": 5,
    "NOTIFY_INTERVAL": 0.05,
    "CHANNEL_PREFIX": "django_pgqueue",
    "TASK_RESULT_TTL": 86_400,
    "MAX_PAYLOAD_BYTES": 16_777_216,
}


def is_allowed(key: str, value: object) -> bool:
    return not checks._problem(key, value)


def test_the_defaults_are_these() -> None:
    """Those of the settings, in their order."""
    assert {key: getattr(Settings, key) for key in SETTING_TYPES} == DEFAULTS
    assert list(DEFAULTS) == list(SETTING_TYPES) == list(SETTINGS)


@pytest.mark.parametrize("key", SETTING_TYPES)
def test_a_setting_is_explained(key: str) -> None:
    """What it is, its unit, what is allowed, when it is read, an example."""
    assert SETTINGS[key].text
    unit = ["unit"] if is_allowed(key, 1) else []
    assert list(SETTINGS[key].fields) == [*unit, "allowed", "read", "example"]
    assert all(SETTINGS[key].fields.values())


@pytest.mark.parametrize("key", SETTING_TYPES)
def test_a_setting_allows_what_its_comment_says(key: str) -> None:
    """The check is asked."""
    fields, text = SETTINGS[key].fields, SETTINGS[key].fields["allowed"]
    assert is_allowed(key, None) == ("or ``None``" in text)
    if not is_allowed(key, 1):
        return
    assert is_allowed(key, 1.5) == text.startswith("a number") == (fields["unit"] == "seconds")
    assert is_allowed(key, 1.5) != text.startswith("a whole number")
    assert is_allowed(key, 0) == ("0 or greater" in text) != ("greater than 0" in text)
    assert not is_allowed(key, -1)
    most = MAX_SECONDS if is_allowed(key, 1.5) else MAX_COUNT
    assert is_allowed(key, most) and not is_allowed(key, most + 1)
    assert f"at most {most:,}" in " ".join((DOCS / "settings.md").read_text().split())


@pytest.mark.parametrize("key", SETTING_TYPES)
def test_an_example_of_a_setting_is_allowed_and_takes_effect(key: str) -> None:
    """The line that shows how to change it, read live."""
    example = ast.literal_eval(SETTINGS[key].fields["example"].strip("`").removeprefix("PGQUEUE = "))
    assert list(example) == [key]
    with override_settings(PGQUEUE=example):
        assert checks.check_settings(None) == []
        assert getattr(conf.settings, key) == example[key]
    assert getattr(conf.settings, key) == getattr(Settings, key) != example[key]


@pytest.mark.parametrize(
    ("backoff", "is_good"),
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
def test_the_back_off_is_bounded_as_its_comment_says(backoff: dict[str, float], is_good: bool) -> None:
    """The words for it are its own."""
    assert is_allowed("BACKOFF", backoff) == is_good


# --- Commands -------------------------------------------------------------------------------------

COMMANDS = sorted(name for name, app in get_commands().items() if app == "django_pgqueue")
#: Those that do one thing to each queue that they are given.
OF_EACH_QUEUE = [name for name in COMMANDS if isinstance(load_command_class("django_pgqueue", name), QueuesCommand)]


def own_actions(name: str) -> list[Action]:
    """Return a command's arguments and options, without those that all commands have."""
    return [action for action in getattr(command_parsers, name)._actions if action.help != SUPPRESS]


def told(name: str) -> dict[str, str]:
    """Return what a command's help says below its options, by the label of the paragraph."""
    epilog = load_command_class("django_pgqueue", name).epilog
    paragraphs = [" ".join(each.split()) for each in epilog.split("\n\n")]
    return dict(re.findall(r"^(Exit status|Signals|Output): (.+)", "\n".join(paragraphs), re.MULTILINE))


def keys_of(name: str) -> list[str]:
    """Return the keys of a command's JSON that the page lists."""
    section = (DOCS / "commands.md").read_text().partition(f"## {name}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| .", section, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_explained(name: str) -> None:
    """What it does, its arguments and options, exit status, signals, output, and the keys of its JSON."""
    command = load_command_class("django_pgqueue", name)
    assert command.help
    assert list(told(name)) == ["Exit status", "Signals", "Output"]
    for action in own_actions(name):
        assert action.help, f"{name} {action.dest}"
        # Of those that take a number with a lower bound.
        if isinstance(action.type, FunctionType):
            least = inspect.getclosurevars(action.type).nonlocals["least"]
            assert re.search(rf"at least {least:g}(?![\d.])", action.help), f"{name} {action.dest}"
    has_format = any(action.dest == "format" for action in own_actions(name))
    assert bool(keys_of(name)) == (has_format or name == "consume_queues")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_an_option_tells_its_default(name: str) -> None:
    """The one that it has."""
    for action in own_actions(name):
        told = re.search(r"\(default: ([^),]+)", action.help or "")
        default = action.default
        if default is None or default == [] or isinstance(default, bool):
            continue
        value = f"{default:g}" if isinstance(default, int | float) else str(default)
        assert told and told[1] == {"-": "standard input"}.get(value, value), f"{name} {action.dest}"


def test_the_commands_without_an_alias_are_named() -> None:
    """All others take one, as the page says."""
    (named,) = re.findall(r"All commands except (.+?) accept\s", (DOCS / "databases.md").read_text())
    without = [name for name in COMMANDS if "database" not in {action.dest for action in own_actions(name)}]
    assert re.findall(r"`(\w+)`", named) == without


def test_help_keeps_its_paragraphs() -> None:
    """And wraps them."""
    text = load_command_class("django_pgqueue", "pause_queue").create_parser("manage.py", "pause_queue").format_help()
    assert re.search(r"\n\nExit status: 0 if .*\n.*\.\n\nSignals: .*\n\nOutput: \"paused NAME\"", text)


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
        assert list(each) == keys_of(arguments[0])


def test_a_probe_answers_with_the_keys_of_the_page() -> None:
    """/livez, /readyz and the file."""
    report = Health(Consumer([make_handler(Queue("q"), print)])).report()
    assert list(dataclasses.asdict(report)) == keys_of("consume_queues")


def test_commands_print_what_their_help_says(work: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word, but for numbers and names."""
    Queue("q", max_deliveries=1).publish(1)
    for arguments in (
        *([name, "q"] for name in OF_EACH_QUEUE),
        ["reap_queues", "--dry-run"],
        ["reap_queues"],
        ["redrive_queue", "q", "--dry-run"],
        ["redrive_queue", "q"],
        ["purge_queue", "q", "--dry-run"],
        ["purge_queue", "q"],
    ):
        line = printed(capsys, *arguments).splitlines()[0]
        said = re.sub(r" q$", " NAME", re.sub(r"\d+", "N", line))
        assert f'"{said}' in told(arguments[0])["Output"], arguments
    assert printed(capsys, "diagnose_queues").splitlines()[-1].rpartition(" ")[2] in ("findings", "finding", "wrong")


def test_an_exit_status_is_in_the_help() -> None:
    """Those that are written as numbers in the commands."""
    exits = {name: set(re.findall(r"\b(\d+),? (?:also )?if\b", told(name)["Exit status"])) for name in COMMANDS}
    for name in COMMANDS:
        source = inspect.getsource(type(load_command_class("django_pgqueue", name)))
        assert {"0", "1", *re.findall(r"returncode=(\d+)", source)} <= exits[name], name
        assert ("progress_line" in source) == ("130" in exits[name]), name
    assert exits["diagnose_queues"] == {"0", "1", "2"}


# --- Signals --------------------------------------------------------------------------------------

SIGNALS = documented("django_pgqueue.signals")


@pytest.mark.parametrize("name", signals_page.names())
def test_a_signal_is_explained(name: str) -> None:
    """When it is sent, its arguments as the code sends them, the transaction, the log line as it is logged."""
    text, fields = SIGNALS[name].text, SIGNALS[name].fields
    sent = signals_page.arguments()[name]
    assert text
    assert list(fields) == [*(f"param {each}" for each in ("sender", *sent)), "transaction", "logged"]
    assert all(fields.values())
    lines = signals_page.logged(name, sent)
    levels, _, line = fields["logged"].partition(", ``") if len(lines) < 2 else fields["logged"].rpartition(", ``")
    assert re.findall(r"[A-Z]{4,}", levels) == [level for level, _ in lines]
    assert {line.strip("`")} == ({line for _, line in lines} or {""})


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


def operate(verb: str) -> None:
    Queue("q").publish(1)
    getattr(Queue("q"), verb)()


#: What sends each signal, on queue "q": what operators do, and all else.
CAUSES: dict[str, Callable[[], object]] = {
    **{name: partial(operate, verb) for name, verb in signals_page.operations().items()},
    "queue_created": lambda: Queue("q").declare(),
    "queue_healed": heal,
    "queue_reaped": reap,
    "queue_taken_over": lambda: (Queue("q", exclusive=True).publish(1), Queue("q", exclusive=True).claim()),
    "messages_published": lambda: Queue("q").publish(1),
    "messages_handled": lambda: handle(lambda message: None),
    "message_failed": lambda: handle(fail),
    "messages_dead_lettered": reject,
    "messages_expired": expire,
    "messages_redriven": lambda: reject().redrive(),
    "orphans_adopted": adopt,
    "subscription_lagged": lag,
    "lease_lost": lose_a_lease,
    "consumer_started": lambda: handle(lambda message: None),
    "consumer_stopped": lambda: handle(lambda message: None),
}


@pytest.mark.parametrize("name", signals_page.names())
def test_a_signal_is_sent_with_the_arguments_of_its_comment(name: str) -> None:
    """And with its sender, by what really happens."""
    with heard(getattr(signals, name)) as told:
        CAUSES[name]()
    told = [(sender, sent) for sender, sent in told if sender == "q" or isinstance(sender, UUID)]
    assert told
    sender, sent = told[0]
    assert isinstance(sender, UUID if "UUID" in SIGNALS[name].fields["param sender"] else str)
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
    assert all(f"`{trigger}`" in tables.page() for trigger in triggers)


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
