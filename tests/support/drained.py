"""A backend for Django's tests of executed tasks: what is enqueued has run when `enqueue()` returns."""

from typing import Any

from django_pgqueue.task_backend import PGQueueBackend
from tests.task_backend.taskrun import run_tasks


class DrainedBackend(PGQueueBackend):
    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        run_tasks(task.queue_name)
        return self.get_result(result.id)
