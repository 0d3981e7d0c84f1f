"""
What the tests of forking run in a process of its own: `python -m tests.support.forks SCENARIO`.

A scenario prints what it found as JSON. Children end by `os._exit`, as those of a pre-forking server do
in effect: nothing of the parent's end is theirs.
"""

import json
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import django
from django.db import connection

CHILDREN = 4
MESSAGES = 100


def fork(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call the function in a forked child. Returns what waits for its result."""
    reader, writer = os.pipe()
    # Newer Pythons warn of what is tested here: threads in the parent.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(function()).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)

    def result() -> Any:
        with os.fdopen(reader, "rb") as stream:
            text = stream.read()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return json.loads(text)

    return result


def backend() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def publish(number: int) -> list[int]:
    """Publish a hundred messages. Returns the backends that this process spoke with."""
    from django_pgqueue import Queue

    queue = Queue("work")
    backends = set()
    for index in range(MESSAGES):
        queue.publish([number, index])
        backends.add(backend())
    return sorted(backends)


def consume(name: str) -> list[Any]:
    """Consume a queue to its end. Returns the payloads, and the backends of the handlers."""
    from django_pgqueue import Queue
    from django_pgqueue.consumer.consumer import Consumer
    from django_pgqueue.queue_internals import make_handler

    payloads: list[Any] = []
    backends: list[int] = []

    def handle(message: Any) -> None:
        payloads.append(message.payload)
        backends.append(backend())

    Consumer([make_handler(Queue(name), handle)], concurrency=1, drain=True).run()
    return [payloads, sorted(set(backends))]


# --- Scenarios ------------------------------------------------------------------------------------


def preloaded() -> Any:
    """What a pre-forking server does: the parent publishes at import, the children at each request."""
    from django_pgqueue import Queue

    Queue("work").publish("at import")
    before = backend()
    results = [fork(lambda number=number: publish(number)) for number in range(CHILDREN)]
    children = [result() for result in results]
    Queue("work").publish("afterwards")
    return {"parent": [before, backend()], "children": children}


def multiprocessing_child(name: str) -> list[Any]:
    django.setup()
    from django_pgqueue import Queue

    Queue(name).publish_many([name] * 10)
    return consume(name)


def multiprocessed() -> Any:
    """Children of multiprocessing, by each of its ways, publish and consume."""
    before = backend()
    found = {}
    for method in ("fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found[method] = pool.map(multiprocessing_child, [f"{method}.{number}" for number in range(2)])
    return {"parent": [before, backend()], "children": found}


def consumed_in_a_child() -> Any:
    """A consumer runs in a child of a parent that consumes, listens and works in threads itself."""
    from django_pgqueue import Queue
    from django_pgqueue.consumer.consumer import Consumer
    from django_pgqueue.queue_internals import make_handler

    parents, childs = Queue("parent"), Queue("child")
    handled = threading.Semaphore(0)
    consumer = Consumer([make_handler(parents, lambda message: handled.release())], concurrency=4)
    parents.declare()
    thread = threading.Thread(target=consumer.run)
    thread.start()
    parents.publish_many(range(20))
    for _ in range(20):
        assert handled.acquire(timeout=20)
    childs.publish_many([1, 2, 3])
    before = backend()
    found = fork(lambda: consume("child"))()
    # The parent's loops go on: each message wakes it, though it polls once a minute.
    parents.publish("afterwards")
    assert handled.acquire(timeout=20)
    consumer.stop()
    thread.join(20)
    return {"parent": [before, backend()], "child": found, "ended": not thread.is_alive()}


if __name__ == "__main__":
    django.setup()
    scenario = {one.__name__: one for one in (preloaded, multiprocessed, consumed_in_a_child)}[sys.argv[1]]
    sys.stdout.write(json.dumps(scenario()))
