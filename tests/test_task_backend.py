"""The backend for Django's Tasks: enqueueing is a publish, `consume_queues` runs what is enqueued."""

from collections.abc import Iterator

import pytest

from django_pgqueue.models import MessageQueueItem
from django_pgqueue.task_compat import TaskResultStatus
from tests.taskrun import run_tasks, tasks_setting
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(transaction=True)

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


@pytest.fixture(autouse=True)
def backend(settings) -> Iterator[None]:
    settings.TASKS = tasks_setting()
    settings.PGQUEUE = {"BACKOFF": {"base": 0.01, "jitter": 0}, "MAX_DELIVERIES": 3}
    yield


def refreshed(result):
    result.refresh()
    return result


def test_a_task_is_enqueued_run_and_known():
    result = tasks.add.enqueue(1, b=2)
    assert (result.status, result.attempts, result.is_finished) == (READY, 0, False)
    assert refreshed(result).status == READY
    assert run_tasks() == 1
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (SUCCESSFUL, 3, 1)
    assert result.enqueued_at < result.started_at == result.last_attempted_at <= result.finished_at
    assert not MessageQueueItem.objects.exists()
