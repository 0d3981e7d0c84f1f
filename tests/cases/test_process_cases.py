"""
Cases B99 (forks), B101 (a worker outside the main thread) and B102 (signals).

B99 ``test_*fork*``, B101 ``test_*thread*``; B102 is in ``tests/processes/test_signals.py`` and, what is missing
there, below.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from tests.support.processes import ROOT, environment, worker
from tests.support.rows import payloads
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = pytest.mark.django_db(transaction=True)


# --- B99 ------------------------------------------------------------------------------------------


def forks(scenario: str, settings: dict[str, Any] | None = None) -> Any:
    """Run a scenario of tests/support/forks.py in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forks", scenario],
        cwd=ROOT,
        env=environment(settings=settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(params=["plain", "pool"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the processes connect."""
    if request.param == "pool":
        options = {"pool": {"min_size": 1, "max_size": 3, "timeout": 10}}
        monkeypatch.setenv("PGQUEUE_TEST_OPTIONS", json.dumps(options))
    return str(request.param)


def test_forked_children_of_a_parent_that_published_publish_on_their_own(kind: str) -> None:
    """As with a server that imports first and then forks: all arrive, and no two processes share a backend."""
    found = forks("preloaded")
    assert sorted(map(str, payloads("work"))) == sorted(
        ["at import", "afterwards", *(str([child, index]) for child in range(4) for index in range(100))]
    )
    assert found["parent"][0] == found["parent"][1]
    backends = [found["parent"][0], *(one for child in found["children"] for one in child)]
    assert len(backends) == len(set(backends))
    assert kind == "pool" or len(backends) == 5


def test_children_of_multiprocessing_by_fork_and_otherwise_publish_and_consume(kind: str) -> None:
    """Each handles what it published, on a backend of its own."""
    found = forks("multiprocessed")
    backends = [found["parent"][0]]
    for method, children in found["children"].items():
        for number, (handled, own) in enumerate(children):
            assert handled == [f"{method}.{number}"] * 10
            backends += own
    assert found["parent"][0] == found["parent"][1]
    assert len(backends) == len(set(backends)) == 5


def test_a_consumer_in_a_forked_child_of_a_parent_with_threads(kind: str) -> None:
    """It makes threads and connections of its own, and the parent's consumer goes on."""
    found = forks("consumed_in_a_child", settings={"POLL_INTERVAL": 60})
    handled, backends = found["child"]
    assert sorted(handled) == [1, 2, 3]
    assert found["parent"][0] not in backends
    assert found["parent"][0] == found["parent"][1] or kind == "pool"
    assert found["ended"]
    assert payloads("parent") == payloads("child") == []


def test_a_handler_may_fork(kind: str, tmp_path: Path) -> None:
    """The child publishes on a connection of its own; the handler goes on with its own."""
    queue, specs = Queue("work"), [{"name": "work", "function": "fork_and_publish"}]
    with worker(queues=specs) as running:
        queue.publish_many(["fork", "fork", "fork"])
        wait_until(lambda: len(payloads("from children")) == 30)
        wait_until(lambda: not payloads("work"))
        assert Seen.objects.filter(worker=running.pid, attempt=1).count() == 3
        assert running.stop() == 0
        assert running.output == ""


# --- B101 -----------------------------------------------------------------------------------------


def signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("embed", ["thread", "executor"])
def test_a_worker_in_a_thread_starts_there_and_stops_by_its_api(embed: str) -> None:
    """
    A consumer runs in a thread of somebody's program, or in an event loop's executor.

    It leaves the process's signal handlers alone, and ``stop()`` ends it within two seconds of its handler's end.
    """
    queue, started = Queue("work"), threading.Event()

    def handle(message: Message) -> None:
        started.set()
        time.sleep(0.5)

    consumer = Consumer([make_handler(queue, handle)], concurrency=1)

    def wait_for_handler(before: list[Any]) -> None:
        try:
            queue.publish(1)
            connection.close()
            assert started.wait(20)
            assert signal_handlers() == before
        finally:
            stopped.append(time.monotonic())
            consumer.stop()

    async def embedded() -> int:
        running = asyncio.get_running_loop().run_in_executor(None, consumer.run)
        await asyncio.to_thread(wait_for_handler, signal_handlers())
        return await running

    stopped: list[float] = []
    if embed == "executor":
        handled = asyncio.run(embedded())
    else:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(consumer.run)
            wait_for_handler(signal_handlers())
            handled = running.result(20)
    assert time.monotonic() - stopped[0] < 2 + 0.5
    assert handled == 1
    assert payloads("work") == []


def test_the_command_in_a_thread_leaves_signals_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """``call_command`` outside the main thread works, and a debug line tells that signals do not stop it."""
    queue = Queue("work")
    queue.publish_many([1, 2, 3])
    before = signal_handlers()
    caplog.set_level("DEBUG", "django_pgqueue")

    def call() -> None:
        path = "tests.testapp.handlers.do_nothing"
        try:
            call_command("consume_queues", "work", "--drain", handler=path)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(20)
    assert payloads("work") == []
    assert signal_handlers() == before
    assert "not in the main thread" in caplog.text


def test_the_command_in_the_main_thread_and_no_other_thread_restores_the_handlers() -> None:
    """What the program had set for a signal is there again afterwards."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        call_command("consume_queues", "work", "--drain", handler="tests.testapp.handlers.do_nothing")
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: received == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_in_the_reloaders_thread(tmp_path: Path) -> None:
    """Under autoreload, where the main thread watches files: it consumes, and the reloader's signals end it."""
    queue = Queue("work")
    script = (
        "import django; django.setup()\n"
        "from django.core.management import call_command\n"
        "from django.utils.autoreload import run_with_reloader\n"
        "run_with_reloader(call_command, 'consume_queues')\n"
    )
    (tmp_path / "reloaded.py").write_text(script)
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, tmp_path / "reloaded.py"],
            cwd=ROOT,
            env={**environment(["work"]), "PYTHONPATH": str(ROOT)},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        ids = [queue.publish({}), queue.publish({})]
        wait_until(lambda: sorted(Seen.objects.values_list("msg_id", flat=True)) == ids, 60)
        wait_until(lambda: not payloads("work"))
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
        assert "Traceback" not in log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
