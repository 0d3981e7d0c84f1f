"""The process that waits until no process uses a server any more, and then stops the server."""

import fcntl
import os
from pathlib import Path

from .cluster import DevCluster
from .folders import take_lock


def keep(home: Path, *, remove: bool) -> None:
    """Act as the keeper of a cluster. See `DevCluster.hold()`."""
    try:
        keeper = take_lock(home / "keeper.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # it already has a keeper
    if os.fork():
        os._exit(0)  # so that the process that started the keeper does not have to wait for it
    take_lock(home / "users.lock", fcntl.LOCK_EX)
    cluster = DevCluster(home)
    if remove:
        cluster.remove()
    else:
        cluster.stop()
    # Released before the users' lock, which is released when the process ends. Otherwise the next
    # user's keeper could take this process for its own and exit.
    os.close(keeper)
