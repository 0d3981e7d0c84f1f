"""
procrastinate: tasks deferred over its synchronous connector, a worker whose task is a coroutine function.

Of jobs that are done it keeps the rows unless ``delete_jobs`` says otherwise. Jobs of a worker that died
are found by a periodic task, as its documentation has it.
"""

import asyncio

from procrastinate import App, PsycopgConnector, SyncPsycopgConnector
from wire import URL, ahandled, main, serve, start_worker, wait_for_go


def make_app(connector) -> App:
    app = App(connector=connector)
    app.task(name="peers", pass_context=False)(handle)
    return app


async def handle(payload: dict) -> None:
    await ahandled(payload)


def setup() -> None:
    with make_app(SyncPsycopgConnector(conninfo=URL)).open() as app:
        app.schema_manager.apply_schema()


class Publisher:
    def __init__(self, app: App) -> None:
        self.connector = app.connector
        self.task = app.tasks["peers"]

    def one(self, payload: dict) -> None:
        self.task.defer(payload=payload)

    def many(self, payloads: list) -> None:
        self.task.batch_defer(*[{"payload": payload} for payload in payloads])

    def left(self) -> int:
        query = "SELECT count(*) AS count FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        return self.connector.execute_query_one(query)["count"]

    def clear(self) -> None:
        self.connector.execute_query("TRUNCATE procrastinate_jobs CASCADE")


def publisher() -> None:
    with make_app(SyncPsycopgConnector(conninfo=URL)).open() as app:
        serve(Publisher(app))


async def worker(mode: str, *, concurrency: str = "1", delete: str = "never", stalled: str = "") -> None:
    start_worker(mode)
    app = make_app(PsycopgConnector(conninfo=URL))
    if stalled:
        retry_stalled_jobs(app, int(stalled))
    async with app.open_async():
        wait_for_go()
        await app.run_worker_async(concurrency=int(concurrency), delete_jobs=delete)


def retry_stalled_jobs(app: App, seconds: int) -> None:
    """Look every ten seconds for jobs whose worker has given no sign for so long, and run them again."""

    @app.periodic(cron="* * * * * */10")
    @app.task(queueing_lock="retry_stalled_jobs", pass_context=True)
    async def retry(context, timestamp: int) -> None:
        for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=seconds):
            await app.job_manager.retry_job(job)


if __name__ == "__main__":
    main(setup, publisher, lambda mode, **options: asyncio.run(worker(mode, **options)))
