"""Write the pages: `python -m tests.reference`."""

import os

import django

from tests.reference import DOCS, PAGES, made

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    for name in PAGES:
        (DOCS / f"{name}.md").write_text(made(name))
