"""
The example project's live page: `Topic.listen` behind server-sent events, on a real ASGI server.

What one tab writes appears in the other, in a real browser; what the stream says is read from a socket, so that
it is tested where there is no browser too.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.test import Client
from playwright.sync_api import Page, expect

from example_project.live import views
from example_project.live.models import Note
from example_project.live.queues import notes
from tests.example_project.test_browser import luminance
from tests.runtime.test_listener import listeners, terminate
from tests.support.browser import Browser, Tab, browser
from tests.support.processes import Worker, command
from tests.support.sessions import Session, connect, in_threads, run_async
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HEARTBEAT = 0.5


class Server:
    """A running ASGI server, and where it is."""

    def __init__(self, process: Worker, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._read = 0

    def new_output(self) -> str:
        """Return what it has written since the last call."""
        output = self.process.output
        start, self._read = self._read, len(output)
        return output[start:]

    def files(self) -> int:
        """Return how many files and sockets it has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


@contextmanager
def serving(port: int = 0) -> Iterator[Server]:
    with command("serve", "--port", str(port)) as process:

        def address() -> "re.Match[str] | None":
            assert process.is_running, process.output
            return re.search(r"running on http://127\.0\.0\.1:(\d+)", process.output)

        yield Server(process, int(wait_until(address, 60)[1]))


@pytest.fixture(scope="module", autouse=True)
def short_heartbeat() -> Iterator[None]:
    """All servers have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIVE_HEARTBEAT", str(HEARTBEAT))
        yield


@pytest.fixture(scope="module")
def running(django_db_setup: None, short_heartbeat: None) -> Iterator[Server]:
    """A server for all tests: to start one takes longer than most of them."""
    with serving() as started:
        yield started


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Nothing went wrong in it until the end. Then it listens no more, as at the start."""
    yield running
    wait_until(lambda: not listeners())
    went_well(running)


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that has served nobody before, and that the test may stop."""
    with serving() as started:
        yield started
        went_well(started)


def went_well(server: Server) -> None:
    output = server.new_output()
    assert "Traceback" not in output, output


def write(text: str) -> Note:
    """Do what the view does, in this process."""
    with transaction.atomic():
        note = Note.objects.create(text=text)
        notes.publish(note.as_data())
    return note


# --- What the stream says ---


class Stream:
    """A reader of the stream. It reads no more than it is asked to."""

    def __init__(self, server: Server, path: str = "/live/stream/", **headers: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE)
        self._connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        self.response = self._connection.getresponse()

    def event(self) -> dict[str, Any]:
        """Read up to the next event, and return its note. Its id is the event's."""
        fields: dict[str, str] = {}
        deadline = time.monotonic() + DEADLINE
        while line := self.response.readline().decode():
            assert time.monotonic() < deadline, "only signs of life"
            if line.startswith(":"):
                continue
            if line.strip():
                name, _, text = line.rstrip("\n").partition(": ")
                fields[name] = text
            elif fields:
                note: dict[str, Any] = json.loads(fields["data"])
                assert fields.keys() == {"id", "data"} and fields["id"] == str(note["id"])
                return note
        raise AssertionError("the stream ended")

    def until(self, text: str) -> list[str]:
        """Read up to this note, and return the texts of all."""
        texts: list[str] = []
        while texts[-1:] != [text]:
            texts.append(self.event()["text"])
        return texts

    def beat(self) -> None:
        """Read up to the next sign of life; nothing else comes before it."""
        assert self.response.readline() == b": still here\n"
        assert self.response.readline() == b"\n"

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def test_a_note_is_told_as_it_is_written(server: Server) -> None:
    """To all who listen, at once, with its number as the event's; proxies are told to pass it on."""
    with closing(Stream(server)) as one, closing(Stream(server)) as two:
        assert one.response.status == 200
        assert one.response.headers["Content-Type"] == "text/event-stream"
        assert "no-cache" in one.response.headers["Cache-Control"]
        assert one.response.headers["X-Accel-Buffering"] == "no"
        wait_until(listeners)
        for stream in (one, two):
            stream.beat()
        note = write("a\nb\u2028 'c' <d> ✓")
        for stream in (one, two):
            assert stream.event() == {"id": note.pk, "text": note.text}


def test_a_quiet_stream_says_that_it_is_there(server: Server) -> None:
    """Every few seconds, with a comment that no script sees."""
    with closing(Stream(server)) as stream:
        stream.beat()
        began = time.monotonic()
        stream.beat()
        stream.beat()
        assert time.monotonic() - began > HEARTBEAT


def test_who_comes_back_is_told_what_was_missed(server: Server) -> None:
    """By the header, as a browser does, or by the parameter, as the page does at first; not what is older than that."""
    first = write("0")
    Note.objects.bulk_create(Note(text=f"{n}") for n in range(1, 2 * views.MAX_NOTES))
    last = Note.objects.latest("id")
    with closing(Stream(server)) as stream:
        assert len(stream.until(last.text)) == views.MAX_NOTES
    write("missed")
    for options in ({"Last_Event_ID": str(last.pk)}, {"path": f"/live/stream/?after={last.pk}"}):
        with closing(Stream(server, **options)) as stream:
            texts = stream.until("missed")
        assert first.text not in texts and len(texts) <= views.MAX_NOTES


def test_any_last_number_is_answered(server: Server) -> None:
    """Whatever a client sends."""
    numbers = ("x", "-1", "٣", "9" * 18, "9" * 19, "9" * 5_000, "1.5", "\0")
    streams = [Stream(server, path=f"/live/stream/?after={quote(last)}") for last in numbers]
    for stream in streams:
        with closing(stream):
            assert stream.response.status == 200
            stream.beat()


def test_a_smaller_number_that_commits_later_is_not_missed(server: Server) -> None:
    """Numbers are given before the commit: who has heard the larger one comes back, and is told the smaller."""
    with Session() as slow:
        slow.begin()
        early = slow.run(write, "early")
        late = write("late")
        with closing(Stream(server)) as stream:
            assert stream.event()["text"] == "late"
        slow.commit()
    assert early.pk < late.pk
    with closing(Stream(server, Last_Event_ID=str(late.pk))) as stream:
        assert stream.event()["text"] == "early"


def test_a_listener_that_was_cut_off_comes_back_and_tells_what_it_missed(server: Server) -> None:
    """The stream stays open meanwhile; the table is read at its next sign of life."""
    with closing(Stream(server)) as stream:
        ((pid, *_),) = wait_until(listeners)
        write("before")
        stream.until("before")
        # Written, and its notification lost.
        Note.objects.create(text="missed")
        terminate(pid)
        stream.until("missed")
        assert [row[0] for row in wait_until(listeners)] != [pid]
        write("after")
        stream.until("after")


def test_all_streams_share_one_connection_and_leave_nothing(own_server: Server) -> None:
    """Forty of them; when the readers are gone nothing listens, and no connection, file or thread is left."""
    with closing(Stream(own_server)) as stream:
        stream.beat()
    wait_until(lambda: not sessions_of_server())
    files, threads = own_server.files(), own_server.threads()
    for _ in range(2):
        streams = [Stream(own_server) for _ in range(40)]
        for stream in streams:
            stream.beat()
        # Also those that read the table are closed.
        wait_until(lambda: sessions_of_server() == ["django_pgqueue listener"])
        write("to all")
        assert all(stream.event()["text"] == "to all" for stream in streams)
        Note.objects.all().delete()
        for stream in streams:
            stream.close()
        wait_until(lambda: not sessions_of_server())
        wait_until(lambda: own_server.files() <= files, what="its files")
        # Beside those of the pool that all share.
        wait_until(lambda: own_server.threads() <= threads + 32, what="its threads")


def sessions_of_server() -> list[str]:
    """Return the names of all sessions on the database, but for those of this process."""
    with connect() as admin:
        rows = admin.execute(
            "SELECT application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND pid <> %s",
            [Note.objects.raw("SELECT pg_backend_pid() AS id")[0].pk],
        )
        return [row[0] for row in rows]


def test_many_streams_that_look_at_the_table_make_few_connections(server: Server) -> None:
    """As when the database comes back, and all of them look for what they have missed."""
    with connect() as admin, admin.transaction():
        admin.execute("LOCK TABLE live_note IN ACCESS EXCLUSIVE MODE")
        streams = [Stream(server) for _ in range(60)]
        wait_until(lambda: len(sessions_of_server()) > 3)
        time.sleep(1)
        # A thread pool of Python's has up to 32 threads; beside them there are the listener and the one that locks.
        assert len(sessions_of_server()) <= 34
    for stream in streams:
        stream.beat()
        stream.close()


def test_a_burst_is_told_to_everybody(server: Server) -> None:
    """Hundreds of notes from several writers: each reader gets each of them once."""
    streams = [Stream(server) for _ in range(3)]
    for stream in streams:
        stream.beat()
    in_threads(4, lambda number: [write(f"{number} {n}") for n in range(100)])
    expected = sorted(Note.objects.values_list("text", flat=True))
    assert len(expected) == 400
    for stream in streams:
        with closing(stream):
            assert sorted(stream.event()["text"] for _ in expected) == expected
            stream.beat()


def test_a_note_between_the_look_and_the_first_step_is_heard() -> None:
    """It listens already when it looks at the table."""

    async def main() -> list[str]:
        stream = views.events(0)
        await sync_to_async(write)("before")
        texts = [text_of(await anext(stream))]
        await sync_to_async(write)("between")
        texts.append(text_of(await asyncio.wait_for(anext(stream), DEADLINE)))
        await stream.aclose()
        return texts

    assert run_async(main()) == ["before", "between"]


def test_a_reader_that_is_too_slow_is_told_the_newest_once_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its buffer dropped is read from the table."""
    listen = notes.listen
    monkeypatch.setattr(notes, "listen", lambda: listen(buffer=10))

    async def main() -> list[str]:
        stream = views.events(0)
        await sync_to_async(write)("first")
        texts = [text_of(await anext(stream))]
        await sync_to_async(lambda: [write(f"{n}") for n in range(50)])()
        while texts[-1] != "last":
            if len(texts) == 11:
                await sync_to_async(write)("last")
            texts.append(text_of(await anext(stream)))
        await stream.aclose()
        return texts

    assert {f"{n}" for n in range(50)} <= set(run_async(main()))


def text_of(event: str) -> str:
    return str(json.loads(event.partition("data: ")[2])["text"])


def test_the_server_stops_although_streams_are_open(own_server: Server) -> None:
    """Within the seconds that it is given for that."""
    with closing(Stream(own_server)) as stream:
        stream.beat()
        began = time.monotonic()
        own_server.process.stop(10)
        assert time.monotonic() - began < 8
    wait_until(lambda: not listeners())


# --- What the other views answer ---


def test_a_note_that_is_refused_is_neither_stored_nor_told() -> None:
    """Nothing, too long: 400, and the page says why."""
    for text in ("", " ", "x" * 501):
        response = Client().post("/live/notes/", {"text": text})
        assert response.status_code == 400
        assert "Ensure" in response.text or "required" in response.text
    assert not Note.objects.exists()


def test_the_form_works_without_a_script() -> None:
    """It answers with the page."""
    response = Client().post("/live/notes/", {"text": "<b>hello</b>"}, follow=True)
    assert response.redirect_chain == [("/live/", 302)]
    assert "&lt;b&gt;hello&lt;/b&gt;" in response.text


def test_a_note_and_its_message_are_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be told is not stored."""

    def fail(payload: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(notes, "publish", fail)
    with pytest.raises(RuntimeError, match="no"):
        Client().post("/live/notes/", {"text": "hello"})
    assert not Note.objects.exists()


def test_under_wsgi_the_page_says_that_it_is_not_live() -> None:
    """And the stream says so at once, where it would else wait for ever."""
    page = Client().get("/live/")
    assert "not live" in page.text and "live.js" not in page.text
    assert Client().get("/live/stream/").status_code == 501


# --- In a browser ---


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def tab(server: Server, chromium: Browser) -> Iterator[Tab]:
    """A page that is live. Its scripts, and its policy for them, complain of nothing until the end."""
    with chromium.open(server.url, viewport={"width": 1280, "height": 800}) as opened:
        look(opened)
        yield opened
        assert opened.problems == []


def look(tab: Tab) -> None:
    tab.go("/live/")
    tab.do(lambda page: expect(page.locator("#state")).to_have_text("live"))


def shows(tab: Tab, *texts: str) -> None:
    """Wait until a page shows these, from the top, and no others."""
    tab.do(lambda page: expect(page.locator("#notes li")).to_have_text(list(texts)))


def typing(text: str) -> Callable[[Page], None]:
    def write(page: Page) -> None:
        page.fill("#form input[name=text]", text)
        page.press("#form input[name=text]", "Enter")
        expect(page.locator("#form input[name=text]")).to_have_value("")

    return write


def test_what_one_tab_writes_appears_in_the_other(tab: Tab) -> None:
    """Both ways, at once, as text; neither page is loaded again."""
    other = tab.tab()
    look(other)
    for page in (tab, other):
        page.do(lambda page: page.evaluate("window.isSame = true"))
    tab.do(typing("from one"))
    shows(other, "from one")
    other.do(typing("<img src=x onerror=alert(1)>"))
    for page in (tab, other):
        shows(page, "<img src=x onerror=alert(1)>", "from one")
        assert page.do(lambda page: page.evaluate("window.isSame")) is True
    # It is stored, so who comes later sees it too.
    later = tab.tab()
    look(later)
    shows(later, "<img src=x onerror=alert(1)>", "from one")


def test_notes_come_again_after_the_listener_was_cut_off(tab: Tab) -> None:
    """Those of meanwhile as well."""
    other = tab.tab()
    look(other)
    ((pid, *_),) = wait_until(listeners)
    Note.objects.create(text="meanwhile")
    terminate(pid)
    shows(other, "meanwhile")
    tab.do(typing("again"))
    for page in (tab, other):
        shows(page, "again", "meanwhile")


def test_a_page_outlives_the_server(chromium: Browser) -> None:
    """It says that it is cut off, comes back by itself, and shows what was written meanwhile."""
    write("before")
    with serving() as first, chromium.open(first.url) as opened:
        look(opened)
        first.process.kill()
        opened.do(lambda page: expect(page.locator("#state")).to_have_text("connecting"))
        write("meanwhile")
        with serving(first.port):
            opened.do(lambda page: expect(page.locator("#state")).to_have_text("live", timeout=60_000))
            shows(opened, "meanwhile", "before")
            write("after")
            shows(opened, "after", "meanwhile", "before")


def test_a_page_comes_back_after_an_answer_that_is_no_stream(tab: Tab) -> None:
    """As a proxy gives while the server restarts; a browser would leave it at that."""
    answers: list[int] = []

    def refuse(route: Any) -> None:
        answers.append(502)
        route.fulfill(status=502, body="")

    def break_once(page: Page) -> None:
        page.route("**/live/stream/*", refuse, times=1)
        page.goto(f"{tab.url}/live/")
        expect(page.locator("#state")).to_have_text("live")

    tab.do(break_once)
    assert answers == [502]
    write("hello")
    shows(tab, "hello")
    assert "502" in tab.problems.pop()


def test_a_burst_is_shown(tab: Tab) -> None:
    """The newest hundred, the newest first."""
    Note.objects.all().delete()
    in_threads(4, lambda number: [write(f"{number} {n}") for n in range(50)])
    newest = list(Note.objects.values_list("text", flat=True)[: views.MAX_NOTES])
    shows(tab, *newest)


def test_a_closed_tab_ends_its_subscription(tab: Tab) -> None:
    """When the last is gone, nothing listens."""
    wait_until(listeners)
    tab.go("/live/notes/nowhere")
    tab.problems.clear()
    wait_until(lambda: not listeners())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits(server: Server, chromium: Browser, scheme: str, width: int) -> None:
    """On a desk and on a phone, by day and by night."""
    write("x" * 500)
    with chromium.open(server.url, viewport={"width": width, "height": 800}, color_scheme=scheme) as opened:
        look(opened)
        assert opened.do(lambda page: page.evaluate("document.documentElement.scrollWidth")) <= width
        background, colour = opened.do(
            lambda page: page.evaluate(
                "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
            )
        )
        assert (luminance(background) < 0.5) == (scheme == "dark") != (luminance(colour) < 0.5)
        assert opened.problems == []
