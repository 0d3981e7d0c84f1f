"""Write the pages: `python -m tests.docs.reference`."""

import os

import django

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()

    from tests.docs.reference import DOCS, PAGES

    for name, page in PAGES.items():
        (DOCS / f"{name}.md").write_text(page())
