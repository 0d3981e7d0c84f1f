"""Django's own tests of its Tasks pass on this package's backend, but for those that are excepted by name."""

import json

import django
import pytest

from tests.task_backend import conformance


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(django.VERSION < (6, 0), reason="Django has Tasks from 6.0 on")
def test_django_s_own_tests_pass():
    """And those that are excepted really fail."""
    folder = conformance.fetch()
    if folder is None:
        pytest.skip("the package index cannot be reached, and the tests were not fetched before")
    verdicts = conformance.run(folder)
    failed = {verdict.name: verdict.outcome for verdict in verdicts if verdict.outcome != conformance.PASSED}
    assert failed.keys() == conformance.EXCEPTED.keys(), failed
    recorded = json.loads(conformance.RECORD.read_text())[conformance.minor()]
    if recorded["version"] == django.__version__:
        assert recorded["tests"].keys() == {verdict.name for verdict in verdicts}


def test_the_page_is_what_the_command_makes():
    """`tests.task_backend.conformance` was run after the last change, for each version of Django that has Tasks."""
    assert conformance.PAGE.read_text() == conformance.page()
    recorded = json.loads(conformance.RECORD.read_text())
    assert sorted(recorded) == ["6.0", "6.1"]
    assert all(
        passed or name in conformance.EXCEPTED for found in recorded.values() for name, passed in found["tests"].items()
    )


def test_an_index_that_cannot_be_reached_is_no_failure(monkeypatch, tmp_path):
    """An index that answers and does not have it is one."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert conformance.download(tmp_path) is False
    monkeypatch.setattr(django, "__version__", "not a version")
    with pytest.raises(RuntimeError, match="pip download failed"):
        conformance.download(tmp_path)
