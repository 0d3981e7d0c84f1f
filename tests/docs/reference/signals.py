"""What the code says of the signals: what they are sent with, and what is logged of them."""

import ast
import functools
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from django.dispatch import Signal

import django_pgqueue
from django_pgqueue import signals
from django_pgqueue.services import operating

#: What a receiver is given to see what it logs: several where the level depends on them.
SAMPLES: dict[str, list[dict[str, Any]]] = {"queue_healed": [{"cause": "revived"}, {"cause": "vanished"}]}
SAMPLE = {
    "using": "default",
    "count": 1,
    "ids": [1],
    "queues": ["q"],
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


def names() -> list[str]:
    """Return the names of all signals, in their order."""
    return [name for name, value in vars(signals).items() if isinstance(value, Signal)]


def operations() -> dict[str, str]:
    """Return the signals that operators cause, each with the method of ``Queue`` that sends it."""
    found: dict[str, str] = {}
    for function in ast.parse(inspect.getsource(operating)).body:
        if isinstance(function, ast.FunctionDef):
            found |= {name: function.name for node in ast.walk(function) if (name := signal_of(node))}
    return found


@functools.cache
def arguments() -> dict[str, list[str]]:
    """Return the arguments that each signal is sent with, as the calls in the code have them."""
    found: dict[str, list[str]] = {}
    for call in calls():
        if name := signal_of(call):
            sent = [str(keyword.arg) for keyword in call.keywords]
            assert found.setdefault(name, sent) == sent, f"{name} is sent with {sent} and {found[name]}"
    return found


def signal_of(node: ast.AST) -> str | None:
    """Return the name of the signal that a node sends, if it is a call that sends one."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name("signals"), attr=name), attr="send_robust")
        ):
            return name
    return None


def calls() -> Iterator[ast.Call]:
    """Yield all calls in the package."""
    for path in sorted(Path(django_pgqueue.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield node


def logged(name: str, sent: list[str]) -> list[tuple[str, str]]:
    """Return level and line of what the signal's receiver logs, if there is one, with dots for what changes."""
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
        for sample in SAMPLES.get(name, [{}]):
            given = {**SAMPLE, **sample}
            receiver("q", **{each: given[each] for each in sent})
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    return [(record.levelname, line_of(str(record.msg))) for record in found]


def line_of(text: str) -> str:
    return " ".join(word.partition("=")[0] + "=…" if "=%" in word else word for word in text.split())
