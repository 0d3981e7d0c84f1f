"""The servers that a project asks for: one for development, others for tests."""

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
    Return the URL of the database to use, starting the development server if need be.

    `DATABASE_URL` of the environment wins, and then nothing is started. Else the server of
    `data_dir`, a cluster for each major version, runs until this process and all others that
    asked for it have ended. Raise `DevDBError` when no server can be started.
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

    They are removed, too, when this process is killed. The arguments are `DevCluster`'s, but
    not durable unless asked for: that is faster, and safe as long as the machine does not crash.
    """
    cluster = _make_throwaway(durable=durable, options=options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


# The servers of `test_database()`, held until this process ends. Its children find the first by the variable.
_test_servers: list[DevCluster] = []

TEST_SERVER = "PGQUEUE_TEST_SERVER"


def test_database(name: str = "postgres", *, options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """
    Return an entry for Django's `DATABASES`, on a PostgreSQL server of the tests' own.

        DATABASES = {"default": test_database()}

    For test settings. The server is started by the first call, is empty, and is not durable; it goes, with its data,
    when this process has ended and all those that this one started and that call this too (workers of pytest-xdist, of
    `manage.py test --parallel`): they use the same server. Root and others alike; the binaries are those that
    `find_pg_bindir()` finds, of the package's extra `embedded`, say. With `DATABASE_URL` in the environment nothing is
    started: the entry is of that database.

    `name`: the database, of which Django's test runner makes `test_NAME`; it is made if it is not there. `options`:
    settings of the server. Raise `DevDBError` when no server can be started.
    """
    if url := os.environ.get("DATABASE_URL"):
        return _django_database(url)
    if not _test_servers:
        _test_servers.append(_shared_test_server(options))
    server = _test_servers[0]
    if name != "postgres":
        _make_database(server.url, name)
    # The port is said, lest PGPORT is taken for it.
    return {**_django_database(server.url), "NAME": name, "PORT": server.options["port"]}


# pytest would collect it where a test module imports it.
test_database.__test__ = False  # type: ignore[attr-defined]


def _shared_test_server(options: Mapping[str, str] | None) -> DevCluster:
    """Return the server of a parent process, held here too, or else a new one that children will find."""
    if home := os.environ.get(TEST_SERVER):
        cluster = DevCluster(Path(home))
        # Gone, its folder is not to be made again: what is there was made by a throw-away server.
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
    from psycopg.conninfo import conninfo_to_dict  # not at the top: the keeper needs none

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
    # Under a lock, so that no run takes a folder that another has made and not yet locked.
    with locked(shared / "throwaway.lock"):
        for folder in shared.glob("throwaway-*/"):
            _remove_leftover(DevCluster(folder))
        folder = Path(tempfile.mkdtemp(prefix="throwaway-", dir=shared))
        cluster = DevCluster(folder, durable=durable, options=options)
        cluster.hold(remove=True)
    return cluster


def _remove_leftover(cluster: DevCluster) -> None:
    """Remove a throw-away cluster, unless it is in use or its server does not stop."""
    # Not found: its own process has removed it meanwhile.
    with contextlib.suppress(BlockingIOError, FileNotFoundError, DevDBError):
        lock = take_lock(cluster.home / "users.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            cluster.remove()
        finally:
            os.close(lock)
