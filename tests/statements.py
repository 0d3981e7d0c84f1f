"""Every SQL statement of the package, as the modules of ``services/`` have them."""

import importlib
import pkgutil
import re

from django_pgqueue import services

BEGINS = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE|SET)\s")


def find_statements() -> dict[str, str]:
    """Return the statements by "module.NAME", in the order of the modules."""
    found = {}
    for module in pkgutil.iter_modules(services.__path__):
        constants = vars(importlib.import_module(f"{services.__name__}.{module.name}")).items()
        found |= {
            f"{module.name}.{name}": value
            for name, value in constants
            if name.isupper() and isinstance(value, str) and BEGINS.match(value)
        }
    return found


STATEMENTS = find_statements()
