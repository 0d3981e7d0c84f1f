"""
pgqueuer on asyncpg, its first driver, under uvloop, as ``pgq run`` is.

Its tables are those of ``pgq install`` (all of them logged) with the autovacuum settings of ``pgq autovac``.
It stores and hands out bytes, so the JSON is made and read here.
"""

import asyncio
import json
import signal
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from wire import URL, ahandled, aserve, main, start_worker, wait_for_go


async def connect() -> tuple[asyncpg.Connection, Queries]:
    connection = await asyncpg.connect(URL)
    return connection, Queries(AsyncpgDriver(connection))


async def setup() -> None:
    _connection, queries = await connect()
    await queries.install()
    await queries.optimize_autovacuum()


class Publisher:
    def __init__(self, connection: asyncpg.Connection, queries: Queries) -> None:
        self.connection = connection
        self.queries = queries

    async def one(self, payload: dict) -> None:
        await self.queries.enqueue("peers", json.dumps(payload).encode())

    async def many(self, payloads: list) -> None:
        count = len(payloads)
        await self.queries.enqueue(
            ["peers"] * count, [json.dumps(payload).encode() for payload in payloads], [0] * count
        )

    async def left(self) -> int:
        return await self.connection.fetchval("SELECT count(*) FROM pgqueuer")

    async def clear(self) -> None:
        await self.connection.execute("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics")


async def publisher() -> None:
    await aserve(Publisher(*await connect()))


async def worker(mode: str, *, batch: str = "10", timeout: str = "30") -> None:
    start_worker(mode)
    connection, _queries = await connect()
    pgq = PgQueuer.from_asyncpg_connection(connection)

    @pgq.entrypoint("peers")
    async def handle(job: Job) -> None:
        await ahandled(json.loads(job.payload))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, pgq.shutdown.set)
    wait_for_go()
    await pgq.run(batch_size=int(batch), dequeue_timeout=timedelta(seconds=float(timeout)))


if __name__ == "__main__":
    main(
        lambda: uvloop.run(setup()),
        lambda: uvloop.run(publisher()),
        lambda mode, **options: uvloop.run(worker(mode, **options)),
    )
