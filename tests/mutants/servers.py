"""Which tests need a PostgreSQL server of their own: those that stop, kill or configure it."""

import ast
from functools import cache
from pathlib import Path

# The fixtures of conftest.py, and the module that knows whose the server is.
SIGNS = frozenset({"server", "pg", "cluster"})


def needs_server(root: Path, test: str) -> bool:
    """
    Tell whether a test, or one of a file, uses one of the signs itself or by a function or fixture of its file.

    With `DATABASE_URL` such a test would be skipped, or would stop another server than that of its database.
    """
    file, *names = test.partition("[")[0].split("::")
    uses = _uses(root / file)
    seen, ahead = set(), {names[-1]} if names else set(uses)
    while ahead:
        seen |= ahead
        ahead = set().union(*(uses.get(name, ()) for name in ahead)) - seen
    return bool(seen & SIGNS)


@cache
def _uses(path: Path) -> dict[str, frozenset[str]]:
    """Return the identifiers and strings that stand in each function and class of a module."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: frozenset(_words(node)) for node in ast.walk(tree) if isinstance(node, functions)}


def _words(function: ast.AST) -> set[str]:
    words = set()
    for node in ast.walk(function):
        match node:
            case ast.arg(arg=word) | ast.Name(id=word) | ast.Constant(value=str(word)):
                words.add(word)
    return words
