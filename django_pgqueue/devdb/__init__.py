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
