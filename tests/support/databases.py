"""Databases of their own beside the test database, and aliases for them: replicas, schemas, roles, restores."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from django.apps import apps
from django.core.management import call_command
from django.db import connections
from psycopg import sql

from tests.support.processes import database_url
from tests.support.sessions import connect, fetch


@contextmanager
def alias(name: str, **changed: Any) -> Iterator[str]:
    """
    Let a database alias be there meanwhile: the default's settings, these changed.

    `OPTIONS` are added to the default's.
    """
    settings = copy.deepcopy(connections.settings["default"])
    settings["OPTIONS"].update(changed.pop("OPTIONS", {}))
    connections.settings[name] = {**settings, "ENGINE": "tests.engine", **changed}
    try:
        yield name
    finally:
        wrapper = connections[name]
        wrapper.close()
        if name in wrapper._connection_pools:
            wrapper.close_pool()
        del connections[name]
        del connections.settings[name]


@contextmanager
def empty_database() -> Iterator[str]:
    """Give the name of a new database on the tests' server, and drop it at the end, whoever is on it."""
    name = f"{connections.settings['default']['NAME']}_{uuid4().hex[:8]}"
    identifier = sql.Identifier(name)
    with connect() as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(identifier))
    try:
        yield name
    finally:
        with connect() as admin:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))


@contextmanager
def database(name: str, **changed: Any) -> Iterator[str]:
    """Give an alias for a new database that has the queue's tables."""
    with empty_database() as database_name, alias(name, NAME=database_name, **changed):
        migrate(name)
        yield name


@contextmanager
def migrated_database() -> Iterator[str]:
    """
    Give the name of a new database that has the queue's tables: for all tests of a module.

    Each makes an alias for it of its own, because Django refuses a test those that were there before it.
    """
    with empty_database() as name:
        with alias(name, NAME=name) as using:
            migrate(using)
        yield name


def empty(using: str) -> None:
    """Delete all rows of the queue's tables there."""
    tables = [model._meta.db_table for model in apps.get_app_config("django_pgqueue").get_models()]
    fetch("; ".join(f"DELETE FROM {table}" for table in tables), using=using)


def migrate(using: str, app: str = "django_pgqueue", *target: str) -> None:
    """Make an app's tables there."""
    call_command("migrate", app, *target, database=using, verbosity=0)


def url_of(using: str) -> str:
    """Return the URL of an alias's database, for other programs."""
    return database_url(path=f"/{connections.settings[using]['NAME']}")
