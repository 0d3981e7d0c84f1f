"""
The mutants of the helpers for people's own tests.

As in ``mutants_list.py``.
"""

from tests.mutants_list import Mutant

PUBLISHED = "what was published is known, and nothing else is"
DRAINED = "a drain is what a worker does, and leaves the test as it was"
IMMEDIATE = "in immediate mode a handler runs when a commit would show its message"
MOVED = "time passes for all that counts it"
FAULTS = "a fault is what it says"
FRESH = "no test believes what another rolled back"
PYTEST = "the plugin gives what it says, and harms no run that does not use it"
SERVER = "a server for tests in one line"

HELPERS = "tests/test_testing.py"
PLUGIN = "tests/test_pytest_plugin.py"

MUTANTS = (
    Mutant(
        PUBLISHED,
        "what was rolled back stays",
        "testing/journal.py",
        ' and fates.get(entry.xmin) != "aborted"',
        "",
        (f"{HELPERS}::test_what_a_savepoint_rolled_back_was_not_published",),
    ),
    Mutant(
        PUBLISHED,
        "what the last test committed stays",
        "testing/journal.py",
        "entry.file == file and ",
        "",
        (f"{HELPERS}::test_a_flush_between_two_tests_does_no_harm",),
    ),
    Mutant(
        PUBLISHED,
        "what was handled is forgotten",
        "testing/journal.py",
        "    found |= {entry.message.id: entry.message for entry in _valid(alias) if entry.message.id > since}\n",
        "",
        (f"{HELPERS}::test_what_was_published_is_known_with_all_that_was_said",),
    ),
    Mutant(
        PUBLISHED,
        "what others have taken already is not known",
        "testing/journal.py",
        "    if len(entries) < len(ids):\n",
        "    if False:\n",
        (f"{HELPERS}::test_what_others_have_taken_already_is_known",),
    ),
    Mutant(
        PUBLISHED,
        "the journal grows for ever",
        "testing/journal.py",
        "    if is_long:\n",
        "    if False:\n",
        (f"{HELPERS}::test_the_journal_of_a_suite_that_never_asks_does_not_grow",),
    ),
    Mutant(
        PUBLISHED,
        "it is asked through Django's cursors",
        "testing/journal.py",
        "        rows: list[tuple[Any, ...]] = connection.connection.execute(statement, params or None).fetchall()\n",
        "        cursor = connection.cursor()\n"
        "        cursor.execute(statement, params or None)\n"
        "        rows: list[tuple[Any, ...]] = cursor.fetchall()\n",
        (f"{HELPERS}::test_noting_and_asking_runs_no_query_that_a_test_counts",),
    ),
    Mutant(
        PUBLISHED,
        "a capture goes on after its block",
        "testing/journal.py",
        "        self._ended = self._messages()\n",
        "        pass\n",
        (f"{HELPERS}::test_what_a_savepoint_rolled_back_was_not_published",),
    ),
    Mutant(
        PUBLISHED,
        "headers are not compared",
        "testing/assertions.py",
        '    headers = asked.pop("headers", {})\n',
        '    asked.pop("headers", {})\n    headers: dict[str, Any] = {}\n',
        (f"{HELPERS}::test_an_assertion_that_fails_tells_what_was_there_instead",),
    ),
    Mutant(
        DRAINED,
        "a failed statement ends the test's transaction",
        "inline.py",
        "        with raw.transaction():\n            return execute(statement, params, many, context)\n",
        "        return execute(statement, params, many, context)\n",
        (f"{HELPERS}::test_a_handler_that_fails_in_sql_leaves_the_tests_transaction_as_it_was",),
    ),
    Mutant(
        DRAINED,
        "what Django marked for rollback stays so",
        "inline.py",
        "        connection.needs_rollback = False\n",
        "        pass\n",
        (f"{HELPERS}::test_a_handler_that_catches_an_error_of_sql_goes_on_as_in_a_worker",),
    ),
    Mutant(
        DRAINED,
        "what fails beside Django's cursors breaks the transaction",
        "inline.py",
        "        if raw.info.transaction_status == TransactionStatus.INERROR:\n",
        "        if False:\n",
        (f"{HELPERS}::test_a_handler_that_fails_in_sql_leaves_the_tests_transaction_as_it_was",),
    ),
    Mutant(
        DRAINED,
        "an atomic handler keeps what it wrote before it failed",
        "inline.py",
        '    besides = handler.queue.using if handler.ack == "atomic" else None\n',
        "    besides = None\n",
        (f"{HELPERS}::test_a_statement_that_fails_in_an_atomic_handler_ends_its_transaction",),
    ),
    Mutant(
        DRAINED,
        "a broken transaction is taken for an outage",
        "consumer.py",
        "        if self._is_inline:\n            # A connection that is closed",
        "        if False:\n            # A connection that is closed",
        (f"{HELPERS}::test_a_drain_in_a_broken_transaction_is_an_error",),
    ),
    Mutant(
        DRAINED,
        "the test's count of queries is reset",
        "consumer.py",
        "            if not self._is_inline:\n                # With DEBUG",
        "            if True:\n                # With DEBUG",
        (f"{HELPERS}::test_a_drain_can_be_counted",),
    ),
    Mutant(
        DRAINED,
        "the first error does not end it",
        "testing/draining.py",
        '            alone = {"concurrency": 1, "prefetch": 1} if raises else {}\n',
        "            alone: dict[str, int] = {}\n",
        (f"{HELPERS}::test_an_error_of_a_handler_is_raised_where_asked_for",),
    ),
    Mutant(
        DRAINED,
        "delayed messages are drained unasked",
        "testing/draining.py",
        "            wait = _next_delay(names, alias) if include_delayed else None\n",
        "            wait = _next_delay(names, alias)\n",
        (f"{HELPERS}::test_delayed_messages_are_drained_only_when_asked_for",),
    ),
    Mutant(
        DRAINED,
        "no end is no error",
        "testing/draining.py",
        "        if limit is None and done.deliveries >= most:\n",
        "        if False:\n",
        (f"{HELPERS}::test_a_drain_without_an_end_is_an_error",),
    ),
    Mutant(
        DRAINED,
        "dead letters are not told",
        "testing/draining.py",
        "        if name in self._names:\n",
        "        if False:\n",
        (f"{HELPERS}::test_a_drain_tells_what_happened",),
    ),
    Mutant(
        IMMEDIATE,
        "at publish, inside the block",
        "testing/immediately.py",
        "        if self._is_draining or not _shows(using):\n",
        "        if self._is_draining:\n",
        (f"{HELPERS}::test_a_handler_runs_when_its_message_would_be_committed",),
    ),
    Mutant(
        IMMEDIATE,
        "not at the block's end",
        "testing/immediately.py",
        "            if using in self._pending:\n",
        "            if False:\n",
        (f"{HELPERS}::test_a_handler_runs_when_its_message_would_be_committed",),
    ),
    Mutant(
        IMMEDIATE,
        "inside another handler",
        "testing/immediately.py",
        "        if self._is_draining or not _shows(using):\n",
        "        if not _shows(using):\n",
        (f"{HELPERS}::test_what_a_handler_publishes_is_handled_too",),
    ),
    Mutant(
        MOVED,
        "due times stay",
        "testing/clock.py",
        '                waiting.update(read_after=F("read_after") - step)\n',
        "                pass\n",
        (f"{HELPERS}::test_delays_end_messages_expire_and_leases_lapse",),
    ),
    Mutant(
        MOVED,
        "only messages grow older",
        "testing/clock.py",
        "            if names and model is not QueueMinute:\n",
        "            if model is MessageQueueItem:\n",
        (f"{HELPERS}::test_queues_fall_idle_owners_are_missed_tombstones_are_forgotten",),
    ),
    Mutant(
        MOVED,
        "parked dead letters are moved",
        "testing/clock.py",
        ".filter(read_after__lt=PARKED)",
        ".filter(read_after__isnull=False)",
        (f"{HELPERS}::test_what_is_parked_stays_parked",),
    ),
    Mutant(
        MOVED,
        "beliefs stay young",
        "testing/clock.py",
        "    services.age_beliefs(seconds)\n",
        "",
        (f"{HELPERS}::test_what_the_process_believes_grows_older",),
    ),
    Mutant(
        FAULTS,
        "a lease lapses that is another's",
        "testing/clock.py",
        "        pk=message.id, lease_token=message.token\n",
        "        pk=message.id\n",
        (f"{HELPERS}::test_a_lease_that_is_lost_cannot_lapse",),
    ),
    Mutant(
        FAULTS,
        "a queue is reaped that holds messages",
        "testing/faults.py",
        "    if not services.reap_queue(name, idle_for, alias):\n",
        "    if not services.reap_queue(name, idle_for, alias) and False:\n",
        (f"{HELPERS}::test_a_queue_is_reaped_on_demand",),
    ),
    Mutant(
        FAULTS,
        "topics' notifications are sent",
        "testing/faults.py",
        '        mock.patch.object(services, "_notify_topic", lose_topics),\n',
        "",
        (f"{HELPERS}::test_a_lost_wake_up_is_told_and_not_sent",),
    ),
    Mutant(
        FRESH,
        "a rolled-back declaration is believed",
        "services.py",
        "    if connection.get_autocommit():\n        key = _key(connection, name)\n",
        "    if True:\n        key = _key(connection, name)\n",
        (f"{HELPERS}::FirstTests",),
    ),
    Mutant(
        FRESH,
        "a wake-up that was rolled back swallows the next one",
        "services.py",
        "    if connection.get_autocommit():\n        # Stamped before",
        "    if True:\n        # Stamped before",
        (f"{HELPERS}::FirstTests",),
    ),
    Mutant(
        PYTEST,
        "what was published before the test counts",
        "testing/verbs.py",
        "        self.since = mark(using)\n",
        "        self.since = 0\n",
        (f"{PLUGIN}::test_the_fixtures_do_what_they_say",),
    ),
    Mutant(
        SERVER,
        "each process starts its own",
        "devdb.py",
        "    os.environ[TEST_SERVER] = str(cluster.home)\n",
        "",
        (f"{PLUGIN}::test_a_server_in_one_line",),
    ),
)
