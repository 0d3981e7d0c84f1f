"""
pgmq, by its client for Python, which brings the extension's SQL along for servers without the extension.

It has no worker: this one is a bare loop around read and delete, without any care for handlers that fail. A
read hides its messages for ``vt`` seconds. The loop has a connection of its own, in autocommit; so a call is
one statement, where the client's pool wraps each into a transaction of three.
"""

from functools import partial

import psycopg
from pgmq import PGMQueue
from pgmq.install import install_pgmq_from_sql
from psycopg.conninfo import conninfo_to_dict
from wire import URL, handled, main, serve, start_worker, wait_for_go

QUEUE = "peers"


def connect() -> tuple[PGMQueue, psycopg.Connection]:
    parts = conninfo_to_dict(URL)
    # Without a password it refuses to start.
    queue = PGMQueue(
        host=parts["host"],
        database=parts["dbname"],
        username=parts["user"],
        password="-",
        init_extension=False,
        pool_size=1,
    )
    return queue, psycopg.connect(URL, autocommit=True)


def setup() -> None:
    with psycopg.connect(URL) as connection:
        install_pgmq_from_sql(conn=connection)
    queue, _connection = connect()
    queue.create_queue(QUEUE)
    queue.close()


class Publisher:
    def __init__(self, connection: str = "") -> None:
        self.queue, self.connection = connect()
        self.options = {"conn": self.connection} if connection else {}

    def one(self, payload: dict) -> None:
        self.queue.send(QUEUE, payload, **self.options)

    def many(self, payloads: list) -> None:
        self.queue.send_batch(QUEUE, payloads, **self.options)

    def left(self) -> int:
        return self.queue.metrics(QUEUE).queue_length

    def clear(self) -> None:
        self.queue.purge(QUEUE)
        self.connection.execute(f"TRUNCATE pgmq.a_{QUEUE}")


def worker(mode: str, *, batch: str = "10", settle: str = "delete", wait: str = "poll", interval: str = "100") -> None:
    start_worker(mode)
    queue, connection = connect()
    read = queue.read if wait == "notify" else partial(queue.read_with_poll, poll_interval_ms=int(interval))
    done = queue.delete_batch if settle == "delete" else queue.archive_batch
    if wait == "notify":
        # Its trigger on each insert, with which publishing costs more, is there only as long as this worker.
        queue.enable_notify(QUEUE, throttle_interval_ms=0)
        connection.execute(f'LISTEN "pgmq.q_{QUEUE}.INSERT"')
    wait_for_go()
    try:
        while True:
            messages = read(QUEUE, qty=int(batch), conn=connection)
            if messages:
                handled(*[message.message for message in messages])
                done(QUEUE, [message.msg_id for message in messages], conn=connection)
            elif wait == "notify":
                list(connection.notifies(timeout=1, stop_after=1))
    finally:
        if wait == "notify":
            queue.disable_notify(QUEUE)


if __name__ == "__main__":
    main(setup, lambda **options: serve(Publisher(**options)), worker)
