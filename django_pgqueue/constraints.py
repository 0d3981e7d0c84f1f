"""
A constraint that Django cannot express: a foreign key that is checked by each statement.

Django creates every PostgreSQL foreign key as DEFERRABLE INITIALLY DEFERRED, so a violation is raised at COMMIT, after
``publish`` has returned. This app needs the violation at the INSERT. Migrations contain the import path of this class,
which must not change.
"""

from typing import Any

from django.db import models
from django.db.backends.ddl_references import Statement


class ImmediateForeignKey(models.BaseConstraint):
    """
    FOREIGN KEY (field) REFERENCES … ON DELETE SET NULL NOT DEFERRABLE.

    ``field`` names a ForeignKey of the model with ``db_constraint=False``.
    """

    template = (
        "CONSTRAINT %(name)s FOREIGN KEY (%(column)s) REFERENCES %(table)s (%(target)s)"
        " ON DELETE SET NULL NOT DEFERRABLE"
    )

    def __init__(self, *, field: str, name: str) -> None:
        super().__init__(name=name)
        self.field = field

    # The base class allows None for both arguments; migrations always pass them.
    def constraint_sql(self, model: Any, schema_editor: Any) -> str:
        """Return the clause for CREATE TABLE."""
        field = model._meta.get_field(self.field)
        quote = schema_editor.quote_name
        return self.template % {
            "name": quote(self.name),
            "column": quote(field.column),
            "table": quote(field.remote_field.model._meta.db_table),
            "target": quote(field.target_field.column),
        }

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that adds the constraint to a table."""
        return Statement(
            "ALTER TABLE %(table)s ADD %(constraint)s",
            table=schema_editor.quote_name(model._meta.db_table),
            constraint=self.constraint_sql(model, schema_editor),
        )

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that drops the constraint."""
        return Statement(
            "ALTER TABLE %(table)s DROP CONSTRAINT %(name)s",
            table=schema_editor.quote_name(model._meta.db_table),
            name=schema_editor.quote_name(self.name),
        )

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the field's own validation looks the queue up."""

    def deconstruct(self) -> Any:
        """Return the constraint as a migration writes it."""
        path, args, kwargs = super().deconstruct()
        return path, args, {**kwargs, "field": self.field}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ImmediateForeignKey):
            return self.name == other.name and self.field == other.field
        return NotImplemented

    __hash__ = models.BaseConstraint.__hash__

    def __repr__(self) -> str:
        return f"<{self.__class__.__qualname__}: field={self.field!r} name={self.name!r}>"
