"""
What consumers do with the messages of a run.

The publisher writes into the headers how a message is to end. Without this header, the message is handled.
"""

import time

from django_pgqueue import Message, Nack, Reject
from example_project.demo.models import Mark
from example_project.demo.notes import note


def handle(message: Message, *, is_atomic: bool = False) -> None:
    """Note the delivery, then its end. Both are in the file before the message is acked."""
    _start(message)
    note("handled", id=message.id, delivery=message.delivery_count, atomic=is_atomic)


async def handle_async(message: Message) -> None:
    """Do the same on the event loop."""
    handle(message)


def handle_atomic(message: Message) -> None:
    """Do the same, with a row that commits with the ack."""
    Mark.objects.create(message_id=message.id, what="handled")
    handle(message, is_atomic=True)


def handle_probe(message: Message) -> None:
    """Note how long after the call of ``publish`` the handler starts."""
    if message.delivery_count == 1:
        note("woken", seconds=time.time() - message.headers["sent"])
    handle(message)


def _start(message: Message) -> None:
    note("started", id=message.id, delivery=message.delivery_count)
    match message.headers.get("fate"):
        case "reject":
            raise Reject("rejected, as its publisher asked")
        case "nack" if message.delivery_count == 1:
            raise Nack("returned, as its publisher asked", delay=0.1)
        case "fail" if message.delivery_count == 1:
            raise RuntimeError("failed, as its publisher asked")
