"""The development server: what happens to it when processes come, go and are killed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from django_pgqueue import devdb
from django_pgqueue.devdb import DevCluster, DevDBError, binaries, find_pg_bindir, folders, throwaway

DEVDB = Path(devdb.__file__).parent
needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root runs the server as another user, who may not reach it"
)


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Return when the condition holds; fail when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def query(cluster: DevCluster, statement: str) -> object:
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row and row[0]


def answers(cluster: DevCluster) -> bool:
    try:
        return query(cluster, "SELECT 1") == 1
    except psycopg.OperationalError:
        return False


@contextlib.contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run the code with `devdb` imported; it goes on until its standard input is closed."""
    preamble = f"import sys; from pathlib import Path\nsys.path.insert(0, {str(DEVDB.parent)!r}); import devdb\n"
    environment = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", f"{preamble}{code}\nsys.stdin.read()", *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        leave(child)


def leave(child: subprocess.Popen[str]) -> None:
    """Let the process end by itself, if it has not been killed."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    child.wait(timeout=30)
    child.stdout.close()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


USER = "print(devdb.database_url(Path(sys.argv[1])), flush=True)"
THROWAWAY = "t = devdb.throwaway(); c = t.__enter__(); print(c.home, flush=True)"


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    return tmp_path / "postgres"


@pytest.fixture
def cluster(data_dir: Path) -> Iterator[DevCluster]:
    cluster = DevCluster(data_dir, durable=False)
    yield cluster
    cluster.remove()


@pytest.fixture
def dev_cluster(data_dir: Path) -> Iterator[DevCluster]:
    """The cluster that `database_url(data_dir)` starts."""
    _bindir, major = binaries.runnable_bindir()
    cluster = DevCluster(data_dir / str(major))
    yield cluster
    cluster.remove()


def test_starts_and_stops(cluster: DevCluster) -> None:
    """The server answers on its socket, on nothing else, and is gone after a stop."""
    assert cluster.start() == cluster.url
    assert query(cluster, "SHOW listen_addresses") == ""
    assert query(cluster, "SHOW server_encoding") == "UTF8"
    assert cluster.pid is not None
    cluster.stop()
    assert cluster.pid is None
    assert not answers(cluster)
    cluster.stop()  # of none: nothing happens


def test_socket_is_private(cluster: DevCluster) -> None:
    """Nobody but the server's user and root can connect, so no password is needed."""
    cluster.start()
    found = cluster.socket_dir.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (folders.server_user()[0], 0o700)
    assert len(str(cluster.socket_dir / ".s.PGSQL.5432.lock")) < 107


def test_data_persists(cluster: DevCluster) -> None:
    """What was committed is there after a restart, of whatever kind, on the same URL."""
    url = cluster.start()
    query(cluster, "CREATE TABLE kept AS SELECT 42 AS value")
    for mode in ("fast", "immediate", "kill"):
        before = cluster.pid
        assert cluster.restart(mode) == url  # type: ignore[arg-type]
        assert cluster.pid != before
        assert query(cluster, "SELECT value FROM kept") == 42


def test_development_server_is_durable(cluster: DevCluster, data_dir: Path) -> None:
    """Only a throw-away server may turn off what makes commits survive."""
    assert "fsync" not in DevCluster(data_dir).options
    cluster.start()
    assert query(cluster, "SHOW fsync") == "off"
    assert query(cluster, "SHOW synchronous_commit") == "on"


def test_options_reach_the_server(data_dir: Path) -> None:
    """A setting is passed on whole, blanks and quotes included."""
    with throwaway(options={"application_name": "it's a 'name'", "work_mem": "5MB"}) as cluster:
        assert query(cluster, "SHOW work_mem") == "5MB"
        assert query(cluster, "SELECT reset_val FROM pg_settings WHERE name = 'application_name'")


def test_leftover_server_is_adopted(cluster: DevCluster, data_dir: Path) -> None:
    """A server whose starter has gone is taken over as it is."""
    cluster.start()
    assert DevCluster(data_dir).start() == cluster.url
    pid = cluster.pid
    with process("print(devdb.DevCluster(Path(sys.argv[1])).start(), flush=True)", data_dir) as it:
        assert first_line(it) == cluster.url
    assert cluster.pid == pid


def test_server_that_cannot_be_reached_is_replaced(cluster: DevCluster) -> None:
    """A server whose socket was cleaned away is no error: another takes its place."""
    cluster.start()
    query(cluster, "CREATE TABLE kept AS SELECT 42 AS value")
    pid = cluster.pid
    shutil.rmtree(cluster.socket_dir)
    cluster.start()
    assert cluster.pid != pid
    assert query(cluster, "SELECT value FROM kept") == 42


def test_process_id_that_another_process_has_got(cluster: DevCluster) -> None:
    """After a crash the server starts though its old process id now is somebody else's."""
    cluster.start()
    cluster.stop("kill")
    user, group = folders.server_user()
    other = subprocess.Popen(["sleep", "60"], **({"user": user, "group": group} if os.getuid() == 0 else {}))
    try:
        pid_file = cluster.pgdata / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(other.pid), *lines[1:]]) + "\n")
        cluster.start()
        assert answers(cluster)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_server_started_by_hand_is_left_alone(cluster: DevCluster) -> None:
    """Two servers on one cluster would ruin it: one started in another way is an error."""
    cluster.start()
    cluster.stop()
    bindir, _major = binaries.runnable_bindir()
    control = [bindir / "pg_ctl", "-D", cluster.pgdata, "-w"]
    settings = f"-c listen_addresses= -c unix_socket_directories={cluster.pgdata}"
    started = binaries.run([*control, "start", "-l", cluster.pgdata / "hand.log", "-o", settings])
    assert started.returncode == 0, started.stdout
    try:
        with pytest.raises(DevDBError, match="not started by this program"):
            cluster.start()
        assert binaries.run([*control, "status"]).returncode == 0
    finally:
        binaries.run([*control, "stop", "-m", "immediate"])


def test_unfinished_initdb_leaves_no_trace(cluster: DevCluster) -> None:
    """A cluster is there whole or not at all."""
    cluster._make_home()
    unfinished = cluster.home / "init-killed"
    unfinished.mkdir()
    (unfinished / "PG_VERSION").write_text("18\n")
    cluster.start()
    assert answers(cluster)
    assert not unfinished.exists()


def test_cluster_of_another_major(cluster: DevCluster) -> None:
    """A cluster of another PostgreSQL is named, not touched."""
    cluster.start()
    cluster.stop()
    (cluster.pgdata / "PG_VERSION").write_text("9\n")
    with pytest.raises(DevDBError, match="was created by PostgreSQL 9, not"):
        cluster.start()


def test_failed_start_shows_the_log(data_dir: Path) -> None:
    """The error carries what the server said."""
    cluster = DevCluster(data_dir, options={"max_connections": "many"})
    try:
        with pytest.raises(DevDBError, match=r"(?s)did not start.*max_connections"):
            cluster.start()
        assert cluster.pid is None
    finally:
        cluster.remove()


def test_two_processes_at_once(dev_cluster: DevCluster, data_dir: Path) -> None:
    """Both get the one server, whoever comes first."""
    with process(USER, data_dir) as one, process(USER, data_dir) as two:
        assert first_line(one) == first_line(two) == dev_cluster.url
        assert answers(dev_cluster)


def test_last_one_out_stops_the_server(dev_cluster: DevCluster, data_dir: Path) -> None:
    """The server outlives the process that started it, and not the last that uses it."""
    with process(USER, data_dir) as one, process(USER, data_dir) as two:
        assert first_line(one) and first_line(two)
        pid = dev_cluster.pid
        leave(one)
        time.sleep(0.3)  # a stop would have begun
        assert dev_cluster.pid == pid
        assert answers(dev_cluster)
    wait_until(lambda: dev_cluster.pid is None)


def test_killed_user_stops_the_server_too(dev_cluster: DevCluster, data_dir: Path) -> None:
    """SIGKILL leaves no server behind, and the next one finds the data."""
    with process(USER, data_dir) as one:
        assert first_line(one)
        query(dev_cluster, "CREATE TABLE kept AS SELECT 42 AS value")
        one.kill()
    wait_until(lambda: dev_cluster.pid is None)
    with process(USER, data_dir) as two:
        assert first_line(two) == dev_cluster.url
        assert query(dev_cluster, "SELECT value FROM kept") == 42


def test_many_come_and_go(dev_cluster: DevCluster, data_dir: Path) -> None:
    """Whoever comes while the server goes down waits and gets it anew."""
    for _ in range(5):
        with process(USER, data_dir) as one:
            assert first_line(one)
            assert answers(dev_cluster)
    wait_until(lambda: dev_cluster.pid is None)


def test_database_url_of_the_environment(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DATABASE_URL nothing is started."""
    monkeypatch.setenv("DATABASE_URL", "postgres://elsewhere/name")
    assert devdb.database_url(data_dir) == "postgres://elsewhere/name"
    assert not data_dir.exists()


def test_throwaway_is_removed() -> None:
    """Server, data and socket are gone on exit, also after an error."""
    with pytest.raises(ZeroDivisionError), throwaway() as cluster:
        assert answers(cluster)
        1 / 0  # noqa: B018
    assert cluster.pid is None
    assert not cluster.home.exists()
    assert not cluster.socket_dir.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_throwaway_of_a_killed_process_is_removed(how: signal.Signals) -> None:
    """A test run that is killed leaves neither a server nor its data."""
    with process(THROWAWAY) as child:
        cluster = DevCluster(Path(first_line(child)))
        assert answers(cluster)
        child.send_signal(how)
    wait_until(lambda: not cluster.home.exists())
    assert not cluster.socket_dir.exists()


def test_throwaway_whose_keeper_was_killed_is_removed_by_the_next() -> None:
    """When everything of a run was killed but the server, the next run removes that."""
    with process(THROWAWAY) as child:
        left = DevCluster(Path(first_line(child)))
        for pid in keepers_of(left):
            os.kill(pid, signal.SIGKILL)
        child.kill()
    assert answers(left)
    with throwaway() as cluster:
        assert not left.home.exists()
        assert not answers(left)
        assert cluster.home.exists()


def keepers_of(cluster: DevCluster) -> list[int]:
    shown = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True)
    lines = [line.split(None, 1) for line in shown.stdout.splitlines()]
    found = [int(pid) for pid, args in lines if str(DEVDB / "__main__.py") in args and str(cluster.home) in args]
    assert found
    return found


def fake_server(bindir: Path) -> Path:
    bindir.mkdir(parents=True)
    for name in ("initdb", "pg_ctl", "postgres"):
        (bindir / name).touch(mode=0o755)
    return bindir


def test_binaries_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable, the package, the newest of the system, PATH; then an error."""
    monkeypatch.delenv("PGQUEUE_PG_BINDIR", raising=False)
    assert find_pg_bindir().parent.name == "pginstall"

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(binaries, "SYSTEM_BINDIRS", (f"{str(tmp_path)[1:]}/pg/*/bin",))
    fake_server(tmp_path / "pg" / "9" / "bin")
    newest = fake_server(tmp_path / "pg" / "15" / "bin")
    assert find_pg_bindir() == newest

    shutil.rmtree(tmp_path / "pg")
    on_path = fake_server(tmp_path / "elsewhere" / "bin")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "pg_ctl").symlink_to(on_path / "pg_ctl")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert find_pg_bindir() == on_path

    chosen = fake_server(tmp_path / "chosen")
    monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(chosen))
    assert find_pg_bindir() == chosen
    (chosen / "initdb").unlink()
    with pytest.raises(DevDBError, match="PGQUEUE_PG_BINDIR"):
        find_pg_bindir()


def test_client_tools_are_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pg_config comes with libpq as well: it does not count."""
    monkeypatch.delenv("PGQUEUE_PG_BINDIR", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(binaries, "SYSTEM_BINDIRS", (f"{str(tmp_path)[1:]}/pg/*/bin",))
    monkeypatch.setenv("PATH", str(tmp_path / "pg" / "18" / "bin"))
    client = tmp_path / "pg" / "18" / "bin"
    client.mkdir(parents=True)
    (client / "pg_config").touch(mode=0o755)
    with pytest.raises(DevDBError, match="No PostgreSQL server was found"):
        find_pg_bindir()


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone may write to /var/tmp: a link or an open folder laid there is passed over."""
    name = f"django-pgqueue-{os.getuid()}"
    bases = (tmp_path / "link", tmp_path / "open", tmp_path / "good")
    for base in bases:
        base.mkdir()
    (bases[0] / name).symlink_to(tmp_path)
    (bases[1] / name).mkdir()
    (bases[1] / name).chmod(0o777)
    monkeypatch.setattr(folders, "SHARED_FOLDERS", bases)
    assert folders.shared_folder() == bases[2] / name
    monkeypatch.setattr(folders, "SHARED_FOLDERS", bases[:2])
    with pytest.raises(DevDBError, match="delete it"):
        folders.shared_folder()


@needs_root
def test_a_folder_that_another_user_owns_is_not_used(tmp_path: Path) -> None:
    """Its owner could change what lies in it."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(DevDBError, match="delete it"):
        folders.private_folder(folder, owner=(0, 0))


@needs_root
def test_binaries_that_the_server_cannot_reach_are_copied(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment below a closed folder does: it stays closed, a copy is run."""
    found = find_pg_bindir()
    package = found.parent.parent
    closed = tmp_path / "closed"
    shutil.copytree(package, closed / package.name)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, closed / libraries.name)
    # Makes the copy another than the one that real runs use.
    (closed / package.name / found.parent.name / "share" / "only-a-test").touch()
    closed.chmod(0o700)
    bindir = closed / found.relative_to(package.parent)
    monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(bindir))

    copied, _major = binaries.runnable_bindir()
    copy = copied.parent.parent.parent
    try:
        assert copied.is_relative_to(folders.shared_folder())
        assert copy.stat().st_uid == 0
        assert copy.stat().st_mode & 0o777 == 0o755
        assert closed.stat().st_mode & 0o777 == 0o700
        cluster.start()
        assert answers(cluster)

        inode = copied.stat().st_ino
        assert binaries.runnable_bindir()[0].stat().st_ino == inode, "it is copied once"
        (copied.parent / "share" / "only-a-test").unlink()
        binaries.runnable_bindir()
        assert copied.stat().st_ino != inode, "a copy with a file missing is made again"
        cluster.restart()
        assert answers(cluster)
    finally:
        cluster.stop("immediate")
        shutil.rmtree(copy)


@pytest.mark.skipif(os.getuid() == 0, reason="root can write everywhere")
def test_a_project_that_cannot_be_written_to(data_dir: Path) -> None:
    """The data of a user who may only read the project lies in a folder of that user."""
    data_dir.parent.chmod(0o500)
    cluster = DevCluster(data_dir)
    assert cluster.home.parent == folders.shared_folder()
    assert DevCluster(data_dir).home == cluster.home
    data_dir.parent.chmod(0o700)


@needs_root
def test_root_keeps_the_data_out_of_the_project(cluster: DevCluster, data_dir: Path) -> None:
    """The server's user owns the data and may not be able to enter the project's folder."""
    data_dir.parent.chmod(0o700)
    cluster.start()
    assert not data_dir.exists()
    assert cluster.pgdata.stat().st_uid == folders.server_user()[0] != 0
