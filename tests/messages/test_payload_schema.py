"""Payloads that have a type: what publish takes, what handlers get, and what becomes of what does not fit."""

import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from typing_extensions import TypedDict  # pydantic asks for this one on Python 3.11

from django_pgqueue import Message, PayloadError, Queue, schema
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import drain
from tests.support.rows import payloads
from tests.support.sessions import second_session

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parent.parent.parent


class Model(pydantic.BaseModel):
    order_id: int
    due: date


class StrictModel(pydantic.BaseModel, strict=True):
    order_id: int
    due: date


class Struct(msgspec.Struct):
    order_id: int
    due: date


@dataclass
class Data:
    order_id: int
    due: date


class Typed(TypedDict):
    order_id: int
    due: date


class Pair:
    """A schema of one's own."""

    def dump(self, payload: Data) -> Any:
        return {"order_id": payload.order_id, "due": payload.due.isoformat()}

    def load(self, value: Any) -> Data:
        return Data(int(value["order_id"]), date.fromisoformat(value["due"]))


def function(value: Any) -> tuple[int, date]:
    return int(value["order_id"]), date.fromisoformat(value["due"])


DUE = date(2026, 1, 2)
STORED = {"order_id": 7, "due": "2026-01-02"}
KINDS: dict[str, tuple[Any, Any, Any]] = {
    # What is given as schema, what is published, what arrives.
    "pydantic": (Model, Model(order_id=7, due=DUE), Model(order_id=7, due=DUE)),
    "strict": (StrictModel, StrictModel(order_id=7, due=DUE), StrictModel(order_id=7, due=DUE)),
    "msgspec": (Struct, Struct(7, DUE), Struct(7, DUE)),
    "dataclass": (Data, Data(7, DUE), Data(7, DUE)),
    "typed dict": (Typed, {"order_id": 7, "due": DUE}, {"order_id": 7, "due": DUE}),
    "function": (function, STORED, (7, DUE)),
    "pair": (Pair(), Data(7, DUE), Data(7, DUE)),
}

each_kind = pytest.mark.parametrize("kind", KINDS)


def insert(payload: str) -> int:
    """Publish as other programs do: no schema is asked."""
    with second_session() as other:
        row = other.execute(
            "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('q', %s) RETURNING id", [payload]
        ).fetchone()
    assert row is not None
    return int(row[0])


@each_kind
def test_what_is_published_arrives(kind: str) -> None:
    """Stored as plain JSON, and handled as what it was."""
    given, published, arrives = KINDS[kind]
    queue: Queue[Any] = Queue("q", schema=given)
    queue.publish(published)
    queue.publish_many([published, published])
    assert payloads("q") == [STORED] * 3
    assert drain(queue) == [arrives] * 3


def test_a_claim_by_hand_gives_it_too() -> None:
    """With the same message otherwise."""
    queue = Queue("q", schema=Data)
    message_id = queue.publish(Data(7, DUE))
    (message,) = queue.claim()
    assert (message.id, message.payload, message.delivery_count) == (message_id, Data(7, DUE), 1)
    queue.ack(message)


WRONG: dict[str, tuple[Any, str]] = {
    "pydantic": ({"order_id": "x", "due": DUE}, "$.order_id"),
    "strict": ({"order_id": "7", "due": DUE}, "$.order_id"),
    "msgspec": ({"order_id": "x", "due": "2026-01-02"}, "$.order_id"),
    "dataclass": ({"order_id": 7}, "$.due"),
    "typed dict": ({"order_id": 7}, "$.due"),
    "function": ({"order_id": "x"}, "$"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_refused_before_any_sql(kind: str) -> None:
    """With the place of the trouble; of many none is stored."""
    queue: Queue[Any] = Queue("q", schema=KINDS[kind][0])
    queue.declare()
    wrong, path = WRONG[kind]
    with CaptureQueriesContext(connection) as queries:
        with pytest.raises(PayloadError) as caught:
            queue.publish(wrong)
        with pytest.raises(PayloadError) as caught_of_many:
            queue.publish_many([KINDS[kind][1], wrong])
    assert caught.value.path == path
    assert caught_of_many.value.path == path.replace("$", "[1]")
    assert len(queries) == 0
    assert payloads("q") == []


class Other(pydantic.BaseModel):
    secret: pydantic.SecretStr = pydantic.SecretStr("")
    excluded: int = pydantic.Field(1, exclude=True)
    shouted: str = ""

    @pydantic.field_validator("shouted")
    @classmethod
    def shout(cls, value: str) -> str:
        return f"{value}!" if value else ""


class Special(Model):
    more: int = 1


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        pytest.param(Data, Data("seven", DUE), id="a dataclass validates nothing"),  # type: ignore[arg-type]
        pytest.param(Model, Model.model_construct(order_id="seven", due=DUE), id="nor does model_construct"),
        pytest.param(Struct, Struct("seven", DUE), id="nor a Struct"),  # type: ignore[arg-type]
        pytest.param(Other, Other(secret=pydantic.SecretStr("x")), id="a secret becomes stars"),
        pytest.param(Other, Other(excluded=2), id="what is excluded is gone"),
        pytest.param(Other, Other(shouted="a"), id="a validator adds to what it added"),
        pytest.param(Model, Special(order_id=1, due=DUE), id="a subclass has more"),
        pytest.param(dict[str, Any], {"due": DUE}, id="any type may be one that is not JSON"),
    ],
)
def test_what_would_arrive_as_something_else_is_refused(given: Any, wrong: Any) -> None:
    """A handler gets what was published, or nobody publishes it."""
    queue: Queue[Any] = Queue("q", schema=given)
    with pytest.raises(PayloadError):
        queue.publish(wrong)
    assert payloads("q") == []


def test_a_function_does_not_change_what_is_stored() -> None:
    """Nor what the caller holds."""

    def mark(value: Any) -> Any:
        value["seen"] = True
        return value

    queue = Queue("q", schema=mark)
    payload = {"n": 1}
    queue.publish(payload)
    assert payload == {"n": 1} and payloads("q") == [{"n": 1}]
    with pytest.raises(PayloadError, match="TypeError"):
        queue.publish(1)


@pytest.mark.parametrize("kind", ["pydantic", "msgspec"])
def test_the_error_does_not_quote_the_payload(kind: str) -> None:
    """Nor what it comes from: a traceback may be logged, and payloads may not."""
    queue: Queue[Any] = Queue("q", schema=KINDS[kind][0])
    # Not in a line of source, which a traceback quotes.
    order_id = "".join(["sec", "ret"])
    with pytest.raises(PayloadError) as caught:
        queue.publish({"order_id": order_id, "due": DUE})
    assert order_id not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("ack", ["late", "early", "atomic"])
def test_a_stored_payload_that_does_not_fit_is_set_aside_with_the_reason(ack: str) -> None:
    """At the first delivery; its neighbours are handled, alone and in batches."""
    queue = Queue("q", schema=Model)
    queue.publish(Model(order_id=1, due=DUE))
    wrong = insert('{"order_id": "x", "due": "2026-01-02"}')
    queue.publish(Model(order_id=3, due=DUE))
    seen: list[int] = []

    def handle(messages: list[Message[Model]]) -> None:
        seen.extend(message.payload.order_id for message in messages)

    Consumer([make_handler(queue, handle, ack=ack, batch=10)], drain=True).run()
    assert seen == [1, 3]
    dead = MessageQueueItem.objects.get()
    assert (dead.pk, dead.queue_id) == (wrong, "q.dead")
    (failure,) = dead.failures
    assert failure["reason"].startswith("schema: $.order_id: ")


def test_an_async_handler_gets_only_what_fits() -> None:
    """Likewise."""
    queue = Queue("q", schema=Model)
    queue.declare()
    insert("[]")
    queue.publish(Model(order_id=3, due=DUE))
    seen: list[int] = []

    async def handle(message: Message[Model]) -> None:
        seen.append(message.payload.order_id)

    Consumer([make_handler(queue, handle)], drain=True).run()
    assert seen == [3]
    assert MessageQueueItem.objects.get().queue_id == "q.dead"


def test_a_schema_that_raises_whatever_it_likes_ends_nothing() -> None:
    """The message is set aside by the name of the error, and its neighbours are handled."""

    def explode(value: Any) -> Any:
        if isinstance(value, str):
            raise {"exit": SystemExit, "interrupt": KeyboardInterrupt}.get(value, KeyError)(value)
        return value

    queue = Queue("q", schema=explode)
    queue.declare()
    insert('"key"')
    insert('"exit"')
    insert('"interrupt"')
    insert("1")
    assert drain(queue) == [1]
    reasons = [item.failures[0]["reason"] for item in MessageQueueItem.objects.order_by("id")]
    assert reasons == ["schema: $: KeyError: 'key'", "schema: SystemExit", "schema: KeyboardInterrupt"]


def test_a_claim_by_hand_sets_aside_what_does_not_fit() -> None:
    """And returns what is behind it."""
    queue = Queue("q", schema=Model)
    queue.declare()
    insert('"no order"')
    queue.publish(Model(order_id=2, due=DUE))
    (message,) = queue.claim()
    assert message.payload.order_id == 2
    assert MessageQueueItem.objects.get(queue_id="q.dead").payload == "no order"


def test_what_is_no_schema_is_refused() -> None:
    """Where the queue is declared."""

    async def asynchronous(value: Any) -> Any: ...

    for wrong in (3, "order", asynchronous):
        with pytest.raises(ValueError, match="schema must be a type, a function, or have"):
            Queue("q", schema=wrong)  # type: ignore[arg-type]


def test_a_type_without_a_library_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do instead. A function needs none."""
    monkeypatch.setattr(schema, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pydantic or msgspec"):
        Queue("q", schema=Data)
    Queue("q", schema=function)


def test_msgspec_does_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the types that it knows."""
    monkeypatch.setattr(schema, "find_spec", lambda name: None if name == "pydantic" else object())
    queue = Queue("q", schema=Data)
    queue.publish(Data(7, DUE))
    assert drain(queue) == [Data(7, DUE)]
    with pytest.raises(PayloadError) as caught:
        queue.publish({"order_id": 7, "due": 1})  # type: ignore[arg-type]
    assert caught.value.path == "$.due"


def test_neither_is_imported_unless_it_is_used() -> None:
    """A project without schemas pays nothing."""
    code = "import django_pgqueue, sys; sys.exit(bool({'pydantic', 'msgspec'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- What a type checker sees ---


def errors_expected(path: Path) -> dict[int, str]:
    lines = enumerate(path.read_text().splitlines(), 1)
    return {number: line.split("# E: ")[1] for number, line in lines if "# E: " in line}


def errors_found(path: Path, folder: Path) -> dict[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", str(path)],
        cwd=folder,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    found = re.finditer(r"^[^:]*:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    by_line: dict[int, str] = {}
    for match in found:
        by_line[int(match[1])] = f"{by_line.get(int(match[1]), '')}{match[2]}\n"
    return by_line


@pytest.mark.full
def test_a_type_checker_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """And nothing else: each line of typed_queues.py that says so, for the reason that it says."""
    path = ROOT / "tests" / "messages" / "typed_queues.py"
    expected, found = errors_expected(path), errors_found(path, tmp_path)
    assert len(expected) >= 10
    assert set(found) == set(expected), found
    assert {line: text for line, text in expected.items() if text not in found[line]} == {}
