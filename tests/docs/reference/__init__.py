"""
The reference in docs/, for the tests that compare it with the code.

Sphinx makes most of it: settings, signals and the Python API from the comments and docstrings where they are defined,
commands from their help texts. `python -m tests.docs.reference` writes one page: tables. `tables.py` has the texts for
what the models do not say; if texts are missing or left over, making the page fails and names them.
"""

from pathlib import Path

from tests.docs.reference import tables

DOCS = Path(__file__).resolve().parent.parent.parent.parent / "docs"

#: The pages that are made of the code here, and not by Sphinx.
PAGES = {"tables": tables.page}
