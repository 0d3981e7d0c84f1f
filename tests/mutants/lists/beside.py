"""Mutants of what stands beside the package."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import LIVE

MUTANTS = (
    Mutant(
        LIVE,
        "each stream keeps a connection",
        "../example_project/live/views.py",
        "        connection.close()\n",
        "        pass\n",
        ("tests/example_project/test_live_page.py::test_all_streams_share_one_connection_and_leave_nothing",),
    ),
    Mutant(
        LIVE,
        "all streams look at the table at once",
        "../example_project/live/views.py",
        "sync_to_async(notes_since, thread_sensitive=False)",
        "sync_to_async(notes_since)",
        ("tests/example_project/test_live_page.py::test_many_streams_that_look_at_the_table_make_few_connections",),
    ),
    Mutant(
        LIVE,
        "numbers are taken to commit in their order",
        "../example_project/live/views.py",
        "pk__gt=last - MAX_NOTES",
        "pk__gt=last",
        ("tests/example_project/test_live_page.py::test_a_smaller_number_that_commits_later_is_not_missed",),
    ),
    Mutant(
        LIVE,
        "the table is read first, and then it listens",
        "../example_project/live/views.py",
        ("    async with notes.listen() as messages:\n        gaps = None\n"),
        ("    messages = notes.listen()\n    if True:\n        gaps = None\n"),
        ("tests/example_project/test_live_page.py::test_a_note_between_the_look_and_the_first_step_is_heard",),
    ),
    Mutant(
        LIVE,
        "a quiet stream says nothing",
        "../example_project/live/views.py",
        '                yield ": still here\\n\\n"\n',
        "                pass\n",
        ("tests/example_project/test_live_page.py::test_a_quiet_stream_says_that_it_is_there",),
    ),
    Mutant(
        LIVE,
        "a stream is begun under WSGI",
        "../example_project/live/views.py",
        "    if not isinstance(request, ASGIRequest):\n",
        "    if False:\n",
        ("tests/example_project/test_live_page.py::test_under_wsgi_the_page_says_that_it_is_not_live",),
    ),
    Mutant(
        LIVE,
        "a note is stored that cannot be told",
        "../example_project/live/views.py",
        "    with transaction.atomic():\n",
        "    if transaction:\n",
        ("tests/example_project/test_live_page.py::test_a_note_and_its_message_are_one_transaction",),
    ),
    Mutant(
        LIVE,
        "the server waits for streams to end",
        "../example_project/live/management/commands/serve.py",
        ", timeout_graceful_shutdown=2)",
        ")",
        ("tests/example_project/test_live_page.py::test_the_server_stops_although_streams_are_open",),
    ),
)
