"""The servers for a project: one for development, others for tests."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .binaries import runnable_bindir
from .cluster import DevCluster
from .folders import DevDBError, locked, shared_folder, take_lock


def database_url(data_dir: Path) -> str:
    """
    Return the URL of the database to use, and start the development server if necessary.

    If `DATABASE_URL` is set in the environment, it is returned and no server is started. Otherwise
    the server of `data_dir`, which has a cluster for each major version, runs until this process and
    all others that called this function have ended. Raise `DevDBError` if no server can be started.
    """
    if url := os.environ.get("DATABASE_URL"):
        return url
    _bindir, major = runnable_bindir()
    cluster = DevCluster(data_dir / str(major))
    cluster.hold()
    return cluster.start()


@contextlib.contextmanager
def throwaway(*, durable: bool = False, options: Mapping[str, str] | None = None) -> Iterator[DevCluster]:
    """
    Start a server with an empty database, and remove both on exit.

    They are also removed if this process is killed. The arguments are those of `DevCluster`, but
    `durable` is False by default. This is faster, and safe as long as the machine does not crash.
    """
    cluster = _make_throwaway(durable=durable, options=options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


# The servers of `test_database()`, held until this process ends. Child processes find the first one by the variable.
_test_servers: list[DevCluster] = []

TEST_SERVER = "PGQUEUE_TEST_SERVER"


def test_database(name: str = "postgres", *, options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """
    Return an entry for Django's `DATABASES` that uses a PostgreSQL server only for the tests.

        DATABASES = {"default": test_database()}

    Use this function in test settings. The first call starts an empty server that is not durable. Child processes that
    call this function, too (workers of pytest-xdist or of `manage.py test --parallel`), use the same server. It is
    removed with its data when this process and all these child processes have ended. Root can use it, too. The binaries
    are those that `find_pg_bindir()` finds, for example from the package's extra `embedded`. If `DATABASE_URL` is set
    in the environment, no server is started, and the entry is for that database.

    `name` is the database for which Django's test runner creates `test_NAME`. It is created if it does not exist.
    `options` are settings of the server. Raise `DevDBError` if no server can be started.
    """
    if url := os.environ.get("DATABASE_URL"):
        return _django_database(url)
    if not _test_servers:
        _test_servers.append(_shared_test_server(options))
    server = _test_servers[0]
    if name != "postgres":
        _make_database(server.url, name)
    # With an explicit port, PGPORT is not used.
    return {**_django_database(server.url), "NAME": name, "PORT": server.options["port"]}


# Otherwise pytest would collect it in a test module that imports it.
test_database.__test__ = False  # type: ignore[attr-defined]


def _shared_test_server(options: Mapping[str, str] | None) -> DevCluster:
    """Return the server of a parent process, and hold it too, or else a new one that child processes will find."""
    if home := os.environ.get(TEST_SERVER):
        cluster = DevCluster(Path(home))
        # The folder is not created again if it was removed: only a throw-away server creates such folders.
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            cluster.hold(remove=True, create=False)
            if cluster.pid is not None:
                return cluster
            cluster.release()
    cluster = _make_throwaway(durable=False, options=options)
    cluster.start()
    os.environ[TEST_SERVER] = str(cluster.home)
    return cluster


def _django_database(url: str) -> dict[str, Any]:
    from psycopg.conninfo import conninfo_to_dict  # not at the top, because the keeper does not need it

    parts: dict[str, Any] = dict(conninfo_to_dict(url))
    keys = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    found = {key: str(parts.pop(part, "")) for part, key in keys.items()}
    return {"ENGINE": "django.db.backends.postgresql", **found, "OPTIONS": parts}


def _make_database(url: str, name: str) -> None:
    import psycopg

    is_there = psycopg.errors.DuplicateDatabase
    with psycopg.connect(url, port=5432, autocommit=True) as connection, contextlib.suppress(is_there):
        connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))


def _make_throwaway(*, durable: bool, options: Mapping[str, str] | None) -> DevCluster:
    shared = shared_folder()
    # Under a lock, so that no process removes a folder that another has created and not yet locked.
    with locked(shared / "throwaway.lock"):
        for folder in shared.glob("throwaway-*/"):
            _remove_leftover(DevCluster(folder))
        folder = Path(tempfile.mkdtemp(prefix="throwaway-", dir=shared))
        cluster = DevCluster(folder, durable=durable, options=options)
        cluster.hold(remove=True)
    return cluster


def _remove_leftover(cluster: DevCluster) -> None:
    """Remove a throw-away cluster, unless it is in use or its server does not stop."""
    # Not found means that its own process has removed it meanwhile.
    with contextlib.suppress(BlockingIOError, FileNotFoundError, DevDBError):
        lock = take_lock(cluster.home / "users.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            cluster.remove()
        finally:
            os.close(lock)
