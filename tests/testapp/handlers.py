"""
Handlers that do what the payload says, so that one worker serves many tests.

Each start is noted in `Seen`, in the transaction that the handler runs in. Keys of the payload:

* `mark`: path of a file to make at the start, which is seen also where the transaction is not
* `times`: misbehave at so many first deliveries only (default: at all)
* `sleep`: seconds; `hold`: wait until this file exists
* `fail`, `nack`, `reject`: the text of an exception; `delay`: that of a nack
* `signal`: send it to this process; `exit`: end it at once; `segfault`: crash it
* `megabytes`: take so many, of which only half are allowed
"""

import asyncio
import ctypes
import os
import resource
import time
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import transaction

from django_pgqueue import Message, Nack, Queue, Reject
from tests.support.forks import backend, fork
from tests.testapp.models import Seen

# A handler that is held ends after so many seconds, so that no failed test leaves one behind.
LONGEST_HOLD = 60.0


def handle(message: Message) -> None:
    orders = begin(message)
    time.sleep(orders.get("sleep", 0))
    deadline = time.monotonic() + LONGEST_HOLD
    while "hold" in orders and not Path(orders["hold"]).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    end(orders)


def handle_batch(messages: list[Message]) -> None:
    for message in messages:
        handle(message)


async def handle_async(message: Message) -> None:
    orders = await sync_to_async(begin)(message)
    await asyncio.sleep(orders.get("sleep", 0))
    end(orders)


async def block_async(message: Message) -> None:
    """Block a thread of the event loop's executor, which nothing can interrupt."""
    orders = await sync_to_async(begin)(message)
    await sync_to_async(time.sleep, thread_sensitive=False)(orders.get("sleep", 0))


def handle_in_transaction(message: Message) -> None:
    """Hold a connection for as long as the handler works."""
    with transaction.atomic():
        handle(message)


def handle_without_database(message: Message) -> None:
    """Touch no database: starts are noted in the file `log`, and the handler is held as by `hold`."""
    with Path(message.payload["log"]).open("a") as log:
        log.write(f"{message.id}/{message.delivery_count}\n")
    deadline = time.monotonic() + LONGEST_HOLD
    while "hold" in message.payload and not Path(message.payload["hold"]).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def fork_and_publish(message: Message) -> None:
    """Let a forked child publish ten messages, and note that this process can go on."""
    begin(message)

    def publish() -> int:
        for number in range(10):
            Queue("from children").publish(number)
        return backend()

    assert fork(publish)() != backend()
    assert Seen.objects.filter(msg_id=message.id).exists()


def do_nothing(message: Message) -> None:
    pass


def begin(message: Message) -> dict[str, Any]:
    """Note the start. Returns what the payload orders for this delivery."""
    orders: dict[str, Any] = message.payload if isinstance(message.payload, dict) else {}
    if "mark" in orders:
        Path(orders["mark"]).touch()
    Seen.objects.create(msg_id=message.id, worker=os.getpid(), attempt=message.delivery_count)
    return orders if message.delivery_count <= orders.get("times", message.delivery_count) else {}


def end(orders: dict[str, Any]) -> None:
    if "signal" in orders:
        os.kill(os.getpid(), orders["signal"])
    if "exit" in orders:
        os._exit(orders["exit"])
    if "segfault" in orders:
        ctypes.string_at(0)
    if "megabytes" in orders:
        take_memory(orders["megabytes"] * 1_000_000)
    if "fail" in orders:
        raise ValueError(orders["fail"])
    if "nack" in orders:
        raise Nack(orders["nack"], delay=orders.get("delay"))
    if "reject" in orders:
        raise Reject(orders["reject"])


def take_memory(size: int) -> None:
    """Ask for twice the memory that this process may still take."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + size // 2, hard))
    try:
        bytearray(size)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
