"""
A real PgBouncer in front of the test server, for the tests and for longer runs.

The binary is the one that `PGQUEUE_PGBOUNCER` names, or one on PATH, in /usr/sbin, or where
`.ci/pgbouncer` unpacks it. It listens on a unix socket in a private folder and on nothing else.
"""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from django.db import connections
from psycopg.conninfo import conninfo_to_dict

from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
UNPACKED = ROOT / ".pgbouncer" / "pgbouncer"

CONFIG = """
[databases]
* = {server}

[pgbouncer]
pool_mode = {mode}
; After each transaction too, so that a session remembers nothing of the one before.
server_reset_query = DISCARD ALL
server_reset_query_always = 1
default_pool_size = {pool_size}
max_client_conn = 500
listen_port = 5432
unix_socket_dir = {folder}
auth_type = any
ignore_startup_parameters = extra_float_digits, options
; A server that was away is tried again soon.
server_login_retry = 0.2
{user}
"""


def find_pgbouncer() -> Path | None:
    """
    Return the binary, None where there is none: the only reason to skip a test that needs it.

    One that `PGQUEUE_PGBOUNCER` names has to be there.
    """
    if named := os.environ.get("PGQUEUE_PGBOUNCER"):
        assert os.access(named, os.X_OK), f"PGQUEUE_PGBOUNCER: {named} cannot be run"
        return Path(named)
    for found in (shutil.which("pgbouncer"), "/usr/sbin/pgbouncer", UNPACKED):
        if found and os.access(found, os.X_OK):
            return Path(found)
    return None


class PgBouncer:
    """
    A PgBouncer in front of a server, in transaction pooling mode unless told otherwise.

    `pool_size` is how many sessions of the server it opens for each database at the most. `server`
    is a URL (default: the test server's). It starts with `start()` or as a context manager; `stop()`
    may be followed by `start()`, and the URL stays the same.
    """

    def __init__(self, *, pool_size: int = 4, mode: str = "transaction", server: str | None = None) -> None:
        binary = find_pgbouncer()
        assert binary is not None, "there is no pgbouncer"
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        # Not below TMPDIR: a socket's path has to be short.
        self.folder = Path(tempfile.mkdtemp(prefix="pgqueue-pgbouncer-", dir="/tmp"))
        self._log = self.folder / "log"
        target = conninfo_to_dict(server or os.environ["DATABASE_URL"])
        target.pop("dbname", None)
        self._user = str(target.setdefault("user", "postgres"))
        user = ""
        if os.getuid() == 0:
            # It refuses to run as root, and starts as root to become somebody else. That has to be the
            # user of the test server, whose socket nobody else may open.
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            user = f"user = {nobody.pw_name}"
        (self.folder / "pgbouncer.ini").write_text(
            CONFIG.format(
                server=" ".join(f"{key}={_quoted(value)}" for key, value in target.items()),
                mode=mode,
                pool_size=pool_size,
                folder=self.folder,
                user=user,
            )
        )

    @property
    def output(self) -> str:
        """What it has logged so far."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def url(self, database: str | None = None) -> str:
        """Return the URL of a database (default: the test database) through it."""
        name = database or connections["default"].settings_dict["NAME"]
        return f"postgres://{quote(self._user)}@/{quote(name)}?host={quote(str(self.folder), safe='')}"

    def start(self) -> None:
        """Start it, and wait until it takes connections. The server need not be up."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, self.folder / "pgbouncer.ini"],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
            )
        wait_until(self._answers, what="PgBouncer")

    def stop(self) -> None:
        """End it at once, as a crash would, and all connections through it. Does nothing if none runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, f"PgBouncer ended:\n{self.output}"
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.folder / ".s.PGSQL.5432")) == 0


@contextmanager
def pgbouncer(**options: Any) -> Iterator[PgBouncer]:
    """Run a PgBouncer. Skips the test where there is no binary."""
    import pytest

    if find_pgbouncer() is None:
        pytest.skip("there is no pgbouncer: .ci/pgbouncer gets one where there is apt")
    with PgBouncer(**options) as bouncer:
        yield bouncer


def _quoted(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"
