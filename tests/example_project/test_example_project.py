"""The example project, from a webhook to its summary in the admin."""

import json

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import transaction
from django.test import Client
from django.urls import reverse

from django_pgqueue import Message
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.registry import registered_handlers
from example_project import settings as example_settings
from example_project.inbox.models import Delivery, Summary
from example_project.inbox.queues import webhooks

pytestmark = pytest.mark.django_db(transaction=True)

PUSH = {"event": "issues", "payload": {"action": "opened", "issue": {"number": 7}}}


def post(body: str | bytes, source: str = "github"):
    return Client().post(f"/webhooks/{source}/", body, content_type="application/json")


def consume() -> int:
    return Consumer(registered_handlers([webhooks.name]), drain=True).run()


def test_a_webhook_is_published_with_its_audit_row_and_ends_as_a_summary():
    """The view stores delivery and message; the handler stores one summary and acks."""
    body = json.dumps(PUSH)
    response = post(body)
    assert response.status_code == 202
    delivery = Delivery.objects.get(pk=response.json()["delivery"])
    assert (delivery.source, delivery.size) == ("github", len(body))
    item = MessageQueueItem.objects.get()
    assert (item.queue_id, item.payload, item.headers) == (webhooks.name, PUSH, {"delivery": delivery.pk})

    assert consume() == 1
    assert Summary.objects.get().text == "issues opened"
    assert Summary.objects.get().delivery == delivery
    assert not MessageQueueItem.objects.exists()


@pytest.mark.parametrize(
    ("body", "clue"),
    [
        ("{", "Expecting"),
        ("", "Expecting"),
        (b"\xff", "decode"),
        ('{"price": NaN}', "$.price"),
        ('["\\u0000"]', "$[0]"),
        ("[" * 100_000, "recursion"),
    ],
    ids=["cut off", "empty", "not UTF-8", "NaN", "NUL", "too deep"],
)
def test_a_body_that_cannot_be_stored_is_refused_and_leaves_nothing(body: str | bytes, clue: str):
    """The answer is 400 and says why; neither the audit row nor a message is there."""
    response = post(body)
    assert response.status_code == 400
    assert clue in response.json()["error"]
    assert not Delivery.objects.exists()
    assert not MessageQueueItem.objects.exists()


def test_only_post_is_taken():
    """A GET is refused with 405."""
    assert Client().get("/webhooks/github/").status_code == 405


def test_a_rollback_takes_audit_row_and_message():
    """What the view does inside a transaction that rolls back is gone, all of it."""
    with transaction.atomic():
        assert post(json.dumps(PUSH)).status_code == 202
        assert MessageQueueItem.objects.count() == Delivery.objects.count() == 1
        transaction.set_rollback(True)
    assert not Delivery.objects.exists()
    assert not MessageQueueItem.objects.exists()


def test_the_summary_and_the_ack_commit_together(monkeypatch: pytest.MonkeyPatch):
    """A handler that fails after it has written leaves no summary, and the message for a retry."""
    post(json.dumps(PUSH))
    (handler,) = registered_handlers([webhooks.name])
    calls = []

    def fail_once(message: Message) -> None:
        handler.function(message)
        calls.append(Summary.objects.count())
        if len(calls) == 1:
            raise RuntimeError("after the write")

    again = make_handler(webhooks, fail_once, ack="atomic")
    assert Consumer([again], max_messages=1).run() == 1
    assert not Summary.objects.exists()
    assert MessageQueueItem.objects.get().delivery_count == 1
    assert Consumer([again], max_messages=1).run() == 1
    assert calls == [1, 1]
    assert Summary.objects.count() == 1


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"event": "ping"}, "ping"),
        ({"action": "paid", "id": 3}, "paid"),
        ({"event": 5, "payload": None}, "keys: event, payload"),
        ([1, 2], "a JSON list"),
        ({"event": "x" * 300}, "x" * 200),
    ],
)
def test_a_webhook_of_any_shape_gets_a_summary(payload: object, text: str):
    """Whatever JSON comes in, the handler finds one line for it."""
    assert post(json.dumps(payload)).status_code == 202
    consume()
    assert Summary.objects.get().text == text


def test_real_webhooks_are_summarized(real_input):
    """Each line of the real input goes through the view and comes out as a summary."""
    lines = real_input.read_text(encoding="utf-8").splitlines()
    assert {post(line).status_code for line in lines} == {202}
    assert consume() == len(lines)
    assert Summary.objects.count() == len(lines)
    assert not Summary.objects.filter(text__startswith="keys:").exists()


def test_the_admin_answers():
    """The login page is at /admin/, and every list shows what is there."""
    assert Client().get("/admin/", follow=True).status_code == 200
    post(json.dumps(PUSH))
    consume()
    post(json.dumps(PUSH))
    user = get_user_model().objects.create_superuser("admin", password="admin")
    client = Client()
    client.force_login(user)
    for model in ("inbox_delivery", "inbox_summary", "django_pgqueue_messagequeue", "django_pgqueue_messagequeueitem"):
        response = client.get(reverse(f"admin:{model}_changelist"))
        assert response.status_code == 200
        assert response.context["cl"].result_list, model


def test_a_digest_is_ordered_and_shown(settings) -> None:
    """A task: who asked for it sees how far it is, and then what it says."""
    settings.TASKS = example_settings.TASKS
    for _ in range(2):
        post(json.dumps(PUSH))
    consume()
    result_id = Client().post("/webhooks/github/digest/").json()["digest"]
    assert Client().get(f"/digests/{result_id}/").json() == {"status": "READY", "counts": None}
    call_command("consume_queues", drain=True)
    assert Client().get(f"/digests/{result_id}/").json() == {"status": "SUCCESSFUL", "counts": {"issues opened": 2}}
    assert Client().get("/digests/7-abcdefgh/").status_code == 404
