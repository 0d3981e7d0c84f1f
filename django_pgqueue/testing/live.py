"""A real consumer that runs beside the test and handles committed messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from django.db import connections

from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queues import Queue
from django_pgqueue.task_backend.queues import handlers_of
from django_pgqueue.testing.draining import Drained, watching
from django_pgqueue.testing.names import alias_of, name_of

# All in seconds.
POLL_INTERVAL = 0.01
# For running handlers when the consumer stops.
GRACE = 5.0
WAIT_TIMEOUT = 10.0


class LiveConsumer:
    """A consumer that runs in a thread of this process."""

    def __init__(self, consumer: Consumer, done: Drained) -> None:
        self.consumer = consumer
        #: The outcomes of deliveries so far.
        self.done = done
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pgqueue live consumer", daemon=True)

    def _run(self) -> None:
        try:
            self.consumer.run()
        except BaseException as error:
            self.error = error
        finally:
            connections.close_all()

    def start(self) -> None:
        """Start it, and return when it is connected and listening for notifications."""
        self._thread.start()
        self.wait_until(lambda: (now := self.consumer.condition()).connected and now.listening, "it to listen")

    def stop(self) -> None:
        """Stop it and wait for its end. Raises the exception that ended it before, or ``TimeoutError``."""
        self.consumer.stop()
        self._thread.join(GRACE + WAIT_TIMEOUT)
        if self._thread.is_alive():
            raise TimeoutError(f"the consumer of {self.consumer.queues} does not end")
        if self.error is not None:
            raise self.error

    def wait_until(self, condition: Callable[[], object], what: str = "", *, timeout: float = WAIT_TIMEOUT) -> None:
        """Return when ``condition()`` is true. Raises ``TimeoutError`` naming ``what`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.error is not None:
                raise self.error
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout} s for {what or condition}; so far: {self.done}")
            time.sleep(POLL_INTERVAL)

    def wait_until_idle(self, *, timeout: float = WAIT_TIMEOUT) -> None:
        """Return when no message of its queues is ready or leased. Delayed messages, such as retries, may remain."""
        items = MessageQueueItem.objects.using(self.consumer.using).filter(queue__in=self.consumer.queues)
        self.wait_until(
            lambda: not (items.ready() | items.leased()).exists(), "its queues to be empty", timeout=timeout
        )


@contextmanager
def live_consumer(
    *queues: Queue | str,
    concurrency: int | None = None,
    prefetch: int | None = None,
    using: str | None = None,
) -> Iterator[LiveConsumer]:
    """
    Run the handlers of these queues in threads inside the block, as ``consume_queues`` does.

    Without queues, all handlers run. The consumer is stopped at the end of the block. Raises ``RuntimeError`` inside a
    transaction, including that of a ``TestCase``, because the consumer could not see its changes; ``LookupError`` if a
    queue has no handler; and ``TimeoutError`` if the consumer does not start.
    """
    alias = alias_of(queues[0] if queues else None, using)
    if connections[alias].in_atomic_block:
        raise RuntimeError("a live consumer sees only committed messages: use TransactionTestCase, or drain()")
    names: Sequence[str] = [name_of(queue) for queue in queues]
    handlers = [handler for handler in handlers_of(names) if handler.queue.using == alias]
    with watching(handlers) as watch:
        live = LiveConsumer(
            Consumer(watch.handlers, concurrency=concurrency, prefetch=prefetch, grace=GRACE), watch.done
        )
        try:
            live.start()
            yield live
        finally:
            live.stop()
