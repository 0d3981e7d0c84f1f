"""The tables of a run: made, looked at, and dropped by the process that runs it."""

import time
from collections.abc import Sequence

from django.core.management import call_command
from django.db import connection

from example_project.demo.ledger import Item, Remains
from example_project.demo.run import Run

LOCK = "SELECT pg_try_advisory_lock(hashtext(%s))"
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'pgqueue_demo_')"
DROP = "DROP SCHEMA IF EXISTS {} CASCADE"

ITEMS = """
SELECT id,
       payload->>'key',
       coalesce(dead_lettered_from, queue_id, orphaned_from),
       queue_id,
       dead_lettered_at IS NOT NULL
FROM django_pgqueue_messagequeueitem
"""
MISSING = (
    "SELECT count(*) FROM unnest(%s::text[]) AS name WHERE name NOT IN (SELECT name FROM django_pgqueue_messagequeue)"
)


def make(run: Run) -> None:
    """Make the schema and its tables, and drop those of runs that were killed."""
    # Each run holds a lock for as long as it is connected.
    fetch(LOCK, run.schema)
    for (schema,) in fetch(SCHEMAS):
        if fetch(LOCK, schema)[0][0]:
            execute(DROP, schema)
    execute("CREATE SCHEMA {}", run.schema)
    # In the connection's parameters too, should it be opened anew.
    options = connection.settings_dict.setdefault("OPTIONS", {})
    options["options"] = f"{options.get('options', '')} -c search_path={run.schema}".strip()
    execute("SET search_path = {}", run.schema)
    call_command("migrate", verbosity=0, interactive=False)


def drop(run: Run) -> None:
    """Drop the schema with all that is in it."""
    # Anew: a statement that was interrupted leaves the connection unusable.
    connection.close()
    execute(DROP, run.schema)


def remains(queues: Sequence[str] = ()) -> Remains:
    """Return what the tables hold, and how many of these queues have no row."""
    items = [Item(*row) for row in fetch(ITEMS)]
    marks = fetch("SELECT message_id, what FROM demo_mark")
    return Remains(items, marks, time.monotonic(), fetch(MISSING, list(queues))[0][0])


def fetch(statement: str, *params: object) -> list[tuple]:
    """Run a statement, and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, params)
        return cursor.fetchall() if cursor.description else []


def execute(statement: str, name: str) -> None:
    """Run a statement about something with this name."""
    with connection.cursor() as cursor:
        cursor.execute(statement.format(connection.ops.quote_name(name)))
