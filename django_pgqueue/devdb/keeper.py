"""The process that waits until nobody uses a server any more, and then stops it."""

import fcntl
import os
from pathlib import Path

from .cluster import DevCluster
from .folders import take_lock


def keep(home: Path, *, remove: bool) -> None:
    """Be the keeper of a cluster: see `DevCluster.hold`."""
    try:
        keeper = take_lock(home / "keeper.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # it has one
    if os.fork():
        os._exit(0)  # the holder, who waits for this process, has nobody to wait for later
    take_lock(home / "users.lock", fcntl.LOCK_EX)
    cluster = DevCluster(home)
    if remove:
        cluster.remove()
    else:
        cluster.stop()
    # This one before the users' lock, which goes with the process: the next holder's keeper
    # must not take this one for its own.
    os.close(keeper)
