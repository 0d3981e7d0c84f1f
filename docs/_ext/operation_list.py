"""``{operations}``: a table of the operations on a queue that the admin offers, with the fields of their forms."""

from collections.abc import Iterator

from django.forms.utils import pretty_name
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from django_pgqueue.admin import operations


def rows() -> Iterator[str]:
    """Yield the rows of the table, in Markdown."""
    yield "| operation | what it does | what it asks for | for several queues at once |"
    yield "| --- | --- | --- | --- |"
    for each in operations.OPERATIONS.values():
        cells = [each.title, each.explanation, fields(each.form) or "nothing", "yes" if each.is_bulk else "no"]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def fields(form: type[operations.OperationForm]) -> str:
    """Return the fields of a form and their help texts, one below the other."""
    found = form.base_fields.items()
    return "<br>".join(f"{field.label or pretty_name(name)}: {field.help_text}" for name, field in found)


class Operations(Directive):
    def run(self) -> list[nodes.Node]:
        found = nodes.Element()
        self.state.nested_parse(StringList(list(rows()), operations.__file__), self.content_offset, found)
        return found.children
