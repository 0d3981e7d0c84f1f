"""``{statements}``: every SQL statement of the package, with the comment above it and the function that runs it."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections import namedtuple
from collections.abc import Iterator

from docutils import nodes
from docutils.parsers.rst import Directive

from django_pgqueue import services

unparse = functools.cache(ast.unparse)
SQL = re.compile(r"\s*(WITH|SELECT|INSERT|UPDATE|DELETE|SET|LOCK)\s")
Statement = namedtuple("Statement", "module name sql comment run_by")


def modules() -> list[str]:
    """Return the modules that have statements, or functions that run them."""
    return [module.name for module in pkgutil.iter_modules(services.__path__, f"{services.__name__}.")]


def statements(names: list[str]) -> Iterator[Statement]:
    """Yield the statements of these modules, in their order there."""
    sources = {name: inspect.getsource(importlib.import_module(name)) for name in names}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    for module in names:
        lines, comment, end = sources[module].splitlines(keepends=True), "", 0
        for node in trees[module].body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(sql))) if SQL.match(sql):
                    # A statement that follows another one without a blank line shares its comment.
                    above = re.search(r"(^#.*\n)+\Z", "".join(lines[end : node.lineno - 1]), re.MULTILINE)
                    comment = above[0].replace("# ", "") if above else comment * (node.lineno == end + 1)
                    yield Statement(module, name, sql, comment, run_by(module, name, trees))
            end = node.end_lineno or 0


def run_by(module: str, name: str, trees: dict[str, ast.Module]) -> str:
    uses = re.compile(rf"(?<![.\w])({module.rpartition('.')[2]}\.)?{name}\b")
    found = (each for tree in (trees[module], *trees.values()) for each in ast.walk(tree))
    found = (each.name for each in found if isinstance(each, ast.FunctionDef) and uses.search(unparse(each)))
    return next(found, "")


class Statements(Directive):
    def run(self) -> list[nodes.Node]:
        sections: dict[str, nodes.section] = {}
        for each in statements(self.state.document.settings.env.config.statement_modules):
            module = nodes.section("", nodes.title(text=each.module), ids=[nodes.make_id(each.module)])
            words = re.split(r"\n(?=[A-Z][a-z]+:|Returns? )", f"{each.comment}Run by {each.run_by}().")
            code = nodes.literal_block(each.sql, each.sql.strip("\n"), language="postgresql", force=True)
            parts = [nodes.title(text=each.name), *(nodes.paragraph(text=text) for text in words), code]
            ids = [nodes.make_id(f"{each.module}-{each.name}")]
            sections.setdefault(each.module, module).append(nodes.section("", *parts, ids=ids))
        return list(sections.values())
