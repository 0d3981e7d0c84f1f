"""Tasks in the admin: read-only, found by a result's id, without COUNT, values cut."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from tests.task_backend.taskrun import run_tasks, tasks_setting
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(transaction=True)

LIST = reverse("admin:django_pgqueue_taskrun_changelist")


@pytest.fixture(autouse=True)
def backend(settings):
    settings.TASKS = tasks_setting()
    settings.PGQUEUE = {"MAX_DELIVERIES": 1}


def test_the_list_shows_runs_without_counting_or_reading_values(admin_client):
    """The last attempt first."""
    tasks.add.enqueue(1)
    tasks.fail.enqueue("broken")
    run_tasks()
    with CaptureQueriesContext(
        connection,
    ) as queries:
        page = admin_client.get(LIST).content.decode()
    assert "tests.testapp.tasks.add" in page and "FAILED" in page.upper() and "Traceback" not in page
    runs = [query["sql"] for query in queries if "taskrun" in query["sql"]]
    assert runs and not any("COUNT(" in statement or "return_value" in statement for statement in runs)


def test_a_run_is_found_by_its_result_s_id(admin_client):
    """Which is what people have at hand."""
    found, other = tasks.add.enqueue(1), tasks.fail.enqueue("broken")
    run_tasks()
    page = admin_client.get(LIST, {"q": found.id}).content.decode()
    assert "tests.testapp.tasks.add" in page and "tests.testapp.tasks.fail" not in page
    assert "1 task run" in admin_client.get(LIST, {"status__exact": "FAILED"}).content.decode(), other


def test_a_run_s_page_shows_what_it_was_given_and_what_became_of_it(admin_client):
    """Its traceback too; what is long is cut, and nothing can be changed."""
    failed, long = tasks.fail.enqueue("<broken>"), tasks.add.enqueue("x" * 50_000, "y")
    run_tasks()
    page = admin_client.get(reverse("admin:django_pgqueue_taskrun_change", args=[failed.id.partition("-")[0]]))
    assert "ValueError: &lt;broken&gt;" in page.content.decode()
    page = admin_client.get(reverse("admin:django_pgqueue_taskrun_change", args=[long.id.partition("-")[0]]))
    text = page.content.decode()
    assert "xxx" in text and len(text) < 50_000 and 'name="_save"' not in text
    assert admin_client.post(page.request["PATH_INFO"], {}).status_code == 403
