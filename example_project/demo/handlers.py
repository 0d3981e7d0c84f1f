"""
What consumers do with the messages of a run.

The publisher wrote into the payload what is to become of a message.
"""

import time
from functools import partial
from typing import Any

from django.db import transaction

from django_pgqueue import Message, Nack, Reject
from example_project.demo.models import Mark
from example_project.demo.notes import note


def handle(message: Message) -> None:
    """Note the delivery, then its end. Both are in the file before the message is acked."""
    begin(message)
    note("handled", **details(message))


async def handle_async(message: Message) -> None:
    """Do the same on the event loop."""
    handle(message)


def handle_atomic(message: Message, *, seconds: float = 0.0) -> None:
    """Do the same, with a row that commits with the ack. The end is noted after that."""
    begin(message, is_atomic=True)
    time.sleep(seconds)
    Mark.objects.create(message_id=message.id, what="handled")
    transaction.on_commit(partial(note, "handled", **details(message)))


def handle_probe(message: Message) -> None:
    """Note how long after the call of ``publish`` the handler starts."""
    if message.delivery_count == 1:
        note("woken", seconds=time.monotonic() - message.payload["sent"])
    handle(message)


def begin(message: Message, *, is_atomic: bool = False) -> None:
    """Note that a delivery begins, and let it fail if that is what its publisher asked for."""
    note("started", **details(message), atomic=is_atomic)
    match message.payload["fate"]:
        case "reject":
            raise Reject("rejected, as its publisher asked")
        case "nack" if message.delivery_count == 1:
            raise Nack("returned, as its publisher asked", delay=0.1)
        case "fail" if message.delivery_count == 1:
            raise RuntimeError("failed, as its publisher asked")


def details(message: Message) -> dict[str, Any]:
    """Return what a note tells of a message."""
    payload = message.payload
    return {
        "id": message.id,
        "delivery": message.delivery_count,
        "queue": message.queue,
        "key": payload["key"],
        "sent": payload["sent"],
    }
