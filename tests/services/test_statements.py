"""Every statement of the package fits the migrated schema. docs/statements.md lists them."""

import re
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer
from statement_list import Statement, modules, statements

from django_pgqueue import services

pytestmark = pytest.mark.django_db

STATEMENTS = list(statements(modules()))


def prepare(sql: str) -> None:
    """Have the server parse a statement as psycopg sends it. Tables, columns, functions and types must all fit."""
    query = PostgresQuery(Transformer())
    query.convert(sql, dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
    connection.ensure_connection()
    pgconn: Any = connection.connection.pgconn
    result = pgconn.prepare(b"", query.query)
    if result.status != psycopg.pq.ExecStatus.COMMAND_OK:
        raise psycopg.ProgrammingError(result.error_message.decode())


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda each: f"{each.module.rpartition('.')[2]}.{each.name}")
def test_a_statement_can_be_prepared(statement: Statement) -> None:
    """On the PostgreSQL of this run."""
    prepare(statement.sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT nothing FROM django_pgqueue_messagequeue WHERE name = %(name)s",
        "SELECT name FROM django_pgqueue_messagequeue WHERE last_active < %(age)s * interval '1 second'",
    ],
    ids=["a column that is not there", "types that do not compare"],
)
def test_a_statement_that_does_not_fit_is_refused(sql: str) -> None:
    """So that the test above can fail."""
    with pytest.raises(psycopg.ProgrammingError):
        prepare(sql)


def test_each_statement_has_a_comment_and_a_function_that_runs_it() -> None:
    """The comment begins with the statement's name."""
    assert len(STATEMENTS) > 80
    for each in STATEMENTS:
        assert re.match(rf"([A-Z_]+, )*{each.name}\b", each.comment), each.name
        assert each.run_by, each.name


def test_the_modules_of_a_package_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each statement with the comment above it and the function below it, and no other constant."""
    (tmp_path / "made_up.py").write_text(
        'LIMIT = "many"\n\n# LOOK - one.\n# Locks: nothing.\nLOOK = "SELECT 1"\nLOOK_TWICE = "SELECT 2"\n\n\n'
        "def look(run):\n    return run(LOOK), LIMIT\n\n\ndef look_twice(run):\n    return run(LOOK_TWICE)\n"
    )
    monkeypatch.setattr(services, "__path__", [str(tmp_path)], raising=False)
    name = "django_pgqueue.services.made_up"
    assert modules() == [name]
    try:
        assert [tuple(each) for each in statements([name])] == [
            (name, "LOOK", "SELECT 1", "LOOK - one.\nLocks: nothing.\n", "look"),
            (name, "LOOK_TWICE", "SELECT 2", "LOOK - one.\nLocks: nothing.\n", "look_twice"),
        ]
    finally:
        # Not to be found by the tests that follow.
        sys.modules.pop(name, None)
        vars(services).pop("made_up", None)
