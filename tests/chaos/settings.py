"""Settings of a run's processes: this package and nothing else on the database that the environment names."""

import os

import environ

env = environ.Env()


def _database(variable: str) -> dict:
    database = env.db(variable)
    database["HOST"] = database.get("OPTIONS", {}).pop("host", database["HOST"])
    # A session that hangs is as good as one that is gone.
    database.setdefault("OPTIONS", {})["connect_timeout"] = 5
    return database


DEBUG = False
SECRET_KEY = "chaos"
USE_TZ = True
INSTALLED_APPS = ["django_pgqueue", "example_project.demo", "tests.chaos"]
PGQUEUE = env.json("PGQUEUE_SETTINGS", default={})
DATABASES = {"default": _database("DATABASE_URL")}
if "CHAOS_DIRECT_URL" in os.environ:
    # The one above goes through PgBouncer, where LISTEN does not work and cursors do not last.
    DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] = True
    DATABASES["direct"] = _database("CHAOS_DIRECT_URL")
    PGQUEUE["LISTEN_DATABASE"] = "direct"
