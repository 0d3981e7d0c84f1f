"""
The mutants of what tells an operator how it is: findings, probes.

As in ``mutants_list.py``.
"""

from tests.mutants_list import Mutant

FOUND = "what is wrong is found, and nothing else"
COUNTED = "what is counted happened"
ALLOWED = "in the admin one does what one may, and it is written down"
TOLD = "a minute tells what became of messages"
CELERY = "a task of Celery's is a message like any other"
PROBED = "a probe is told the truth"
WRITTEN = "the reference says what the code does"

DIAGNOSIS = "tests/test_diagnosis.py"
REFERENCE = "tests/test_reference.py"
TRANSPORT = "tests/test_celery_transport.py"

MUTANTS = (
    Mutant(
        FOUND,
        "the reaper's runs are not noted",
        "reaper.py",
        "            services.record_run(time.monotonic() - began, report, self.using)\n",
        "            pass\n",
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
        "SELECT (SELECT indisvalid AND indisready AND indoption",
        "SELECT (SELECT indoption",
        (f"{DIAGNOSIS}::test_a_claim_index_that_claims_cannot_use",),
    ),
    Mutant(
        PROBED,
        "ready without the database",
        "health.py",
        "                and condition.connected\n                and self._has_database\n",
        "",
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
        "services.backlogs(using, self.consumer.queues)",
        "services.backlogs(using)",
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
    Mutant(
        ALLOWED,
        "whoever may look may operate",
        "admin/base.py",
        "django_pgqueue.change_messagequeue",
        "django_pgqueue.view_messagequeue",
        ("tests/test_admin_operations.py::test_who_may_only_look_can_do_nothing",),
    ),
    Mutant(
        ALLOWED,
        "it is not written down",
        "admin/queues.py",
        "        self.log_change(request, row, outcome)\n",
        "",
        ("tests/test_admin_operations.py::test_a_queue_is_paused_and_resumed",),
    ),
    Mutant(
        ALLOWED,
        "a purge takes any name",
        "admin/operations.py",
        "        if name != self.row.name:\n",
        "        if not name:\n",
        ("tests/test_admin_operations.py::test_a_purge_wants_the_name_typed",),
    ),
    Mutant(
        ALLOWED,
        "publishing rewrites the queue's attributes",
        "queues.py",
        "return Queue(name, **stored._asdict(), using=using)",
        "return Queue(name, using=using)",
        (
            "tests/test_admin_operations.py::test_a_message_is_published",
            "tests/commands/test_publish_messages.py::test_a_queue_that_another_project_declared_stays_as_it_is",
        ),
    ),
    Mutant(
        TOLD,
        "a heartbeat tells all of it again",
        "consumer.py",
        "                lane.told = tally\n",
        "                pass\n",
        ("tests/test_history.py::test_it_tells_with_each_heartbeat_and_nothing_twice",),
    ),
    Mutant(
        TOLD,
        "counts of one minute replace each other",
        "sql.py",
        "SET handled = kept.handled + excluded.handled,\n",
        "SET handled = excluded.handled,\n",
        ("tests/test_history.py::test_counts_of_several_processes_add_up",),
    ),
    Mutant(
        WRITTEN,
        "another default than the page has",
        "conf.py",
        "    LEASE: float = 60\n",
        "    LEASE: float = 30\n",
        (f"{REFERENCE}::test_the_pages_are_made_of_the_code",),
    ),
    Mutant(
        WRITTEN,
        "a count may be larger than the database holds",
        "checks.py",
        "MAX_SECONDS if float in allowed else MAX_COUNT",
        "MAX_SECONDS",
        ("tests/test_schema.py::test_wrong_settings_are_found",),
    ),
    Mutant(
        WRITTEN,
        "an option has another default than its help says",
        "management/commands/consume_queues.py",
        "            default=30.0,\n",
        "            default=60.0,\n",
        (f"{REFERENCE}::test_the_pages_are_made_of_the_code",),
    ),
    Mutant(
        WRITTEN,
        "JSON without a key of the page",
        "management/commands/diagnose_queues.py",
        '        "remedy": remedy_of(message),\n',
        "",
        (f"{REFERENCE}::test_json_has_the_keys_of_the_page",),
    ),
    Mutant(
        WRITTEN,
        "a signal is logged at another level",
        "signals.py",
        '    logger.info("queue reaped queue=',
        '    logger.warning("queue reaped queue=',
        (f"{REFERENCE}::test_the_pages_are_made_of_the_code",),
    ),
    Mutant(
        WRITTEN,
        "a signal carries more than the page says",
        "consumer.py",
        "signals.consumer_stopped.send_robust(self.id, using=self.using, queues=names)",
        "signals.consumer_stopped.send_robust(self.id, using=self.using, queues=names, handled=self.handled)",
        (f"{REFERENCE}::test_the_pages_are_made_of_the_code",),
    ),
    Mutant(
        WRITTEN,
        "what is dead counts as ready",
        "models.py",
        "queue__isnull=False, dead_lettered_at__isnull=True).exclude(",
        "queue__isnull=False).exclude(",
        (f"{REFERENCE}::test_each_message_is_in_the_state_of_its_condition_and_in_no_other",),
    ),
    Mutant(
        CELERY,
        "an ETA is for the worker to wait for",
        "celery_transport.py",
        "delay=delay_of(message), ",
        "delay=0, ",
        (f"{TRANSPORT}::test_an_eta_is_a_delay_of_the_message",),
    ),
    Mutant(
        CELERY,
        "a task that reaches no queue is forgotten",
        "celery_transport.py",
        "        if not (reached or is_transient or is_fanout):\n",
        "        if reached is None:\n",
        (f"{TRANSPORT}::test_a_task_that_would_reach_nobody_is_refused",),
    ),
    Mutant(
        CELERY,
        "a transient task is told to those who listen only",
        "celery_transport.py",
        "        names = () if is_fanout else",
        "        names = () if is_fanout or is_transient else",
        (f"{TRANSPORT}::test_a_transient_task_has_a_row_too",),
    ),
    Mutant(
        CELERY,
        "a worker claims more than its prefetch",
        "celery_transport.py",
        "        return most - sum(len(feed.held) for feed in list(self.feeds.values()))\n",
        "        return most\n",
        (f"{TRANSPORT}::test_a_worker_holds_what_its_prefetch_allows_and_gives_it_back",),
    ),
    Mutant(
        CELERY,
        "a worker that ends keeps what it holds",
        "celery_transport.py",
        "        for tag in list(self.held):\n            self.settle(tag, RELEASE)\n",
        "",
        (f"{TRANSPORT}::test_a_worker_holds_what_its_prefetch_allows_and_gives_it_back",),
    ),
    Mutant(
        CELERY,
        "leases are not extended for long",
        "celery_transport.py",
        "timeout=MAX_SECONDS)",
        "timeout=1)",
        (f"{TRANSPORT}::test_what_takes_longer_than_a_lease_runs_once",),
    ),
    Mutant(
        CELERY,
        "a refused task is done",
        "celery_transport.py",
        'lambda feed, held: Outcome("reject", "rejected")',
        "lambda feed, held: ACK",
        (f"{TRANSPORT}::test_a_task_that_kills_its_process_and_one_that_is_refused_are_dead_letters",),
    ),
    Mutant(
        CELERY,
        "a requeued task does not count",
        "celery_transport.py",
        'return Outcome("nack", "requeued by its worker", feed.queue.retry_delay(held.message))',
        "return RELEASE",
        (f"{TRANSPORT}::test_a_task_that_kills_its_process_and_one_that_is_refused_are_dead_letters",),
    ),
    Mutant(
        CELERY,
        "a broadcast is for live subscribers",
        "celery_transport.py",
        "            self.connection.topic(exchange).bind(self.connection.queue(queue))\n",
        "            pass\n",
        (f"{TRANSPORT}::test_a_broadcast_reaches_each_worker_once",),
    ),
    Mutant(
        CELERY,
        "a broken connection stays",
        "celery_transport.py",
        "        connections[self.using].close_if_unusable_or_obsolete()\n",
        "",
        (f"{TRANSPORT}::test_an_outage_costs_a_worker_nothing",),
    ),
    Mutant(
        CELERY,
        "a worker that cannot claim sits there",
        "celery_transport.py",
        "            raise self.error\n",
        "            return False\n",
        (f"{TRANSPORT}::test_a_worker_without_the_tables_ends",),
    ),
)
