"""
The mutants of what tells an operator how it is: findings, probes.

As in ``mutants_list.py``.
"""

from tests.mutants_list import Mutant

FOUND = "what is wrong is found, and nothing else"
COUNTED = "what is counted happened"
PROBED = "a probe is told the truth"

DIAGNOSIS = "tests/test_diagnosis.py"

MUTANTS = (
    Mutant(
        FOUND,
        "the reaper's runs are not noted",
        "reaper.py",
        "        services.record_run(time.monotonic() - began, report, self.using)\n",
        "",
        (f"{DIAGNOSIS}::test_a_reaper_that_does_not_run",),
    ),
    Mutant(
        FOUND,
        "a queue with a consumer is reported too",
        "diagnosis.py",
        " and not backlog.has_consumer:",
        ":",
        (f"{DIAGNOSIS}::test_messages_that_nobody_consumes",),
    ),
    Mutant(
        FOUND,
        "messages that wait for their time count as due",
        "sql.py",
        "               WHERE queue_id = queue.name AND read_after <= statement_timestamp()\n"
        "               ORDER BY read_after, id\n               LIMIT %(limit)s)\n              UNION ALL\n"
        "              (SELECT published_at",
        "               WHERE queue_id = queue.name AND read_after <= 'infinity'\n"
        "               ORDER BY read_after, id\n               LIMIT %(limit)s)\n              UNION ALL\n"
        "              (SELECT published_at - interval '1 day'",
        (f"{DIAGNOSIS}::test_nothing_is_found_where_nothing_is_wrong",),
    ),
    Mutant(
        FOUND,
        "a session that only reads holds back nothing",
        "sql.py",
        "  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)\n",
        "  AND backend_xid IS NOT NULL\n",
        (f"{DIAGNOSIS}::test_a_session_that_holds_back_vacuum",),
    ),
    Mutant(
        FOUND,
        "it listens where it sends",
        "diagnosis.py",
        "    ear = dedicated_connection(listening, ",
        "    ear = dedicated_connection(using, ",
        (f"{DIAGNOSIS}::test_two_databases_that_are_not_one",),
    ),
    Mutant(
        FOUND,
        "an invalid index is as good as any",
        "sql.py",
        "SELECT (SELECT indisvalid AND indisready\n               AND ARRAY",
        "SELECT (SELECT ARRAY",
        (f"{DIAGNOSIS}::test_a_claim_index_that_claims_cannot_use",),
    ),
    Mutant(
        PROBED,
        "ready without the database",
        "health.py",
        "alive and condition.connected and self._has_database and not is_late",
        "alive and not is_late",
        ("tests/test_health.py::test_without_the_database_it_is_alive_and_not_ready",),
    ),
    Mutant(
        PROBED,
        "a claim that never ends is alive",
        "health.py",
        "condition.turn_age < sleep + STUCK",
        "condition.turn_age >= 0",
        ("tests/test_health.py::test_a_claim_that_never_ends_is_not_alive",),
    ),
    Mutant(
        PROBED,
        "late messages of other queues count",
        "health.py",
        "services.backlogs(self.consumer.using, self.consumer.queues)",
        "services.backlogs(self.consumer.using)",
        ("tests/test_health.py::test_late_messages_make_it_not_ready",),
    ),
    Mutant(
        COUNTED,
        "a transaction's later publishes are not",
        "services.py",
        "        counts[name] += count\n",
        "",
        ("tests/test_metrics.py::test_publishes_count_once_they_are_committed",),
    ),
    Mutant(
        COUNTED,
        "the hooks of two transactions share what they count",
        "services.py",
        "            counts = {}\n",
        "            counts.clear()\n",
        ("tests/test_metrics.py::test_a_hook_that_publishes_counts_as_well",),
    ),
    Mutant(
        COUNTED,
        "what is not counted is not told",
        "sql.py",
        "                count(*) FILTER (WHERE walk = 3)) >= %(most)s",
        "                count(*) FILTER (WHERE walk = 3)) > %(most)s",
        ("tests/test_metrics.py::test_a_scrape_looks_at_no_more_than_so_many",),
    ),
)
