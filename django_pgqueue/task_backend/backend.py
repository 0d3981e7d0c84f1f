"""
A backend for Django's Tasks: enqueueing is a publish, and ``consume_queues`` runs the tasks.

    TASKS = {"default": {"BACKEND": "django_pgqueue.task_backend.PGQueueBackend"}}

Each ``queue_name`` is a queue. A ``Queue`` of that name in a ``queues.py`` module determines how its messages are
retried, expire and are dead-lettered. Without one, the defaults from the settings apply.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.crypto import get_random_string

from django_pgqueue.conf import database_alias, settings
from django_pgqueue.consumer.handler import OWN_ACK, Handler
from django_pgqueue.exceptions import InvalidQueueName, PayloadError, PayloadTooLarge
from django_pgqueue.message import Message, encode
from django_pgqueue.queue_internals import declaration_of, publish_at
from django_pgqueue.queues import Queue
from django_pgqueue.registry import find_queue, has_handler
from django_pgqueue.services import tasks
from django_pgqueue.task_backend.compat import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_enqueued,
)
from django_pgqueue.task_backend.results import KEY_LENGTH, make_result, message_id_of, ticket_of
from django_pgqueue.task_backend.runner import TaskRunner, Ticket, is_for_loop
from django_pgqueue.validation import MAX_SECONDS, check_count, check_name, check_seconds

P = ParamSpec("P")
R = TypeVar("R")

#: The keys of OPTIONS, and their defaults.
OPTIONS: dict[str, Any] = {
    # Alias of the database with the queues. None: PGQUEUE["DATABASE"].
    "database": None,
    # How many sync tasks of a queue one process runs at the same time, and also how many async tasks.
    "concurrency": 1,
    # Seconds after which a running task's lease is no longer extended.
    "timeout": 3600,
    # Whether results are stored.
    "results": True,
}


class InvalidArguments(PayloadError, TypeError):
    """Arguments of a task cannot be stored as JSON. Raised by ``enqueue`` before any SQL is sent."""


class PGQueueBackend(BaseTaskBackend):
    """The backend. Django creates one instance for each thread and alias in ``TASKS``."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    # A claim walks one index in the order of due times and ids. The docs say what priorities would cost.
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.supports_get_result = self.option("results") is not False
        # A cache, so that a queue is not created for each task.
        self._queues: dict[str, Queue] = {}

    def option(self, name: str) -> Any:
        """Return the value of an option from ``OPTIONS``, or its default."""
        return self.options.get(name, OPTIONS[name])

    @property
    def using(self) -> str:
        """The alias of the database with the queues."""
        return database_alias(self.option("database"))

    def queue(self, name: str) -> Queue:
        """Return the queue of this name: the one that the project declares, or one with the default attributes."""
        queue = self._queues.get(name)
        if queue is None:
            database = self.option("database")
            queue = self._queues[name] = find_queue(name, self.using) or Queue(name, using=database)
        return queue

    # --- Enqueueing ---

    def validate_task(self, task: Task[..., Any]) -> None:
        """Raise ``InvalidTask`` if Django rejects the task, or if its queue name or ``run_after`` is invalid here."""
        super().validate_task(task)
        try:
            check_name(task.queue_name)
        except InvalidQueueName as error:
            raise InvalidTask(str(error)) from error
        if task.run_after is not None and (task.run_after - now_like(task.run_after)).total_seconds() > MAX_SECONDS:
            raise InvalidTask(f"run_after must be within {MAX_SECONDS} seconds, not {task.run_after}")

    def enqueue(self, task: Task[P, R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult[P, R]:
        """
        Publish a task, and return its result, whose status is READY.

        Like ``Queue.publish()``, it is part of the transaction inside ``atomic()``, and is committed at once otherwise.
        Raises ``InvalidTask``, ``InvalidArguments``, ``PayloadTooLarge`` or ``QueueNotFound``.
        """
        self.validate_task(task)
        payload = encode_call(args, kwargs)
        enqueued_at = timezone.now()
        ticket = Ticket(
            task.module_path,
            self.alias,
            get_random_string(KEY_LENGTH),
            enqueued_at,
            task.run_after,
            iscoroutinefunction(task.func),
        )
        message_id = publish_at(self.queue(task.queue_name), task.run_after, payload, ticket.headers)
        result: TaskResult[P, R] = TaskResult(
            task=task,
            id=ticket.result_id(message_id),
            status=TaskResultStatus.READY,
            enqueued_at=enqueued_at,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            **json.loads(payload),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        task_enqueued.send_robust(type(self), task_result=result)
        return result

    # --- Results ---

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return the present result of a task. Raises ``TaskResultDoesNotExist`` if there is none with this id."""
        if not self.supports_get_result:
            return super().get_result(result_id)
        message_id = message_id_of(result_id)
        record = None if message_id is None else tasks.task_record(message_id, self.using)
        ticket = None if record is None else ticket_of(record)
        if (
            record is None
            or ticket is None
            or (ticket.backend, ticket.result_id(message_id)) != (self.alias, result_id)
        ):
            raise TaskResultDoesNotExist(result_id)
        return make_result(result_id, record, ticket)

    # --- Checks ---

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Return E011 for invalid options, E012 for invalid queue names, E013 for queues that also have a handler."""
        return [
            *(
                Error(f"TASKS[{self.alias!r}]: {text}", hint=hint, id="django_pgqueue.E011")
                for text, hint in self._wrong_options()
            ),
            *(Error(f"TASKS[{self.alias!r}]: {text}.", id="django_pgqueue.E012") for text in self._wrong_names()),
            *(
                Error(
                    f"TASKS[{self.alias!r}]: queue {name!r} has a handler of its own, so its tasks are not run.",
                    hint="Use another queue for the tasks or for the handler.",
                    id="django_pgqueue.E013",
                )
                for name in sorted(map(str, self.queues))
                if has_handler(name)
            ),
        ]

    def _wrong_options(self) -> Iterator[tuple[str, str | None]]:
        for key in self.options:
            if key not in OPTIONS:
                nearest = difflib.get_close_matches(str(key), OPTIONS, n=1)
                hint = f"Did you mean {nearest[0]!r}?" if nearest else f"The options are: {', '.join(OPTIONS)}."
                yield f"OPTIONS has no {key!r}.", hint
        database = self.option("database")
        if database is not None and database not in django_settings.DATABASES:
            yield f"OPTIONS: there is no database alias {database!r}.", None
        if not isinstance(self.option("results"), bool):
            yield "OPTIONS: 'results' must be True or False.", None
        try:
            self._handling()
        except ValueError as error:
            yield f"OPTIONS: {error}.", None

    def _handling(self) -> dict[str, Any]:
        return {
            "concurrency": check_count(self.option("concurrency"), "concurrency"),
            "timeout": check_seconds(self.option("timeout"), "timeout", zero=False),
        }

    def _wrong_names(self) -> Iterator[str]:
        for name in self.queues:
            try:
                check_name(name)
            except InvalidQueueName as error:
                yield str(error)

    # --- Running ---

    def handler(self, name: str) -> Handler:
        """
        Return the handler with which a ``Consumer`` runs the tasks of a queue.

        Raises ``ValueError`` if the queue has a handler of its own, or if an option is invalid.
        """
        if has_handler(name):
            raise ValueError(f"queue {name!r} has a handler of its own, so it cannot be a queue of tasks")
        queue = self.queue(name)
        runner = TaskRunner(queue)
        return Handler(
            queue=queue,
            function=runner.run,
            ack=OWN_ACK,
            is_async=False,
            read_declaration=lambda: declaration_of(queue),
            async_function=runner.arun,
            is_for_loop=belongs_on_loop,
            **self._handling(),
        )


def encode_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a task's payload as JSON text. Raises ``InvalidArguments`` with the path, or ``PayloadTooLarge``."""
    refused: Exception | None = None
    try:
        # As Django does it: bytes become str, and any sequence becomes a list.
        call = {"args": normalize_json(list(args)), "kwargs": normalize_json(dict(kwargs))}
    except (TypeError, ValueError, RecursionError) as error:
        refused, call = error, {"args": list(args), "kwargs": dict(kwargs)}
    try:
        payload = encode(call, settings.MAX_PAYLOAD_BYTES)
    except PayloadTooLarge:
        raise
    except PayloadError as error:
        reason = str(refused or error).removeprefix(f"{error.path}: ")
        raise InvalidArguments(reason, error.path) from error
    if refused is not None:
        raise InvalidArguments(str(refused)) from refused
    return payload


def now_like(moment: datetime) -> datetime:
    """Return the present time, aware or naive like ``moment``."""
    return timezone.now() if timezone.is_aware(moment) else datetime.now()


# --- Running --------------------------------------------------------------------------------------


def belongs_on_loop(message: Message) -> bool:
    """Return whether a message's task runs on the event loop."""
    return is_for_loop(message.headers)


def our_backends() -> list[PGQueueBackend]:
    """Return the backends in ``TASKS`` that are a ``PGQueueBackend``."""
    found = []
    for alias in task_backends:
        # Other backends may be missing. Django's own check reports them.
        with suppress(ImproperlyConfigured):
            if isinstance(backend := task_backends[alias], PGQueueBackend):
                found.append(backend)
    return found


def task_handlers(names: Sequence[str] = ()) -> dict[str, Handler]:
    """
    Return the handlers of these queues of tasks by name, or of all queues in ``TASKS`` if ``names`` is empty.

    A backend whose ``QUEUES`` is empty accepts any name without a handler of its own. Raises ``ValueError`` if a queue
    in ``QUEUES`` has one, or if an option is invalid.
    """
    handlers: dict[str, Handler] = {}
    for backend in our_backends():
        for name in sorted(backend.queues) or [name for name in names if not has_handler(name)]:
            if name not in handlers and (not names or name in names):
                handlers[name] = backend.handler(name)
    return handlers


def make_queues(using: str) -> list[Queue]:
    """Return the queues in ``TASKS`` that are in this database."""
    return [backend.queue(name) for backend in our_backends() if backend.using == using for name in backend.queues]
