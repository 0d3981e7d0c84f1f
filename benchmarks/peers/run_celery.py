"""
Celery on Redis, without a store for results, which nothing here asks for.

In bulk: kombu's batch of its producer, which sends 1,000 in one pipeline. ``argsrepr`` is what the worker's
log shows of the arguments; left to itself it is made of them for each message, at almost half of the cost.
"""

import os
import sys
import threading
import time
from functools import partial
from typing import Any

from celery import Celery
from celery.signals import worker_process_init
from redis import Redis
from wire import handled, main, report, serve, start_worker, wait_for_go

QUEUE = "peers"

app = Celery(broker=f"redis+socket://{os.environ['REDIS_SOCKET']}")
app.conf.update(task_default_queue=QUEUE, task_ignore_result=True, broker_connection_retry_on_startup=True)


@app.task(name="handle")
def handle(payload: dict) -> None:
    handled(payload)


def setup() -> None:
    Redis(unix_socket_path=os.environ["REDIS_SOCKET"]).ping()


class Publisher:
    def __init__(self, argsrepr: str = "") -> None:
        self.one = partial(self.publish, argsrepr=argsrepr) if argsrepr else handle.delay
        self.redis = Redis(unix_socket_path=os.environ["REDIS_SOCKET"])

    def many(self, payloads: list) -> None:
        with app.producer_pool.acquire(block=True) as producer, producer.batch(len(payloads)):
            for payload in payloads:
                self.publish(payload, argsrepr="-", producer=producer)

    def publish(self, payload: dict, **options: Any) -> None:
        handle.apply_async((payload,), **options)

    def left(self) -> int:
        return self.redis.llen(QUEUE) + self.redis.hlen("unacked")

    def clear(self) -> None:
        self.redis.delete(QUEUE, "unacked", "unacked_index")


def worker(
    mode: str, *, pool: str = "prefork", prefetch: str = "4", late: str = "", quiet: str = "", timeout: str = ""
) -> None:
    # Its own words on starting and ending would go to stdout.
    sys.stdout = sys.__stdout__ = sys.stderr
    start_worker(mode)
    app.conf.task_acks_late = bool(late)
    if timeout:
        # Looked for every second, where by default it is every hundred.
        app.conf.broker_transport_options = {
            "visibility_timeout": int(timeout),
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    arguments = [f"--pool={pool}", "--concurrency=1", f"--prefetch-multiplier={prefetch}", "--loglevel=ERROR"]
    if quiet:
        arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    wait_for_go()
    app.worker_main(["--quiet", "worker", f"--hostname=worker{os.getpid()}@%h", *arguments])


@worker_process_init.connect
def set_up_child(**_: Any) -> None:
    report()
    threading.Thread(target=end_with_parent, args=[os.getppid()], daemon=True).start()


def end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(setup, lambda **options: serve(Publisher(**options)), worker)
