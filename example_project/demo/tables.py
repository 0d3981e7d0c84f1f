"""The tables of a run: made, looked at, and dropped by the process that runs it."""

from collections.abc import Sequence

from django.core.management import call_command
from django.db import connection

from example_project.demo.ledger import Remains
from example_project.demo.run import Run

LOCK = "SELECT pg_try_advisory_lock(hashtext(%s))"
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'pgqueue_demo_')"
DROP = "DROP SCHEMA IF EXISTS {} CASCADE"

# What a consumer could take now, or after its queue is made again. Dead letters are not it, and what
# has expired is the reaper's.
TO_CONSUME = """
SELECT DISTINCT coalesce(queue_id, orphaned_from)
FROM django_pgqueue_messagequeueitem
WHERE coalesce(queue_id, orphaned_from) = ANY (%s)
  AND (read_after IS NULL OR read_after <= statement_timestamp())
  AND (expires_at IS NULL OR expires_at > statement_timestamp())
  AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
"""
UNSETTLED = "SELECT count(*) FROM django_pgqueue_messagequeueitem WHERE dead_lettered_at IS NULL"
HOLDS = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem AS item
JOIN django_pgqueue_queueconsumer AS consumer ON consumer.id = item.leased_by
WHERE consumer.pid = %s AND item.lease_expires_at > statement_timestamp()
"""
ITEMS = "SELECT id, queue_id IS NULL, dead_lettered_at IS NOT NULL FROM django_pgqueue_messagequeueitem"
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


def remains(auto_deleted: Sequence[str]) -> Remains:
    """Return what the tables hold."""
    waiting, orphaned, dead = set(), set(), set()
    for message_id, is_orphan, is_dead in fetch(ITEMS):
        (dead if is_dead else orphaned if is_orphan else waiting).add(message_id)
    return Remains(
        frozenset(waiting),
        frozenset(orphaned),
        frozenset(dead),
        tuple(fetch("SELECT message_id, what FROM demo_mark")),
        fetch(MISSING, list(auto_deleted))[0][0],
    )


def fetch(statement: str, *params: object) -> list[tuple]:
    """Return the rows of a statement."""
    with connection.cursor() as cursor:
        cursor.execute(statement, params)
        return cursor.fetchall()


def execute(statement: str, name: str) -> None:
    """Run a statement about something with this name."""
    with connection.cursor() as cursor:
        cursor.execute(statement.format(connection.ops.quote_name(name)))
