"""Every SQL statement of the package, by "module.NAME"."""

from statement_list import modules, statements

STATEMENTS = {f"{each.module.rpartition('.')[2]}.{each.name}": each.sql for each in statements(modules())}
