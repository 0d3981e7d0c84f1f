"""Case B40 with a slow database: an extension that takes a third of the lease still lands in time."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from django_pgqueue import Message, Queue
from django_pgqueue.consumer import Consumer
from tests.support import connect, payloads, wait_until
from tests.workers import consuming

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

# Extensions alone: they change the deadline and leave the token.
SLOW = """
CREATE FUNCTION slow_extension() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_sleep(0.8); RETURN NEW; END $$;
CREATE TRIGGER slow_extension BEFORE UPDATE ON django_pgqueue_messagequeueitem FOR EACH ROW
    WHEN (OLD.lease_token = NEW.lease_token AND NEW.lease_expires_at > OLD.lease_expires_at)
    EXECUTE FUNCTION slow_extension();
"""


@pytest.fixture
def slow_extensions() -> Iterator[None]:
    with connect() as admin:
        admin.execute(SLOW)
        try:
            yield
        finally:
            admin.execute("DROP TRIGGER slow_extension ON django_pgqueue_messagequeueitem")
            admin.execute("DROP FUNCTION slow_extension()")


def test_slow_extensions_let_no_message_be_handled_twice(slow_extensions: None, settings: Any) -> None:
    """Two consumers, handlers of two leases: one start for each message, and none is abandoned."""
    settings.PGQUEUE = {"LEASE": 2.4, "POLL_INTERVAL": 0.5}
    queue = Queue("q")
    queue.publish_many([1, 2])
    started: list[tuple[Any, int]] = []

    def handle(message: Message) -> None:
        started.append((message.payload, message.delivery_count))
        time.sleep(5)

    handler = queue.make_handler(handle)
    with consuming(Consumer([handler], prefetch=1)), consuming(Consumer([handler], prefetch=1)):
        wait_until(lambda: not payloads("q"), 30)
    assert sorted(started) == [(1, 1), (2, 1)]
