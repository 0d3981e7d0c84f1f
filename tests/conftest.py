"""
The tests' database, and what it takes to reach the parts of the machine that tests use.

The database is a throw-away cluster for the whole run unless `DATABASE_URL` is set.
"""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from django_pgqueue.devdb import DevCluster, throwaway

_resources = contextlib.ExitStack()
_cluster: DevCluster | None = None


# Before pytest-django reads the settings, which need the database's URL.
if "DATABASE_URL" not in os.environ:
    _cluster = _resources.enter_context(throwaway())
    os.environ["DATABASE_URL"] = _cluster.url


def pytest_unconfigure() -> None:
    _resources.close()


def pytest_report_header() -> str:
    """Show what the run really is on: the matrix is read from these lines."""
    import django

    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        server = connection.info.parameter_status("server_version")
    versions = (platform.python_version(), django.get_version(), str(server))
    # The matrix says here what it means to run on; a cell that is another must not pass for it.
    expected = os.environ.get("PGQUEUE_EXPECT_VERSIONS", "").split()
    if any(not f"{v}.".startswith(f"{e}.") for v, e in zip(versions, expected, strict=False)):
        raise pytest.UsageError(f"expected the versions {expected}, found {versions}")
    return "matrix: Python {}, Django {}, PostgreSQL {}, psycopg {}".format(
        *versions, psycopg.__version__
    )


@pytest.fixture(scope="session")
def pg() -> Iterator[DevCluster]:
    """
    A server that a test may stop, kill and restart; it must be up again when the test ends.

    It is the one that the test database lives on, unless `DATABASE_URL` was given: then it is
    one of its own.
    """
    if _cluster is not None:
        yield _cluster
    else:
        with throwaway() as cluster:
            yield cluster


@pytest.fixture(scope="session")
def real_input() -> Path:
    """
    The file of real webhooks that `PGQUEUE_REAL_INPUT` names, one JSON object a line.

    Without the variable the test is skipped; with it, a file that is not there is a failure.
    """
    name = os.environ.get("PGQUEUE_REAL_INPUT")
    if not name:
        pytest.skip("PGQUEUE_REAL_INPUT is not set")
    path = Path(name)
    assert path.is_file(), f"PGQUEUE_REAL_INPUT: there is no file {path}"
    return path
