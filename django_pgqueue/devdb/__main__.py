"""
The keeper's process: `python PATH_OF_THIS_FILE HOME stop|remove`.

The modules in this folder are loaded by path, so that the package `django_pgqueue` is not imported.
"""

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("devdb", Path(__file__).with_name("__init__.py"))
    assert spec is not None and spec.loader is not None
    package = sys.modules["devdb"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    keeper = importlib.import_module("devdb.keeper")
    keeper.keep(Path(sys.argv[1]), remove=sys.argv[2] == "remove")
