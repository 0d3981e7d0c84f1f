"""The queues of a run, with their handlers; declared in its processes and nowhere else."""

import math
import time

from asgiref.sync import sync_to_async

from django_pgqueue import Message, Queue, Topic
from example_project.demo.handlers import begin, details, handle_atomic
from example_project.demo.models import Mark
from example_project.demo.notes import note
from tests.chaos import plan

# Seconds that handling takes, so that consumers hold messages when a fault comes; where it is so slow
# that a batch outlives its TTL.
WORK, SLOW_WORK = 0.02, 0.12

QUEUES = {
    queue.name: queue
    for queue in (
        Queue(plan.LATE),
        Queue(plan.ATOMIC),
        # For ever, or a message that is missing at the end could be one that expired.
        Queue(plan.AUTO, auto_deleted=True, ttl=math.inf),
        Queue(plan.AUTO_ATOMIC, auto_deleted=True, ttl=math.inf),
        Queue(plan.POOLED),
        Queue(plan.BRIEF, ttl=plan.BRIEF_TTL, dead_letter=plan.EXPIRED),
        *(Queue(name, auto_deleted=name.endswith(".auto"), ttl=math.inf) for name in plan.BOUND),
    )
}
TOPIC = Topic(plan.TOPIC)


def handle(message: Message, *, seconds: float = WORK) -> None:
    """Handle it with a write that commits before the ack."""
    begin(message)
    time.sleep(seconds)
    Mark.objects.create(message_id=message.id, what="handled")
    note("handled", **details(message))


def handle_slowly(message: Message) -> None:
    handle(message, seconds=SLOW_WORK)


def handle_in_transaction(message: Message) -> None:
    handle_atomic(message, seconds=WORK)


async def handle_async(message: Message) -> None:
    await sync_to_async(handle)(message)


for name in plan.BOUND:
    TOPIC.bind(QUEUES[name])
    QUEUES[name].handler(concurrency=2)(handle)
QUEUES[plan.LATE].handler(concurrency=2)(handle)
QUEUES[plan.ATOMIC].handler(concurrency=2, ack="atomic")(handle_in_transaction)
QUEUES[plan.AUTO].handler(concurrency=2)(handle_async)
QUEUES[plan.AUTO_ATOMIC].handler(ack="atomic")(handle_in_transaction)
QUEUES[plan.POOLED].handler(concurrency=2, ack="atomic")(handle_in_transaction)
QUEUES[plan.BRIEF].handler(handle_slowly)
