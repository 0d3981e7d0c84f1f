"""Mutants of runtime/."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import EVERYBODY, PREPARED

MUTANTS = (
    Mutant(
        EVERYBODY,
        "a thread of the listener goes on where another has begun",
        "runtime/listener.py",
        "            if self._thread is not threading.current_thread():\n",
        "            if self._thread is None:\n",
        ("tests/subscriptions/test_subscriptions.py::test_one_that_opens_while_the_last_one_closes_is_the_only_one",),
    ),
    Mutant(
        EVERYBODY,
        "closing a subscription takes the listener's lock",
        "runtime/listener.py",
        "        channel_set.is_removed = True\n",
        ("        with self._lock:\n            channel_set.is_removed = True\n"),
        ("tests/example_project/test_live_messages.py::test_closing_takes_no_lock",),
    ),
    Mutant(
        PREPARED,
        "nothing is prepared",
        "runtime/prepared.py",
        "    raw.prepare_threshold = PREPARE_THRESHOLD if hot.may_prepare else None\n",
        "",
        ("tests/runtime/test_prepared_publish.py::test_a_connection_that_publishes_often_prepares_it",),
    ),
    Mutant(
        PREPARED,
        "the project's statements are prepared from then on",
        "runtime/prepared.py",
        "        raw.prepare_threshold = threshold\n",
        "        pass\n",
        ("tests/runtime/test_prepared_publish.py::test_the_project_s_statements_are_not_prepared",),
    ),
    Mutant(
        PREPARED,
        "statements are prepared behind a pooler",
        "runtime/prepared.py",
        "        hot.may_prepare = is_direct(raw)\n",
        "        hot.may_prepare = True\n",
        ("tests/runtime/test_prepared_publish.py::test_nothing_is_prepared_through_another_pooler",),
    ),
    Mutant(
        PREPARED,
        "nobody notices that the project ended them",
        "runtime/prepared.py",
        "            if self.statusmessage in ENDING:\n",
        "            if False:\n",
        (
            "tests/runtime/test_prepared_lost.py::test_publishing_survives_what_ends_prepared_statements",
            "tests/runtime/test_prepared_lost.py::test_each_request_may_begin_with_that",
        ),
    ),
    Mutant(
        PREPARED,
        "statements that were ended unseen are not forgotten",
        "runtime/prepared.py",
        ("        _forget(raw)\n        return cursor"),
        "        return cursor",
        ("tests/runtime/test_prepared_lost.py::test_autocommit_survives_statements_that_were_ended_unseen",),
    ),
    Mutant(
        PREPARED,
        "a closed connection is kept",
        "runtime/prepared.py",
        "    cursor = psycopg.Cursor(raw)\n",
        ("    cursor = psycopg.Cursor(raw)\n    _hot[Hot] = raw\n"),
        ("tests/runtime/test_prepared_publish.py::test_a_closed_connection_is_forgotten",),
    ),
    Mutant(
        PREPARED,
        "an engine's own cursors are passed by",
        "runtime/prepared.py",
        "        or not _are_django_s(_cursors_of(type(connection)))\n",
        "",
        ("tests/runtime/test_prepared_publish.py::test_an_engine_that_makes_its_own_cursors_has_them_used",),
    ),
    Mutant(
        PREPARED,
        "execute wrappers are passed by",
        "runtime/prepared.py",
        (
            '        any(getattr(wrapper, "__func__", wrapper) not in INDIFFERENT for wrapper in connection.execute_wrappers)\n'
            "        or connection"
        ),
        "        connection",
        ("tests/runtime/test_prepared_publish.py::test_an_execute_wrapper_sees_each_publish",),
    ),
    Mutant(
        PREPARED,
        "a broken transaction is not told as Django does",
        "runtime/prepared.py",
        "    connection.validate_no_broken_transaction()\n",
        "",
        ("tests/runtime/test_prepared_lost.py::test_a_broken_transaction_is_told_as_django_does",),
    ),
    Mutant(
        PREPARED,
        "health checks are left out",
        "runtime/prepared.py",
        "        connection.close_if_health_check_failed()\n",
        "        pass\n",
        ("tests/runtime/test_prepared_lost.py::test_health_checks_are_made",),
    ),
)
