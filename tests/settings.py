"""
Settings of the tests: the example project's, on the database that cluster.py provides.

Two variables of the environment choose how Django connects, so that the whole suite can run
either way: `PGQUEUE_TEST_POOL=1` (psycopg's pool) and `PGQUEUE_TEST_SERVER_SIDE_BINDING=1`.

Three more are for the processes that a test starts: `PGQUEUE_TEST_OPTIONS` adds to OPTIONS, as a JSON
object, `PGQUEUE_TEST_DIRECT_URL` makes a second alias, "direct", and `PGQUEUE_TEST_TASKS` is Django's `TASKS`.

`PGQUEUE_TEST_DATABASE` names the test database, for a run with `--reuse-db` on one that was made before.
"""

import json
import os
import sys

import django

from tests.support import cluster

if "mypy" in sys.modules:
    # mypy's Django plugin reads the settings too, and needs no database.
    os.environ.setdefault("DATABASE_URL", "postgres:///none")
cluster.start()

from example_project.settings import *  # noqa: E402, F403
from example_project.settings import DATABASES, INSTALLED_APPS, env  # noqa: E402

INSTALLED_APPS = [*INSTALLED_APPS, "tests.testapp"]

if "PGQUEUE_TEST_DATABASE" in os.environ:
    DATABASES["default"]["TEST"] = {"NAME": os.environ["PGQUEUE_TEST_DATABASE"]}
OPTIONS = DATABASES["default"].setdefault("OPTIONS", {})
# A test that would wait for a lock for ever fails instead.
OPTIONS["options"] = "-c lock_timeout=20s"
if os.environ.get("PGQUEUE_TEST_POOL") == "1":
    OPTIONS["pool"] = {"min_size": 0, "max_size": 40}
if os.environ.get("PGQUEUE_TEST_SERVER_SIDE_BINDING") == "1":
    OPTIONS["server_side_binding"] = True
OPTIONS.update(json.loads(os.environ.get("PGQUEUE_TEST_OPTIONS", "{}")))
if "PGQUEUE_TEST_DIRECT_URL" in os.environ:
    DATABASES["direct"] = env.db("PGQUEUE_TEST_DIRECT_URL")
# So that no test consumes the example project's tasks unless it says so.
IMMEDIATE = f"{'django.tasks' if django.VERSION >= (6, 0) else 'django_tasks'}.backends.immediate.ImmediateBackend"
TASKS = {"default": {"BACKEND": IMMEDIATE, "QUEUES": []}}
if "PGQUEUE_TEST_TASKS" in os.environ:
    TASKS = json.loads(os.environ["PGQUEUE_TEST_TASKS"])

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
