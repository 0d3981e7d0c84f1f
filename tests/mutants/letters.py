"""
The mutants of dead letters, owners, pauses, batches, events, durability and memory.

As in ``promises.py``.
"""

from tests.mutants.mutant import Mutant

ONE_CONSUMER = "an exclusive queue has one consumer at a time"
PAUSE = "a paused queue gives nothing"
GO_BACK = "dead letters go back once, with a fresh count"
BATCH = "each message of a batch ends by itself"
CAUSE = "a queue that comes back says why it was gone"
SPARES = "a queue that is not durable spares the disk and nothing else"
MEMORY = "a worker's memory is bounded"
HISTORY = "the history of a dead letter tells what happened"
FITS = "a payload is what its queue's schema says"

MUTANTS = (
    Mutant(
        ONE_CONSUMER,
        "who was woken in vain sleeps at once",
        "consumer.py",
        "(settings.NOTIFY_INTERVAL if lane.look_again else settings.POLL_INTERVAL)",
        "settings.POLL_INTERVAL",
        (
            "tests/test_exclusive.py::test_an_owner_that_is_stopped_in_good_order_hands_over_at_once",
            "tests/test_pause.py::test_a_resume_right_after_a_publish_wakes_them_too",
        ),
    ),
    Mutant(
        ONE_CONSUMER,
        "the owner is not compared again under the lock",
        "sql.py",
        "    WHERE queue.exclusive_consumer_id IS NOT DISTINCT FROM stale.owner\n",
        "    WHERE true\n",
        (
            "tests/test_exclusive.py::test_candidates_that_saw_the_same_dead_owner_do_not_both_win",
            "tests/test_exclusive.py::test_of_many_candidates_for_a_dead_owner_one_wins",
        ),
    ),
    Mutant(
        ONE_CONSUMER,
        "a claim does not lock the row that names the owner",
        "sql.py",
        "AND exclusive AND exclusive_consumer_id = %(consumer)s\n    FOR SHARE\n",
        "AND exclusive AND exclusive_consumer_id = %(consumer)s\n",
        ("tests/test_exclusive.py::test_a_claim_waits_for_a_change_of_the_owner_that_is_under_way",),
    ),
    Mutant(
        ONE_CONSUMER,
        "whoever claims owns",
        "sql.py",
        "AND exclusive AND exclusive_consumer_id = %(consumer)s\n",
        "AND exclusive AND %(consumer)s::uuid IS NOT NULL\n",
        (
            "tests/test_exclusive.py::test_of_two_processes_one_handles_everything",
            "tests/test_exclusive.py::test_who_claims_by_hand_owns_the_queue_and_a_stranger_gets_nothing",
        ),
    ),
    Mutant(
        ONE_CONSUMER,
        "a forked child claims as its parent",
        "services.py",
        "    consumer = _claimers.setdefault(os.getpid(), uuid4())\n",
        "    consumer = _claimers.setdefault(0, uuid4())\n    _claimers[os.getpid()] = consumer\n",
        ("tests/test_exclusive.py::test_a_forked_child_is_another_claimer",),
    ),
    Mutant(
        ONE_CONSUMER,
        "a declare forgets the owner",
        "sql.py",
        "    dead_letter = excluded.dead_letter,\n    max_deliveries = excluded.max_deliveries\nRETURNING xmax = 0\n",
        "    dead_letter = excluded.dead_letter,\n"
        "    max_deliveries = excluded.max_deliveries,\n"
        "    exclusive_consumer_id = NULL\n"
        "RETURNING xmax = 0\n",
        ("tests/test_exclusive.py::test_declares_and_publishes_never_touch_the_owner",),
    ),
    Mutant(
        PAUSE,
        "a full consumer is not told",
        "consumer.py",
        "                self._heed_pause(now)\n",
        "",
        ("tests/test_pause.py::test_a_full_consumer_stops_too",),
    ),
    Mutant(
        PAUSE,
        "a paused queue may be reaped",
        "sql.py",
        "WHERE auto_deleted\n  AND paused_at IS NULL\n  AND last_active",
        "WHERE auto_deleted\n  AND last_active",
        ("tests/test_pause.py::test_a_paused_queue_is_not_reaped",),
    ),
    Mutant(
        GO_BACK,
        "what died again is sent again",
        "sql.py",
        "      AND id > %(after)s\n      AND dead_lettered_at <= %(before)s\n",
        "      AND id > %(after)s AND %(before)s IS NOT NULL\n",
        ("tests/test_redrive.py::test_what_dies_meanwhile_for_the_first_time_is_for_the_next_redrive",),
    ),
    Mutant(
        GO_BACK,
        "the old count stays",
        "sql.py",
        "    lease_token = NULL,\n    delivery_count = 0,\n    dead_lettered_from = dead_letter_path ->> -2,\n",
        "    lease_token = NULL,\n    dead_lettered_from = dead_letter_path ->> -2,\n",
        ("tests/test_redrive.py::test_deliveries_on_the_dead_letter_queue_do_not_count_either",),
    ),
    Mutant(
        GO_BACK,
        "a letter of a chain goes all the way back",
        "sql.py",
        "    WHERE dead_lettered_from = (SELECT name FROM queue)\n      AND id > %(after)s\n",
        "    WHERE dead_letter_path ? (SELECT name FROM queue)\n      AND id > %(after)s\n",
        ("tests/test_redrive.py::test_a_letter_of_a_chain_goes_one_step_back",),
    ),
    Mutant(
        GO_BACK,
        "a redrive takes what somebody holds",
        "sql.py",
        "      AND dead_lettered_at <= %(before)s\n"
        "      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())\n"
        "      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))\n"
        "      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)\n"
        "      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)\n"
        "    ORDER BY dead_lettered_from, id\n",
        "      AND dead_lettered_at <= %(before)s\n"
        "      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))\n"
        "      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)\n"
        "      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)\n"
        "    ORDER BY dead_lettered_from, id\n",
        ("tests/test_redrive.py::test_what_somebody_holds_is_left",),
    ),
    Mutant(
        GO_BACK,
        "the others do not wait for the canary",
        "redrive.py",
        "            self._watch(sent, before)\n",
        "",
        ("tests/test_redrive_canary.py::test_a_canary_that_dies_again_stops_the_redrive",),
    ),
    Mutant(
        GO_BACK,
        "a queue of a cycle is visited again",
        "sql.py",
        "           CASE WHEN target <> name AND NOT path ? target THEN target END AS target\n",
        "           target\n",
        ("tests/cases/test_retry_letters_cases.py::test_b69_a_cycle_made_by_sql_is_left_after_one_round",),
    ),
    Mutant(
        GO_BACK,
        "a purge takes what comes in meanwhile",
        "sql.py",
        "      AND published_at <= %(before)s\n",
        "      AND %(before)s IS NOT NULL\n",
        ("tests/test_purge.py::test_what_comes_in_meanwhile_stays",),
    ),
    Mutant(
        GO_BACK,
        "a mistyped name makes a queue",
        "redrive.py",
        "            return 0\n        services.ensure",
        "            pass\n        services.ensure",
        ("tests/test_redrive.py::test_where_there_is_nothing_to_send_back_no_queue_is_made",),
    ),
    Mutant(
        BATCH,
        "named errors are passed over",
        "workers.py",
        "self._failure(lane, message, errors[message.id]) if message.id in errors else done for message in messages",
        "done for message in messages",
        ("tests/test_batches.py::test_a_mapping_names_those_that_failed",),
    ),
    Mutant(
        BATCH,
        "a lost lease commits the rest of an atomic batch",
        "workers.py",
        "                if lost:\n                    transaction.set_rollback",
        "                if False:\n                    transaction.set_rollback",
        ("tests/test_batches.py::test_a_lease_lost_within_an_atomic_batch_rolls_all_of_it_back",),
    ),
    Mutant(
        BATCH,
        "any mapping will do",
        "workers.py",
        "        if message_id not in ids or not isinstance(error, BaseException):\n",
        "        if False:\n",
        ("tests/test_batches.py::test_a_mapping_that_means_something_else_fails_them_all",),
    ),
    Mutant(
        BATCH,
        "errors after an early ack are nobody's",
        "workers.py",
        "                self._log_after_early_ack(lane, call(lane.handler, mine))\n",
        "                call(lane.handler, mine)\n",
        ("tests/test_batches.py::test_after_an_early_ack_errors_are_logged",),
    ),
    Mutant(
        CAUSE,
        "the reaper leaves no tombstone",
        "sql.py",
        "SELECT name, 'reaped' FROM gone\n",
        "SELECT name, 'reaped' FROM gone WHERE false\n",
        ("tests/test_events.py::test_a_reaped_queue_is_revived",),
    ),
    Mutant(
        CAUSE,
        "a committed publish fails for its event",
        "services.py",
        "        if not connection.get_autocommit():\n            raise\n        # The queue, and a message",
        "        if True:\n            raise\n        # The queue, and a message",
        ("tests/test_events.py::test_a_committed_heal_whose_event_cannot_be_recorded_is_no_failure",),
    ),
    Mutant(
        CAUSE,
        "a rolled-back heal is told",
        "services.py",
        "    once_committed(tell, using)\n\n\ndef _bind_declared",
        "    tell()\n\n\ndef _bind_declared",
        ("tests/test_events.py::test_a_rollback_leaves_no_event_and_tells_nobody",),
    ),
    Mutant(
        SPARES,
        "it waits for the disk all the same",
        "services.py",
        "sql.PUBLISH if declaration.durable else sql.PUBLISH_RELAXED",
        "sql.PUBLISH",
        ("tests/test_durability.py::test_only_a_durable_queue_waits_for_the_disk",),
    ),
    Mutant(
        SPARES,
        "the session's setting is changed",
        "sql.py",
        "FROM set_config('synchronous_commit', 'off', true)\n",
        "FROM set_config('synchronous_commit', 'off', false)\n",
        ("tests/test_durability.py::test_the_setting_of_the_session_is_left_as_it_is",),
    ),
    Mutant(
        SPARES,
        "publish_many changes the session's setting",
        "sql.py",
        'RELAX = "SET LOCAL synchronous_commit = off"',
        'RELAX = "SET synchronous_commit = off"',
        ("tests/test_durability.py::test_the_setting_of_the_session_is_left_as_it_is",),
    ),
    Mutant(
        SPARES,
        "the caller's transaction is relaxed",
        "services.py",
        "        ids = fetch_ids(connection, sql.PUBLISH_IF_QUEUE, params)\n",
        "        with connection.cursor() as cursor:\n"
        "            if not declaration.durable:\n"
        "                cursor.execute(sql.RELAX)\n"
        "        ids = fetch_ids(connection, sql.PUBLISH_IF_QUEUE, params)\n",
        ("tests/test_durability.py::test_inside_a_transaction_the_callers_commit_decides",),
    ),
    Mutant(
        MEMORY,
        "claims are not cut by bytes",
        "consumer.py",
        "            most_bytes=CLAIM_BYTES,\n",
        "",
        ("tests/test_memory.py::test_a_worker_holds_what_fits_and_goes_on",),
    ),
    Mutant(
        MEMORY,
        "compressed payloads of the due walk count as they are stored",
        "sql.py",
        "           pg_column_size(payload) * CASE WHEN pg_column_compression(payload) IS NULL"
        " THEN 1 ELSE 16 END AS bytes\n"
        "    FROM",
        "           pg_column_size(payload) AS bytes\n    FROM",
        ("tests/test_memory.py::test_one_claim_is_cut_by_bytes",),
    ),
    Mutant(
        HISTORY,
        "the process is not noted",
        "sql.py",
        "                'process', (SELECT host || ':' || pid\n"
        "                            FROM django_pgqueue_queueconsumer\n"
        "                            WHERE id = item.leased_by),\n"
        "                'expires_at'",
        "                'expires_at'",
        ("tests/test_dead_letters.py::test_the_process_is_told_by_host_and_pid",),
    ),
    Mutant(
        HISTORY,
        "the last batch of a path is lost",
        "services.py",
        "    return storable(text if len(text) <= MAX_REASON_LENGTH else",
        "    return storable(text if True else",
        ("tests/test_dead_letters.py::test_the_reason_is_the_path_of_the_exception_and_its_text",),
    ),
    Mutant(
        FITS,
        "publish asks no schema",
        "queues.py",
        "value = payload if self._validation is None else self._validation.dump(payload)",
        "value = payload",
        ("tests/test_payload_schema.py::test_what_does_not_fit_is_refused_before_any_sql",),
    ),
    Mutant(
        FITS,
        "what does not fit is retried",
        "workers.py",
        'Outcome("reject", misfit(error))',
        'Outcome("nack", misfit(error))',
        ("tests/test_payload_schema.py::test_a_stored_payload_that_does_not_fit_is_set_aside_with_the_reason",),
    ),
    Mutant(
        FITS,
        "the place in a bulk is not told",
        "queues.py",
        """self._validation.dump(payload, f"[{position}]")""",
        "self._validation.dump(payload)",
        ("tests/test_payload_schema.py::test_what_does_not_fit_is_refused_before_any_sql",),
    ),
    Mutant(
        FITS,
        "a claim by hand hands out what does not fit",
        "queues.py",
        "services.reject(self.declaration, misfits, reasons, self.using)",
        "fitting.extend(misfits)",
        ("tests/test_payload_schema.py::test_a_claim_by_hand_sets_aside_what_does_not_fit",),
    ),
)
