"""The plugin for pytest and the server in one line, in projects of their own, run as their people run them."""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from django_pgqueue import devdb
from tests.support.databases import empty_database
from tests.support.processes import ROOT, database_url
from tests.support.waiting import busy, wait_until

committed = pytest.mark.django_db(transaction=True)

SETTINGS = """
from django_pgqueue.devdb import test_database
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_pgqueue"]
DATABASES = {"default": test_database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
"""


def project(folder: Path, **files: str) -> Path:
    """Make a project that has the plugin installed, and these modules."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    installed = folder / "plugin-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    lines = [f"{name} = {module}" for name, module in entry_points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def run(folder: Path, *command: str, status: int = 0, **variables: str) -> str:
    """Run a module of Python there, and return what it writes."""
    unwanted = ("DATABASE_URL", "DJANGO_SETTINGS_MODULE", "PYTEST_ADDOPTS", devdb.TEST_SERVER)
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    environment |= {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


FIXTURES = """
import pytest
from django.db import connection, transaction
from django_pgqueue import Queue

orders = Queue("orders")
seen = []

@orders.handler
def handle(message):
    seen.append(message.payload)
    if message.payload == "fail":
        raise ValueError("no")

@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()

def test_pgqueue(pgqueue):
    assert connection.in_atomic_block
    orders.publish(1, delay=5)
    pgqueue.assert_published(orders, 1)
    with pgqueue.capture_published() as captured, pgqueue.lose_notifications():
        orders.publish(2)
    assert captured.payloads == [2]
    assert len(pgqueue.drain(orders).handled) == 1
    pgqueue.advance(5)
    with pgqueue.immediate():
        orders.publish(3)
    assert seen == [2, 1, 3]
    assert [each.payload for each in pgqueue.published(orders)] == [1, 2, 3]
    pgqueue.vanish(orders)

def test_counts_from_its_beginning(orders_before, pgqueue):
    assert pgqueue.published() == []
    orders.publish(2)
    pgqueue.assert_published(orders, count=1)

@pytest.fixture
def orders_before(db):
    orders.publish(1)

def test_captured(captured_messages):
    orders.publish(1)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        orders.publish(2)
        1 / 0
    assert captured_messages.payloads == [1]

def test_live(live_consumer, pgqueue):
    assert not connection.in_atomic_block
    consumer = live_consumer(orders)
    orders.publish_many([1, "fail"])
    consumer.wait_until(lambda: consumer.done.deliveries == 2)
    assert sorted(map(str, seen)) == ["1", "fail"]
    pgqueue.assert_published(orders, count=2)

@pytest.mark.django_db
def test_live_in_a_transaction(request):
    with pytest.raises(RuntimeError, match="only committed messages"):
        request.getfixturevalue("live_consumer")(orders)

def test_a_failure(pgqueue):
    orders.publish({"id": 1})
    pgqueue.assert_published(orders, {"id": 2})
"""


@committed
def test_the_fixtures_do_what_they_say(tmp_path):
    """Each in a project of its own; a failed assertion ends at the line of the test."""
    folder = project(tmp_path, test_orders=FIXTURES)
    with empty_database() as name:
        url = database_url(path=f"/{name}")
        output = run(folder, "pytest", "-q", status=1, DATABASE_URL=url, DJANGO_SETTINGS_MODULE="tests.settings")
    assert "5 passed" in output and "1 failed" in output, output
    assert "-  payload: {'id': 2}".replace("-  ", "- ") in output
    assert "matching" not in output


def test_a_run_without_django_goes_on_as_without_the_plugin(tmp_path):
    """No settings, no pytest-django: the plugin is loaded, and asks for nothing."""
    folder = project(
        tmp_path,
        test_plain="def test_plain(request):\n    assert request.config.pluginmanager.has_plugin('django_pgqueue')\n",
    )
    assert "1 passed" in run(folder, "pytest", "-q", "-W", "error", "-p", "no:django")


USES = """
from django.db import connection
from django.test import TestCase
from django_pgqueue import Queue
from django_pgqueue.testing import drain

queue = Queue(__name__)
queue.handler(lambda message: None)

class Uses(TestCase):
    def handles(self):
        queue.publish(1)
        self.assertEqual(drain(queue).deliveries, 1)
        with connection.cursor() as cursor:
            cursor.execute("SHOW data_directory")
            with open("servers", "a") as file:
                file.write(cursor.fetchone()[0] + "\\n")

class One(Uses):
    test_one = test_two = Uses.handles

class Two(Uses):
    test_one = test_two = Uses.handles
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [
        ("pytest", "-q", "-n", "2", "--dist", "loadfile", "test_uses.py", "test_more.py"),
        ("django", "test", "--parallel", "2"),
    ],
    ids=["xdist", "django"],
)
def test_a_server_in_one_line(tmp_path, command):
    """One for all processes of a run, empty at first, and gone after it."""
    folder = project(tmp_path, settings=SETTINGS, test_uses=USES, test_more=USES)
    output = run(folder, *command, DJANGO_SETTINGS_MODULE="settings")
    assert "8 passed" in output or "Ran 8 tests" in output, output
    (data,) = set((folder / "servers").read_text().split())
    wait_until(lambda: not Path(data).parent.exists())


def test_a_server_for_the_database_that_is_asked_for(tmp_path):
    """Called twice it is the same server; the database is made; with DATABASE_URL nothing is started."""
    code = (
        "from django_pgqueue.devdb import test_database as t; a, b = t(), t('shop'); print(a['HOST'] == b['HOST']);"
        " import psycopg; print(psycopg.connect(host=b['HOST'], user=b['USER'], dbname='shop').info.dbname); t('shop')"
    )
    (tmp_path / "code.py").write_text(code)
    assert run(tmp_path, "code").split() == ["True", "shop"]
    (tmp_path / "code.py").write_text("from django_pgqueue.devdb import test_database as t; print(t())")
    began = time.monotonic()
    url = "postgres://ada:p%40ss@db.example:5433/shop?sslmode=require"
    assert run(tmp_path, "code", DATABASE_URL=url).strip() == str(
        {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "shop",
            "USER": "ada",
            "PASSWORD": "p@ss",
            "HOST": "db.example",
            "PORT": "5433",
            "OPTIONS": {"sslmode": "require"},
        }
    )
    assert time.monotonic() - began < 20 * busy()


def test_a_server_that_is_gone_is_not_waited_for(tmp_path):
    """The variable may outlive it: another is started."""
    (tmp_path / "code.py").write_text("from django_pgqueue.devdb import test_database as t; print(t()['HOST'])")
    gone = tmp_path / "throwaway-gone"
    assert run(tmp_path, "code", **{devdb.TEST_SERVER: str(gone)}).strip()
    assert not gone.exists()
