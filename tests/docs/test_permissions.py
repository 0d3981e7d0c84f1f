"""
The grants of docs/permissions.md: each role can do its job with them, and not without any one of them.

The statements are taken out of the page, so that the two cannot drift. The roles log in to a database
in which PUBLIC has nothing.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from queue import Empty, SimpleQueue
from uuid import uuid4

import psycopg
import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import DatabaseError, IntegrityError, transaction
from psycopg import sql

from django_pgqueue import Queue, Topic, subscriptions
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.monitoring import diagnosis
from django_pgqueue.queue_internals import declaration_of, make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import claiming, consumers, minutes, reaping, tasks
from django_pgqueue.services import session as session_services
from django_pgqueue.services.beliefs import beliefs
from tests.support.databases import alias, empty, migrated_database
from tests.support.sessions import connect, fetch, second_session
from tests.support.waiting import DEADLINE

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "permissions.md"
STATEMENT = re.compile(r"(GRANT .*?|CREATE ROLE \w+ LOGIN)\s*;\s*", re.DOTALL)
GRANT = re.compile(r"GRANT (\w+)(?: \(([\w, ]+)\))? ON (DATABASE |SCHEMA |)(\w+) TO ([\w, ]+)")


@dataclass(frozen=True)
class Grant:
    """One privilege, of one role, on one thing; of a table, on these columns or on all."""

    role: str
    privilege: str
    columns: tuple[str, ...]
    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.role}: {self.privilege} ({', '.join(self.columns)}) {self.kind}{self.target}"

    def run(self, admin: psycopg.Connection, verb: str, to: str, role: str) -> None:
        """GRANT … TO, or REVOKE … FROM, a role of another name."""
        columns = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        target = admin.info.dbname if self.kind == "DATABASE " else self.target
        admin.execute(
            sql.SQL("{} {} {} ON {} {} {} {}").format(
                sql.SQL(verb),
                sql.SQL(self.privilege),
                sql.SQL("({})").format(columns) if self.columns else sql.SQL(""),
                sql.SQL(self.kind),
                sql.Identifier(target),
                sql.SQL(to),
                sql.Identifier(role),
            )
        )


def statements() -> list[str]:
    """Return what stands in the page's blocks of SQL; nothing may stand there that is not understood."""
    found: list[str] = []
    for block in re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL):
        text = re.sub(r"--.*", "", block).strip()
        assert re.fullmatch(rf"({STATEMENT.pattern})+", text, re.DOTALL), text
        found += [" ".join(statement.split()) for statement in STATEMENT.findall(text)]
    return found


def grants() -> list[Grant]:
    found: list[Grant] = []
    for statement in statements():
        if statement.startswith("GRANT"):
            privilege, columns, kind, target, roles = GRANT.fullmatch(statement).groups()
            names = tuple(columns.split(", ")) if columns else ()
            found += [Grant(role, privilege, names, kind, target) for role in roles.split(", ")]
    return found


#: Seconds for which a message of a topic is waited for: with a grant left out none comes.
SOON = 2.0

GRANTS = grants()
ROLES = sorted({grant.role for grant in GRANTS})
TABLES = [model._meta.db_table for model in apps.get_app_config("django_pgqueue").get_models()]


@pytest.fixture(scope="module")
def names(django_db_setup, django_db_blocker) -> Iterator[dict[str, str]]:
    """Make each role of the page, under a name of its own: roles are the whole server's."""
    made = {role: f"{role}_{uuid4().hex[:8]}" for role in ROLES}
    with django_db_blocker.unblock(), connect() as admin:
        for name in made.values():
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(name), sql.Literal(name)))
        yield made
        for name in made.values():
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


class Shop:
    """A database with the queue's tables, in which the roles of the page have the page's grants."""

    def __init__(self, admin: psycopg.Connection, owner: str, names: dict[str, str]) -> None:
        self.admin = admin
        self.owner = owner
        self.names = names

    @contextmanager
    def without(self, grant: Grant) -> Iterator[None]:
        name = self.names[grant.role]
        grant.run(self.admin, "REVOKE", "FROM", name)
        try:
            yield
        finally:
            grant.run(self.admin, "GRANT", "TO", name)

    def do(self, role: str, job: Callable[["Shop", str], None]) -> None:
        """Do a job on empty tables, on new connections of the role."""
        empty(self.owner)
        beliefs.forget()
        name = self.names[role]
        with alias(role, NAME=self.admin.info.dbname, USER=name, PASSWORD=name, OPTIONS={"pool": False}) as using:
            job(self, using)

    def queue(self, name: str, **options) -> Queue:
        """Return a queue as the owner uses it: for what is there before the job begins."""
        return Queue(name, using=self.owner, **options)

    def sql(self, statement: str) -> None:
        self.admin.execute(statement)


@pytest.fixture(scope="module")
def admin(names, django_db_blocker) -> Iterator[psycopg.Connection]:
    """Make the shop's database, with the grants, and give a superuser's session there."""
    with django_db_blocker.unblock(), migrated_database() as name, second_session(dbname=name) as session:
        session.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
        session.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(sql.Identifier(name)))
        for grant in GRANTS:
            grant.run(session, "GRANT", "TO", names[grant.role])
        yield session


@pytest.fixture
def shop(admin, names) -> Iterator[Shop]:
    with alias("owner", NAME=admin.info.dbname) as owner:
        yield Shop(admin, owner, names)


# --- The jobs: what the page says that each role can do ---


def publish(shop: Shop, using: str) -> None:
    queue = Queue("orders", using=using)
    queue.declare()
    queue.publish({"n": 1})
    with transaction.atomic(using=using):
        queue.publish({"n": 2}, delay=1, ttl=60, headers={"a": 1})
    assert len(queue.publish_many([{"n": 3}, {"n": 4}])) == 2
    # Refreshed, with what the code says by now.
    shop.sql("UPDATE django_pgqueue_messagequeue SET last_active = '2000-01-01'")
    beliefs.forget()
    Queue("orders", max_deliveries=9, using=using).publish({"n": 5})
    # First use, and healed in both ways.
    passing = Queue("replies", auto_deleted=True, using=using)
    passing.publish({"n": 1})
    for block in (True, False):
        shop.sql("DELETE FROM django_pgqueue_messagequeue WHERE name = 'replies'")
        if block:
            with transaction.atomic(using=using):
                passing.publish({"n": 2})
        else:
            passing.publish({"n": 3})


def write(shop: Shop, using: str) -> None:
    shop.queue("orders").declare()
    plain = (
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)"
        " VALUES (%s, '{}', '{}', statement_timestamp(), statement_timestamp() + interval '1 minute')"
    )
    fetch(plain, ["orders"], using)
    with pytest.raises(IntegrityError):
        fetch(plain, ["replies"], using)
    assert fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " SELECT name, '{}' FROM django_pgqueue_messagequeue WHERE name = 'orders' FOR KEY SHARE RETURNING id",
        using=using,
    )
    fetch(
        "WITH ensured AS (INSERT INTO django_pgqueue_messagequeue (name, auto_deleted) VALUES ('replies', true)"
        " ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp() RETURNING name)"
        " INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) SELECT name, '{}' FROM ensured",
        using=using,
    )
    fetch('NOTIFY "django_pgqueue:orders"', using=using)


def announce(shop: Shop, using: str) -> None:
    topic = Topic("prices", using=using)
    for name in ("orders", "replies"):
        Topic("prices", using=shop.owner).bind(shop.queue(name))
    shop.sql("DELETE FROM django_pgqueue_messagequeue WHERE name = 'replies'")
    assert len(topic.publish({"n": 1})) == 2
    with transaction.atomic(using=using):
        assert len(topic.publish({"text": "x" * 9_000}, ttl=60)) == 2


def subscribe(shop: Shop, using: str) -> None:
    seen: SimpleQueue = SimpleQueue()
    with closing(Topic("prices", using=using).subscribe(lambda message: seen.put(message.payload))):
        for payload in ("small", "x" * 9_000):
            Topic("prices", using=shop.owner).publish(payload)
            assert seen.get(timeout=SOON) == payload


def consume(shop: Shop, using: str) -> None:
    shop.queue("orders").publish_many([{"n": n} for n in range(5)])
    # Another one, which somebody had deleted: its message is an orphan.
    shop.queue("replies").publish({})
    shop.sql("DELETE FROM django_pgqueue_messagequeue WHERE name IN ('replies', 'orders.dead')")
    queue = Queue("orders", max_deliveries=2, using=using)
    queue.declare()
    shop.sql("DELETE FROM django_pgqueue_messagequeue WHERE name = 'orders.dead'")
    one, two, three = queue.claim(3)
    queue.extend(one)
    queue.ack(one)
    queue.nack(two, delay=0, reason="later")
    queue.reject(three, reason="no")
    # An auto-deleted queue that vanished comes back with an event.
    passing = Queue("passing", auto_deleted=True, using=using)
    passing.declare()
    shop.sql("DELETE FROM django_pgqueue_messagequeue WHERE name = 'passing'")
    passing.declare()
    assert fetch("SELECT kind FROM django_pgqueue_queueevent", using=shop.owner) == [("vanished",)]
    topic = Topic("prices", using=using)
    topic.bind(passing)
    topic.bind(Queue("passing", auto_deleted=True, ttl=7, using=using))
    assert topic.unbind(passing)
    replies = Queue("replies", using=using)
    replies.declare()
    assert claiming.look("replies", using).orphans
    assert reaping.adopt("replies", 10, using) == 1
    heartbeat = Heartbeat(using, declared=[declaration_of(queue)], consumer=uuid4())
    heartbeat.run_once()
    heartbeat.run_once()
    minute = int(session_services.now(using).timestamp() // 60)
    for _ in range(2):
        minutes.count_minute({"orders": minutes.Tally(1, 2, 3, {minute: 4})}, using)
    run_tasks_of(shop, using)
    Queue("owned", exclusive=True, using=using).declare()
    assert consumers.take_over("owned", heartbeat.consumer, using)
    consumers.forget_consumer(heartbeat.consumer, using)


def run_tasks_of(shop: Shop, using: str) -> None:
    """What a worker writes of a task that is done, and of one that fails and is tried again."""
    shop.queue("tasks").publish_many([{"args": [], "kwargs": {}}] * 2)
    queue = Queue("tasks", using=using)
    done, failed = (tasks.TaskRun(each, "shop.tasks.one", "default", "key", None, None) for each in queue.claim(2))
    assert tasks.start_run(done, using) and tasks.finish_run(done, "1", using)
    for _ in range(2):
        assert tasks.start_run(failed, using)
        assert tasks.fail_run(declaration_of(queue), failed, 0, "no", using) is not None
        (message,) = queue.claim()
        failed = tasks.TaskRun(message, "shop.tasks.one", "default", "key", None, None)


def ask(shop: Shop, using: str) -> None:
    shop.queue("tasks").publish({"args": [], "kwargs": {}})
    (message_id,) = shop.admin.execute("SELECT id FROM django_pgqueue_messagequeueitem").fetchone()
    assert tasks.task_record(message_id, using).has_message


def reap(shop: Shop, using: str) -> None:
    shop.queue("orders", dead_letter="late").publish({}, ttl=0.001)
    shop.queue("replies").publish({}, ttl=0.001)
    shop.queue("killer", lease=0.001, max_deliveries=1).publish({})
    shop.queue("killer", lease=0.001, max_deliveries=1).claim()
    shop.queue("gone").publish({})
    shop.sql("DELETE FROM django_pgqueue_messagequeue WHERE name IN ('gone', 'late', 'killer.dead')")
    shop.queue("gone").declare()
    Topic("prices", using=shop.owner).bind(shop.queue("idle", auto_deleted=True))
    shop.sql("INSERT INTO django_pgqueue_queueevent (queue, kind, at) VALUES ('long ago', 'reaped', '2000-01-01')")
    shop.sql("INSERT INTO django_pgqueue_topicbody (content, expires_at) VALUES ('', '2000-01-01')")
    shop.sql("INSERT INTO django_pgqueue_queueminute (queue, minute) VALUES ('long ago', '2000-01-01')")
    shop.sql(
        "INSERT INTO django_pgqueue_taskrun (id, queue, task, backend, key, status, started_at, last_attempted_at,"
        " worker_ids, lease_token) VALUES (0, '', '', '', '', 'READY', '2000-01-01', '2000-01-01', '[]',"
        " gen_random_uuid())"
    )
    shop.sql("UPDATE django_pgqueue_messagequeue SET last_active = '2000-01-01' WHERE name = 'idle'")
    consumers.beat(uuid4(), "host", 1, ["orders"], shop.owner)
    shop.sql("UPDATE django_pgqueue_queueconsumer SET last_heartbeat = '2000-01-01'; SELECT pg_sleep(0.002)")
    reaped = Reaper(using).run_once()
    assert (reaped.expired, reaped.dead_lettered, reaped.adopted, reaped.queues) == (1, 2, 1, ["idle"])
    assert (reaped.events, reaped.bodies) == (1, 1)
    # The second run finds the first one's records.
    Reaper(using).run_once()
    for table, count in (("django_pgqueue_queueminute", 0), ("django_pgqueue_reaperrun", 1)):
        assert fetch(f"SELECT count(*) FROM {table}", using=shop.owner) == [(count,)]
    for table in ("queueconsumer", "topicbinding", "topicbody", "taskrun"):
        table = f"django_pgqueue_{table}"
        assert fetch(f"SELECT count(*) FROM {table}", using=shop.owner) == [(0,)]


def keep_alive(shop: Shop, using: str) -> None:
    shop.queue("orders").declare()
    shop.sql("UPDATE django_pgqueue_messagequeue SET last_active = '2000-01-01'")
    call_command("heartbeat_queues", "orders", once=True, database=using)
    assert fetch("SELECT max(last_active) > '2000-01-01' FROM django_pgqueue_messagequeue", using=shop.owner) == [
        (True,)
    ]


def operate(shop: Shop, using: str) -> None:
    shop.queue("orders").publish_many([{}, {}, {}], headers={"tenant": 1})
    shop.queue("orders").reject(*shop.queue("orders").claim(3), reason="no")
    queue = Queue("orders", using=using)
    queue.pause()
    assert shop.queue("orders").claim() == []
    queue.resume()
    assert queue.redrive(limit=1) == 1
    assert queue.redrive(reason="no", headers={"tenant": 1}, limit=1) == 1
    # Parked on a dead-letter queue without one of its own.
    shop.queue("orders.dead").reject(*shop.queue("orders.dead").claim(3), reason="no")
    assert Queue("orders.dead", using=using).redrive() == 1
    assert queue.purge() == 2


def look(shop: Shop, using: str) -> None:
    shop.queue("orders").publish({})
    assert Queue("orders", using=using).stats().ready == 1
    call_command("inspect_queues", database=using, stdout=StringIO())
    assert Reaper(using).preview().queues == []
    # All but the sessions of others, which no grant on a table shows.
    assert "django_pgqueue.I034" in {message.id for message in diagnosis.examine(using)}


JOBS = {
    "shop_publisher": publish,
    "shop_writer": write,
    "shop_announcer": announce,
    "shop_subscriber": subscribe,
    "shop_consumer": consume,
    "shop_asker": ask,
    "shop_reaper": reap,
    "shop_heartbeat": keep_alive,
    "shop_operator": operate,
    "shop_viewer": look,
}


# --- Enough, and not more ---


def test_the_page_gives_grants_for_each_job():
    """A role without a test, or a test without a role, is a page that drifted."""
    assert sorted(JOBS) == ROLES
    assert {grant.target for grant in GRANTS if not grant.kind} <= set(TABLES)


@pytest.mark.parametrize("role", JOBS)
def test_each_role_can_do_its_job_with_the_grants_of_the_page(shop, role):
    """Where PUBLIC has no rights at all, and the role does not own a thing."""
    shop.do(role, JOBS[role])


def test_the_consumers_grants_are_enough_for_a_whole_consumer(shop, caplog):
    """With its heartbeat, leases, listener, retries and dead letters; nothing is refused on the way."""
    seen: list = []

    def handle(message) -> None:
        seen.append(message.payload)
        if message.payload == "bad":
            raise ValueError("bad")

    def job(shop: Shop, using: str) -> None:
        shop.queue("orders", dead_letter="late").publish_many(["good", "bad"])
        queue = Queue("orders", dead_letter="late", max_deliveries=2, backoff={"base": 0}, using=using)
        for ack in ("late", "atomic"):
            consumer = Consumer([make_handler(queue, handle, ack=ack)], drain=True)
            # What is refused would be tried again and again.
            timer = threading.Timer(DEADLINE, consumer.stop)
            timer.start()
            consumer.run()
            timer.cancel()

    shop.do("shop_consumer", job)
    assert sorted(seen) == ["bad", "bad", "good"]
    assert "42501" not in caplog.text and "permission denied" not in caplog.text


def parts(grant: Grant) -> list[Grant]:
    """Return a grant column by column: each must be needed."""
    if not grant.columns:
        return [grant]
    return [replace(grant, columns=(column,)) for column in grant.columns]


@pytest.mark.parametrize("role", JOBS)
def test_without_any_one_of_its_grants_a_role_cannot_do_its_job(shop, role, monkeypatch):
    """Each privilege of the page is needed, down to the column: the least."""
    monkeypatch.setattr(subscriptions, "HEARD_WITHIN", SOON)
    needless = []
    for grant in (part for whole in GRANTS if whole.role == role for part in parts(whole)):
        try:
            with shop.without(grant):
                shop.do(role, JOBS[role])
        except (DatabaseError, psycopg.Error, CommandError) as error:
            # A schema that may not be used is passed over: the tables are not found.
            assert re.search("permission denied|does not exist", str(error)), (str(grant), error)
        except (AssertionError, Empty):
            # What was refused was logged, and the job was not done.
            pass
        else:
            needless.append(str(grant))
    assert needless == []


FORBIDDEN = {
    "shop_asker": [
        "UPDATE django_pgqueue_taskrun SET return_value = '1'",
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('orders', '{}')",
        "UPDATE django_pgqueue_messagequeueitem SET read_after = NULL",
        "DELETE FROM django_pgqueue_messagequeueitem",
        "SELECT * FROM django_pgqueue_messagequeue",
    ],
    "shop_publisher": [
        "SELECT payload FROM django_pgqueue_messagequeueitem",
        "DELETE FROM django_pgqueue_messagequeueitem",
        "UPDATE django_pgqueue_messagequeueitem SET read_after = NULL",
        "UPDATE django_pgqueue_messagequeue SET paused_at = now()",
        "DELETE FROM django_pgqueue_messagequeue",
        "SELECT * FROM django_pgqueue_queueconsumer",
    ],
    "shop_writer": [
        "SELECT payload FROM django_pgqueue_messagequeueitem",
        "DELETE FROM django_pgqueue_messagequeueitem",
        "UPDATE django_pgqueue_messagequeueitem SET read_after = NULL",
        "UPDATE django_pgqueue_messagequeue SET paused_at = now()",
        "DELETE FROM django_pgqueue_messagequeue",
    ],
    "shop_announcer": [
        "SELECT payload FROM django_pgqueue_messagequeueitem",
        "INSERT INTO django_pgqueue_topicbinding (topic, queue) VALUES ('prices', 'orders')",
        "UPDATE django_pgqueue_topicbinding SET queue = 'mine'",
        "SELECT content FROM django_pgqueue_topicbody",
        "DELETE FROM django_pgqueue_messagequeue",
    ],
    "shop_subscriber": [
        "SELECT id FROM django_pgqueue_messagequeueitem",
        "SELECT name FROM django_pgqueue_messagequeue",
        "DELETE FROM django_pgqueue_topicbody",
    ],
    "shop_consumer": [
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('orders', '1')",
        "UPDATE django_pgqueue_messagequeueitem SET payload = '1'",
        "UPDATE django_pgqueue_messagequeue SET paused_at = now()",
        "DELETE FROM django_pgqueue_messagequeue",
    ],
    "shop_reaper": [
        "SELECT payload FROM django_pgqueue_messagequeueitem",
        "SELECT headers FROM django_pgqueue_messagequeueitem",
        "UPDATE django_pgqueue_messagequeueitem SET payload = '1'",
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('orders', '1')",
    ],
    "shop_heartbeat": [
        "SELECT id FROM django_pgqueue_messagequeueitem",
        "UPDATE django_pgqueue_messagequeue SET max_deliveries = 1",
        "DELETE FROM django_pgqueue_messagequeue",
    ],
    "shop_operator": [
        "SELECT payload FROM django_pgqueue_messagequeueitem",
        "UPDATE django_pgqueue_messagequeueitem SET payload = '1'",
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('orders', '1')",
        "DELETE FROM django_pgqueue_messagequeue",
        "UPDATE django_pgqueue_messagequeue SET auto_deleted = true",
    ],
    "shop_viewer": [
        "SELECT payload FROM django_pgqueue_messagequeueitem",
        "UPDATE django_pgqueue_messagequeue SET last_active = now()",
        "DELETE FROM django_pgqueue_messagequeueitem",
    ],
}
# For every role: what only the owner may.
FORBIDDEN_TO_ALL = [
    "SELECT django_pgqueue_orphan_messages()",
    "TRUNCATE django_pgqueue_messagequeueitem",
    "SELECT nextval('django_pgqueue_messagequeueitem_id_seq')",
    "ALTER TABLE django_pgqueue_messagequeue DISABLE TRIGGER ALL",
    "CREATE TABLE mine ()",
]


@pytest.mark.parametrize("role", JOBS)
def test_a_role_can_do_no_more_than_the_page_says(shop, role):
    """Read, change or delete what is not its business; nor call the trigger's function."""
    name = shop.names[role]
    with second_session(dbname=shop.admin.info.dbname, user=name, password=name) as session:
        for statement in [*FORBIDDEN[role], *FORBIDDEN_TO_ALL]:
            with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.FeatureNotSupported)):
                session.execute(statement)
                pytest.fail(statement)
