"""
The server that the tests run on: a throw-away cluster unless `DATABASE_URL` is set.

`tests/settings.py` starts it, because pytest-django reads the settings before any conftest. Each worker of
pytest-xdist has a server of its own; on a server that was given, each has a database of its own, as pytest-django
makes them.
"""

import contextlib
import os

from django_pgqueue.devdb import DevCluster, throwaway

# In the environment of a run's workers: the URL of the server that the process which controls them started.
STARTED = "PGQUEUE_TEST_STARTED"

_resources = contextlib.ExitStack()

#: None where `DATABASE_URL` was given.
cluster: DevCluster | None = None


def start() -> None:
    """Put the URL of a server into `DATABASE_URL`, starting one if there is none."""
    global cluster
    url, controllers = os.environ.get("DATABASE_URL"), os.environ.pop(STARTED, None)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not url or (is_worker and url == controllers):
        cluster = _resources.enter_context(throwaway())
        os.environ["DATABASE_URL"] = cluster.url
        if not is_worker:
            os.environ[STARTED] = cluster.url


def stop() -> None:
    """Take down what `start()` started."""
    _resources.close()
