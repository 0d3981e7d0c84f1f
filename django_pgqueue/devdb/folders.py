"""The folders of the servers' files, their owners, and the locks on them."""

import contextlib
import fcntl
import hashlib
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

# Every user can enter these folders, and a socket's path in them is far below its limit of 107
# bytes. /var/tmp comes first because it survives a reboot.
SHARED_FOLDERS = (Path("/var/tmp"), Path("/tmp"))


class DevDBError(RuntimeError):
    """The development database cannot be provided. The message says why, and what to do."""


def shared_folder() -> Path:
    """Return this user's folder in a place that the server's user can enter."""
    return next(shared_folders())


def shared_folders() -> Iterator[Path]:
    refused = []
    for base in SHARED_FOLDERS:
        folder = base / f"django-pgqueue-{os.getuid()}"
        try:
            private_folder(folder, owner=(os.getuid(), os.getgid()))
        except (OSError, DevDBError) as error:
            refused.append(str(error))
        else:
            yield folder
    if len(refused) == len(SHARED_FOLDERS):
        raise DevDBError(f"No folder can be created for the database: {'; '.join(refused)}")


def private_folder(folder: Path, *, owner: tuple[int, int]) -> None:
    """
    Create a folder that only its owner can write to, or verify an existing one.

    Everybody may write to its parent folder, so a folder of another user or a link is not used. Raise
    `DevDBError` in this case.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        os.chown(folder, *owner)
        # The server's user must be able to pass through the folder of root.
        folder.chmod(0o711 if owner[0] == 0 else 0o700)
    found = folder.lstat()
    if found.st_uid != owner[0] or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise DevDBError(f"{folder} is not a folder that only user {owner[0]} can write to: delete it")


def server_user() -> tuple[int, int]:
    """Return the user and group ids that the server runs as."""
    if os.getuid() != 0:
        return os.getuid(), os.getgid()
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def writable(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(existing, os.W_OK)


def digest(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:12]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    lock = take_lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def take_lock(path: Path, operation: int, *, create: bool = True) -> int:
    """Lock the file and return its descriptor. Closing the descriptor releases the lock."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
