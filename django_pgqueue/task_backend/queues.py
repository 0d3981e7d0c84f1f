"""
The queues and handlers that ``TASKS`` configures for this package's backend.

Nothing of Django's Tasks is imported if ``TASKS`` is empty, or if neither Tasks nor the backport is installed.
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
    Return the handlers of these queues, whether for tasks or not, or all handlers if ``names`` is empty.

    Raises ``LookupError`` for a queue without a handler, and ``ValueError`` for a queue of tasks that has a handler of
    its own.
    """
    tasks = task_handlers(names)
    others = [name for name in names if name not in tasks]
    return [*tasks.values(), *(registered_handlers(others) if others or not names else ())]


def task_handlers(names: Sequence[str] = ()) -> dict[str, Handler]:
    """Return the handlers of these queues of tasks (empty: of all) by name. Raises ``ValueError``."""
    backend = backend_module()
    return {} if backend is None else backend.task_handlers(names)


def make_queues(using: str) -> list[Queue]:
    """Return the queues in ``TASKS`` that are in this database."""
    backend = backend_module()
    return [] if backend is None else backend.make_queues(using)


def backend_module() -> ModuleType | None:
    """
    Return the module ``backend``, or None if it is not needed.

    Raises ``ImportError`` if ``TASKS`` names this package's backend, but Django's Tasks are not installed.
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
