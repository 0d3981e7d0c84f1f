"""Tasks that the tests enqueue."""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_pgqueue import Nack, Reject
from tests.testapp.models import Seen

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

# What is held ends after so many seconds, so that no failed test leaves it behind.
LONGEST_HOLD = 60.0


@task
def add(a: int, b: int = 0) -> int:
    return a + b


@task
async def add_async(a: int, b: int = 0) -> int:
    await asyncio.sleep(0)
    return a + b


@task(takes_context=True)
def tell(context: Any) -> dict[str, Any]:
    """Return what a task can know of itself."""
    result = context.task_result
    return {"id": result.id, "attempt": context.attempt, "status": result.status, "errors": len(result.errors)}


@task
def place() -> str:
    return threading.current_thread().name


@task
async def loop() -> int:
    return id(asyncio.get_running_loop())


@task
def note(number: int) -> None:
    Seen.objects.create(msg_id=number, worker=os.getpid(), attempt=0)


@task(takes_context=True)
def fail_first(context: Any, times: int) -> int:
    if context.attempt <= times:
        raise ValueError(f"attempt {context.attempt}")
    return int(context.attempt)


@task
def fail(text: str) -> None:
    raise ValueError(text)


@task
def leave() -> None:
    raise SystemExit("leaving")


@task
def nack(delay: float) -> None:
    raise Nack("later", delay=delay)


@task
def reject() -> None:
    raise Reject("no such order")


@task
def give_back(kind: str) -> Any:
    """Return what cannot be kept as a result."""
    return {"object": object(), "nul": "a\0b", "nan": float("nan"), "lambda": lambda: None}[kind]


@task
def wrong_sql() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


@task
async def wrong_sql_async() -> None:
    await sync_to_async(wrong_sql.func)()


@task
def leave_open() -> None:
    transaction.set_autocommit(False)
    Seen.objects.create(msg_id=1, worker=os.getpid(), attempt=0)


@task
def hold(mark: str, until: str) -> int:
    """Make the file `mark`, and wait until the other one exists. Returns this process's id."""
    Path(mark).touch()
    deadline = time.monotonic() + LONGEST_HOLD
    while not Path(until).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getpid()


def plain() -> None:
    """No task."""
