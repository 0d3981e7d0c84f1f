"""Real failures of other systems over async code: B104, publishing from it."""

import asyncio
import json

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from django_pgqueue import Queue
from django_pgqueue.models import MessageQueueItem
from tests.support.locks import is_waiting
from tests.support.rows import make_queue, payloads
from tests.support.sessions import Session, connect, run_async
from tests.support.waiting import DEADLINE, wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

REQUESTS = 500
# Each has a thread and a connection of its own, as under any ASGI server.
AT_ONCE = 50


async def publish_view(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"id": await Queue("q").apublish({"n": int(request.GET["n"])})})


async def publish_sync_view(request: HttpRequest) -> JsonResponse:
    """What people write by mistake."""
    try:
        Queue("q").publish({"n": 0})
    except SynchronousOnlyOperation as error:
        return JsonResponse({"refused": str(error)})
    return JsonResponse({"refused": None})


urlpatterns = [path("publish/", publish_view), path("publish-sync/", publish_sync_view)]


def requested(url: str, query: str = "") -> ApplicationCommunicator:
    """Return a request to the project's ASGI application, as a server would make it."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": url,
        "query_string": query.encode(),
        "headers": [(b"host", b"testserver")],
        "server": ("testserver", "80"),
    }
    return ApplicationCommunicator(get_asgi_application(), scope)


async def answer(request: ApplicationCommunicator) -> dict:
    await request.send_input({"type": "http.request", "body": b""})
    start = await request.receive_output(DEADLINE)
    body = await request.receive_output(DEADLINE)
    await request.wait(DEADLINE)
    assert start["status"] == 200, body
    return json.loads(body["body"])


def backends() -> int:
    with connect() as admin:
        return admin.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()[0]


def test_b104_a_sync_publish_in_an_async_view_is_refused_by_django():
    """With Django's own clear error, and nothing is stored."""
    Queue("q").declare()
    assert "async context" in asyncio.run(answer(requested("/publish-sync/")))["refused"]
    assert payloads("q") == []


def test_b104_five_hundred_requests_at_once_store_a_message_each_and_leak_no_connection(settings):
    """Through Django's ASGI handler; each request's thread gives its connection back."""
    settings.ALLOWED_HOSTS = ["testserver"]
    Queue("q").declare()
    before = backends()
    seen: list[int] = []

    async def requests() -> list[dict]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> dict:
            async with gate:
                done = await answer(requested("/publish/", f"n={number}"))
                if number % 100 == 0:
                    seen.append(await asyncio.to_thread(backends))
                return done

        return await asyncio.gather(*(one(number) for number in range(REQUESTS)))

    answers = asyncio.run(requests())
    assert len({one["id"] for one in answers}) == REQUESTS
    assert sorted(payload["n"] for payload in payloads("q")) == list(range(REQUESTS))
    assert max(seen) > before
    wait_until(lambda: backends() <= before, what="the requests' connections to close")


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_b104_apublish_takes_part_in_a_transaction_of_the_same_context(ends):
    """Sync code in a transaction that calls async code: Django leads back to its thread, and so to its connection."""
    queue = Queue("q")
    queue.declare()

    def business() -> None:
        with transaction.atomic():
            make_queue("business row")
            async_to_sync(queue.apublish)({"n": 1})
            async_to_sync(queue.apublish_many)([{"n": 2}])
            with connect() as other:
                assert other.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchone() == (0,)
            if ends == "rollback":
                transaction.set_rollback(True)

    async def view() -> None:
        await sync_to_async(business)()

    run_async(view())
    assert payloads("q") == ([{"n": 1}, {"n": 2}] if ends == "commit" else [])


def test_b104_many_publishes_of_one_task_group_share_djangos_thread():
    """Fifty at once need one connection, not fifty."""
    queue = Queue("q")
    queue.declare()

    async def gather() -> int:
        await asyncio.gather(*(queue.apublish({"n": n}) for n in range(50)))
        return await asyncio.to_thread(backends)

    before = backends()
    assert run_async(gather()) <= before + 1
    assert len(payloads("q")) == 50


@pytest.mark.parametrize("after", ["commit", "rollback"], ids=["the lock's holder commits", "or rolls back"])
def test_b104_a_cancelled_call_stores_one_message_or_none(after):
    """Cancelled in mid-publish, as when a client hangs up: no session stays in a transaction, the next call works."""
    queue = Queue("q")
    queue.declare()

    async def hang_up(holder: Session) -> None:
        pid = await sync_to_async(lambda: connection.connection.info.backend_pid if connection.connection else 0)()
        if not pid:
            await queue.apublish({"n": 0})
            pid = await sync_to_async(lambda: connection.connection.info.backend_pid)()
        await asyncio.to_thread(holder.begin)
        await asyncio.to_thread(holder.sql, "SELECT FROM django_pgqueue_messagequeue WHERE name = 'q' FOR UPDATE")
        task = asyncio.ensure_future(queue.apublish({"n": 1}))
        await asyncio.to_thread(wait_until, lambda: is_waiting(pid))
        task.cancel()
        await asyncio.to_thread(holder.commit if after == "commit" else holder.rollback)
        with pytest.raises(asyncio.CancelledError):
            await task
        await queue.apublish({"n": 2})

    with Session() as holder:
        run_async(hang_up(holder))
    assert [payload["n"] for payload in payloads("q")] in ([0, 1, 2], [0, 2])
    assert MessageQueueItem.objects.filter(payload__n=2).count() == 1
    with connect() as admin:
        stuck = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        assert admin.execute(stuck).fetchone() == (0,)
