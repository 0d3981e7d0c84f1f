"""Real failures of other systems over model signals: B106, receivers of every save and deletion that publish."""

import io
import uuid
from collections.abc import Iterator

import pytest
from django.contrib.auth.models import Group
from django.core.management import call_command
from django.db import transaction
from django.db.models.signals import m2m_changed, post_delete, post_save, pre_delete, pre_save
from django.test import Client
from django.urls import reverse

from django_pgqueue import PayloadError, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem, QueueConsumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import consumers
from tests.support.rows import backdate, delete_queue, payloads
from tests.support.sessions import fetch

pytestmark = pytest.mark.django_db(transaction=True)

SIGNALS = {
    "pre_save": pre_save,
    "post_save": post_save,
    "pre_delete": pre_delete,
    "post_delete": post_delete,
    "m2m_changed": m2m_changed,
}


@pytest.fixture
def audit() -> Iterator[list[str]]:
    """An app that records every save and deletion of any model, and publishes it. Gives what it recorded."""
    recorded: list[str] = []
    queue = Queue("audit")
    queue.declare()

    def receive(sender, instance, signal, **kwargs) -> None:
        recorded.append(sender.__name__)
        queue.publish({"model": sender.__name__, "pk": instance.pk})

    for signal in SIGNALS.values():
        signal.connect(receive)
    try:
        yield recorded
    finally:
        for signal in SIGNALS.values():
            signal.disconnect(receive)


def test_b106_the_products_own_writes_send_no_model_signals(audit):
    """Publish, heal, claim, settle, dead-letter, consume, beat, expire, adopt, reap: no receiver hears of it."""
    queue = Queue("work", auto_deleted=True, max_deliveries=1)
    queue.declare()
    queue.publish({"n": 1})
    delete_queue("work")
    with transaction.atomic():
        queue.publish({"n": 2})
    queue.publish_many([{"n": 3}, {"n": 4}, {"n": 5}])
    one, two, three = queue.claim(3)
    queue.extend(one)
    queue.ack(one)
    queue.nack(two)
    queue.reject(three, reason="no")
    assert Consumer([make_handler(queue, lambda message: None)], drain=True).run() >= 1
    queue.publish({"n": 6}, ttl=0.001)
    fetch("SELECT pg_sleep(0.01)")
    fetch("UPDATE django_pgqueue_messagequeueitem SET expires_at = statement_timestamp() WHERE queue_id = 'work.dead'")
    for name in ("work", "work.dead"):
        backdate(name, 9999)
    assert set(Reaper("default").run_once().queues) == {"work", "work.dead"}
    call_command("inspect_queues", format="json", stdout=io.StringIO())
    assert audit == []
    assert payloads("audit") == []


def test_b106_one_save_of_the_callers_stores_one_message_each_signal(audit):
    """And the message's own row sets off nothing further: no recursion, however the save is made."""
    group = Group.objects.create(name="one")
    assert audit == ["Group", "Group"]
    group_pk = group.pk
    group.delete()
    assert audit == ["Group"] * 4
    # Before it has a key, and with it, three times.
    assert payloads("audit") == [{"model": "Group", "pk": pk} for pk in (None, group_pk, group_pk, group_pk)]
    assert Consumer([make_handler(Queue("audit"), lambda message: None)], drain=True).run() == 4
    assert audit == ["Group"] * 4


def test_b106_a_handler_that_saves_sets_off_one_publish_a_save_and_no_more(audit):
    """What a handler saves is the caller's: its receivers run as anywhere, once."""
    queue = Queue("work")
    queue.publish({"n": 1})
    Consumer([make_handler(queue, lambda message: Group.objects.create(name="made"))], drain=True).run()
    assert audit == ["Group", "Group"]
    assert len(payloads("audit")) == 2


def test_b106_a_save_in_the_admin_ends(audit, admin_client: Client):
    """With its log entry, which is a save too."""
    audit.clear()
    fetch("DELETE FROM django_pgqueue_messagequeueitem")
    answer = admin_client.post(reverse("admin:auth_group_add"), {"name": "by hand"})
    assert answer.status_code == 302
    assert Group.objects.filter(name="by hand").exists()
    assert audit.count("Group") == 2
    assert "MessageQueueItem" not in audit and "MessageQueue" not in audit
    assert len(payloads("audit")) == len(audit)


def test_b106_a_receiver_whose_key_is_no_json_gets_one_clear_error_and_the_transaction_lives(audit):
    """A UUID is refused before any SQL, with the path, never with a RecursionError; the caller may catch it."""
    consumer = QueueConsumer(id=uuid.uuid4(), host="theirs", pid=1, queues=[])
    with transaction.atomic():
        with pytest.raises(PayloadError, match=r"\$\.pk: UUID is not JSON") as failure:
            consumer.save()
        assert failure.value.path == "$.pk"
        Group.objects.create(name="all the same")
    assert Group.objects.filter(name="all the same").exists()


def test_b106_saving_our_models_by_hand_ends_too(audit):
    """Whoever writes a message by the model gets one publish for it, by SQL, and that is the end of it."""
    queue = Queue("work")
    queue.declare()
    MessageQueueItem.objects.create(queue_id="work", payload={})
    assert audit == ["MessageQueueItem"] * 2
    assert len(payloads("audit")) == 2
    consumers.beat(uuid.uuid4(), "host", 1, [], "default")
    assert audit == ["MessageQueueItem"] * 2
