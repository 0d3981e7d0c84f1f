"""The pages of a list of messages: found by key, at any depth, while messages come and go."""

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pgqueue.admin import MessageQueueItemAdmin
from django_pgqueue.models import MessageQueueItem
from tests.support.rows import make_message, make_queue
from tests.support.sessions import fetch
from tests.support.waiting import mostly_full

pytestmark = pytest.mark.django_db

ITEM = MessageQueueItem._meta.db_table
#: More than any list here has.
MAX_PAGES = 500

LIST = reverse("admin:django_pgqueue_messagequeueitem_changelist")
PER_PAGE = 12

# Of each state: fresh, given back or delayed at the same moment and at others, and at no moment that Python knows.
MESSAGES = f"""
INSERT INTO {ITEM} (queue_id, payload, read_after, expires_at, lease_expires_at, lease_token, dead_lettered_from,
                    dead_lettered_at)
SELECT CASE WHEN number %% 5 = 4 THEN 'b' ELSE 'a' END,
       '1',
       CASE WHEN number %% 11 = 3 THEN statement_timestamp() + interval '1 hour'
            WHEN number %% 11 = 5 THEN statement_timestamp() - number * interval '1 microsecond'
            WHEN number %% 11 = 7 THEN statement_timestamp() + number * interval '1 day'
            WHEN number %% 97 = 8 THEN '-infinity'::timestamptz
            WHEN number %% 97 = 9 THEN 'infinity'::timestamptz
       END,
       CASE WHEN number %% 13 = 1 THEN statement_timestamp() END,
       CASE WHEN number %% 6 = 1 THEN statement_timestamp() + interval '1 hour' END,
       CASE WHEN number %% 6 = 1 THEN gen_random_uuid() END,
       CASE WHEN number %% 5 = 2 THEN 'b' END,
       CASE WHEN number %% 5 = 2 THEN statement_timestamp() END
FROM generate_series(%s::int, %s::int) AS number
"""


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few hundred messages, on pages of a few."""
    monkeypatch.setattr(MessageQueueItemAdmin, "list_per_page", PER_PAGE)
    for name in ("a", "b"):
        make_queue(name)
    fetch(MESSAGES, [1, 300])
    # Counted from the first: where the ids begin depends on the tests before.
    first = f"(SELECT min(id) FROM {ITEM})"
    fetch(f"UPDATE {ITEM} SET queue_id = NULL, orphaned_from = 'gone' WHERE (id - {first}) %% 17 = 4")
    yield


class Page:
    """A page of the list, and where it leads."""

    def __init__(self, client: Client, url: str) -> None:
        answer = client.get(url)
        assert answer.status_code == 200
        self.text = answer.content.decode()
        self.ids = [row.pk for row in answer.context["cl"].result_list]
        self.told = [str(message) for message in answer.context["messages"]]

    def link(self, rel: str) -> str | None:
        """Return where a link leads, that a keyboard reaches."""
        found = re.findall(rf'<a href="([^"]+)" rel="{rel}">', self.text)
        assert len(found) <= 1
        return LIST + html.unescape(found[0]) if found else None


def walk(client: Client, url: str | None, rel: str) -> Iterator[Page]:
    """Yield page after page. More than the lists of these tests can have is an error: a link leads back."""
    for _ in range(MAX_PAGES):
        if url is None:
            return
        page = Page(client, url)
        yield page
        url = page.link(rel)
    raise AssertionError(f"more than {MAX_PAGES} pages")


def everything(query: str) -> list[int]:
    """Return the ids of a list in its order, as one page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MessageQueueItemAdmin, "list_per_page", 10_000)
        client = Client()
        client.force_login(admin())
        return Page(client, LIST + query).ids


def admin() -> Any:
    from django.contrib.auth.models import User

    return User.objects.filter(is_superuser=True)[0]


LISTS = {
    "": 300,
    "?o=0": 300,
    "?queue=a": 220,
    "?queue=a&o=0": 220,
    "?queue=a&state=ready": 90,
    "?queue=a&state=delayed": 20,
    "?queue=a&state=leased": 35,
    "?queue=a&state=dead": 25,
    "?state=ready": 110,
    "?state=delayed": 30,
    "?state=leased": 45,
    "?state=dead": 30,
    "?state=expired": 15,
    "?state=orphaned": 13,
    "?dead_from=b": 55,
    "?dead_from=b&queue=a": 40,
}


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("query", mostly_full(LISTS, "", "?queue=a", "?queue=a&state=ready"))
def test_each_message_is_on_one_page(admin_client: Client, query: str) -> None:
    """In the order of the list, forwards and backwards; the filters stay."""
    whole = everything(query)
    assert len(whole) >= LISTS[query] > PER_PAGE
    pages = list(walk(admin_client, LIST + query, "next"))
    assert [pk for page in pages for pk in page.ids] == whole
    assert pages[0].link("prev") is None and all(len(page.ids) == PER_PAGE for page in pages[:-1])
    back = list(walk(admin_client, pages[-1].link("prev"), "prev"))
    assert [page.ids for page in reversed(back)] == [page.ids for page in pages[:-1]]
    # And forth again, from what was reached backwards.
    assert Page(admin_client, str(back[-1].link("next"))).ids == pages[1].ids
    assert set(re.findall(r"\w+=", query)) <= set(re.findall(r"\w+=", str(pages[0].link("next"))))


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize(
    ("query", "rel"),
    [
        ("", "next"),
        ("?queue=a", "prev"),
        *mostly_full(
            [(query, "next") for query in ("?o=0", "?queue=a", "?queue=a&state=ready", "?queue=a&state=delayed")]
        ),
        *mostly_full([("", "prev"), ("?state=dead", "prev")]),
    ],
)
def test_messages_that_come_and_go_skip_and_double_none(admin_client: Client, query: str, rel: str) -> None:
    """Not even where the message goes that a page ended with."""
    whole = everything(query)
    start: str | None = LIST + query
    if rel == "prev":
        *_, last = walk(admin_client, start, "next")
        start, whole = last.link("prev"), [pk for pk in whole if pk not in last.ids]
    seen: list[int] = []
    gone: set[int] = set()
    for number, page in enumerate(walk(admin_client, start, rel)):
        seen += page.ids
        left = [pk for pk in whole if pk not in seen]
        gone |= {page.ids[-1], page.ids[0], *left[3::20], *seen[2::9]}
        fetch(f"DELETE FROM {ITEM} WHERE id = ANY (%s)", [list(gone)])
        fetch(MESSAGES, [1000 + 5 * number, 1004 + 5 * number])
    assert len(seen) == len(set(seen))
    assert set(whole) - gone <= set(seen)
    places = {pk: place for place, pk in enumerate(whole)}
    order = [places[pk] for pk in seen if pk in places]
    assert len(seen) > PER_PAGE
    if rel == "next":
        assert order == sorted(order)


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize(
    ("query", "key"),
    [
        *[
            ("?", key)
            for key in ("x", "", "-1", "9" * 19, "9" * 40, "_5", "1;2", "1\0", "٣", "2026-01-01 00:00:00+00_5")
        ],
        *[("?queue=a&", key) for key in ("5", "x_5", "_x", "2026-99-99 00:00:00+00_5", "_9999999999999999999", "'_1")],
    ],
)
@pytest.mark.parametrize("place", ["after", "before"])
def test_what_is_no_key_gives_the_first_page(admin_client: Client, query: str, key: str, place: str) -> None:
    """With a word, and with the filters."""
    params = dict(pair.split("=") for pair in query.strip("?&").split("&") if pair)
    answer = admin_client.get(LIST, {**params, place: key})
    assert answer.status_code == 200
    shown = answer.context["cl"].result_list
    assert [row.pk for row in shown] == everything(query.rstrip("&"))[:PER_PAGE]
    assert [str(message) for message in answer.context["messages"]] == [
        "That page no longer exists. This is the first page."
    ]


@pytest.mark.usefixtures("messages")
def test_a_page_whose_messages_are_gone_gives_the_first_one(admin_client: Client) -> None:
    """Behind the last one, and before the first one."""
    first, second = Page(admin_client, LIST), Page(admin_client, str(Page(admin_client, LIST).link("next")))
    assert first.told == []
    fetch(f"DELETE FROM {ITEM} WHERE id = ANY (%s)", [first.ids])
    page = Page(admin_client, str(second.link("prev")))
    assert page.ids == second.ids and page.told != [] and page.link("prev") is None
    fetch(f"DELETE FROM {ITEM} WHERE NOT id = ANY (%s)", [second.ids])
    assert Page(admin_client, str(second.link("next"))).ids == second.ids
    # A choice of another filter begins at its first page.
    assert (
        "after=" not in second.text.split("changelist-filter")[1]
        and "before=" not in second.text.split("changelist-filter")[1]
    )


@pytest.mark.usefixtures("messages")
def test_a_page_says_what_is_on_it(admin_client: Client) -> None:
    """Nobody counts the others."""
    first = Page(admin_client, LIST)
    assert f"{PER_PAGE} message queue items on this page" in first.text and ">Older</a>" in first.text
    assert ">Newer</a>" in Page(admin_client, str(first.link("next"))).text
    assert ">Newer</a>" in Page(admin_client, LIST + "?queue=a&state=leased").text
    fetch(f"DELETE FROM {ITEM} WHERE id <> %s", [first.ids[0]])
    text = Page(admin_client, LIST).text
    assert "1 message queue item\n" in text and "on this page" not in text


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("place", ["after", "before"])
@pytest.mark.parametrize(
    ("query", "condition"),
    [
        ("?", r"id [<>] "),
        ("?queue=a&", r"read_after IS NULL\) AND \(id [<>] "),
        ("?queue=a&due&", r"ROW\(read_after, id\) [<>] ROW\("),
        ("?dead_from=b&", r"id [<>] "),
    ],
)
def test_a_page_in_the_middle_reads_no_more_than_it_shows(
    admin_client: Client, query: str, condition: str, place: str
) -> None:
    """Its key is where the index is entered; nothing is sorted, and what is before it is not read."""
    make_queue("a")
    due = "statement_timestamp() + interval '1 hour'" if "due" in query else "NULL"
    fetch(
        f"INSERT INTO {ITEM} (queue_id, payload, read_after, dead_lettered_from, dead_lettered_at)"
        f" SELECT 'a', '1', {due}, 'b', statement_timestamp() FROM generate_series(1, 20000)"
    )
    fetch(f"VACUUM ANALYZE {ITEM}")
    middle = make_message("a", **({"due_in": 3600} if "due" in query else {})).pk - 10_000
    ((text,),) = fetch(f"SELECT read_after::text FROM {ITEM} WHERE id = %s", [middle])
    key = f"{text or ''}_{middle}" if "queue" in query else str(middle)
    params = dict(pair.split("=") for pair in query.strip("?&").split("&") if "=" in pair)
    with CaptureQueriesContext(connection) as captured:
        answer = admin_client.get(LIST, {**params, place: key})
    (page,) = [each["sql"] for each in captured if f'FROM "{ITEM}"' in each["sql"]]
    assert [row.pk for row in answer.context["cl"].result_list] != []
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) {page}")
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Sort" not in plan and "Removed by Filter" not in plan, plan
    assert re.search(rf"Index Cond: .*{condition}", plan), plan
