"""
A backend for Django's Tasks that runs on the queues of this package::

    TASKS = {"default": {"BACKEND": "django_pgqueue.task_backend.PGQueueBackend"}}

Importing this package does not import Django's Tasks, which may not be installed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_pgqueue.task_backend.backend import PGQueueBackend

__all__ = ["PGQueueBackend"]


def __getattr__(name: str) -> Any:
    """Import the backend on first access."""
    if name == "PGQueueBackend":
        from django_pgqueue.task_backend.backend import PGQueueBackend

        return PGQueueBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
