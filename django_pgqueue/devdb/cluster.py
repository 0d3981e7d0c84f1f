"""``DevCluster``: a cluster in a folder, and its server."""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from .binaries import run, runnable_bindir
from .folders import DevDBError, digest, locked, private_folder, server_user, shared_folder, take_lock, writable

StopMode = Literal["fast", "immediate", "kill"]

TIMEOUT = 60  # seconds for a start or a stop; crash recovery is the slow case

STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
    "kill": signal.SIGKILL,
}
# The program of the keeper process.
KEEPER = Path(__file__).with_name("__main__.py")


class DevCluster:
    """
    A PostgreSQL cluster in a folder, and its server.

    For root, the cluster is in another folder (`home`), because the data belongs to `nobody`, who
    may not be able to enter `data_dir`. The same applies to a user who cannot write to `data_dir`.
    The object keeps no state of the server: two objects for one folder, even in two processes, see
    the same server.

    `durable=False` turns off fsync and full-page writes. `options` are further server settings by
    name. Both take effect when the server starts.
    """

    def __init__(self, data_dir: Path, *, durable: bool = True, options: Mapping[str, str] | None = None) -> None:
        shared = shared_folder()
        self.home = data_dir.absolute()
        if self.home.parent != shared and (os.getuid() == 0 or not writable(self.home)):
            self.home = shared / f"dev-{digest(data_dir.resolve())}"
        self.pgdata = self.home / "data"
        self.socket_dir = shared / f"socket-{digest(self.home)}"
        self.options = {
            "listen_addresses": "",
            "port": "5432",
            "unix_socket_directories": str(self.socket_dir),
            "unix_socket_permissions": "0700",
            "max_connections": "200",
            "shared_buffers": "64MB",
            **({} if durable else {"fsync": "off", "full_page_writes": "off"}),
            **(options or {}),
        }
        self._holds: list[int] = []

    @property
    def url(self) -> str:
        """The database's URL, for libpq and django-environ alike."""
        # The host is a parameter because django-environ does not decode a host before the path.
        return f"postgres://postgres@/postgres?host={quote(str(self.socket_dir))}"

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None if it does not run."""
        return self._read_pid_file()[0] if self._lives() else None

    def start(self) -> str:
        """
        Start the server unless it runs already, and return the database's URL.

        The cluster is created first if there is none. A server that runs but does not answer is
        replaced. Raise `DevDBError` with the end of the server's log if it does not start.
        """
        self._make_home()
        with locked(self.home / "start.lock"):
            if self._answers():
                return self.url
            self._replace()
            bindir, major = runnable_bindir()
            if not self.pgdata.exists():
                self._init(bindir)
            found = (self.pgdata / "PG_VERSION").read_text().strip()
            if found != str(major):
                raise DevDBError(f"{self.pgdata} was created by PostgreSQL {found}, not {major}: move it away")
            self._forget_stale_pid()
            # Emptied first, because the socket lock of a killed server names a process id, too.
            shutil.rmtree(self.socket_dir, ignore_errors=True)
            private_folder(self.socket_dir, owner=server_user())
            self._launch(bindir)
        return self.url

    def stop(self, mode: StopMode = "fast", *, timeout: float = TIMEOUT) -> None:
        """
        Stop the server and wait until all of its processes have ended. Do nothing if none runs.

        `mode` is a mode of pg_ctl, or "kill", which sends SIGKILL to the server's main process, as
        in a crash. Raise `DevDBError` if a process still runs after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        signalled = None
        while self._lives():
            pid, _status = self._read_pid_file()
            # A server that is just starting has no process id yet, so it is read again.
            if pid is not None and pid != signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STOP_SIGNALS[mode])
                signalled = pid
            if time.monotonic() > deadline:
                raise DevDBError(f"The server in {self.pgdata} (process {pid}) does not stop")
            time.sleep(0.01)

    def restart(self, mode: StopMode = "fast") -> str:
        """Stop the server, start it again, and return the URL, which is the same."""
        self.stop(mode)
        return self.start()

    def remove(self) -> None:
        """Stop the server at once and delete the cluster."""
        self.stop("immediate")
        shutil.rmtree(self.socket_dir, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)
        self.release()

    def hold(self, *, remove: bool = False, create: bool = True) -> None:
        """
        Keep the server running until this process ends or calls `release()`.

        When the last process that holds it has ended, in whatever way, a keeper process stops the
        server and, with `remove`, deletes the cluster. If a keeper is just stopping the server, this
        method waits. Without `create`, raise `FileNotFoundError` if there is no cluster.
        """
        if create:
            self._make_home()
        self._holds.append(take_lock(self.home / "users.lock", fcntl.LOCK_SH, create=create))
        subprocess.run(
            # By path, because the keeper does not need the package's own imports. With -P, this
            # folder's modules do not hide others of the same name.
            [sys.executable, "-P", KEEPER, str(self.home), "remove" if remove else "stop"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # so that Ctrl-C in the terminal does not end it
            check=True,
        )

    def release(self) -> None:
        """Undo all calls of `hold()` of this object."""
        while self._holds:
            os.close(self._holds.pop())

    def _make_home(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        if os.getuid() == 0:
            self.home.chmod(0o711)  # regardless of the umask: the server's user must be able to pass

    def _lives(self) -> bool:
        """Return whether a process of the server, or one that starts it, runs."""
        try:
            os.close(take_lock(self.home / "server.lock", fcntl.LOCK_SH | fcntl.LOCK_NB, create=False))
        except BlockingIOError:
            return True
        except FileNotFoundError:  # never started, or removed
            return False
        return False

    def _read_pid_file(self) -> tuple[int | None, str]:
        """Return the server's process id (None if that process is not the server) and its status."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, IndexError, ValueError):  # missing, or being written
            return None, ""
        status = lines[7].strip() if len(lines) > 7 else "starting"
        return (pid if _works_in(pid, self.pgdata) else None), status

    def _answers(self) -> bool:
        import psycopg  # not at the top, because the keeper does not need it

        deadline = time.monotonic() + TIMEOUT
        while self._lives() and time.monotonic() < deadline:
            try:
                with psycopg.connect(self.url, connect_timeout=5) as connection:
                    row = connection.execute("SHOW data_directory").fetchone()
                    return row is not None and Path(row[0]).samefile(self.pgdata)
            except psycopg.OperationalError:
                if self._read_pid_file()[1] not in ("starting", "stopping"):
                    return False
            time.sleep(0.05)
        return False

    def _replace(self) -> None:
        """Stop a server that does not answer, if there is one."""
        try:
            self.stop("immediate", timeout=10)
        except DevDBError:
            self.stop("kill")

    def _init(self, bindir: Path) -> None:
        for unfinished in self.home.glob("init-*/"):
            shutil.rmtree(unfinished)
        # Created under another name, so that a killed initdb does not leave half a cluster.
        folder = Path(tempfile.mkdtemp(prefix="init-", dir=self.home))
        os.chown(folder, *server_user())
        command: list[str | Path] = [
            bindir / "initdb",
            "-D",
            folder,
            "-U",
            "postgres",
            "-E",
            "UTF8",
        ]
        command += ["--auth-local=trust", "--auth-host=reject"]
        if self.options.get("fsync") == "off":
            command.append("--no-sync")
        done = run([*command, "--locale=C.UTF-8"])
        if done.returncode:  # not every system has that locale
            done = run([*command, "--no-locale"])
        if done.returncode:
            raise DevDBError(f"initdb failed:\n{done.stdout}{done.stderr}")
        folder.rename(self.pgdata)

    def _forget_stale_pid(self) -> None:
        """
        Delete the process id of a killed server if another process has that id now.

        PostgreSQL detects that a process has ended, but refuses to start if a process of the same
        user has the id.
        """
        pid_file = self.pgdata / "postmaster.pid"
        if not pid_file.exists():
            return
        pid, _status = self._read_pid_file()
        if pid is not None:
            raise DevDBError(
                f"A server that was not started by this program runs on {self.pgdata} (process "
                f"{pid}). Stop it, or set DATABASE_URL to use it."
            )
        with contextlib.suppress(ValueError, IndexError, ProcessLookupError):
            os.kill(int(pid_file.read_text().split()[0]), 0)
            pid_file.unlink()

    def _launch(self, bindir: Path) -> None:
        log = self.home / "data" / "server.log"
        log.unlink(missing_ok=True)
        settings = " ".join(shlex.quote(f"--{key}={value}") for key, value in self.options.items())
        command: list[str | Path] = [bindir / "pg_ctl", "start", "-w", "-t", str(TIMEOUT)]
        command += ["-D", self.pgdata, "-l", log, "-o", settings]
        lock = take_lock(self.home / "server.lock", fcntl.LOCK_EX)
        try:
            done = run(command, pass_fds=(lock,))
        finally:
            os.close(lock)  # closed, not unlocked, because the server holds the same lock
        if done.returncode:
            tail = log.read_text()[-2000:] if log.exists() else ""
            raise DevDBError(f"PostgreSQL did not start:\n{done.stdout}{done.stderr}{tail}")


def _works_in(pid: int, folder: Path) -> bool:
    """Return whether the process is a server that runs in the folder."""
    if Path("/proc/self/cwd").exists():
        try:
            return Path(f"/proc/{pid}/cwd").samefile(folder)
        except OSError:  # it has ended, or belongs to another user
            return False
    shown = run(["ps", "-wwo", "command=", "-p", str(pid)]).stdout
    return "postgres" in shown and str(folder) in shown
