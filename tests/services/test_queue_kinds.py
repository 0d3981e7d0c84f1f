"""The kinds of docs/queue-kinds.md, each through its whole life: nothing that had not expired is lost."""

from collections import Counter

import pytest
from django.db import transaction

from django_pgqueue import Queue, Reject, Topic
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.message import Message
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueEvent, TopicBinding
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaped, Reaper
from tests.support.processes import consuming
from tests.support.rows import backdate, payloads
from tests.support.sessions import fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = 3600.0


class Ledger:
    """What was published must have been handled, or wait somewhere, or have expired; nothing else."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.handled: list[int] = []
        self.expired = 0

    def publish(self, queue: Queue, count: int) -> None:
        """Publish half in autocommit and half in a transaction."""
        numbers = range(len(self.published), len(self.published) + count)
        for number in numbers[: count // 2]:
            queue.publish({"n": number})
        with transaction.atomic():
            for number in numbers[count // 2 :]:
                queue.publish({"n": number})
        self.published += numbers

    def handle(self, message: Message) -> None:
        self.handled.append(message.payload["n"])

    def drain(self, queue: Queue) -> None:
        Consumer([make_handler(queue, self.handle)], drain=True).run()

    def reap(self) -> Reaped:
        reaped = Reaper("default").run_once()
        self.expired += reaped.expired
        return reaped

    def assert_balanced(self) -> None:
        stored = [item.payload["n"] for item in MessageQueueItem.objects.all()]
        assert Counter(self.handled).total() == len(set(self.handled))
        assert not set(self.handled) & set(stored)
        assert len(self.handled) + len(stored) + self.expired == len(self.published)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def expire_all(name: str) -> None:
    """Let the TTL of a queue's messages pass."""
    fetch(
        "UPDATE django_pgqueue_messagequeueitem"
        " SET expires_at = statement_timestamp() - interval '1 second'"
        " WHERE queue_id = %s AND expires_at IS NOT NULL",
        [name],
    )


def test_a_static_durable_queue_with_a_dead_letter_queue(ledger: Ledger) -> None:
    """It stays, idle or not; its messages wait for years; what is given up is kept and comes back."""
    invoices = Queue("invoices", dead_letter="invoices.failed", max_deliveries=1)
    invoices.declare()
    ledger.publish(invoices, 10)
    backdate("invoices", 1000 * HOUR)
    assert ledger.reap() == Reaped()
    assert MessageQueue.objects.filter(name="invoices").exists()

    def refuse(message: Message) -> None:
        if message.payload["n"] % 2:
            raise Reject("odd")
        ledger.handle(message)

    Consumer([make_handler(invoices, refuse)], drain=True).run()
    assert sorted(letter["n"] for letter in payloads("invoices.failed")) == [1, 3, 5, 7, 9]
    ledger.assert_balanced()

    backdate("invoices.failed", 1000 * HOUR)
    assert ledger.reap() == Reaped()
    assert invoices.redrive() == 5
    ledger.drain(invoices)
    assert sorted(ledger.handled) == ledger.published
    ledger.assert_balanced()


def test_a_dispatcher_queue(ledger: Ledger) -> None:
    """One consumer at a time; what expires is kept as a dead letter; idle it goes, and it comes back."""
    failed = Queue("dispatcher.failed")
    dispatcher = Queue("dispatcher.7", auto_deleted=True, exclusive=True, ttl=300, dead_letter="dispatcher.failed")
    ledger.publish(dispatcher, 10)
    assert {item.expires_at is None for item in MessageQueueItem.objects.all()} == {False}

    owner = Consumer([make_handler(dispatcher, ledger.handle)])
    with consuming(owner):
        wait_until(lambda: len(ledger.handled) == 10)
        assert dispatcher.stats().owner == owner.id
        ledger.publish(dispatcher, 10)
        # A stranger gets nothing while the owner lives, whatever publishers declare.
        assert dispatcher.claim(10) == []
        dispatcher.declare()
        assert dispatcher.stats().owner == owner.id
        wait_until(lambda: len(ledger.handled) == 20)
    wait_until(lambda: not payloads("dispatcher.7"))
    ledger.assert_balanced()

    # Nobody consumes for five minutes: nothing is dropped.
    ledger.publish(dispatcher, 10)
    expire_all("dispatcher.7")
    assert ledger.reap().dead_lettered == 10
    assert len(payloads("dispatcher.failed")) == 10
    ledger.assert_balanced()

    # Idle for an hour it is reaped; its dead letters stay, and send it back.
    backdate("dispatcher.7", HOUR + 1)
    assert ledger.reap().queues == ["dispatcher.7"]
    assert failed.stats().dead == 10
    assert dispatcher.redrive() == 10
    assert [event.kind for event in QueueEvent.objects.order_by("id")] == ["reaped", "revived"]
    ledger.drain(dispatcher)
    assert sorted(ledger.handled) == ledger.published
    ledger.assert_balanced()


def test_a_consumer_queue(ledger: Ledger) -> None:
    """Kept by its consumer; gone after it, with what expired and nothing else; back with the next publish."""
    replies = Queue("replies.web1", durable=False, auto_deleted=True)
    consumer = Consumer([make_handler(replies, ledger.handle)])
    with consuming(consumer):
        ledger.publish(replies, 10)
        wait_until(lambda: len(ledger.handled) == 10)
    wait_until(lambda: not payloads("replies.web1"))

    # Its consumer is gone, but a reply waits: the queue stays as long as that does.
    ledger.publish(replies, 4)
    backdate("replies.web1", HOUR + 1)
    assert ledger.reap() == Reaped()
    assert len(payloads("replies.web1")) == 4
    expire_all("replies.web1")
    reaped = ledger.reap()
    assert (reaped.expired, reaped.queues) == (4, ["replies.web1"])
    ledger.assert_balanced()

    ledger.publish(replies, 4)
    assert [event.kind for event in QueueEvent.objects.order_by("id")] == ["reaped", "revived"]
    ledger.drain(replies)
    assert len(ledger.handled) == 14
    ledger.assert_balanced()


def test_a_queue_that_only_publishers_keep(ledger: Ledger) -> None:
    """Publishing counts as use: for hours nobody consumes, and neither the queue nor a message goes."""
    inbox = Queue("tenant.7.inbox", auto_deleted=True, ttl=86_400)
    for _ in range(5):
        ledger.publish(inbox, 2)
        backdate("tenant.7.inbox", HOUR - 1)
        assert ledger.reap() == Reaped()
    ledger.drain(inbox)
    assert sorted(ledger.handled) == ledger.published
    ledger.assert_balanced()


def test_a_tenant_exchange() -> None:
    """Everybody gets every message; idle for an hour, the topic works as before and so does who stayed."""
    tenant = Topic("tenant.7")
    # Nobody listens yet: no error.
    assert tenant.publish("unheard") == []

    archive = Queue("archive")
    node = Queue("tenant.7.web1", auto_deleted=True)
    tenant.bind(archive)
    tenant.bind(node)
    live: list[str] = []
    with tenant.subscribe(lambda message: live.append(message.payload)):
        assert len(tenant.publish("first")) == 2
        wait_until(lambda: live == ["first"])
    assert payloads("archive") == payloads("tenant.7.web1") == ["first"]

    # An hour passes; web1 is gone, and what was published meanwhile did not keep its queue.
    backdate("archive", HOUR + 1)
    backdate("tenant.7.web1", HOUR + 1)
    assert len(tenant.publish("second")) == 1
    expire_all("tenant.7.web1")
    reaped = Reaper("default").run_once()
    assert (reaped.expired, reaped.queues) == (1, ["tenant.7.web1"])
    assert [binding.queue for binding in TopicBinding.objects.all()] == ["archive"]

    # Published again: who stayed has all, and who comes back gets what is published from then on.
    assert len(tenant.publish("third")) == 1
    node.declare()
    assert len(tenant.publish("fourth")) == 2
    assert payloads("archive") == ["first", "second", "third", "fourth"]
    assert payloads("tenant.7.web1") == ["fourth"]
