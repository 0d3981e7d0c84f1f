"""The main paths through the admin, in a real browser: what an operator does at three in the morning."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from playwright.sync_api import Page, expect

from django_pgqueue import Message, Queue, Reject
from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.models import MessageQueue, MessageQueueItem
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.services import minutes
from tests.support.browser import Browser, Tab, browser
from tests.support.processes import consuming
from tests.support.rows import make_message, make_queue
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/django_pgqueue/messagequeue/"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def operator(live_server: Any, chromium: Browser) -> Iterator[Tab]:
    """A browser in which an operator is logged in. Its scripts complain of nothing until the end."""
    User.objects.create_superuser("ada", password="lovelace")
    with chromium.open(live_server.url, viewport={"width": 1280, "height": 800}) as opened:
        opened.log_in("ada", "lovelace")
        yield opened
        assert opened.problems == []


def test_dead_letters_are_found_read_and_redriven(operator: Tab) -> None:
    """A handler failed; it is mended; its dead letter is found, read, sent back, and handled."""
    queue = Queue("payments", max_deliveries=1)
    is_mended = threading.Event()
    handled: list[Any] = []

    def pay(message: Message) -> None:
        if not is_mended.is_set():
            raise Reject("card declined")
        handled.append(message.payload)

    with consuming(Consumer([make_handler(queue, pay)])):
        queue.publish({"order": 4711})
        wait_until(lambda: MessageQueueItem.objects.filter(dead_lettered_from="payments").exists())
        is_mended.set()

        def find_and_redrive(page: Page) -> None:
            page.goto(f"{operator.url}{LIST}")
            page.click("text=payments >> nth=0")
            page.click(".pgqueue-links >> text=Dead letters")
            page.click("#result_list tbody th a")
            expect(page.locator(".pgqueue-json").first).to_contain_text("4711")
            expect(page.locator(".pgqueue-failures")).to_contain_text("card declined")
            page.click("text=Redrive")
            page.click("input[value=Redrive]")
            expect(page.locator(".messagelist")).to_contain_text("Redriven: 1 messages.")

        operator.do(find_and_redrive)
        wait_until(lambda: handled == [{"order": 4711}])


def test_a_queue_is_paused_and_resumed_by_keyboard(operator: Tab) -> None:
    """Every control can be reached and used without a mouse."""
    make_queue("mails")

    def press(page: Page, label: str) -> None:
        page.goto(f"{operator.url}{LIST}mails/change/")
        page.focus(f"text={label}")
        page.keyboard.press("Enter")
        page.focus(f"input[value={label}]")
        page.keyboard.press("Enter")
        expect(page.locator(".messagelist")).to_contain_text(f"{label}d." if label == "Pause" else "Resumed.")

    operator.do(lambda page: press(page, "Pause"))
    assert MessageQueue.objects.get(name="mails").paused_at is not None
    assert "paused" in operator.text()
    operator.do(lambda page: press(page, "Resume"))
    assert MessageQueue.objects.get(name="mails").paused_at is None


def test_the_reaper_is_previewed_and_run(operator: Tab) -> None:
    """What would go is shown first."""
    make_queue("idle", auto_deleted=True, idle=7200)

    def reap(page: Page) -> None:
        page.goto(f"{operator.url}{LIST}")
        page.click("text=Reap now")
        expect(page.locator(".pgqueue-preview")).to_contain_text("idle")
        page.click("input[value='Reap now']")
        expect(page.locator(".messagelist")).to_contain_text("Queues deleted: 1.")

    operator.do(reap)
    assert not MessageQueue.objects.filter(name="idle").exists()


def test_the_numbers_renew_themselves_in_place(operator: Tab) -> None:
    """The page is not loaded again, its rows stay the same nodes, and what is being used is left alone."""
    make_queue("orders")

    def ready(page: Page) -> str:
        return page.inner_text("#result_list tbody tr:first-child .field-ready")

    def mark(page: Page) -> None:
        page.clock.install()
        page.goto(f"{operator.url}{LIST}?q=orders")
        page.evaluate("document.querySelector('#result_list tbody tr').pgqueueMark = 1")

    operator.do(mark)
    assert operator.do(ready) == "0"
    make_message("orders")
    operator.do(lambda page: page.clock.run_for(5_100))
    wait_until(lambda: operator.do(ready) == "1")
    assert operator.do(lambda page: page.evaluate("document.querySelector('#result_list tbody tr').pgqueueMark")) == 1
    # A box is ticked: somebody is about to do something.
    operator.do(lambda page: page.check("input.action-select"))
    make_message("orders")
    operator.do(lambda page: page.clock.run_for(20_000))
    assert operator.do(ready) == "1"
    operator.do(lambda page: page.uncheck("input.action-select"))
    operator.do(lambda page: page.evaluate("document.activeElement.blur()"))
    operator.do(lambda page: page.clock.run_for(10_100))
    wait_until(lambda: operator.do(ready) == "2")
    # "Select all" still selects.
    operator.do(lambda page: page.check("#action-toggle"))
    assert operator.do(lambda page: page.is_checked("input.action-select"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_pages_fit(live_server: Any, chromium: Browser, scheme: str, width: int) -> None:
    """On a desk and on a phone: nothing is wider than the page, but for the table, which scrolls by itself."""
    User.objects.create_superuser("ada", password="lovelace")
    Queue("orders").publish({"text": "x" * 500, "url": "https://example.com/" + "y" * 300})
    minutes.count_minute({"orders": minutes.Tally(10, 2, 1)}, "default")
    (message,) = Queue("orders").claim()
    Queue("orders").nack(message, delay=0, reason="E" * 300)
    paths = [LIST, f"{LIST}orders/change/", f"{LIST}orders/operate/purge/", f"{LIST}reap/"]
    paths.append(reverse("admin:django_pgqueue_messagequeueitem_change", args=[message.id]))
    with chromium.open(live_server.url, viewport={"width": width, "height": 800}, color_scheme=scheme) as opened:
        opened.log_in("ada", "lovelace")
        for path in paths:
            opened.go(path)
            widest = opened.do(lambda page: page.evaluate("document.documentElement.scrollWidth"))
            assert widest <= width, path
            background, colour = opened.do(lambda page: page.evaluate(COLOURS))
            assert (luminance(background) < 0.5) == (scheme == "dark") != (luminance(colour) < 0.5), path
        assert opened.problems == []


# Of the page, and of the text on it.
COLOURS = (
    "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('#content')).color]"
)


def luminance(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255
