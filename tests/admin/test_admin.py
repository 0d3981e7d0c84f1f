"""The admin: both tables can be seen, nothing can be changed, and large tables are not read for it."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pgqueue.admin import UncountedPaginator
from django_pgqueue.models import MessageQueue, MessageQueueItem
from tests.support.rows import make_message, make_queue
from tests.support.sessions import fetch

pytestmark = pytest.mark.django_db

ITEM = MessageQueueItem._meta.db_table
MODELS = {"messagequeue": MessageQueue, "messagequeueitem": MessageQueueItem}
each_model = pytest.mark.parametrize("model", MODELS)


def url(model: str, page: str, *args: Any) -> str:
    return reverse(f"admin:django_pgqueue_{model}_{page}", args=args)


@pytest.fixture
def rows() -> None:
    make_queue("orders / daily?")
    make_message("orders / daily?", {"secret": "x" * 50})
    make_message("orders / daily?", lease=60)
    make_message(
        "orders / daily?", dead_lettered_from="x", dead_lettered_at="2026-01-01T00:00:00Z", failures=[{"a": 1}]
    )


@each_model
def test_the_list_is_shown(admin_client: Client, rows: None, model: str) -> None:
    """With a row for each object."""
    answer = admin_client.get(url(model, "changelist"))
    assert answer.status_code == 200
    assert "orders / daily?" in answer.content.decode()


@each_model
def test_the_detail_page_is_shown(admin_client: Client, rows: None, model: str) -> None:
    """Of every row, also of one whose name needs quoting in a URL."""
    for row in MODELS[model].objects.all():  # type: ignore[attr-defined]
        answer = admin_client.get(url(model, "change", row.pk), follow=True)
        assert answer.status_code == 200
        assert answer.redirect_chain == []
    assert "orders / daily?" in answer.content.decode()


@each_model
def test_search_and_filters_work(admin_client: Client, rows: None, model: str) -> None:
    """Ordering by each column as well."""
    for query in ("?q=orders", "?o=1", "?o=-2", "?p=1", "?all="):
        answer = admin_client.get(url(model, "changelist") + query)
        assert answer.status_code == 200, query


@each_model
def test_nothing_can_be_added(admin_client: Client, rows: None, model: str) -> None:
    """Queues are declared and messages published, by the library."""
    assert admin_client.get(url(model, "add")).status_code == 403
    before = MODELS[model].objects.count()  # type: ignore[attr-defined]
    assert admin_client.post(url(model, "add"), {"name": "x", "payload": "1"}).status_code == 403
    assert MODELS[model].objects.count() == before  # type: ignore[attr-defined]


@each_model
def test_nothing_can_be_changed_or_deleted(admin_client: Client, rows: None, model: str) -> None:
    """Neither from the detail page nor by an action on the list."""
    before = list(MODELS[model].objects.order_by("pk").values())  # type: ignore[attr-defined]
    row = MODELS[model].objects.first()  # type: ignore[attr-defined]
    assert admin_client.post(url(model, "change", row.pk), {"payload": "1", "max_deliveries": 1}).status_code == 403
    assert admin_client.get(url(model, "delete", row.pk)).status_code == 403
    assert admin_client.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403
    admin_client.post(
        url(model, "changelist"), {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
    )
    assert list(MODELS[model].objects.order_by("pk").values()) == before  # type: ignore[attr-defined]


def test_the_list_needs_a_login(client: Client) -> None:
    """Payloads are data."""
    for model in MODELS:
        assert client.get(url(model, "changelist")).status_code == 302


def statements(get: Callable[[], Any]) -> list[str]:
    """Return the statements on the table of messages that a request sends."""
    with CaptureQueriesContext(
        connection,
    ) as captured:
        assert get().status_code == 200
    return [query["sql"] for query in captured if f'"{ITEM}"' in query["sql"]]


@pytest.mark.parametrize("query", ["", "?o=1", "?q=", "?p=1"])
def test_the_list_of_messages_counts_nothing_and_reads_no_payload(admin_client: Client, rows: None, query: str) -> None:
    """A COUNT(*) of a million messages, or a page of payloads of megabytes, would be felt by publishers."""
    fetch(f"INSERT INTO {ITEM} (queue_id, payload) SELECT 'orders / daily?', '{{}}' FROM generate_series(1, 150)")
    sent = statements(lambda: admin_client.get(url("messagequeueitem", "changelist") + query))
    assert sent
    for statement in sent:
        assert "COUNT(" not in statement.upper()
        assert "LIMIT" in statement
        for column in ("payload", "headers", "failures"):
            assert f'"{ITEM}"."{column}"' not in statement


def test_the_detail_page_of_a_message_shows_its_payload(admin_client: Client, rows: None) -> None:
    """One payload is read there."""
    message = MessageQueueItem.objects.order_by("pk")[0]
    answer = admin_client.get(url("messagequeueitem", "change", message.pk))
    assert "xxxxxxxxxx" in answer.content.decode()


def test_the_detail_page_of_a_message_does_not_list_all_queues_messages(admin_client: Client, rows: None) -> None:
    """Nor count them."""
    message = MessageQueueItem.objects.order_by("pk")[0]
    for statement in statements(lambda: admin_client.get(url("messagequeueitem", "change", message.pk))):
        assert "COUNT(" not in statement.upper()


def test_the_paginator_looks_no_further_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last page is the last within reach, however many rows there are."""
    make_queue("q")
    fetch(f"INSERT INTO {ITEM} (queue_id, payload) SELECT 'q', '{{}}' FROM generate_series(1, 50)")
    monkeypatch.setattr(UncountedPaginator, "max_rows", 20)
    paginator = UncountedPaginator(MessageQueueItem.objects.order_by("-id"), 10)
    with CaptureQueriesContext(connection) as captured:
        assert (paginator.count, paginator.num_pages) == (20, 2)
    (query,) = captured
    assert "LIMIT 20" in query["sql"]
    assert "ORDER BY" not in query["sql"]


def test_the_admin_shows_a_message_that_cannot_be_decoded(admin_client: Client) -> None:
    """The list does not read payloads, so one undecodable row does not take the page down."""
    make_queue("q")
    fetch(f"INSERT INTO {ITEM} (queue_id, payload) SELECT 'q', ('[' || repeat('7', 5000) || ']')::jsonb")
    assert admin_client.get(url("messagequeueitem", "changelist")).status_code == 200
