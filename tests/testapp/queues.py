"""
The queues of a worker process, as JSON in the environment; none in the process of the tests.

    [{"name": "work", "queue": {"max_deliveries": 3}, "function": "handle", "handler": {"ack": "atomic"}}]

With "topics" it is bound to these.
"""

import json
import os

from django_pgqueue import Queue, Topic
from tests.testapp import handlers

for spec in json.loads(os.environ.get("TESTAPP_QUEUES", "[]")):
    queue = Queue(spec["name"], **spec.get("queue", {}))
    queue.handler(**spec.get("handler", {}))(getattr(handlers, spec.get("function", "handle")))
    for topic in spec.get("topics", []):
        Topic(topic).bind(queue)
