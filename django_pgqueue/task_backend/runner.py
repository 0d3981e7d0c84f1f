"""
Running tasks: what a worker does with the message of a task.

An attempt settles its message itself, together with the record of the task: recording that the task has finished and
deleting its message are one atomic step.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from traceback import format_exception
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections
from django.dispatch import Signal
from django.utils.module_loading import import_string

from django_pgqueue.conf import settings
from django_pgqueue.consumer.handler import LOST, Outcome, Settlement
from django_pgqueue.exceptions import Reject
from django_pgqueue.message import Message, encode
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.queues import Queue
from django_pgqueue.runtime.loop import DATABASE_FAULTS, Outage, is_passing
from django_pgqueue.services import dead_letters, session, tasks
from django_pgqueue.services.tasks import TaskRun
from django_pgqueue.task_backend.compat import (
    InvalidTask,
    Task,
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)

T = TypeVar("T")

# The last failures of a task are kept, and the end of each traceback, because it contains the error.
MAX_ERRORS = 10
MAX_TRACEBACK_CHARS = 20_000

# Stands for the workers of earlier attempts when results are not stored.
UNKNOWN_WORKER = "unknown"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The headers of a task's message."""

    task: str
    backend: str
    key: str
    enqueued_at: datetime | None = None
    run_after: datetime | None = None
    #: Whether the function was a coroutine function when it was enqueued. The task then runs on the event loop.
    is_async: bool = False

    @property
    def headers(self) -> dict[str, Any]:
        headers: dict[str, Any] = {"task": self.task, "backend": self.backend, "key": self.key}
        for name in ("enqueued_at", "run_after"):
            if (moment := getattr(self, name)) is not None:
                headers[name] = moment.isoformat()
        if self.is_async:
            headers["async"] = True
        return headers

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> Ticket | None:
        """Return the ticket in these headers. None: they are not the headers of a task."""
        try:
            times = [headers.get(name) for name in ("enqueued_at", "run_after")]
            enqueued_at, run_after = (None if text is None else datetime.fromisoformat(text) for text in times)
            names = [headers[name] for name in ("task", "backend", "key")]
        except (KeyError, TypeError, ValueError):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
        return cls(names[0], names[1], names[2], enqueued_at, run_after, is_for_loop(headers))

    def result_id(self, message_id: int | None) -> str:
        """Return the id of the task's result."""
        return f"{message_id}-{self.key}"

    def load(self, queue: str) -> Task[..., Any]:
        """Return the task as it was enqueued. Raises ``ImportError``, ``InvalidTask``, or what its import raises."""
        found = import_string(self.task)
        if not isinstance(found, Task):
            raise InvalidTask(f"{self.task} is not a task")
        return found.using(queue_name=queue, backend=self.backend, run_after=self.run_after)


def is_for_loop(headers: Mapping[str, Any]) -> bool:
    """Return whether a task runs on the event loop."""
    return headers.get("async") is True


class TaskRunner:
    """Runs the tasks of one queue."""

    def __init__(self, queue: Queue[Any]) -> None:
        self.queue = queue

    def run(self, message: Message) -> TaskAttempt | None:
        """Run a task in this thread, and return the attempt. None: the lease was lost before the task started."""
        attempt = self._begin(message)
        if attempt is not None and attempt.error is None:
            attempt.call()
        return attempt

    async def arun(self, message: Message) -> TaskAttempt | None:
        """Run a task on the event loop. See ``run()``."""
        attempt = await sync_to_async(self._begin)(message)
        if attempt is not None and attempt.error is None:
            await attempt.acall()
        return attempt

    def _begin(self, message: Message) -> TaskAttempt | None:
        ticket = Ticket.of(message.headers)
        if ticket is None:
            raise Reject("not a task")
        run = TaskRun(message, ticket.task, ticket.backend, ticket.key, ticket.enqueued_at, ticket.run_after)
        attempt = TaskAttempt(self.queue, run)
        try:
            backend = task_backends[ticket.backend]
            attempt.keeps_result = backend.supports_get_result
        except Exception as error:
            attempt.error = error
        if not attempt.start():
            return None
        if attempt.error is None:
            try:
                attempt.load(ticket, type(backend))
            except Exception as error:
                attempt.error = error
        return attempt


@dataclass(eq=False)
class TaskAttempt:
    """One attempt at a task."""

    queue: Queue[Any]
    run: TaskRun
    keeps_result: bool = True
    sender: type | None = None
    result: TaskResult[..., Any] | None = None
    #: The return value, as JSON.
    returned: str = "null"
    error: BaseException | None = None
    _outage: Outage = field(default_factory=lambda: Outage("task"))

    def start(self) -> bool:
        """Record that the attempt starts. Returns whether the lease is still held."""
        message = self.run.message
        if self.keeps_result:
            return self._patiently(lambda: tasks.start_run(self.run, self.queue.using))
        worker = f"{socket.gethostname()}:{os.getpid()}"
        self.run.worker_ids = json.dumps([UNKNOWN_WORKER] * (message.delivery_count - 1) + [worker])
        self.run.started_at = self.run.last_attempted_at = session.now(self.queue.using)
        return True

    def load(self, ticket: Ticket, sender: type) -> None:
        """Import the task, and send ``task_started``."""
        task, payload = ticket.load(self.run.message.queue), self.run.message.payload
        self.result = TaskResult(
            task=task,
            id=ticket.result_id(self.run.message.id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=self.run.enqueued_at,
            started_at=self.run.started_at,
            last_attempted_at=self.run.last_attempted_at,
            finished_at=None,
            args=payload["args"],
            kwargs=payload["kwargs"],
            backend=self.run.backend,
            errors=[TaskError(**error) for error in json.loads(self.run.errors)],
            worker_ids=json.loads(self.run.worker_ids),
        )
        self.sender = sender
        self._tell(task_started)

    def call(self) -> None:
        """Call the function. Any exception that it raises is stored in ``error``."""
        try:
            assert self.result is not None
            self._returned(self.result.task.call(*self._args(), **self.result.kwargs))
        except BaseException as error:
            self.error = error

    async def acall(self) -> None:
        """Call the coroutine function. See ``call()``."""
        try:
            assert self.result is not None
            self._returned(await self.result.task.acall(*self._args(), **self.result.kwargs))
        except BaseException as error:
            self.error = error

    def _args(self) -> list[Any]:
        assert self.result is not None
        context: list[Any] = [TaskContext(task_result=self.result)] if self.result.task.takes_context else []
        return [*context, *self.result.args]

    def _returned(self, value: Any) -> None:
        value = normalize_json(value)
        self.returned = encode(value, settings.MAX_PAYLOAD_BYTES, "return value")
        set_on(self.result, _return_value=value)

    def settle(self, settlement: Settlement) -> Settlement:
        """
        Settle the message and store the result as ``settlement`` says. Send ``task_finished`` if the task has ended.

        Returns what the consumer still has to do. While the database is unavailable, it waits: the work is done, and
        must not be repeated.
        """
        outcome = settlement.outcome
        if outcome is not Outcome.ACK:
            self._note_error()
        if not self.keeps_result:
            return self._settle_without(settlement)
        if outcome is Outcome.ACK:
            finished_at = self._patiently(
                lambda: tasks.finish_run(self.run, self.returned, self.queue.using),
            )
            return LOST if finished_at is None else self._ended(Outcome.SETTLED, finished_at)
        delay, reason = settlement.delay if outcome is Outcome.NACK else None, settlement.reason
        failed = self._patiently(
            lambda: tasks.fail_run(declaration_of(self.queue), self.run, delay, reason, self.queue.using)
        )
        if failed is None:
            return LOST
        given_up, finished_at = failed
        if given_up:
            return self._ended(Outcome.GIVEN_UP, finished_at)
        return Settlement(Outcome.FAILED, reason, settlement.delay)

    def _settle_without(self, settlement: Settlement) -> Settlement:
        """Leave settling to the consumer, which settles many messages in one statement."""
        is_last = self.run.message.delivery_count >= declaration_of(self.queue).max_deliveries
        if settlement.outcome is not Outcome.NACK or is_last:
            self._ended(settlement.outcome, session.now(self.queue.using))
        return settlement

    def _ended(self, outcome: Outcome, finished_at: datetime) -> Settlement:
        if self.result is not None:
            status = TaskResultStatus.FAILED if self.error is not None else TaskResultStatus.SUCCESSFUL
            set_on(self.result, status=status, finished_at=finished_at)
            try:
                # Receivers, such as Django's, log the exception that is being handled.
                if self.error is not None:
                    raise self.error
            except BaseException:
                self._tell(task_finished)
            else:
                self._tell(task_finished)
        return Settlement(outcome)

    def _tell(self, signal: Signal) -> None:
        signal.send_robust(self.sender, task_result=self.result)

    def _note_error(self) -> None:
        assert self.error is not None
        kind = type(self.error)
        entry = {
            "exception_class_path": f"{kind.__module__}.{kind.__qualname__}",
            "traceback": dead_letters.storable("".join(format_exception(self.error))[-MAX_TRACEBACK_CHARS:]),
        }
        errors = [*json.loads(self.run.errors), entry][-MAX_ERRORS:]
        self.run.errors = json.dumps(errors)
        if self.result is not None:
            set_on(self.result, errors=[TaskError(**error) for error in errors], _return_value=None)

    def _patiently(self, statement: Callable[[], T]) -> T:
        """Run a statement. While the database is unavailable, wait and try again."""
        connection = connections[self.queue.using]
        while True:
            try:
                done = statement()
            except DATABASE_FAULTS as error:
                if connection.in_atomic_block or not is_passing(error):
                    raise
                connection.close()
                time.sleep(self._outage.failed(error))
            else:
                self._outage.recovered()
                return done


def set_on(result: TaskResult[..., Any] | None, **values: Any) -> None:
    """Set attributes of a result, which is a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(result, name, value)
