"""A peer that is gone without a word: the connection looks open, and nothing ever comes."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections
from django.db.backends.signals import connection_created

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.runtime import listener
from tests.soak.listener_kills import listeners
from tests.support.processes import consuming, database_url, worker
from tests.support.proxy import Proxy
from tests.support.sessions import fetch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LISTENER = "django_pgqueue listener"
# When a session's last statement was sent, if that was a probe.
PROBES = "SELECT query_start FROM pg_stat_activity WHERE application_name = %s AND query = 'SELECT 1'"


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as running:
        yield running


@pytest.fixture
def through_proxy(proxy: Proxy) -> Iterator[Proxy]:
    """Let the default alias, in threads that connect from now on, go through the proxy."""
    # The listener of the test before is this process's one: it would be used on.
    wait_until(lambda: not listeners())
    settings = connections.settings["default"]
    before = {key: settings[key] for key in ("HOST", "PORT")}
    settings.update(HOST="127.0.0.1", PORT=proxy.port)
    try:
        yield proxy
    finally:
        settings.update(before)
        connection.close()


def handled_by(seen: list[Any]) -> Any:
    def handle(message: Message) -> None:
        seen.append(message.payload)

    return handle


def test_a_listener_that_hears_nothing_any_more_is_noticed(
    through_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """
    The kernel of the other side answers, the server does not: the probe gives up and listens anew.

    Polls are a minute apart, so what was published meanwhile is found by the look that follows.
    """
    monkeypatch.setattr(listener, "LIVENESS_INTERVAL", 0.5)
    monkeypatch.setattr(listener, "LIVENESS_TIMEOUT", 1.0)
    settings.PGQUEUE = {"POLL_INTERVAL": 60}
    queue = Queue("q")
    seen: list[Any] = []
    with consuming(Consumer([make_handler(queue, handled_by(seen))])):
        wait_until(lambda: through_proxy.count(LISTENER) == 1)
        queue.publish(0)
        wait_until(lambda: seen == [0])
        (link,) = through_proxy.freeze(LISTENER)
        queue.publish(1)
        wait_until(lambda: seen == [0, 1], 10)
        wait_until(lambda: "database back loop=listener" in caplog.text)
        assert through_proxy.count(LISTENER) == 2
        queue.publish(2)
        wait_until(lambda: seen == [0, 1, 2], 10)
        assert not link.flowing.is_set()
    assert caplog.text.count("database lost loop=listener") == 1
    assert "database lost loop=consumer" not in caplog.text


def test_a_quiet_listener_is_left_alone(
    through_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The probe itself is no reason to hang up: it is answered, and the connection stays the same."""
    monkeypatch.setattr(listener, "LIVENESS_INTERVAL", 0.05)
    probes: set[Any] = set()

    def probed_often() -> bool:
        probes.update(fetch(PROBES, [LISTENER]))
        return len(probes) >= 3

    with consuming(Consumer([make_handler(Queue("q"), handled_by([]))])):
        wait_until(probed_often)
        assert through_proxy.count(LISTENER) == 1
    assert "database lost" not in caplog.text


def test_a_listener_outlives_any_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that is no fault of the database, such as no file descriptor left: told, and it listens anew."""
    monkeypatch.setattr(listener, "LIVENESS_INTERVAL", 0.05)
    monkeypatch.setattr(listener, "LONGEST_RETRY", 0.1)
    prove_alive, failed = listener.prove_alive, threading.Event()

    def fail_once(raw: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("Too many open files")
        prove_alive(raw)

    monkeypatch.setattr(listener, "prove_alive", fail_once)
    with consuming(Consumer([make_handler(Queue("q"), handled_by([]))])):
        wait_until(lambda: fetch(PROBES, [LISTENER]))
    assert caplog.text.count("loop failed, continuing loop=listener") == 1


def test_a_consumer_goes_on_without_its_listener(proxy: Proxy) -> None:
    """As long as LISTEN cannot be had it polls every second, whatever POLL_INTERVAL says."""
    proxy.hold(LISTENER)
    queue = Queue("work")
    with worker(settings={"POLL_INTERVAL": 60}, url=database_url(netloc=proxy.netloc, query="sslmode=disable")):
        wait_until(lambda: proxy.count(LISTENER) == 1)
        for _ in range(3):
            time.sleep(0.5)  # Let it fall asleep.
            queue.publish({})
            wait_until(lambda: queue.stats().ready == 0, 8)


def test_the_kernel_gives_up_on_a_peer_that_is_gone(through_proxy: Proxy) -> None:
    """Each connection of the library's own has keepalives, and a limit on what is not acknowledged."""
    sockets: dict[str, tuple[int, int, int]] = {}

    def note(connection: Any, **kwargs: Any) -> None:
        raw = connection.connection
        name = raw.info.get_parameters().get("application_name", "")
        with socket.fromfd(raw.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            sockets[name] = (
                end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )

    connection_created.connect(note)
    try:
        with consuming(Consumer([make_handler(Queue("q"), handled_by([]))])):
            wait_until(lambda: LISTENER in sockets)
    finally:
        connection_created.disconnect(note)
    assert sockets[LISTENER] == sockets["django_pgqueue consumer"] == (1, 10, 20_000)
