"""Bindings in the admin: bound and unbound by who may, validated, and without getting in anybody's way."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_pgqueue import Queue, Topic
from django_pgqueue.models import MessageQueue, TopicBinding
from django_pgqueue.services import reaping
from tests.support.locks import is_waiting
from tests.support.rows import make_queue, payloads
from tests.support.sessions import Session, connect, second_session
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db

LIST = "admin:django_pgqueue_topicbinding_changelist"
ADD = "admin:django_pgqueue_topicbinding_add"
VALID = {"topic": "t", "queue": "q", "ttl": ""}


@pytest.fixture
def queue() -> MessageQueue:
    return make_queue("q")


@pytest.fixture
def client_with() -> Callable[..., Client]:
    """A client of a member of staff with these permissions on bindings."""

    def make(*permissions: str) -> Client:
        user = User.objects.create_user("staff", is_staff=True)
        codenames = [f"{permission}_topicbinding" for permission in permissions]
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        assert user.user_permissions.count() == len(permissions)
        client = Client()
        client.force_login(user)
        return client

    return make


def page(binding: TopicBinding, name: str) -> str:
    return reverse(f"admin:django_pgqueue_topicbinding_{name}", args=[binding.pk])


def unbind_all(client: Client) -> Any:
    chosen = list(TopicBinding.objects.values_list("pk", flat=True))
    return client.post(reverse(LIST), {"action": "delete_selected", "_selected_action": chosen, "post": "yes"})


def test_a_queue_is_bound_and_unbound(admin_client: Client, queue: MessageQueue) -> None:
    """The next publish counts it in, and no longer."""
    assert admin_client.post(reverse(ADD), {**VALID, "ttl": "60"}).status_code == 302
    assert len(Topic("t").publish(1)) == 1
    answer = admin_client.get(reverse(LIST), {"q": "t"})
    assert b"60.0" in answer.content
    binding = TopicBinding.objects.get()
    assert admin_client.post(page(binding, "delete"), {"post": "yes"}).status_code == 302
    assert Topic("t").publish(2) == []
    assert payloads("q") == [1]


def test_many_are_unbound_by_one_action(admin_client: Client) -> None:
    """Each by itself, in the order in which publishers lock them."""
    for name in ("c", "a", "b"):
        Topic("t").bind(Queue(name))
    assert unbind_all(admin_client).status_code == 302
    assert not TopicBinding.objects.exists()


REFUSED = {
    "empty topic": {"topic": ""},
    "topic with a control character": {"topic": "a\x07b"},
    "topic that is not in normal form": {"topic": "e\u0301"},
    "long topic": {"topic": "x" * 251},
    "no such queue": {"queue": "missing"},
    "empty queue": {"queue": ""},
    "ttl of nothing": {"ttl": "0"},
    "negative ttl": {"ttl": "-1"},
    # Every publish to the topic would fail: no time is that late.
    "ttl beyond all times": {"ttl": "1e300"},
    "ttl that is no number": {"ttl": "nan"},
}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused(admin_client: Client, queue: MessageQueue, wrong: dict[str, str]) -> None:
    """With a message at the field; nothing is stored."""
    answer = admin_client.post(reverse(ADD), {**VALID, **wrong})
    assert answer.status_code == 200
    assert set(answer.context["adminform"].form.errors) == set(wrong)
    assert not TopicBinding.objects.exists()


def test_a_queue_that_is_bound_already_is_not_bound_twice(admin_client: Client, queue: MessageQueue) -> None:
    """The form says so."""
    assert admin_client.post(reverse(ADD), VALID).status_code == 302
    answer = admin_client.post(reverse(ADD), VALID)
    assert answer.status_code == 200
    assert answer.context["adminform"].form.errors
    assert TopicBinding.objects.count() == 1


def test_nothing_is_edited(admin_client: Client, queue: MessageQueue) -> None:
    """A binding is what it is: it can be seen and ended."""
    binding = TopicBinding.objects.create(topic="t", queue="q")
    assert admin_client.get(page(binding, "change")).status_code == 200
    assert admin_client.post(page(binding, "change"), {**VALID, "topic": "other"}).status_code == 403
    assert TopicBinding.objects.get().topic == "t"


@pytest.mark.parametrize("permissions", [(), ("view",), ("change",), ("add",), ("delete", "view")], ids="-".join)
def test_each_step_needs_its_permission(
    client_with: Callable[..., Client], queue: MessageQueue, permissions: tuple[str, ...]
) -> None:
    """To view, to bind, to unbind; who may none of it sees nothing."""
    binding = TopicBinding.objects.create(topic="bound", queue="q")
    client = client_with(*permissions)
    may_see = {"view", "change"} & set(permissions)
    assert client.get(reverse(LIST)).status_code == (200 if may_see else 403)
    assert client.get(page(binding, "change")).status_code == (200 if may_see else 403)

    assert client.post(reverse(ADD), VALID).status_code == (302 if "add" in permissions else 403)
    assert TopicBinding.objects.filter(topic="t").exists() == ("add" in permissions)

    unbind_all(client)
    answer = client.post(page(binding, "delete"), {"post": "yes"})
    assert TopicBinding.objects.filter(topic="bound").exists() == ("delete" not in permissions)
    if "delete" not in permissions:
        assert answer.status_code == 403


@pytest.mark.django_db(transaction=True)
def test_a_queue_that_is_just_reaped_is_waited_for(admin_client: Client) -> None:
    """The reaper meets no binding that it has not locked: such a one could deadlock it with a publisher."""
    make_queue("q", idle=7200, auto_deleted=True)
    with second_session() as reaper, Session() as staff:
        with reaper.transaction():
            assert reaper.execute(reaping.LOCK_IDLE_QUEUE, {"name": "q", "idle_for": 3600}).fetchone()
            bound = staff.start(admin_client.post, reverse(ADD), VALID)
            wait_until(lambda: is_waiting(staff.pid))
            with connect() as other:
                assert other.execute("SELECT count(*) FROM django_pgqueue_topicbinding").fetchone() == (0,)
        assert bound.result(10).status_code == 302
