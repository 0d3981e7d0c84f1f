"""Real failures of other systems over how a project is set up: B94, names that are taken already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import ProgrammingError, connections
from django.db.migrations.recorder import MigrationRecorder

from django_pgqueue import Queue
from django_pgqueue.apps import DjangoPGQueueConfig
from django_pgqueue.services import notifying
from tests.support.databases import alias, empty_database, migrate, url_of
from tests.support.processes import ROOT
from tests.support.sessions import fetch, second_session

pytestmark = pytest.mark.django_db(transaction=True)


# --- A project that is full of such names ---

SETTINGS = """
import environ
SECRET_KEY = "x"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
database = environ.Env().db("DATABASE_URL")
database["HOST"] = database.get("OPTIONS", {}).pop("host", database["HOST"])
DATABASES = {"default": database}
ROOT_URLCONF = "project_urls"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", "django_pgqueue", "shop_pgqueue", "shop_queue", "shop_tasks", *EXTRA]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {
    "context_processors": ["django.template.context_processors.request",
                           "django.contrib.auth.context_processors.auth",
                           "django.contrib.messages.context_processors.messages"]}}]
"""
URLS = """
from django.contrib import admin
from django.urls import path
urlpatterns = [path("admin/", admin.site.urls)]
"""
CONFIG = """
from django.apps import AppConfig
class Config(AppConfig):
    name = "shop_{label}"
    label = "{label}"
"""
MODELS = """
from django.db import models
class MessageQueue(models.Model):
    name = models.TextField()
    class Meta:
        db_table = "{label}_messagequeue" if "{label}" != "queue" else "messagequeue"
class MessageQueueItem(models.Model):
    queue = models.ForeignKey(MessageQueue, models.CASCADE, related_name="items")
    class Meta:
        db_table = "{label}_messagequeueitem" if "{label}" != "queue" else "messagequeueitem"
class QueueConsumer(models.Model):
    pass
"""
ADMIN = """
from django.contrib import admin
from .models import MessageQueue, MessageQueueItem
admin.site.register([MessageQueue, MessageQueueItem])
"""
COMMAND = """
from django.core.management.base import BaseCommand
class Command(BaseCommand):
    def handle(self, **options):
        self.stdout.write("the shop's own")
"""
USE = """
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from django.urls import reverse
from django_pgqueue import Queue
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.queue_internals import make_handler
from shop_queue.models import MessageQueue
seen = []
queue = Queue("orders")
queue.publish({"n": 1})
Consumer([make_handler(queue, lambda message: seen.append(message.payload))], drain=True).run()
assert seen == [{"n": 1}]
shops = MessageQueue.objects.create(name="the shop's own")
assert shops.items.count() == 0
urls = {reverse(f"admin:{label}_messagequeue_changelist") for label in ("django_pgqueue", "pgqueue", "queue", "tasks")}
assert len(urls) == 4
with connection.cursor() as cursor:
    cursor.execute("SELECT orphan_messages(), 'ready'::messagequeueitem_state")
call_command("reap_queues", interval=None)
print("all is well")
"""
# What other apps may have in the same database, without the prefix.
TAKEN = """
CREATE FUNCTION orphan_messages() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE TYPE messagequeueitem_state AS ENUM ('ready');
CREATE TABLE item (queue_id text);
CREATE INDEX item_claim_idx ON item (queue_id);
"""


@pytest.fixture
def project(tmp_path: Path):
    """A project whose apps are labelled pgqueue, queue and tasks, with models and tables named as ours are."""
    (tmp_path / "project_urls.py").write_text(URLS)
    for label in ("pgqueue", "queue", "tasks"):
        app = tmp_path / f"shop_{label}"
        (app / "management" / "commands").mkdir(parents=True)
        for name, text in {
            "__init__": "",
            "apps": CONFIG,
            "models": MODELS,
            "admin": ADMIN,
            "management/__init__": "",
            "management/commands/__init__": "",
            "management/commands/reap_queues": COMMAND,
        }.items():
            (app / f"{name}.py").write_text(text.replace("{label}", label))
    with empty_database() as name, alias("project", NAME=name) as using:

        def run(*arguments: str, extra: str = "[]", apps: str = "") -> "subprocess.CompletedProcess[str]":
            (tmp_path / "project_settings.py").write_text(f"EXTRA = {extra}\n{SETTINGS}\n{apps}")
            return subprocess.run(
                [sys.executable, *arguments],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "DATABASE_URL": url_of(using),
                    "DJANGO_SETTINGS_MODULE": "project_settings",
                    "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
                },
                capture_output=True,
                text=True,
                timeout=60,
            )

        run.database = name
        yield run


def test_b94_a_project_full_of_such_names_starts_migrates_and_works(project):
    """Labels, models, reverse names, tables, functions, types, indexes, admin pages and commands live side by side."""
    with second_session(dbname=project.database) as admin:
        admin.execute(TAKEN)
    for arguments in (["-m", "django", "check"], ["-m", "django", "migrate", "--run-syncdb"], ["-c", USE]):
        done = project(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    # Django's own rule for commands of one name: the app that stands first in INSTALLED_APPS.
    assert "the shop's own" not in done.stdout


CONFLICTS = {
    "our label taken by another app": (
        "['taken.apps.Config']",
        "",
        "Application labels aren't unique, duplicates: django_pgqueue",
    ),
    "another label for our app": (
        "[]",
        "INSTALLED_APPS[INSTALLED_APPS.index('django_pgqueue')] = 'taken.apps.Renamed'",
        "The label of django_pgqueue cannot be changed to 'renamed'",
    ),
    "our app twice": ("['taken.apps.Renamed']", "", "Application names aren't unique, duplicates: django_pgqueue"),
}
TAKEN_APP = """
from django.apps import AppConfig
from django_pgqueue.apps import DjangoPGQueueConfig
class Config(AppConfig):
    name = "taken"
    label = "django_pgqueue"
class Renamed(DjangoPGQueueConfig):
    default = False
    label = "renamed"
"""


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_b94_what_cannot_be_is_refused_at_the_start_in_one_clear_error(project, tmp_path, conflict):
    """Before any SQL: nothing is half migrated."""
    extra, apps, message = CONFLICTS[conflict]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "__init__.py").touch()
    (tmp_path / "taken" / "apps.py").write_text(TAKEN_APP)
    done = project("-m", "django", "migrate", extra=extra, apps=apps)
    assert done.returncode != 0
    assert "ImproperlyConfigured" in done.stderr and message in done.stderr
    with second_session(dbname=project.database) as admin:
        assert admin.execute("SELECT count(*) FROM pg_class WHERE relname LIKE '%queue%'").fetchone() == (0,)


def test_b94_the_label_is_fixed():
    """The migrations, the tables and the permissions go by it."""
    config = DjangoPGQueueConfig("django_pgqueue", sys.modules["django_pgqueue"])
    config.label = "other"
    with pytest.raises(ImproperlyConfigured, match="'other'"):
        config.ready()


# --- The database ---

CATALOGUES = {
    "relations": "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace",
    "constraints": "SELECT conname FROM pg_constraint WHERE connamespace = 'public'::regnamespace",
    "functions": "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
    "triggers": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal",
    "types": "SELECT ltrim(typname, '_') FROM pg_type WHERE typnamespace = 'public'::regnamespace",
}


@pytest.fixture
def fresh():
    """An alias for a new database without tables."""
    with empty_database() as name, alias("fresh", NAME=name) as using:
        yield using


def ours(using: str, catalogue: str) -> set[str]:
    return {name for (name,) in fetch(CATALOGUES[catalogue], using=using) if not name.startswith("django_migrations")}


def test_b94_all_that_is_made_in_the_database_has_the_prefix(fresh):
    """Tables, indexes, sequences, constraints, functions, triggers, types; and the channels."""
    migrate(fresh)
    for catalogue in CATALOGUES:
        found = ours(fresh, catalogue)
        assert found
        assert {name for name in found if not name.startswith("django_pgqueue_")} == set(), catalogue
    assert notifying.channel("orders").startswith("django_pgqueue:")
    assert notifying.channel("x" * 200).startswith("django_pgqueue#")


CLASHES = {
    "table": "CREATE TABLE django_pgqueue_messagequeue (theirs int)",
    "second table": "CREATE TABLE django_pgqueue_messagequeueitem (theirs int)",
    "index": "CREATE TABLE theirs (queue_id int); CREATE INDEX django_pgqueue_item_claim_idx ON theirs (queue_id)",
    "type": "CREATE TYPE django_pgqueue_messagequeueitem AS ENUM ('ready')",
    "function": "CREATE FUNCTION django_pgqueue_orphan_messages() RETURNS int LANGUAGE sql AS 'SELECT 1'",
}


@pytest.mark.parametrize("clash", CLASHES)
def test_b94_a_true_clash_is_one_error_that_names_it_and_changes_nothing(fresh, clash):
    """The migration is one transaction; when the other thing is out of the way it runs."""
    with second_session(dbname=connections.settings[fresh]["NAME"]) as admin:
        admin.execute(CLASHES[clash])
    before = {catalogue: ours(fresh, catalogue) for catalogue in CATALOGUES}
    with pytest.raises(ProgrammingError, match=r"django_pgqueue_\w+.* (already exists|in the same schema)") as failure:
        migrate(fresh)
    assert failure.value.__cause__.sqlstate in ("42P07", "42723", "42710")
    # As the end of the command would: Django leaves the transaction open where a deferred statement fails.
    connections[fresh].close()
    del connections[fresh]
    assert {catalogue: ours(fresh, catalogue) for catalogue in CATALOGUES} == before
    assert not [
        name for app, name in MigrationRecorder(connections[fresh]).applied_migrations() if app == "django_pgqueue"
    ]
    with second_session(dbname=connections.settings[fresh]["NAME"]) as admin:
        admin.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    migrate(fresh)
    assert Queue("q", using=fresh).publish({}) == 1
