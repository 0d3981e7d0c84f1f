"""
The server that the tests run on: a throw-away cluster unless `DATABASE_URL` is set.

`tests/settings.py` starts it, because pytest-django reads the settings before any conftest.
"""

import contextlib
import os

from django_pgqueue.devdb import DevCluster, throwaway

_resources = contextlib.ExitStack()

#: None where `DATABASE_URL` was given.
cluster: DevCluster | None = None


def start() -> None:
    """Put the URL of a server into `DATABASE_URL`, starting one if there is none."""
    global cluster
    if not os.environ.get("DATABASE_URL"):
        cluster = _resources.enter_context(throwaway())
        os.environ["DATABASE_URL"] = cluster.url


def stop() -> None:
    """Take down what `start()` started."""
    _resources.close()
