"""How Sphinx builds these pages: ``python3 dev.py docs``, with warnings as errors."""

import shutil
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from pygments.lexers.special import TextLexer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

# For the reference, which is made of docstrings. No database is asked.
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.admin", "django_pgqueue"],
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}},
)
django.setup()

import command_list  # noqa: E402 - these are found by the path above
import operation_list  # noqa: E402
import signal_list  # noqa: E402
import statement_list  # noqa: E402

project = "django_pgqueue"
author = "django_pgqueue contributors"
project_copyright = author
version = release = version_of("django-pg-messagequeue")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxarg.ext"]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["attrs_block", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# Attributes show their types. Functions keep short signatures: their docstrings say what the arguments are.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True

# The modules whose statements {statements} lists.
statement_modules = statement_list.modules()

html_theme = "furo"
html_title = "django_pgqueue"

# Named by HTML (pictures for light and dark) or for people to take, so that Sphinx does not know of them.
CARRIED = ("img", "benchmarks", "ops", "results")


def carry(app: Any, exception: Exception | None) -> None:
    """Put files beside the pages that name them."""
    if exception is None:
        for folder in CARRIED:
            shutil.copytree(HERE / folder, Path(app.outdir) / folder, dirs_exist_ok=True)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", carry)
    app.add_lexer("cron", TextLexer)
    app.add_config_value("statement_modules", [], "env")
    app.add_directive("operations", operation_list.Operations)
    app.add_directive("signals", signal_list.Signals)
    app.add_directive("statements", statement_list.Statements)
    app.connect("source-read", command_list.add_help)
