"""
Where mutants are tried one after the other: a copy of the tree, and a PostgreSQL server of its own.

The server has a template with all tables, and each run of pytest gets a copy of it. Places share no server,
because tests look at what a whole server has: its oldest transaction, its sessions, its notifications.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg
from psycopg import sql

from django_pgqueue.devdb import DevCluster, throwaway
from tests.mutants.lists import ROOT
from tests.mutants.mutant import Mutant
from tests.mutants.servers import needs_server
from tests.mutants.verdict import PASSED, TIMEOUT, Outcome, clean, run_tests

# What a copy needs: the package, the example project, the tests, the pages that they read, the settings of the tools.
COPIED = ("django_pgqueue", "example_project", "tests", "docs", "manage.py", "dev.py", "pyproject.toml", "README.md")
# Mutants of what makes a database or a server: the template was made without them.
MAKERS = ("migrations/", "models.py", "constraints.py", "apps.py", "devdb")
TEMPLATE = "template_queue"


@dataclass
class Place:
    """One copy of the tree and one server."""

    tree: Path
    server: DevCluster
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def try_mutant(self, mutant: Mutant) -> Outcome:
        """Run its tests with the change, and take the change back."""
        with changed(self.tree / mutant.path, mutant.old, mutant.new, next(self.numbers)):
            outcome = self.run_first(mutant.tests, TIMEOUT, own=mutant.file.startswith(MAKERS))
            if outcome.status == PASSED:
                # A race is not lost every time. Nor is a test that was skipped for want of a server taken for silent.
                outcome = run_tests(self.tree, mutant.tests, {})
        return outcome

    def try_unbroken(self, tests: tuple[str, ...]) -> Outcome:
        """Run tests without any change: they must pass, here or on a server of their own."""
        timeout = TIMEOUT * len(tests)
        outcome = self.run_first(tests, timeout)
        return outcome if outcome.all_passed else run_tests(self.tree, tests, {}, timeout=timeout)

    def run_first(self, tests: tuple[str, ...], timeout: float, *, own: bool = False) -> Outcome:
        """Run tests where they can run: on a copy of the template if that will do."""
        if own or any(needs_server(self.tree, test) for test in tests):
            return run_tests(self.tree, tests, {}, timeout=timeout)
        return self.run_on_template(tests, timeout)

    def run_on_template(self, tests: tuple[str, ...], timeout: float) -> Outcome:
        """Run tests on a new copy of the template."""
        # Under a name of its own, so that nothing left of an earlier run finds it.
        name = f"test_{next(self.numbers)}"
        environment = {"DATABASE_URL": self.server.url, "PGQUEUE_TEST_DATABASE": name}
        with self._database(name):
            return run_tests(self.tree, tests, environment, "--reuse-db", timeout=timeout)

    def make_template(self) -> None:
        """Make the database that has all tables and no rows."""
        self._execute("CREATE DATABASE {}", TEMPLATE)
        environment = clean({"DATABASE_URL": self.server.url.replace("/postgres?", f"/{TEMPLATE}?")})
        command = [sys.executable, "-m", "django", "migrate", "--settings=tests.settings", "--verbosity=0"]
        subprocess.run(command, cwd=self.tree, env=environment, check=True)

    @contextlib.contextmanager
    def _database(self, name: str) -> Iterator[None]:
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, TEMPLATE)
        try:
            yield
        finally:
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.server.url, autocommit=True) as admin:
            admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextlib.contextmanager
def open_place() -> Iterator[Place]:
    """Give a place; it is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-mutant-") as folder, throwaway() as server:
        place = Place(Path(folder), server)
        copy_tree(place.tree)
        place.make_template()
        yield place


def copy_tree(into: Path) -> None:
    """Copy what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "_build")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, into / name)


@contextlib.contextmanager
def changed(path: Path, old: str, new: str, number: int) -> Iterator[None]:
    """
    Let a file be changed meanwhile.

    Python takes bytecode for a file's own by its size and the second of its change: each change gets a second of
    its own by `number`.
    """
    source, stat = path.read_bytes(), path.stat()
    path.write_bytes(source.decode().replace(old, new).encode())
    os.utime(path, (stat.st_atime, int(stat.st_mtime) + number))
    try:
        yield
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
