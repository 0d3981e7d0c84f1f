"""All mutants, and what is wrong with those that do not apply any more."""

import ast
import importlib
import pkgutil
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent.parent
#: One list for each folder of the package.
_NAMES = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
MODULES = tuple(importlib.import_module(f"{__name__}.{name}") for name in _NAMES)


def all_mutants() -> tuple[Mutant, ...]:
    """Return the mutants of all lists."""
    return tuple(mutant for module in MODULES for mutant in module.MUTANTS)


def faults(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Return a line for each mutant that does not apply to the tree, or whose tests are not there."""
    found = []
    for name, count in Counter(map(str, mutants)).items():
        if count > 1:
            found.append(f"{name}: {count} mutants have this name")
    for mutant in mutants:
        path = root / mutant.path
        times = _text(path).count(mutant.old) if path.is_file() else 0
        if times != 1:
            found.append(f"{mutant}: its text stands {times} times in {mutant.file}")
        found += [f"{mutant}: there is no test {test}" for test in mutant.tests if not _is_there(root, test)]
    return found


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _is_there(root: Path, test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    return path.is_file() and (not names or "::".join(names) in _tests(path))


@cache
def _tests(path: Path) -> frozenset[str]:
    """Return the names of the functions and methods of a module, `Class::method` for the latter."""
    found = set()
    for node in ast.parse(_text(path)).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)
