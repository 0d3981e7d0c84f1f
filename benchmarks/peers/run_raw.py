"""
What one would write by hand with psycopg: our kind of table, one connection, one thread.

No handler can fail here, nobody extends a lease, nothing is retried or set aside, and nothing stops
in an orderly way: it is what a framework may cost, not a queue to use.
"""

import json
import sys
import time
from pathlib import Path
from uuid import uuid4

import psycopg
from wire import URL, handled, main, serve, start_worker, wait_for_go

ITEM = "django_pgqueue_messagequeueitem"
PUBLISH = f"INSERT INTO {ITEM} (queue_id, payload) VALUES ('peers', %s::jsonb) RETURNING id"
COPY = f"COPY {ITEM} (queue_id, payload) FROM STDIN"
# The joined single row keeps the planner on the index, whatever it believes of the table's size.
CLAIM = f"""
WITH candidate AS MATERIALIZED (
    SELECT id
    FROM {ITEM} AS item, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = 'peers'
      AND read_after IS NULL
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
    ORDER BY read_after, id
    LIMIT %s
    FOR UPDATE OF item SKIP LOCKED
)
UPDATE {ITEM}
SET lease_expires_at = statement_timestamp() + %s * interval '1 second',
    lease_token = %s,
    delivery_count = delivery_count + 1
WHERE id = ANY (ARRAY(SELECT id FROM candidate))
RETURNING id, payload
"""
ACK = f"DELETE FROM {ITEM} WHERE id = ANY (%s) AND lease_token = %s"

# Seconds between two notifications, as ours are held back.
NOTIFY_INTERVAL = 0.05


def connect() -> psycopg.Connection:
    return psycopg.connect(URL, autocommit=True)


def setup() -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    import run_ours

    run_ours.setup()
    with connect() as connection:
        connection.execute("INSERT INTO django_pgqueue_messagequeue (name) VALUES ('peers')")


class Publisher:
    def __init__(self) -> None:
        self.connection = connect()
        self.notified = 0.0

    def one(self, payload: dict) -> None:
        self.connection.execute(PUBLISH, [json.dumps(payload)], prepare=True).fetchone()
        self.notify()

    def many(self, payloads: list) -> None:
        with self.connection.cursor() as cursor, cursor.copy(COPY) as copy:
            for payload in payloads:
                copy.write_row(("peers", json.dumps(payload)))
        self.notify()

    def notify(self) -> None:
        now = time.monotonic()
        if now - self.notified > NOTIFY_INTERVAL:
            self.notified = now
            self.connection.execute("NOTIFY peers")

    def left(self) -> int:
        return self.connection.execute(f"SELECT count(*) FROM {ITEM}").fetchone()[0]

    def clear(self) -> None:
        self.connection.execute(f"TRUNCATE {ITEM}")


def worker(mode: str, *, batch: str, lease: str = "60") -> None:
    start_worker(mode)
    with connect() as connection:
        connection.execute("LISTEN peers")
        wait_for_go()
        while True:
            token = uuid4()
            rows = connection.execute(CLAIM, [int(batch), float(lease), token], prepare=True).fetchall()
            if not rows:
                list(connection.notifies(timeout=1, stop_after=1))
                continue
            handled(*[payload for _id, payload in rows])
            connection.execute(ACK, [[id for id, _payload in rows], token], prepare=True)


if __name__ == "__main__":
    main(setup, lambda: serve(Publisher()), worker)
