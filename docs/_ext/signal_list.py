"""``.. signals::``: every signal of the package, in the order of the module."""

from django.dispatch import Signal
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from django_pgqueue import signals


def names() -> list[str]:
    """Return the names of all signals, in their order."""
    return [name for name, value in vars(signals).items() if isinstance(value, Signal)]


class Signals(Directive):
    def run(self) -> list[nodes.Node]:
        lines = [f".. currentmodule:: {signals.__name__}", ""]
        for name in names():
            lines += [f".. autodata:: {name}", "   :no-value:", ""]
        found = nodes.Element()
        self.state.nested_parse(StringList(lines, signals.__file__), self.content_offset, found)
        return found.children
