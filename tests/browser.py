"""
A real browser on Django's live server: headless Chromium, driven by Playwright.

The binary is the one that `PGQUEUE_CHROMIUM` names, or one on PATH. Playwright's loop runs in a thread of its
own: in the test's thread Django would refuse the database, because a loop runs there.
"""

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from playwright.sync_api import Page, sync_playwright

from tests.support import DEADLINE

T = TypeVar("T")


def find_chromium() -> str | None:
    """Return the binary, None where there is none. One that `PGQUEUE_CHROMIUM` names has to be there."""
    if named := os.environ.get("PGQUEUE_CHROMIUM"):
        assert os.access(named, os.X_OK), f"PGQUEUE_CHROMIUM: {named} cannot be run"
        return named
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """
    One page of a browser. `do(function)` calls it with the page and returns the result.

    `tab()` opens another one beside it. At the end `problems` has what the scripts of all complained of.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.problems: list[str] = []
        self._options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="browser")
        self._page: Page

    def do(self, function: Callable[[Page], T]) -> T:
        return self._thread.submit(lambda: function(self._page)).result(3 * DEADLINE)

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
        return str(self.do(lambda page: page.inner_text("body")))

    def tab(self) -> "Browser":
        """Open another page in the same browser. It is closed with it."""
        other = copy.copy(self)
        self._thread.submit(other._open_page).result(DEADLINE)
        return other

    def open(self) -> None:
        self._thread.submit(self._open).result(DEADLINE)

    def close(self) -> None:
        self._thread.submit(self._close).result(DEADLINE)
        self._thread.shutdown()

    def _open(self) -> None:
        self._playwright = sync_playwright().start()
        # As root Chromium runs without its sandbox only; what it is shown is ours.
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        self._browser = self._playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
        self._context = self._browser.new_context(**self._options)
        self._open_page()

    def _open_page(self) -> None:
        self._page = self._context.new_page()
        self._page.set_default_timeout(DEADLINE * 1000)
        self._page.on("console", self._note)
        self._page.on("pageerror", lambda error: self.problems.append(str(error)))

    def _note(self, line: Any) -> None:
        # The test project has no icon.
        if line.type == "error" and not line.location["url"].endswith("/favicon.ico"):
            self.problems.append(line.text)

    def _close(self) -> None:
        self._browser.close()
        self._playwright.stop()


@contextmanager
def browser(url: str, **options: Any) -> Iterator[Browser]:
    """Give a page of a browser. Skips the test where there is none."""
    import pytest

    if find_chromium() is None:
        pytest.skip("there is no Chromium on PATH")
    page = Browser(url, **options)
    page.open()
    try:
        yield page
    finally:
        page.close()
