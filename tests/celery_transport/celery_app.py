"""
A Celery application on the test database, for test_celery_transport.py and its workers.

Tasks note what they do in the file that `CELERY_NOTES` names, a line each.
"""

import os
import signal
import time
from typing import Any

from celery import Celery
from celery.exceptions import Reject
from kombu import Queue
from kombu.common import Broadcast

app = Celery("tests.celery_transport.celery_app")
app.conf.update(
    broker_transport="django_pgqueue.celery_transport:Transport",
    task_ignore_result=True,
    task_queues=(Queue("celery"), Broadcast("news")) if os.environ.get("CELERY_NEWS") else None,
    task_routes={"tests.celery_transport.celery_app.news": {"queue": "news", "exchange": "news"}},
    worker_hijack_root_logger=False,
)


def note(*words: object) -> None:
    file = os.open(os.environ["CELERY_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, " ".join(map(str, words)).encode() + b"\n")
    finally:
        os.close(file)


@app.task
def quick(number: int) -> None:
    note("quick", number)


@app.task(acks_late=True)
def late(number: int) -> None:
    note("late", number)


@app.task(acks_late=True)
def slow(number: int, seconds: float) -> None:
    note("start", number)
    time.sleep(seconds)
    note("end", number)


@app.task(bind=True)
def again(self: Any, number: int) -> None:
    note("try", self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.5)


@app.task(acks_late=True, reject_on_worker_lost=True)
def deadly() -> None:
    note("deadly")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(acks_late=True)
def refused() -> None:
    raise Reject("no", requeue=False)


@app.task
def news(number: int) -> None:
    note("news", number)
