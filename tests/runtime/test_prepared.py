"""A loop's statements are planned once where that is sound, and never behind a pooler."""

import re
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, connections

from django_pgqueue import Queue
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.runtime.connections import PREPARE_THRESHOLD, dedicated_connection, own_connection
from django_pgqueue.services import claiming, settling
from tests.support.rows import truncate_messages
from tests.support.sessions import fetch

ITEM = "django_pgqueue_messagequeueitem"
INSERT = (
    f"INSERT INTO {ITEM} (queue_id, payload, read_after)"
    " SELECT 'work', '{}', now() + %s::interval + number * interval '1 ms' FROM generate_series(1, %s) AS number"
)

pytestmark = pytest.mark.django_db(transaction=True)


def prepared_statements() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_prepared_statements")
        return int(cursor.fetchone()[0])


def claim(times: int) -> None:
    queue = Queue("work")
    for _ in range(times):
        claiming.claim(declaration_of(queue), queue.using, limit=1, lease=60, consumer=uuid4())


def test_a_loop_prepares_what_it_runs_often() -> None:
    """On the loop's own connection a claim that was made often enough is a prepared statement of the session."""
    Queue("work").declare()
    with own_connection("default", "test"):
        claim(PREPARE_THRESHOLD + 2)
        assert prepared_statements() > 0


def test_a_loop_prepares_again_after_a_reconnect() -> None:
    """A new session of the same loop prepares as well."""
    Queue("work").declare()
    with own_connection("default", "test"):
        claim(1)
        connections["default"].close()
        claim(PREPARE_THRESHOLD + 2)
        assert prepared_statements() > 0


def test_nothing_is_prepared_on_the_project_s_connections() -> None:
    """What the project's connection does is the project's choice, also in a dedicated copy of it."""
    assert connection.cursor() is not None
    assert connection.connection.prepare_threshold is None
    copy = dedicated_connection("default", "test")
    try:
        copy.connect()
        assert copy.connection.prepare_threshold is None
    finally:
        copy.close()


def test_nothing_is_prepared_through_a_pooler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the session's process id is not the one that the protocol told, nothing is prepared."""
    Queue("work").declare()
    with pooler() as folder:
        monkeypatch.setitem(connection.settings_dict, "HOST", folder)
        monkeypatch.setitem(connection.settings_dict, "PORT", "5432")
        with own_connection("default", "test"):
            claim(PREPARE_THRESHOLD + 2)
            assert connections["default"].connection.info.host == folder
            assert prepared_statements() == 0


@contextmanager
def pooler() -> Iterator[str]:
    """Pass one connection on to the server, and tell the client a process id of its own, as poolers do."""
    connection.ensure_connection()
    info = connection.connection.info
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/.s.PGSQL.5432")
        listening.listen()

        def pass_on() -> None:
            family = socket.AF_UNIX if info.host.startswith("/") else socket.AF_INET
            address: Any = f"{info.host}/.s.PGSQL.{info.port}" if family == socket.AF_UNIX else (info.host, info.port)
            with listening.accept()[0] as client, socket.socket(family) as server:
                server.connect(address)
                while True:
                    (source, *_), _, _ = select.select([client, server], [], [])
                    if not (data := source.recv(65536)):
                        return
                    # BackendKeyData: its length, the process id, a secret.
                    data = re.sub(rb"(?<=K\0\0\0\x0c)....", b"\0\0\0\1", data, count=1, flags=re.DOTALL)
                    (server if source is client else client).sendall(data)

        thread = threading.Thread(target=pass_on)
        thread.start()
        yield folder
        thread.join(10)
        assert not thread.is_alive()


SETTLING = {
    "ack": (settling.ACK, {}),
    "extend": (settling.EXTEND, {"lease": 60}),
    "release": (settling.RELEASE, {}),
}


@pytest.mark.parametrize("verb", SETTLING)
def test_messages_are_found_by_id_with_statistics_of_an_emptied_table(verb: str) -> None:
    """
    The claim index ends with the id: going through all of it must not seem to cost nothing.

    That is what the planner believes of a table that had pages and no row when it was analysed, as a
    queue's mostly has, and the delayed messages of a burst make it long.
    """
    Queue("work").declare()
    fetch(INSERT, ["0", 1_000])
    fetch(f"DELETE FROM {ITEM}")
    truncate_messages()
    fetch(f"ANALYZE {ITEM}")
    fetch(INSERT, ["1 day", 20_000])
    statement, params = SETTLING[verb]
    params = params | {"ids": list(range(20_000, 20_010)), "tokens": [uuid4()] * 10}
    with own_connection("default", "test"), connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (COSTS OFF) {statement}", params)
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert f"{ITEM}_pkey" in plan, plan
    assert "claim_idx" not in plan
