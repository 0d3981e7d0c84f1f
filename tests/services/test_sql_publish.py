"""
Publishing with plain SQL, from a session that knows nothing of Django: psql, a trigger, another language.

The statements are those of docs/sql.md, which the tests of the pages run as they stand there.
"""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from django_pgqueue import Message, Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import notifying
from tests.support.locks import is_waiting, lock_waits
from tests.support.processes import consuming, drain
from tests.support.rows import backdate, delete_queue, make_queue, payloads
from tests.support.sessions import connect, fetch, second_session
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

PAGES = Path(__file__).resolve().parent.parent.parent / "docs"

BARE = "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('orders', %s)"
WHERE_THERE = (
    "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
    " SELECT name, '1' FROM django_pgqueue_messagequeue WHERE name = %s FOR KEY SHARE RETURNING id"
)
ENSURE = (
    "WITH ensured AS (INSERT INTO django_pgqueue_messagequeue (name, auto_deleted) VALUES ('replies', true)"
    " ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp() RETURNING name)"
    " INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) SELECT name, %s FROM ensured"
)

Session = psycopg.Connection[Any]


@pytest.fixture
def session() -> Iterator[Session]:
    with second_session() as opened:
        yield opened


@pytest.fixture
def orders() -> Queue:
    queue = Queue("orders", max_deliveries=2, backoff={"base": 0, "jitter": 0})
    queue.declare()
    return queue


def test_a_bare_insert_is_a_message_as_any_other(session: Session, orders: Queue) -> None:
    """Every column has what publish() would have given it, but for the id and the time."""
    session.execute(BARE, ['{"n": 1}'])
    orders.publish({"n": 1})
    by_hand, published = MessageQueueItem.objects.order_by("id").values()
    for row in (by_hand, published):
        assert row.pop("id") and row.pop("published_at")
    assert by_hand == published
    assert drain(orders) == [{"n": 1}, {"n": 1}]


def test_headers_delay_and_ttl_are_columns(session: Session, orders: Queue) -> None:
    """They do what the arguments of publish() do."""
    insert = (
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at) VALUES"
        " ('orders', '1', '{\"a\": 1}', statement_timestamp() + %s * interval '1 second',"
        " statement_timestamp() + %s * interval '1 second')"
    )
    session.execute(insert, [60, 120])
    session.execute(insert, [None, 0.001])
    assert orders.stats().delayed == 1
    time.sleep(0.01)
    assert orders.claim() == []
    session.execute(insert, [0.2, 60])
    (message,) = wait_until(orders.claim)
    assert (message.payload, message.headers, message.delivery_count) == (1, {"a": 1}, 1)


def test_many_are_handed_out_in_their_order(session: Session, orders: Queue) -> None:
    """INSERT … SELECT, and COPY."""
    session.execute(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " SELECT 'orders', jsonb_build_object('n', n) FROM generate_series(1, 500) AS n ORDER BY n"
    )
    with session.cursor().copy("COPY django_pgqueue_messagequeueitem (queue_id, payload) FROM STDIN") as copy:
        for n in range(501, 1001):
            copy.write_row(("orders", f'{{"n": {n}}}'))
    # One at a time: what several are handling has no order.
    seen: list[int] = []
    handler = make_handler(orders, lambda message: seen.append(message.payload["n"]), concurrency=1)
    Consumer([handler], drain=True).run()
    assert seen == list(range(1, 1001))


def test_what_cannot_be_read_is_set_aside(session: Session, orders: Queue) -> None:
    """A number of 5,000 digits, in the payload or the headers, is a dead letter, and harms nobody else."""
    insert = "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers) VALUES ('orders', %s, %s)"
    for payload, headers in (("1e5000", "{}"), ("2", '{"n": 1e5000}'), ("3", "{}")):
        session.execute(insert, [payload, headers])
    assert drain(orders) == [3]
    assert MessageQueueItem.objects.filter(dead_lettered_from="orders").count() == 2


# --- A queue that is not there ---


def test_a_missing_queue_is_a_foreign_key_violation(session: Session, orders: Queue) -> None:
    """At the statement, not at the commit."""
    delete_queue("orders")
    with pytest.raises(psycopg.errors.ForeignKeyViolation) as caught, session.transaction():
        session.execute(BARE, ["1"])
    assert caught.value.diag.constraint_name == "django_pgqueue_item_queue_fk"
    assert not MessageQueueItem.objects.exists()


def test_the_form_that_asks_leaves_the_transaction_usable(session: Session, orders: Queue) -> None:
    """One row, or none, and no error."""
    with session.transaction():
        assert session.execute(WHERE_THERE, ["nowhere"]).fetchall() == []
        assert len(session.execute(WHERE_THERE, ["orders"]).fetchall()) == 1
    assert payloads("orders") == [1]


def test_the_form_that_asks_holds_the_queue_until_the_commit(session: Session) -> None:
    """The reaper passes it by, whoever deletes it by hand waits, and other publishers do not."""
    make_queue("orders", auto_deleted=True, idle=7_200)
    with ThreadPoolExecutor(1) as pool, connect() as deleter, lock_waits() as waits:
        with session.transaction():
            session.execute(WHERE_THERE, ["orders"])
            assert Reaper("default").run_once().queues == []
            with second_session() as other:
                other.execute(WHERE_THERE, ["orders"])
                other.execute(BARE, ["2"])
            assert waits == []
            pid = deleter.info.backend_pid
            deleted = pool.submit(deleter.execute, "DELETE FROM django_pgqueue_messagequeue WHERE name = 'orders'")
            wait_until(lambda: is_waiting(pid))
        deleted.result(20)
    assert MessageQueueItem.objects.filter(orphaned_from="orders").count() == 3


def test_the_form_that_ensures_makes_the_queue_or_takes_the_one_that_is_there(session: Session) -> None:
    """With its message, in one statement; what is there keeps its attributes."""
    for number in (1, 2):
        session.execute(ENSURE, [f"{number}"])
    assert payloads("replies") == [1, 2]
    queue = MessageQueue.objects.get(name="replies")
    assert (queue.auto_deleted, queue.durable, queue.max_deliveries) == (True, True, 5)
    MessageQueue.objects.filter(name="replies").update(auto_deleted=False, max_deliveries=9)
    session.execute(ENSURE, ["3"])
    queue.refresh_from_db()
    assert (queue.auto_deleted, queue.max_deliveries) == (False, 9)
    assert drain(Queue("replies", auto_deleted=True)) == [1, 2, 3]


def test_the_form_that_ensures_brings_back_what_was_reaped(session: Session) -> None:
    """A message that it published keeps its queue from the reaper until it is handled."""
    session.execute(ENSURE, ["1"])
    backdate("replies", 7_200)
    assert Reaper("default").run_once().queues == []
    MessageQueueItem.objects.all().delete()
    assert Reaper("default").run_once().queues == ["replies"]
    session.execute(ENSURE, ["2"])
    assert payloads("replies") == [2]


def test_the_form_that_ensures_makes_others_wait(session: Session) -> None:
    """Which is why it is for a queue that is gone only: with the others nobody waits."""
    make_queue("replies", auto_deleted=True)
    with session.transaction(), second_session(options="-c lock_timeout=100ms") as other:
        session.execute(ENSURE, ["1"])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(ENSURE, ["2"])


# --- Waking consumers ---


@pytest.mark.parametrize("name", ["orders", "wörk.λ 1", "n" * 48])
def test_notify_wakes_a_consumer_at_once(session: Session, name: str, settings: Any) -> None:
    """By the name of the channel that the page tells; without it the message waits for the next poll."""
    settings.PGQUEUE = {"POLL_INTERVAL": 300}
    seen: list[Any] = []
    queue = Queue(name)
    queue.declare()
    consumer = Consumer([make_handler(queue, lambda message: seen.append(message.payload))])
    with consuming(consumer):
        # As long as it is not heard it polls. From here on it sleeps.
        wait_until(
            lambda: consumer._channels.listening.is_set() and consumer.lanes[0].next_look - time.monotonic() > 60
        )
        insert = "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES (%s, '1')"
        session.execute(insert, [name])
        session.execute(sql.SQL("NOTIFY {}").format(sql.Identifier(f"django_pgqueue:{name}")))
        wait_until(lambda: seen == [1])


@pytest.mark.parametrize("name", ["n" * 49, "λ" * 25])
def test_longer_names_have_a_channel_that_sql_cannot_make(name: str) -> None:
    """From 49 bytes on."""
    assert notifying.channel(name) != f"django_pgqueue:{name}"
    assert notifying.channel(name[:-1]) == f"django_pgqueue:{name[:-1]}"


# --- From a trigger ---

TRIGGER = re.search(r'PUBLISH_NEW_ORDERS = """\n(.*?)"""', (PAGES / "sql.md").read_text(), re.DOTALL)[1]
DROP = re.search(r'DROP = """\n(.*?)"""', (PAGES / "sql.md").read_text(), re.DOTALL)[1]


@pytest.fixture
def shop(session: Session) -> Iterator[Session]:
    """A table of orders with the trigger of the page."""
    session.execute("CREATE TABLE orders_order (id bigint GENERATED BY DEFAULT AS IDENTITY, email text)")
    session.execute(TRIGGER)
    try:
        yield session
    finally:
        session.execute(DROP)
        session.execute("DROP TABLE orders_order")


def place(session: Session, *emails: str) -> None:
    session.execute("INSERT INTO orders_order (email) SELECT unnest(%s::text[])", [list(emails)])


def test_a_trigger_publishes_what_is_inserted(shop: Session, orders: Queue) -> None:
    """Each order once; those that are rolled back not at all."""
    place(shop, "a", "b", "c")
    with shop.transaction(force_rollback=True):
        place(shop, "d")
        assert shop.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem").fetchone() == (4,)
    assert drain(orders) == [{"order_id": number} for number in (1, 2, 3)]
    place(shop)
    assert not MessageQueueItem.objects.exists()


def test_without_the_queue_the_trigger_refuses_the_order(shop: Session) -> None:
    """No order is stored that nobody is told of."""
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        place(shop, "a")
    assert shop.execute("SELECT count(*) FROM orders_order").fetchone() == (0,)


def test_what_a_failed_handler_inserted_publishes_nothing(shop: Session, orders: Queue) -> None:
    """An atomic handler's order and the trigger's message are one transaction with its ack."""
    incoming, tries = Queue("incoming", backoff={"base": 0, "jitter": 0}), []

    def handle(message: Message) -> None:
        tries.append(message.delivery_count)
        fetch("INSERT INTO orders_order (email) VALUES ('a')")
        if message.delivery_count == 1:
            raise ValueError("once")

    incoming.publish("an order")
    wait_until(lambda: Consumer([make_handler(incoming, handle, ack="atomic")], drain=True).run() and len(tries) == 2)
    assert drain(orders) == [{"order_id": 2}]


# --- Rights ---


@pytest.fixture
def role(session: Session) -> Iterator[Callable[[str], Session]]:
    """Give a session of a role that has nothing but what is granted to `shop_writer` in these words of the page."""
    name = f"writer_{uuid4().hex[:8]}"
    session.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(name), sql.Literal(name)))
    opened: list[Session] = []

    def log_in(grants: str) -> Session:
        session.execute(grants.replace("shop_writer", name))
        opened.append(connect(user=name, password=name))
        return opened[-1]

    try:
        yield log_in
    finally:
        for each in opened:
            each.close()
        session.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        session.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


PERMISSIONS = (PAGES / "permissions.md").read_text()
# Those for SQL, in their order; the first is for the bare insert.
GRANTS = re.findall(r"GRANT [^;]*TO shop_writer;", PERMISSIONS.partition("## Publish with SQL")[2])


def test_a_bare_insert_needs_the_right_to_insert_and_no_other(role: Callable[[str], Session], orders: Queue) -> None:
    """Not on the queue, nor on a sequence; it can notify, and can read nothing."""
    writer = role(GRANTS[0])
    writer.execute(BARE, ["1"])
    writer.execute('NOTIFY "django_pgqueue:orders"')
    assert payloads("orders") == [1]
    for statement in ("SELECT id FROM django_pgqueue_messagequeueitem", WHERE_THERE.replace("%s", "'orders'")):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            writer.execute(statement)


def test_the_other_forms_need_what_the_page_says(role: Callable[[str], Session], orders: Queue) -> None:
    """All of it: `test_permissions` takes away one after the other."""
    writer = role("".join(GRANTS))
    writer.execute(WHERE_THERE, ["orders"])
    writer.execute(ENSURE, ["2"])
    assert payloads("orders") == [1] and payloads("replies") == [2]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        writer.execute("SELECT payload FROM django_pgqueue_messagequeueitem")


def test_a_trigger_runs_with_the_rights_of_who_inserts(
    role: Callable[[str], Session], shop: Session, orders: Queue
) -> None:
    """Without the right to publish the order is refused; SECURITY DEFINER, as the page tells, lends it."""
    writer = role("GRANT INSERT ON orders_order TO shop_writer; GRANT SELECT ON orders_order TO shop_writer;")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        place(writer, "a")
    definer = TRIGGER.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").partition("CREATE TRIGGER")[0]
    definer = definer.replace("plpgsql AS", "plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS")
    shop.execute(definer.replace("INTO django_", "INTO public.django_"))
    place(writer, "a")
    assert drain(orders) == [{"order_id": 2}]
