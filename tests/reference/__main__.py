"""Write the pages: `python -m tests.reference`."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django  # noqa: E402 - its settings are named above

django.setup()

from tests.reference import DOCS, PAGES, made  # noqa: E402 - models need Django set up

for name in PAGES:
    (DOCS / f"{name}.md").write_text(made(name))
