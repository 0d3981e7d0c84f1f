"""
What the reference in docs/ is made of, for the tests that hold it against the code.

Sphinx makes most of it: settings, signals and the Python API of the comments and docstrings where they are defined,
commands of their help texts. One page is written by `python -m tests.reference`: tables. What the models do not say
stands in `tables.py` as words; where words are missing, or left over, making the page fails and says which.
"""

from pathlib import Path

from tests.reference import tables

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"

#: The pages that are made of the code here, and not by Sphinx.
PAGES = {"tables": tables.page}
