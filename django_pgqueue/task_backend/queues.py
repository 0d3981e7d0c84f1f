"""
What ``TASKS`` says of this package's backend.

Where it says nothing, and on a Django that has neither Tasks nor their backport, nothing of them is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from django.conf import settings as django_settings

from django_pgqueue.consumer.handler import Handler
from django_pgqueue.queues import Queue
from django_pgqueue.registry import registered_handlers


def handlers_of(names: Sequence[str] = ()) -> list[Handler]:
    """
    Return the handlers of these queues, of tasks or not (none named: of all that have one).

    Raises ``LookupError`` for one that has none, and ``ValueError`` for a queue of tasks that has a handler of its own.
    """
    tasks = task_handlers(names)
    others = [name for name in names if name not in tasks]
    return [*tasks.values(), *(registered_handlers(others) if others or not names else ())]


def task_handlers(names: Sequence[str] = ()) -> dict[str, Handler]:
    """Return the handlers of these queues of tasks (none named: of all), by queue. Raises ``ValueError``."""
    backend = backend_module()
    return {} if backend is None else backend.task_handlers(names)


def make_queues(using: str) -> list[Queue]:
    """Return the queues of tasks that ``TASKS`` names, of one database."""
    backend = backend_module()
    return [] if backend is None else backend.make_queues(using)


def backend_module() -> ModuleType | None:
    """
    Return ``backend.py``. None: nobody uses it.

    Raises ``ImportError`` where ``TASKS`` names it and Django has no Tasks.
    """
    configured = getattr(django_settings, "TASKS", None)
    if not configured:
        return None
    try:
        from django_pgqueue.task_backend import backend
    except ImportError:
        if any("django_pgqueue." in str(params.get("BACKEND")) for params in configured.values()):
            raise
        return None
    return backend
