"""
A PostgreSQL server for development and tests, started from binaries found on the machine.

`manage.py` calls `database_url()`: the server's data persists between runs, and the server stops
when the last process that uses it ends. Tests call `throwaway()`, and the test settings of any
project call `test_database()`.

How it works:

* The server listens only on a unix socket in a private folder, so it needs no password and no free
  port.
* PostgreSQL refuses to run as root. If this process runs as root, the server runs as `nobody`, who
  owns the data. Binaries that `nobody` cannot reach, for example in a virtual environment below a
  home folder, are copied once.
* Locks are `flock` locks, which the kernel releases when the last process that holds them ends. The
  server's processes inherit one. Whether the server runs can therefore be decided without a process
  id, which may belong to another process by then.
* Each process that uses a server holds a lock. A small keeper process waits until all of them have
  ended, by exit or by SIGKILL, and then stops the server.
"""

from .binaries import find_pg_bindir
from .cluster import DevCluster, StopMode
from .folders import DevDBError
from .servers import TEST_SERVER, database_url, test_database, throwaway

__all__ = [
    "TEST_SERVER",
    "DevCluster",
    "DevDBError",
    "StopMode",
    "database_url",
    "find_pg_bindir",
    "test_database",
    "throwaway",
]
