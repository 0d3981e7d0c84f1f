"""Mutants of devdb/."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import SERVER

MUTANTS = (
    Mutant(
        SERVER,
        "each process starts its own",
        "devdb/servers.py",
        "    os.environ[TEST_SERVER] = str(cluster.home)\n",
        "",
        ("tests/testing/test_pytest_plugin.py::test_a_server_in_one_line",),
    ),
)
