"""Mutants of migrations/."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import INSERTED, NOT_LOST

MUTANTS = (
    Mutant(
        NOT_LOST,
        "the orphan trigger does not stamp",
        "migrations/0001_initial.py",
        "SET orphaned_from = queue_id, queue_id = NULL\n",
        "SET orphaned_from = NULL\n",
        ("tests/services/test_orphans.py::test_messages_of_a_deleted_queue_are_handled_once_it_is_there_again",),
    ),
    Mutant(
        INSERTED,
        "headers have no default in the database",
        "migrations/0001_initial.py",
        "models.JSONField(db_default=models.Value({}, output_field=models.JSONField()), default=dict)",
        "models.JSONField(default=dict)",
        ("tests/services/test_sql_publish.py::test_a_bare_insert_is_a_message_as_any_other",),
    ),
    Mutant(
        INSERTED,
        "the count of deliveries has no default in the database",
        "migrations/0001_initial.py",
        '("delivery_count", models.IntegerField(db_default=0, default=0))',
        '("delivery_count", models.IntegerField(default=0))',
        ("tests/services/test_sql_publish.py::test_a_bare_insert_is_a_message_as_any_other",),
    ),
    Mutant(
        INSERTED,
        "an auto-deleted queue has to be told that it is durable",
        "migrations/0001_initial.py",
        '("durable", models.BooleanField(db_default=True, default=True))',
        '("durable", models.BooleanField(db_default=False, default=True))',
        (
            "tests/services/test_sql_publish.py::test_the_form_that_ensures_makes_the_queue_or_takes_the_one_that_is_there",
        ),
    ),
)
