"""
What a type checker says of typed queues. Nothing runs this: tests/services/test_schema.py gives it to mypy.

Each line that must be refused ends with a comment that has some words of mypy's error.
"""

from dataclasses import dataclass
from typing import Any, TypedDict

from django_pgqueue import Message, Queue


@dataclass
class Paid:
    order_id: int


class Shipped(TypedDict):
    order_id: int


def checked(value: Any) -> Paid:
    return Paid(**value)


paid = Queue("paid", schema=Paid)
shipped = Queue[Shipped]("shipped")
by_function = Queue("by-function", schema=checked)
anything = Queue("anything")

paid.publish(Paid(1))
paid.publish({"order_id": 1})  # E: Argument 1 to "publish" of "Queue"
paid.publish_many([Paid(1), 2])  # E: List item 1 has incompatible type
shipped.publish({"order_id": 1})
shipped.publish({"order": 1})  # E: Missing key "order_id" for TypedDict
by_function.publish(Paid(1))
anything.publish({"whatever": [1]})


async def publish() -> None:
    await paid.apublish(Paid(1))
    await paid.apublish("paid")  # E: Argument 1 to "apublish" of "Queue"


@paid.handler
def handle(message: Message[Paid]) -> None:
    number: int = message.payload.order_id
    text: str = message.payload.order_id  # E: Incompatible types in assignment
    assert number, text


@paid.handler(ack="atomic", concurrency=2)
def handle_atomic(message: Message[Paid]) -> None: ...


@paid.handler  # E: Argument 1 to "handler" of "Queue"
def handle_other(message: Message[Shipped]) -> None: ...


@shipped.handler(batch=10)
def handle_batch(messages: list[Message[Shipped]]) -> dict[int, Exception]:
    return {message.id: ValueError() for message in messages if message.payload["order_id"] < 0}


@shipped.handler(batch=10)  # E: Argument 1 has incompatible type
def handle_one(message: Message[Shipped]) -> None: ...


@paid.handler
async def handle_async(message: Message[Paid]) -> None: ...


@anything.handler
def handle_any(message: Message) -> None:
    assert message.payload["whatever"]


for one in paid.claim(10):
    assert one.payload.order_id, one.payload.price  # E: "Paid" has no attribute "price"
    paid.ack(one)

# The decorated function keeps its type.
handle_batch([]).items()
handle(1)  # E: Argument 1 to "handle" has incompatible type
Queue("wrong", schema=3)  # E: Argument "schema" to "Queue"
