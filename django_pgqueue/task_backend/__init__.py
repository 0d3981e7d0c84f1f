"""
Django's Tasks on queues of this package::

    TASKS = {"default": {"BACKEND": "django_pgqueue.task_backend.PGQueueBackend"}}

Importing this package imports nothing of Django's Tasks, which may not be there.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_pgqueue.task_backend.backend import PGQueueBackend

__all__ = ["PGQueueBackend"]


def __getattr__(name: str) -> Any:
    """Import the backend when it is asked for."""
    if name == "PGQueueBackend":
        from django_pgqueue.task_backend.backend import PGQueueBackend

        return PGQueueBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
