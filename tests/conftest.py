"""What the tests share: the server, the real input, the header that tells what a run is on."""

import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_pgqueue import registry
from django_pgqueue.devdb import DevCluster, throwaway
from tests.support import cluster, flush

flush.install()


#: The tests that were left out of this run, by file.
left_out: "Counter[str]" = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the long tests too, which only a named file runs else")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out, unless they are asked for: by an option, by their file or by an expression."""
    if config.option.full or config.option.markexpr:
        return
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    out = [item for item in items if item.get_closest_marker("full") and item.path not in named]
    if out:
        left_out.update(item.location[0] for item in out)
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker left out. All of them collect the same tests."""
    left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - left_out)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Let a worker tell of a test whose log, or failure, holds what is not Unicode."""
    return encodable((yield))


def encodable(value: Any) -> Any:
    """Return the value with the lone surrogates of its strings escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, list | tuple):
        return type(value)(map(encodable, value))
    if isinstance(value, dict):
        return {encodable(key): encodable(each) for key, each in value.items()}
    return value


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if left_out:
        terminalreporter.section(f"left out: {left_out.total()} long tests; --full runs them too")
        for file, count in sorted(left_out.items()):
            terminalreporter.write_line(f"{count:4}  {file}")


def pytest_unconfigure() -> None:
    cluster.stop()


def versions() -> tuple[str, str, str]:
    """Return the versions of Python, Django and PostgreSQL that the run really is on."""
    import django

    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        server = connection.info.parameter_status("server_version")
    return platform.python_version(), django.get_version(), str(server)


def pytest_sessionstart() -> None:
    """Stop a run that is not on the versions that the matrix means it to be on; let children end at SIGINT."""
    # Ignored, as in what a shell runs in the background, it would be ignored by all children, and some are sent it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    expected = os.environ.get("PGQUEUE_EXPECT_VERSIONS", "").split()
    for found, prefix in zip(versions(), expected, strict=False):
        if not f"{found}.".startswith(f"{prefix}."):
            raise pytest.UsageError(f"PGQUEUE_EXPECT_VERSIONS is {expected}, found {versions()}")


def pytest_report_header() -> str:
    return "matrix: Python {}, Django {}, PostgreSQL {}, psycopg {}".format(*versions(), psycopg.__version__)


def pytest_runtest_setup(item: pytest.Item) -> None:
    flush.is_djangos = item.get_closest_marker("django_flush") is not None


@pytest.fixture(autouse=True)
def forget_queues() -> Iterator[None]:
    """
    Let a test's queues and handlers go with it.

    A `Queue` that a failed test or an excinfo keeps alive would else be declared after the next
    flush of the database, which emits post_migrate.
    """
    declared, handled = list(registry._queues), dict(registry._handlers)
    yield
    for queue in set(registry._queues) - set(declared):
        registry._queues.discard(queue)
    registry._handlers.clear()
    registry._handlers.update(handled)


@pytest.fixture(autouse=True)
def as_in_production(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only the tests of the testing helpers note what is published: that runs statements after each publish."""
    journal = sys.modules.get("django_pgqueue.testing.journal")
    if journal is not None and not hasattr(request.module, "testing") and "testing" not in request.module.__name__:
        monkeypatch.setattr(journal, "_note", lambda *arguments: None)


@pytest.fixture(scope="session")
def pg() -> Iterator[DevCluster]:
    """
    A server that a test may stop, kill and restart; it must be up again when the test ends.

    It is the one that the test database lives on, unless `DATABASE_URL` was given: then it is
    one of its own.
    """
    if cluster.cluster is not None:
        yield cluster.cluster
    else:
        with throwaway() as own:
            yield own


@pytest.fixture
def server(pg: DevCluster) -> Iterator[DevCluster]:
    """The server of the test database; it is up at the end, and this process has no dead connection to it."""
    if cluster.cluster is None:
        pytest.skip("the server that DATABASE_URL names is not ours to stop")
    try:
        yield pg
    finally:
        pg.start()
        connection.close()


@pytest.fixture(scope="session")
def real_input() -> Path:
    """
    The file of real webhooks that `PGQUEUE_REAL_INPUT` names, one JSON object a line.

    Without the variable the test is skipped; with it, a file that is not there is a failure.
    """
    name = os.environ.get("PGQUEUE_REAL_INPUT")
    if not name:
        pytest.skip("PGQUEUE_REAL_INPUT is not set")
    path = Path(name)
    assert path.is_file(), f"PGQUEUE_REAL_INPUT: there is no file {path}"
    return path
