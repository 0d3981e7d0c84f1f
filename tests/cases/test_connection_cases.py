"""Real failures of other systems over connections that come and go: B16, B18."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from django_pgqueue.devdb import DevCluster
from tests.soak import database_away, listener_kills
from tests.support.processes import database_url, run
from tests.support.sessions import connect

pytestmark = pytest.mark.django_db(transaction=True)

#: Seconds: what the cases call soon (5 and 10), with room for a busy machine. Polls are a minute apart.
PROMPT = 20.0


# --- B16: the LISTEN connection is killed ---


def test_b16_a_killed_listener_comes_back_by_itself() -> None:
    """
    Five times: killed, and what is published afterwards is handled within seconds though polls are a minute apart.

    One line for each loss and each return, one listening session at the end, no attempt used up, no spinning.
    """
    figures = listener_kills.run(0, rounds=5, offset=(0.5, 0.8), prompt=PROMPT)
    assert figures["rounds"] == 5


# --- B18: the database is away, or not to be had ---


def test_b18_a_worker_waits_for_its_server_at_the_start_and_in_mid_work(server: DevCluster) -> None:
    """(a) and (b): same process, work goes on within ten seconds of the return, each loop says it once."""
    figures = database_away.run(6, prompt=PROMPT)
    assert figures.keys() == {"at_start", "in_mid_work"}


PASSWORD_LINES = "local all pgq_somebody scram-sha-256\nlocal all pgq_barred reject\n"


@pytest.fixture
def password_needed(server: DevCluster) -> Iterator[None]:
    """Roles that need a password, or that may not connect at all."""
    rules: Path = server.pgdata / "pg_hba.conf"
    before = rules.read_text()
    with connect() as admin:
        admin.execute("CREATE ROLE pgq_somebody LOGIN PASSWORD 'right'")
        admin.execute("CREATE ROLE pgq_barred LOGIN")
        rules.write_text(PASSWORD_LINES + before)
        admin.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            rules.write_text(before)
            admin.execute("SELECT pg_reload_conf()")
            admin.execute("DROP ROLE pgq_somebody")
            admin.execute("DROP ROLE pgq_barred")


REFUSALS = {
    "wrong password": ({"netloc": "pgq_somebody:wrong@"}, 'password authentication failed for user "pgq_somebody"'),
    "no password": ({"netloc": "pgq_somebody@"}, "no password supplied"),
    "barred": ({"netloc": "pgq_barred@"}, "pg_hba.conf rejects connection"),
    "no such role": ({"netloc": "pgq_nobody@"}, 'role "pgq_nobody" does not exist'),
    "no such database": ({"path": "/pgq_nowhere"}, 'database "pgq_nowhere" does not exist'),
    "not migrated": ({"path": "/template1"}, 'relation "django_pgqueue_messagequeue'),
}
LOOPS = {"reap_queues": ["reap_queues", "--interval", "1"], "heartbeat_queues": ["heartbeat_queues", "work"]}


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        *((["consume_queues"], refusal) for refusal in REFUSALS),
        *((arguments, refusal) for arguments in LOOPS.values() for refusal in ("wrong password", "not migrated")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_b18_a_fault_that_needs_a_person_ends_the_start(
    password_needed: None, arguments: list[str], refusal: str
) -> None:
    """(c), (d), (e): exit status 1 and one plain line that names the cause; never alive but idle."""
    parts, cause = REFUSALS[refusal]
    done = run(*arguments, queues=["work"], url=database_url(**parts), timeout=30)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("CommandError: the database refuses: ")
    assert cause in line
    assert "wrong" not in line
