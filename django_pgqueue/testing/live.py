"""A real consumer beside the test, for what is committed."""

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

# Seconds between two looks.
LOOK = 0.01
# Seconds that handlers get at the end, and the consumer's thread after that.
GRACE = 5.0
WAIT_TIMEOUT = 10.0


class LiveConsumer:
    """A consumer that runs in a thread of this process."""

    def __init__(self, consumer: Consumer, done: Drained) -> None:
        self.consumer = consumer
        #: What became of messages so far.
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
        """Start it, and return when it is woken by what is published from now on."""
        self._thread.start()
        self.wait_until(lambda: (now := self.consumer.condition()).connected and now.listening, "it to listen")

    def stop(self) -> None:
        """Stop it and wait for its end. Raises what ended it before."""
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
            time.sleep(LOOK)

    def wait_until_idle(self, *, timeout: float = WAIT_TIMEOUT) -> None:
        """Return when no message of its queues is ready or leased; delayed ones, retries say, stay."""
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
    Run the handlers of these queues (none named: of all) in threads inside the block, as ``consume_queues`` does.

    It is stopped at the end of the block. Raises ``RuntimeError`` inside a transaction, a ``TestCase``'s too, for it
    would see nothing of that; ``LookupError`` where a queue has no handler; ``TimeoutError`` where it does not start.
    """
    alias = alias_of(queues[0] if queues else None, using)
    if connections[alias].in_atomic_block:
        raise RuntimeError("a live consumer sees only what is committed: use TransactionTestCase, or drain()")
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
