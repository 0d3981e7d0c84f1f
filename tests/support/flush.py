"""
A fast flush between tests that commit.

Django's own truncates each table and sends `post_migrate`, which makes permissions and content types anew: some 90 ms,
more than most tests take. This one deletes all rows in one round trip, and keeps what `post_migrate` made.
"""

from functools import cache
from typing import Any

from django.db import connections, transaction
from django.test import TransactionTestCase

from django_pgqueue.apps import declare_standing_queues
from django_pgqueue.models import MessageQueue, MessageQueueItem

# `post_migrate` makes them, and no test changes them.
KEPT = {"django_content_type", "auth_permission"}

#: Whether the test that runs asks for Django's own flush: see the marker `django_flush`.
is_djangos = False

_djangos = TransactionTestCase._fixture_teardown


def install() -> None:
    """Let each test case that commits be flushed this way."""
    TransactionTestCase._fixture_teardown = _fixture_teardown  # type: ignore[method-assign]


def _fixture_teardown(case: Any) -> None:
    if is_djangos or case.available_apps is not None or case.serialized_rollback:
        _djangos(case)
        return
    for using in case._databases_names(include_mirrors=False):
        flush(using)


def flush(using: str) -> None:
    """Leave the database as `migrate` leaves an empty one."""
    connection = connections[using]
    with transaction.atomic(using=using):
        connection.ensure_connection()
        # Round Django's cursors, which a test may watch. Never prepared: that takes one statement only.
        connection.connection.execute(_deletions(using), prepare=False)
    # The other half of what `post_migrate` does.
    declare_standing_queues(using)


@cache
def _deletions(using: str) -> str:
    """Return the statements that delete all rows, in one string."""
    connection = connections[using]
    tables = set(connection.introspection.django_table_names(include_views=False)) - KEPT
    # The messages before their queues, which would else make orphans of them; all other foreign keys are deferred.
    first = [MessageQueueItem._meta.db_table, MessageQueue._meta.db_table]
    ordered = [*first, *sorted(tables - set(first))]
    return "; ".join(f"DELETE FROM {connection.ops.quote_name(table)}" for table in ordered)
