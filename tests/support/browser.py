"""
A real browser: headless Chromium, driven by Playwright.

The binary is the one that `PGQUEUE_CHROMIUM` names, or one on PATH. Playwright's loop runs in a thread of its
own: where a loop runs, Django refuses the database, and asyncio refuses another loop. The fixtures of
pytest-playwright run theirs in the test's thread, until the end of the session, so they do not serve here.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from playwright.sync_api import BrowserContext, Page, sync_playwright

from tests.support.waiting import DEADLINE

T = TypeVar("T")


def find_chromium() -> str | None:
    """Return the binary, None where there is none. One that `PGQUEUE_CHROMIUM` names has to be there."""
    if named := os.environ.get("PGQUEUE_CHROMIUM"):
        assert os.access(named, os.X_OK), f"PGQUEUE_CHROMIUM: {named} cannot be run"
        return named
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """
    One page of a browser. `do(function)` calls it with the page and returns the result.

    `tab()` opens another one beside it, with the same cookies. `problems` has what the scripts of all complain of.
    """

    def __init__(self, thread: ThreadPoolExecutor, context: BrowserContext, url: str, problems: list[str]) -> None:
        self.url = url
        self.problems = problems
        self._thread = thread
        self._context = context
        self._page: Page = thread.submit(self._open).result(DEADLINE)

    def do(self, function: Callable[[Page], T]) -> T:
        return self._thread.submit(function, self._page).result(3 * DEADLINE)

    def go(self, path: str) -> None:
        self.do(lambda page: page.goto(f"{self.url}{path}"))

    def log_in(self, name: str, password: str) -> None:
        """Log in by the form, as everybody does."""

        def log_in(page: Page) -> None:
            page.goto(f"{self.url}/admin/login/")
            page.fill("input[name=username]", name)
            page.fill("input[name=password]", password)
            page.press("input[name=password]", "Enter")
            page.wait_for_url(f"{self.url}/**")

        self.do(log_in)

    def text(self) -> str:
        return self.do(lambda page: page.inner_text("body"))

    def tab(self) -> "Tab":
        return Tab(self._thread, self._context, self.url, self.problems)

    def _open(self) -> Page:
        page = self._context.new_page()
        page.set_default_timeout(DEADLINE * 1000)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        return page

    def _note(self, line: Any) -> None:
        # The test project has no icon.
        if line.type == "error" and not line.location["url"].endswith("/favicon.ico"):
            self.problems.append(line.text)


class Browser:
    """A running Chromium. Each `open()` starts with no cookies, and ends with all of its pages closed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="browser")
        self._thread.submit(self._start).result(DEADLINE)

    @contextmanager
    def open(self, url: str, **options: Any) -> Iterator[Tab]:
        """Give a page for a server. `options` are those of Playwright's `new_context()`."""
        context = self._thread.submit(lambda: self._browser.new_context(**options)).result(DEADLINE)
        try:
            yield Tab(self._thread, context, url, [])
        finally:
            self._thread.submit(context.close).result(DEADLINE)

    def close(self) -> None:
        self._thread.submit(self._stop).result(DEADLINE)
        self._thread.shutdown()

    def _start(self) -> None:
        self._playwright = sync_playwright().start()
        # As root Chromium runs without its sandbox only; what it is shown is ours.
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        self._browser = self._playwright.chromium.launch(executable_path=find_chromium(), args=arguments)

    def _stop(self) -> None:
        self._browser.close()
        self._playwright.stop()


@contextmanager
def browser() -> Iterator[Browser]:
    """Give a browser, for a module of tests. Skips them where there is none."""
    if find_chromium() is None:
        pytest.skip("there is no Chromium on PATH")
    running = Browser()
    try:
        yield running
    finally:
        running.close()
