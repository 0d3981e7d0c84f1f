"""A row that the server refuses to settle, or to hand out, holds up no other message."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import sql

from django_pgqueue import Message, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import consuming
from tests.support.rows import payloads
from tests.support.sessions import connect
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Refuse = Callable[[str, str], None]


@pytest.fixture
def refuse() -> Iterator[Refuse]:
    """Let a trigger refuse an operation on the rows that a condition picks, as a project's own might."""
    with connect() as admin:
        admin.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$"
        )

        def make(operation: str, condition: str) -> None:
            admin.execute(
                sql.SQL(
                    "CREATE TRIGGER refuse BEFORE {} ON django_pgqueue_messagequeueitem FOR EACH ROW WHEN ({})"
                    " EXECUTE FUNCTION refuse()"
                ).format(sql.SQL(operation), sql.SQL(condition))
            )

        try:
            yield make
        finally:
            admin.execute("DROP FUNCTION refuse() CASCADE")


@pytest.fixture(autouse=True)
def short(settings: Any) -> None:
    settings.PGQUEUE = {"LEASE": 1.5, "POLL_INTERVAL": 0.3, "BACKOFF": {"base": 0.1}}


IS_BAD = "OLD.payload = '\"bad\"'"
IS_SETTLED = "OLD.lease_token IS NOT NULL AND NEW.lease_token IS DISTINCT FROM OLD.lease_token"


@pytest.mark.parametrize("ack", ["late", "atomic"])
@pytest.mark.parametrize("verb", ["ack", "nack", "reject"])
def test_a_message_that_cannot_be_settled_holds_up_no_other(refuse: Refuse, verb: str, ack: str) -> None:
    """
    Its ack, its failure or its rejection is refused each time, in one batch with others that are not.

    These are settled; it is logged, its lease runs out, and the consumer goes on with what comes later.
    """
    if verb == "ack":
        refuse("DELETE", IS_BAD)
    else:
        refuse("UPDATE", f"{IS_BAD} AND {IS_SETTLED}")
    queue = Queue("work", max_deliveries=2)

    def handle(message: Message) -> None:
        if message.payload in ("bad", "failing") and verb == "nack":
            raise ValueError("no")
        if message.payload in ("bad", "failing") and verb == "reject":
            raise Reject("no")

    queue.publish_many(["first", "bad", "failing", "last"])
    # As many are held as there are: what is not settled would leave no room for more.
    with consuming(Consumer([make_handler(queue, handle, ack=ack)], concurrency=2, prefetch=4)):
        ids = queue.publish_many(range(20))
        wait_until(lambda: not MessageQueueItem.objects.filter(queue="work").exclude(payload="bad").exists())
        assert not MessageQueueItem.objects.filter(id__in=ids).exists()
        later = queue.publish("later")
        wait_until(lambda: not MessageQueueItem.objects.filter(id=later).exists())
    assert MessageQueueItem.objects.filter(payload="bad").exists()
    # Where the ack is in the handler's transaction, what refuses it makes the handler fail.
    assert payloads("work.dead") in ([[], ["bad"]] if verb == "ack" else [["failing"]])


def test_what_cannot_be_settled_is_not_handled_for_ever(refuse: Refuse, caplog: pytest.LogCaptureFixture) -> None:
    """Each delivery counts as ever: after the last one it is a dead letter, and its handler was not called again."""
    refuse("UPDATE", f"{IS_BAD} AND {IS_SETTLED} AND NEW.queue_id = 'work' AND NEW.lease_token IS NULL")
    queue, starts = Queue("work", max_deliveries=2), []

    def handle(message: Message) -> None:
        starts.append(message.delivery_count)
        raise ValueError("no")

    queue.publish("bad")
    with consuming(Consumer([make_handler(queue, handle)], concurrency=1)):
        wait_until(lambda: payloads("work.dead") == ["bad"])
    assert starts == [1, 2]
    assert "message not settled, its lease runs out" in caplog.text
