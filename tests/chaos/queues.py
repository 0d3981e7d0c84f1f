"""The queues of a run, with their handlers; declared in its processes and nowhere else."""

import math

from django_pgqueue import Queue, Topic
from tests.chaos import handlers, plan

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
for name in plan.BOUND:
    TOPIC.bind(QUEUES[name])
    QUEUES[name].handler(concurrency=2)(handlers.handle)
QUEUES[plan.LATE].handler(concurrency=2)(handlers.handle)
QUEUES[plan.ATOMIC].handler(concurrency=2, ack="atomic")(handlers.handle)
QUEUES[plan.AUTO].handler(concurrency=2)(handlers.handle_async)
QUEUES[plan.AUTO_ATOMIC].handler(ack="atomic")(handlers.handle)
QUEUES[plan.POOLED].handler(concurrency=2, ack="atomic")(handlers.handle)
QUEUES[plan.BRIEF].handler(handlers.handle_slowly)
