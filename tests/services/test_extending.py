"""Extending leases while others hold the rows for a moment, or for long."""

import pytest

from django_pgqueue import LeaseLost, Queue, queues
from tests.support.rows import make_message, make_queue
from tests.support.sessions import Session, fetch

pytestmark = pytest.mark.django_db(transaction=True)

LOCK = "SELECT id FROM django_pgqueue_messagequeueitem WHERE queue_id = 'q' FOR UPDATE"


def test_extend_is_patient_with_rows_that_are_locked_for_a_moment():
    """A claim beside it locks what it looks at for as long as it runs: the lease is not lost for that."""
    make_queue("q")
    make_message("q")
    queue = Queue("q")
    (message,) = queue.claim()
    with Session() as other:
        other.begin()
        other.sql(LOCK)
        released = other.start(fetch, "SELECT pg_sleep(0.2)")
        other.start(other._leave, None)
        queue.extend(message, seconds=500)
        released.result()
    ((left,),) = fetch(
        "SELECT extract(epoch FROM lease_expires_at - statement_timestamp()) FROM django_pgqueue_messagequeueitem"
    )
    assert left > 490


def test_extend_does_not_wait_for_ever_and_extends_the_others(monkeypatch):
    """A row that stays locked counts as lost after LOCK_TIMEOUT; the rest is extended."""
    monkeypatch.setattr(queues, "LOCK_TIMEOUT", 0.1)
    make_queue("q")
    queue = Queue("q")
    queue.publish_many(range(3))
    messages = queue.claim(3)
    with Session() as other:
        other.begin()
        other.sql(f"{LOCK} LIMIT 1")
        with pytest.raises(LeaseLost) as failure:
            queue.extend(*messages, seconds=500)
    assert failure.value.ids == [messages[0].id]
    assert fetch(
        "SELECT count(*) FROM django_pgqueue_messagequeueitem"
        " WHERE lease_expires_at > statement_timestamp() + interval '400 s'"
    ) == [(2,)]
