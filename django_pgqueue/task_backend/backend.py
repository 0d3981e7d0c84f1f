"""
A backend for Django's Tasks: enqueueing is a publish, and ``consume_queues`` runs the tasks.

    TASKS = {"default": {"BACKEND": "django_pgqueue.task_backend.PGQueueBackend"}}

Each ``queue_name`` is a queue. A ``Queue`` of that name in a ``queues.py`` module says how its messages are retried,
expire and become dead letters; without one the settings' defaults hold.
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

#: What OPTIONS may hold, and what holds without.
OPTIONS: dict[str, Any] = {
    # Alias of the database of its queues. None: PGQUEUE["DATABASE"].
    "database": None,
    # How many sync tasks, and as many async ones, one process runs at once of each queue.
    "concurrency": 1,
    # Seconds after which a running task's lease is no longer extended.
    "timeout": 3600,
    # Whether results are kept.
    "results": True,
}


class InvalidArguments(PayloadError, TypeError):
    """Arguments of a task cannot be stored as JSON. Raised by ``enqueue`` before any SQL is sent."""


class PGQueueBackend(BaseTaskBackend):
    """The backend. One instance for each thread and alias in ``TASKS``."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    # A claim walks one index in the order of due times and ids; see the docs for what priorities would cost it.
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.supports_get_result = self.option("results") is not False
        # Held here, or they would be made anew for each task.
        self._queues: dict[str, Queue] = {}

    def option(self, name: str) -> Any:
        """Return what ``OPTIONS`` says, or the default."""
        return self.options.get(name, OPTIONS[name])

    @property
    def using(self) -> str:
        """The alias of the database that holds its queues."""
        return database_alias(self.option("database"))

    def queue(self, name: str) -> Queue:
        """Return the queue of this name: the one that the project declares, or one with the defaults."""
        queue = self._queues.get(name)
        if queue is None:
            database = self.option("database")
            queue = self._queues[name] = find_queue(name, self.using) or Queue(name, using=database)
        return queue

    # --- Enqueueing ---

    def validate_task(self, task: Task[..., Any]) -> None:
        """Raise ``InvalidTask`` for what Django refuses, and for what no queue and no time can be."""
        super().validate_task(task)
        try:
            check_name(task.queue_name)
        except InvalidQueueName as error:
            raise InvalidTask(str(error)) from error
        if task.run_after is not None and (task.run_after - now_like(task.run_after)).total_seconds() > MAX_SECONDS:
            raise InvalidTask(f"run_after must be within {MAX_SECONDS} seconds, not {task.run_after}")

    def enqueue(self, task: Task[P, R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult[P, R]:
        """
        Publish a task, and return its result, which is ready.

        As ``Queue.publish``: inside ``atomic()`` it is part of the transaction, else it is committed. Raises
        ``InvalidTask``, ``InvalidArguments``, ``QueueNotFound``.
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
        """Return what is known of a task by now. Raises ``TaskResultDoesNotExist``."""
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
        """E011: an option. E012: a queue's name. E013: a queue of tasks that has a handler of its own."""
        return [
            *(
                Error(f"TASKS[{self.alias!r}]: {text}", hint=hint, id="django_pgqueue.E011")
                for text, hint in self._wrong_options()
            ),
            *(Error(f"TASKS[{self.alias!r}]: {text}.", id="django_pgqueue.E012") for text in self._wrong_names()),
            *(
                Error(
                    f"TASKS[{self.alias!r}]: queue {name!r} has a handler of its own, so its tasks are not run.",
                    hint="Give the tasks or the handler another queue.",
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
                hint = f"Did you mean {nearest[0]!r}?" if nearest else f"There are: {', '.join(OPTIONS)}."
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
        """Return what a ``Consumer`` takes to run the tasks of a queue. Raises ``ValueError``."""
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
    """Return the payload of a task as JSON text. Raises ``InvalidArguments`` with the path, or ``PayloadTooLarge``."""
    refused: Exception | None = None
    try:
        # As Django does: bytes become text, any sequence a list.
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
    """Return this moment with a time zone, if that one has one."""
    return timezone.now() if timezone.is_aware(moment) else datetime.now()


# --- Running --------------------------------------------------------------------------------------


def belongs_on_loop(message: Message) -> bool:
    """Tell whether a message's place is on the event loop."""
    return is_for_loop(message.headers)


def our_backends() -> list[PGQueueBackend]:
    """Return those of the backends in ``TASKS`` that are of this kind."""
    found = []
    for alias in task_backends:
        # Another one that cannot be found is not this one's business, and Django's check names it.
        with suppress(ImproperlyConfigured):
            if isinstance(backend := task_backends[alias], PGQueueBackend):
                found.append(backend)
    return found


def task_handlers(names: Sequence[str] = ()) -> dict[str, Handler]:
    """
    Return the handlers of these queues of tasks (none named: of all that ``TASKS`` names), by queue.

    A backend whose ``QUEUES`` is empty takes any name that has no handler of its own. Raises ``ValueError``.
    """
    handlers: dict[str, Handler] = {}
    for backend in our_backends():
        for name in sorted(backend.queues) or [name for name in names if not has_handler(name)]:
            if name not in handlers and (not names or name in names):
                handlers[name] = backend.handler(name)
    return handlers


def make_queues(using: str) -> list[Queue]:
    """Return the queues of tasks that ``TASKS`` names, of one database."""
    return [backend.queue(name) for backend in our_backends() if backend.using == using for name in backend.queues]
