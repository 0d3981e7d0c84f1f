"""The PgBouncer that tests put in front of the server really pools transactions, and can be restarted."""

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from tests.support.pgbouncer import PgBouncer, pgbouncer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def bouncer() -> Iterator[PgBouncer]:
    with pgbouncer(pool_size=2) as running:
        yield running


def connected(bouncer: PgBouncer) -> "closing[psycopg.Connection[tuple[int]]]":
    return closing(psycopg.connect(bouncer.url(), autocommit=True))


def backend(client: "psycopg.Connection[tuple[int]]") -> int:
    row = client.execute("SELECT pg_backend_pid()").fetchone()
    assert row
    return row[0]


def test_each_transaction_may_have_another_session_of_the_server(bouncer: PgBouncer) -> None:
    """A client that finds its last session in use gets the next one, and what it had SET is not there."""
    with connected(bouncer) as one, connected(bouncer) as other:
        first = backend(one)
        one.execute("SET work_mem = '3MB'")
        other.execute("BEGIN")
        assert backend(other) == first
        assert backend(one) != first
        assert one.execute("SHOW work_mem").fetchone() != ("3MB",)
        assert one.info.backend_pid not in (first, backend(one))


def test_it_can_be_restarted(bouncer: PgBouncer) -> None:
    """Its clients lose their connections; the URL stays the same."""
    url = bouncer.url()
    with connected(bouncer) as client:
        assert backend(client)
        bouncer.stop()
        with pytest.raises(psycopg.OperationalError):
            backend(client)
    bouncer.start()
    assert bouncer.url() == url
    with connected(bouncer) as client:
        assert backend(client)
    bouncer.restart()
    with connected(bouncer) as client:
        wait_until(lambda: backend(client))
