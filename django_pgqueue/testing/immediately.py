"""Running handlers as soon as their messages would be committed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from typing import Any, Self
from unittest import mock

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.transaction import Atomic

from django_pgqueue.queues import Queue
from django_pgqueue.services import publishing, topics
from django_pgqueue.task_backend.queues import handlers_of
from django_pgqueue.testing.draining import Drained, run
from django_pgqueue.testing.journal import observed
from django_pgqueue.testing.names import name_of


class immediate(ContextDecorator):
    """
    Drain the queues at each publish. Use it as a context manager, or as a decorator for tests.

    The handlers of these queues (of all queues with a handler if none is named) run when a message is published. Inside
    an ``atomic()`` block of the code under test, they run when the outermost block succeeds, which is when a commit
    would make the message visible to a worker. If the block is rolled back, no handler runs. Inside a ``TestCase``, the
    handlers run before any ``on_commit`` hook, because these hooks wait for a commit that does not happen.

    This is a complete drain through the tables: earlier messages that are ready are handled, too, and a retry waits for
    its back-off. As in production, the publisher does not see a handler's exceptions. With ``raises``, they are raised
    from ``publish()`` or at the end of the block. The context manager yields the outcomes as ``Drained``.
    """

    def __init__(self, *queues: Queue | str, raises: bool = False) -> None:
        self._names = [name_of(queue) for queue in queues]
        self._raises = raises
        self._done = Drained()
        self._stack = ExitStack()
        # Aliases with published messages that have not been drained yet.
        self._pending: set[str] = set()
        self._is_draining = False

    def _recreate_cm(self) -> Self:
        # A decorated test may run more than once.
        return type(self)(*self._names, raises=self._raises)

    def __enter__(self) -> Drained:
        for room, name in ((publishing, "publish"), (publishing, "publish_many"), (topics, "publish_to_topic")):
            publish = observed(getattr(room, name), lambda call, ids: self._published(call["using"]))
            self._stack.enter_context(mock.patch.object(room, name, publish))
        self._stack.enter_context(mock.patch.object(Atomic, "__exit__", self._following(Atomic.__exit__)))
        return self._done

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _published(self, using: str) -> None:
        self._pending.add(using)
        self._drain(using)

    def _following(self, leave: Callable[..., None]) -> Callable[..., None]:
        def leave_and_drain(block: Atomic, error_type: Any, error: Any, traceback: Any) -> None:
            leave(block, error_type, error, traceback)
            using = block.using or DEFAULT_DB_ALIAS
            if using in self._pending:
                self._drain(using)

        return leave_and_drain

    def _drain(self, using: str) -> None:
        if self._is_draining or not _shows(using):
            return
        self._is_draining = True
        try:
            while using in self._pending:
                self._pending.discard(using)
                handlers = [each for each in handlers_of(self._names) if each.queue.using == using]
                if handlers:
                    self._add(run(handlers, limit=None, include_delayed=False, raises=self._raises))
        finally:
            self._is_draining = False

    def _add(self, done: Drained) -> None:
        self._done.handled += done.handled
        self._done.failed += done.failed
        self._done.dead_lettered += done.dead_lettered
        self._done.lost += done.lost


def _shows(using: str) -> bool:
    """Return whether a worker would see the changes: no block is open except those of a TestCase."""
    connection = connections[using]
    blocks = connection.atomic_blocks
    return all(getattr(block, "_from_testcase", False) for block in blocks) and (
        bool(blocks) or connection.get_autocommit()
    )
