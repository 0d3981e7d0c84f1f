"""
Every page of the docs holds: its blocks are run in a project that a reader of the quick start has.

The quick start begins in an empty folder, with the built wheel. The other pages go on from where it ends.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from django.db import connections

import dev
from tests.docs.pages import ROOT, Project, blocks, build_wheel
from tests.support.pgbouncer import pgbouncer

DOCS = ROOT / "docs"
QUICK_START = DOCS / "quick-start.md"
# Where a page's project connects through a PgBouncer.
POOLER, POOLER_PORT = '"HOST": "pgbouncer.internal"', '"PORT": "6432"'
PAGES = [page for page in sorted(DOCS.glob("*.md")) if page != QUICK_START and blocks(page.read_text())]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project that the quick start makes."""
    folder = tmp_path_factory.mktemp("reader")
    settings = connections.settings["default"]
    keys = {"HOST": "PGHOST", "PORT": "PGPORT", "USER": "PGUSER", "PASSWORD": "PGPASSWORD"}
    server = {name: str(settings[key]) for key, name in keys.items() if settings[key]}
    database = f"shop_{uuid4().hex[:8]}"
    venv = folder / "venv"
    dev.make(venv)
    project = Project(folder / "project", venv, build_wheel(folder), database, server, settings_module="shop.settings")
    project.folder.mkdir()
    address = {name.removeprefix("PG").lower(): value for name, value in server.items()}
    with psycopg.connect(**address, dbname="postgres", autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{database}"')
        try:
            project.follow(QUICK_START)
            yield project
        finally:
            admin.execute(f'DROP DATABASE "{database}" WITH (FORCE)')


@pytest.mark.full
def test_the_quick_start_reaches_a_handled_message_a_finished_task_and_a_test(shop: Project) -> None:
    """From an empty folder, with nothing but what the page says: this is what it leaves in the database."""
    assert shop.query("SELECT paid FROM orders_order") == [(True,)]
    assert shop.query("SELECT status, return_value FROM django_pgqueue_taskrun") == [("SUCCESSFUL", 1)]
    assert shop.query("SELECT count(*) FROM django_pgqueue_messagequeueitem") == [(0,)]
    assert "python manage.py test" in QUICK_START.read_text()


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_holds(page: Path, shop: Project, tmp_path: Path) -> None:
    """Each of its blocks."""
    with ExitStack() as stack:
        project = stack.enter_context(shop.copied(tmp_path / "project", f"{shop.database}_{uuid4().hex[:8]}"))
        project.replaced['"HOST": "db.internal"'] = f'"HOST": "{shop.server.get("PGHOST", "")}"'
        if POOLER in page.read_text():
            bouncer = stack.enter_context(pgbouncer(pool_size=10))
            project.replaced |= {POOLER: f'"HOST": "{bouncer.folder}"', POOLER_PORT: '"PORT": "5432"'}
        project.follow(page)
    shutil.rmtree(tmp_path / "project")


def test_blocks_that_are_not_run_have_a_reason_that_is_known() -> None:
    """No block is left out in silence."""
    reasons = {
        block.argument for page in DOCS.glob("*.md") for block in blocks(page.read_text()) if block.word == "not run"
    }
    others = {"needs Celery", "needs django-tasks-db"}
    assert reasons <= {"needs Docker", "needs Kubernetes", "needs systemd", "needs a terminal", *others}
