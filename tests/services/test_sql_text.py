"""No statement of the package is put together from strings: values are parameters, names are composed by psycopg."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.apps import apps
from psycopg._queries import MAX_CACHED_STATEMENT_LENGTH

import django_pgqueue
from tests.support.statements import STATEMENTS

PACKAGE = Path(django_pgqueue.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

#: Methods that run a statement, and the position of the statement among its arguments.
RUNNERS = {"execute": 0, "executemany": 0, "copy": 0, "stream": 0, "callproc": 0, "mogrify": 0, "raw": 0, "RunSQL": 0}
#: Functions of the package that pass a statement on. Their callers are held to the same.
PASSING_ON = {"_rows": 1, "run": 1, "run_often": 1, "fetch_ids": 1, "fetch_rows": 1, "_execute": 1}


def statement_in(call: ast.Call) -> ast.expr | None:
    """Return the argument that is a statement, if the call runs one."""
    # A plain `execute(…)` is what Django hands to a wrapper, with the statement that somebody runs.
    function = call.func
    if not isinstance(function, ast.Attribute):
        position = PASSING_ON.get(getattr(function, "id", ""))
    elif isinstance(function.value, ast.Name) and function.value.id == "session":
        position = PASSING_ON.get(function.attr)
    else:
        position = RUNNERS.get(function.attr)
    return None if position is None or len(call.args) <= position else call.args[position]


def is_composition(node: ast.expr) -> bool:
    """Tell whether it is `sql.SQL("literal").format(…)`, or a part of one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("format", "join"):
            return is_composition(node.func.value)
        return node.func.attr == "SQL" and len(node.args) == 1 and isinstance(node.args[0], ast.Constant)
    return False


def is_plain(node: ast.expr, parameters: set[str]) -> bool:
    """
    Tell whether it is a statement as it was written: a literal, a constant by name, or psycopg's composition.

    A function's own parameter is its callers' business, where the function is listed in PASSING_ON.
    """
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.IfExp):
        return is_plain(node.body, parameters) and is_plain(node.orelse, parameters)
    if isinstance(node, ast.Name):
        return node.id.isupper() or node.id in parameters
    return is_composition(node)


def violations(tree: ast.Module) -> Iterator[str]:
    """Yield each call that runs something else than a plain statement."""
    for parent in ast.walk(tree):
        parameters: set[str] = set()
        if isinstance(parent, ast.FunctionDef):
            parameters = {argument.arg for argument in parent.args.args} if parent.name in PASSING_ON else set()
        elif not isinstance(parent, ast.Module):
            continue
        for call in calls_of(parent):
            statement = statement_in(call)
            if statement is not None and not is_plain(statement, parameters):
                yield f"line {call.lineno}: {ast.unparse(call)[:80]}"


def calls_of(parent: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a function or module, those in functions inside it excepted."""
    waiting = list(ast.iter_child_nodes(parent))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_run_is_a_statement_as_it_was_written(path):
    """A literal, a constant, or psycopg's composition of quoted names: no f-string, %, + or str.format."""
    assert list(violations(ast.parse(path.read_text()))) == []


def test_the_statements_are_literals():
    """Each statement of services/ is one string, whole: it can be pasted into psql, and holds no value."""
    found = 0
    for path in (PACKAGE / "services").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
            if f"{path.stem}.{name}" in STATEMENTS:
                assert isinstance(node.value, ast.Constant) and isinstance(node.value.value, str), name
                found += 1
    assert found == len(STATEMENTS) > 80


def test_a_constant_that_is_run_is_a_literal_wherever_it_stands():
    """Those of the migrations too."""
    found = 0
    for path in MODULES:
        tree = ast.parse(path.read_text())
        literals = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            for argument in call.args if statement_in(call) is not None else ():
                if isinstance(argument, ast.Name) and argument.id.isupper():
                    assert isinstance(literals[argument.id], ast.Constant), (path.name, argument.id)
                    found += 1
    assert found >= 3


NOT_PLAIN = [
    'cursor.execute(f"SELECT {x}")',
    'cursor.execute("SELECT %s" % x)',
    'cursor.execute("SELECT " + x)',
    'cursor.execute("SELECT {}".format(x))',
    'cursor.execute(" ".join(parts))',
    "cursor.execute(statement)",
    "def show(statement): cursor.execute(statement)",
    'run(using, f"SELECT {x}")',
    "run(using, statement)",
    'session.run(using, f"SELECT {x}")',
    "session.run_often(using, statement)",
    "cursor.execute(sql.SQL(x))",
    'cursor.execute(sql.SQL(f"SELECT {x}").format(y))',
    'Model.objects.raw("SELECT " + x)',
    'migrations.RunSQL("DROP TABLE %s" % x)',
    'cursor.execute(ACK if x else f"SELECT {x}")',
    "cursor.execute(settling.ACK)",
]
PLAIN = [
    'cursor.execute("SELECT 1")',
    "cursor.execute(ACK, params)",
    "session.run(using, ACK)",
    "cursor.execute(TRIGGER)",
    "cursor.execute(ACK if x else NACK)",
    'cursor.execute(sql.SQL("LISTEN {}").format(sql.Identifier(x)))',
    "def run(using, statement): cursor.execute(statement)",
    "execute(statement, params, many, context)",
]


@pytest.mark.parametrize("code", NOT_PLAIN)
def test_the_test_refuses(code):
    """What would be a way in for somebody else's SQL."""
    assert list(violations(ast.parse(code)))


@pytest.mark.parametrize("code", PLAIN)
def test_the_test_allows(code):
    """What is written in the package."""
    assert not list(violations(ast.parse(code)))


@pytest.mark.parametrize(
    "name",
    [
        "claiming.CLAIM",
        "settling.ACK",
        "settling.EXTEND",
        "publishing.PUBLISH",
        "publishing.PUBLISH_RELAXED",
        "publishing.PUBLISH_IF_QUEUE",
        "publishing.PUBLISH_MANY",
    ],
)
def test_what_runs_for_each_message_is_short_enough_to_be_remembered(name):
    """Longer statements psycopg parses anew each time, for their placeholders: that costs more than running them."""
    assert len(STATEMENTS[name].encode()) <= MAX_CACHED_STATEMENT_LENGTH


#: Who may have SQL on the tables, beside services/: what makes them.
MAKERS = ("migrations/", "constraints.py")
TABLES = "|".join(sorted(model._meta.db_table for model in apps.get_app_config("django_pgqueue").get_models()))
#: A verb of a statement that reads or writes rows, or a table where such a statement has it.
ON_ROWS = re.compile(
    r"\b(SELECT|INSERT|UPDATE|(?<!ON )DELETE|MERGE|TRUNCATE|LOCK|COPY)\b"
    rf"|(?i:\b(from|into|join|update)\s+\"?({TABLES})\b)"
)


def texts_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the string literals with their lines; of an f-string what is written in it."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            inside |= set(map(id, parts))
            yield node.lineno, " ".join(str(part.value) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def sql_on_tables(tree: ast.Module) -> list[str]:
    """Return the literals that are SQL on rows of the package's tables."""
    return [
        f"line {line}: {text.strip()[:80]}"
        for line, text in texts_in(tree)
        if re.search(rf"\b({TABLES})\b", text) and ON_ROWS.search(text)
    ]


def test_only_services_have_sql_on_the_tables():
    """Each statement stands above its function there, and nowhere else."""
    found = {}
    for path in MODULES:
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(("services/", *MAKERS)):
            found[name] = sql_on_tables(ast.parse(path.read_text()))
    assert len(found) > 60
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    "code",
    [
        'X = "SELECT 1 FROM django_pgqueue_messagequeue"',
        'cursor.execute("delete from django_pgqueue_messagequeueitem where id = %s", [1])',
        """run(f'UPDATE "django_pgqueue_messagequeue" SET {column} = 1')""",
        "MAY_READ = \"SELECT has_table_privilege('django_pgqueue_messagequeueitem', 'SELECT')\"",
    ],
)
def test_sql_elsewhere_is_noticed(code):
    """Whatever it is for, and in whatever letters."""
    assert sql_on_tables(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        'HINT = "Find who deletes rows of `django_pgqueue_messagequeue`."',
        """URL = "admin:django_pgqueue_messagequeue_change\"""",
        'cursor.execute("SELECT pg_notify(%s, %s)", values)',
    ],
)
def test_what_is_no_sql_on_the_tables(code):
    """Words, addresses, and statements on nothing."""
    assert not sql_on_tables(ast.parse(code))


# The two passages that are written out in full wherever they are used.
FENCE = "(id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))\n"
WALK = ", generate_series(1, (SELECT 1)) AS once\n"


@pytest.mark.parametrize(
    ("passage", "sign", "copies"),
    [(FENCE, "lease_token) IN (", 6), (WALK, "generate_series(1, (", 21)],
    ids=["fence", "walk"],
)
def test_the_copies_of_a_passage_are_equal_letter_by_letter(passage: str, sign: str, copies: int) -> None:
    """A fence or a walk that was changed in one statement is changed in all."""
    found = {name: (text.count(passage), text.count(sign)) for name, text in STATEMENTS.items() if sign in text}
    assert {name for name, (equal, all_of_them) in found.items() if equal != all_of_them} == set()
    assert sum(equal for equal, _ in found.values()) >= copies
