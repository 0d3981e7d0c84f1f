"""Mutants of services/."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import (
    ALL_OR_NONE,
    CAUSE,
    CLOCK,
    COUNTED,
    DELIVERED_AGAIN,
    ENQUEUED,
    EVERYBODY,
    FENCED,
    FOUND,
    FRESH,
    GO_BACK,
    HISTORY,
    IN_USE,
    INSERTED,
    KEPT,
    KNOWN,
    LOUD,
    MEMORY,
    NEVER_WAIT,
    NOBODY_WAITS,
    NOT_HIDDEN,
    NOT_LOST,
    ONE,
    ONE_CONSUMER,
    ONE_OWNER,
    OWN_TRANSACTION,
    PAUSE,
    PAUSED,
    POISON,
    PUBLISHED,
    RATED,
    RELAXED,
    RETURNED,
    SHORT,
    SPARES,
    TIMES,
    TOLD,
)

MUTANTS = (
    Mutant(
        NEVER_WAIT,
        "a publish in a transaction locks the queue's row for itself",
        "services/publishing.py",
        "FOR KEY SHARE OF queue\n",
        "FOR UPDATE OF queue\n",
        ("tests/services/test_publishing.py::test_sixteen_open_publishers_wait_for_no_lock",),
    ),
    Mutant(
        NEVER_WAIT,
        "the refresh runs in the caller's transaction",
        "services/publishing.py",
        "        ids = fetch_ids(connection, PUBLISH_IF_QUEUE",
        (
            "        declaring.refresh(connection, declaration, key)\n"
            "        ids = fetch_ids(connection, PUBLISH_IF_QUEUE"
        ),
        ("tests/services/test_publishing.py::test_sixteen_open_publishers_wait_for_no_lock",),
    ),
    Mutant(
        NEVER_WAIT,
        "the refresh waits for the row",
        "services/declaring.py",
        (
            "    WHERE name = %(name)s\n"
            "      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'\n"
            "    FOR NO KEY UPDATE SKIP LOCKED\n"
        ),
        (
            "    WHERE name = %(name)s\n"
            "      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'\n"
            "    FOR NO KEY UPDATE\n"
        ),
        ("tests/services/test_declaring.py::test_the_refresh_never_waits_and_looks_again_at_the_next_publish",),
    ),
    Mutant(
        NEVER_WAIT,
        "a heal names the key column",
        "services/publishing.py",
        (
            "    ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()\n"
            "    RETURNING name, xmax = 0 AS created\n"
        ),
        ("    ON CONFLICT (name) DO UPDATE SET name = excluded.name\n    RETURNING name, xmax = 0 AS created\n"),
        ("tests/services/test_healing.py::test_a_heal_and_an_open_publisher_do_not_wait_for_each_other",),
    ),
    Mutant(
        OWN_TRANSACTION,
        "a heal leaves a row that is there again as it is",
        "services/publishing.py",
        (
            "    ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()\n"
            "    RETURNING name, xmax = 0 AS created\n"
        ),
        ("    ON CONFLICT (name) DO NOTHING\n    RETURNING name, xmax = 0 AS created\n"),
        ("tests/services/test_healing.py::test_a_heal_and_an_open_publisher_do_not_wait_for_each_other",),
    ),
    Mutant(
        OWN_TRANSACTION,
        "inside a transaction the plain INSERT is used",
        "services/publishing.py",
        "fetch_ids(connection, PUBLISH_IF_QUEUE, params)",
        "fetch_ids(connection, PUBLISH, params)",
        ("tests/services/test_healing.py",),
    ),
    Mutant(
        OWN_TRANSACTION,
        "the wake-up is sent inside the transaction",
        "services/publishing.py",
        ("        _follow_commit(connection, declaration, key, 1)\n        return message_id\n"),
        (
            "        _follow_commit(connection, declaration, key, 1)\n"
            "        notifying.notify(declaration.name, using)\n"
            "        return message_id\n"
        ),
        ("tests/services/test_publishing.py",),
    ),
    Mutant(
        NOT_LOST,
        "the reaper deletes queues that hold messages",
        "services/reaping.py",
        ("           LIMIT 1) IS NULL\n    RETURNING name"),
        ("           LIMIT 0) IS NULL\n    RETURNING name"),
        ("tests/services/test_reaper.py",),
    ),
    Mutant(
        NOT_LOST,
        "the reaper deletes without locking first",
        "services/reaping.py",
        ("        if cursor.fetchone() is None:\n            return False\n        cursor.execute(LOCK_BINDINGS"),
        "        cursor.execute(LOCK_BINDINGS",
        ("tests/services/test_reaper.py",),
    ),
    Mutant(
        NOT_LOST,
        "messages expire under a live lease",
        "services/reaping.py",
        (
            "    WHERE expires_at <= statement_timestamp()\n"
            "      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())\n"
        ),
        "    WHERE expires_at <= statement_timestamp()\n",
        ("tests/services/test_reaper.py::test_nothing_expires_under_a_live_lease",),
    ),
    Mutant(
        DELIVERED_AGAIN,
        "a lapsed lease is never ready",
        "services/claiming.py",
        (
            "          AND id > %(above)s\n"
            "          AND (lease_expires_at IS NULL\n"
            "               OR (lease_expires_at <= statement_timestamp() AND NOT %(skip_suspects)s))\n"
        ),
        ("          AND id > %(above)s\n          AND lease_expires_at IS NULL\n"),
        ("tests/services/test_claiming.py",),
    ),
    Mutant(
        DELIVERED_AGAIN,
        "a claim deletes at once the lease that is to lapse",
        "services/claiming.py",
        ("    SET lease_expires_at = statement_timestamp() + %(lease)s * interval '1 second',\n        lease_token"),
        ("    SET lease_expires_at = 'infinity',\n        lease_token"),
        ("tests/services/test_claiming.py",),
    ),
    Mutant(
        FENCED,
        "an ack matches the id alone",
        "services/settling.py",
        (
            "      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))\n"
            "    ORDER BY id\n"
            "    FOR UPDATE\n"
            ")\n"
            "DELETE"
        ),
        ("    ORDER BY id\n    FOR UPDATE\n)\nDELETE"),
        ("tests/services/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "a nack matches the id alone",
        "services/settling.py",
        (
            "      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))\n"
            "    ORDER BY id\n"
            "    FOR UPDATE\n"
            "), fit"
        ),
        ("    ORDER BY id\n    FOR UPDATE\n), fit"),
        ("tests/services/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "an extension matches the id alone",
        "services/settling.py",
        (
            "      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))\n"
            "    ORDER BY id\n"
            "    FOR UPDATE SKIP LOCKED\n"
            "), extended"
        ),
        ("    ORDER BY id\n    FOR UPDATE SKIP LOCKED\n), extended"),
        ("tests/services/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "a rejection matches the id alone",
        "services/dead_letters.py",
        "ELSE (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))",
        "ELSE true",
        ("tests/services/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "giving back matches the id alone",
        "services/settling.py",
        (
            "      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))\n"
            "    ORDER BY id\n"
            "    FOR UPDATE\n"
            ")\n"
            "UPDATE"
        ),
        ("    ORDER BY id\n    FOR UPDATE\n)\nUPDATE"),
        ("tests/services/test_settling.py::test_releasing_takes_the_delivery_back",),
    ),
    Mutant(
        FENCED,
        "a lost lease is not told",
        "services/settling.py",
        ("    if lost:\n        raise LeaseLost(queue, lost)\n"),
        "",
        ("tests/services/test_settling.py",),
    ),
    Mutant(
        POISON,
        "deliveries are not counted when claimed",
        "services/claiming.py",
        "        delivery_count = delivery_count + 1\n",
        "        delivery_count = delivery_count\n",
        ("tests/services/test_claiming.py",),
    ),
    Mutant(
        POISON,
        "a suspect is claimed with others",
        "services/claiming.py",
        "THEN 1 ELSE %(limit)s END",
        "THEN %(limit)s ELSE %(limit)s END",
        ("tests/services/test_claiming.py",),
    ),
    Mutant(
        POISON,
        "what was delivered too often is claimed again",
        "services/claiming.py",
        "    WHERE candidate.delivery_count < queue.max_deliveries\n",
        "    WHERE true\n",
        ("tests/services/test_claiming.py",),
    ),
    Mutant(
        IN_USE,
        "publishing does not refresh the queue",
        "services/publishing.py",
        (
            "    session.warn_of_other_transaction(connection)\n"
            "    declaring.refresh(connection, declaration, key)\n"
            "    believed"
        ),
        ("    session.warn_of_other_transaction(connection)\n    believed"),
        (
            "tests/services/test_declaring.py",
            "tests/services/test_reaper.py",
        ),
    ),
    Mutant(
        IN_USE,
        "the heartbeat does not touch",
        "services/declaring.py",
        ("), touched AS (\n    UPDATE django_pgqueue_messagequeue\n    SET last_active = statement_timestamp()\n"),
        ("), touched AS (\n    UPDATE django_pgqueue_messagequeue\n    SET last_active = last_active\n"),
        (
            "tests/services/test_declaring.py",
            "tests/services/test_reaper.py",
        ),
    ),
    Mutant(
        IN_USE,
        "an auto-deleted queue is not healed",
        "services/publishing.py",
        "    if believed and not declaration.auto_deleted:\n",
        "    if believed:\n",
        ("tests/services/test_healing.py",),
    ),
    Mutant(
        IN_USE,
        "the reaper does not look again under its lock",
        "services/reaping.py",
        (
            "  AND paused_at IS NULL\n"
            "  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'\n"
            "FOR UPDATE SKIP LOCKED\n"
        ),
        ("  AND paused_at IS NULL\nFOR UPDATE\n"),
        ("tests/services/test_reaper.py",),
    ),
    Mutant(
        LOUD,
        "a standing queue is healed as well",
        "services/publishing.py",
        "        raise QueueNotFound(declaration.name) from error\n",
        "        pass\n",
        ("tests/services/test_healing.py",),
    ),
    Mutant(
        CLOCK,
        "a delay counts from the transaction's start",
        "services/publishing.py",
        ("SELECT queue.name, %(payload)s::jsonb, %(headers)s::jsonb,\n       statement_timestamp() + %(delay)s"),
        ("SELECT queue.name, %(payload)s::jsonb, %(headers)s::jsonb,\n       now() + %(delay)s"),
        ("tests/cases/test_transaction_cases.py",),
    ),
    Mutant(
        CLOCK,
        "a delay is computed from the application's clock",
        "services/publishing.py",
        '        "delay": outgoing.delay,\n',
        (
            '        "delay": outgoing.delay'
            ' and outgoing.delay + (lambda t: t.time() - t.clock_gettime(t.CLOCK_REALTIME))(__import__("time")),\n'
        ),
        ("tests/cases/test_transaction_cases.py",),
    ),
    Mutant(
        CLOCK,
        "idleness is computed from the application's clock",
        "services/reaping.py",
        "session.run(using, IDLE_QUEUES, idle_for=idle_for)",
        (
            "session.run(using, IDLE_QUEUES,"
            ' idle_for=idle_for + (lambda t: t.clock_gettime(t.CLOCK_REALTIME) - t.time())(__import__("time")))'
        ),
        ("tests/cases/test_transaction_cases.py",),
    ),
    Mutant(
        EVERYBODY,
        "the size of a notification is counted in characters",
        "services/topics.py",
        "    fits = len(content.encode()) + 1 <= MAX_NOTIFICATION_BYTES\n",
        "    fits = len(content) + 1 <= MAX_NOTIFICATION_BYTES\n",
        ("tests/subscriptions/test_subscriptions.py",),
    ),
    Mutant(
        EVERYBODY,
        "the first reader of a body takes it away",
        "services/topics.py",
        'TOPIC_BODY = "SELECT content FROM django_pgqueue_topicbody WHERE id = %(id)s"',
        'TOPIC_BODY = "DELETE FROM django_pgqueue_topicbody WHERE id = %(id)s RETURNING content"',
        ("tests/subscriptions/test_subscriptions.py",),
    ),
    Mutant(
        EVERYBODY,
        "live subscribers are told before the commit",
        "services/topics.py",
        ("    if connection.in_atomic_block:\n        transaction.on_commit(tell, using=using, robust=True)\n"),
        ("    if False:\n        transaction.on_commit(tell, using=using, robust=True)\n"),
        (
            "tests/services/test_topics.py",
            "tests/subscriptions/test_subscriptions.py",
        ),
    ),
    Mutant(
        EVERYBODY,
        "what comes through a topic goes to queues that nobody uses",
        "services/topics.py",
        (
            "                        AND auto_deleted\n"
            "                        AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second')\n"
            "    ORDER BY queue\n"
        ),
        ("                        AND false)\n    ORDER BY queue\n"),
        ("tests/services/test_queue_kinds.py::test_a_tenant_exchange",),
    ),
    Mutant(
        ALL_OR_NONE,
        "a bound queue whose row is gone gets nothing",
        "services/topics.py",
        "    FROM binding LEFT JOIN bound ON bound.name = binding.queue\n",
        "    FROM binding JOIN bound ON bound.name = binding.queue\n",
        ("tests/services/test_topics.py::test_a_bound_queue_whose_row_was_deleted_by_hand_loses_nothing",),
    ),
    Mutant(
        ALL_OR_NONE,
        "the reaper leaves the bindings of a queue that it removes",
        "services/reaping.py",
        "    DELETE FROM django_pgqueue_topicbinding WHERE queue IN (SELECT name FROM gone)\n",
        "    DELETE FROM django_pgqueue_topicbinding WHERE queue IN (SELECT name FROM gone) AND false\n",
        ("tests/services/test_topics.py::test_reaping_a_queue_ends_its_bindings",),
    ),
    Mutant(
        ONE_OWNER,
        "anybody claims from an exclusive queue",
        "services/claiming.py",
        "AND exclusive AND exclusive_consumer_id = %(consumer)s\n",
        "AND exclusive\n",
        ("tests/services/test_queue_kinds.py::test_a_dispatcher_queue",),
    ),
    Mutant(
        ONE_OWNER,
        "the owner is taken over while it lives",
        "services/consumers.py",
        "                        AND owner.last_heartbeat > statement_timestamp() - %(heartbeat_timeout)s * interval '1 second')\n",
        "                        AND false)\n",
        ("tests/services/test_queue_kinds.py::test_a_dispatcher_queue",),
    ),
    Mutant(
        ONE_OWNER,
        "a declare takes the owner away",
        "services/declaring.py",
        ("ON CONFLICT (name) DO UPDATE\nSET last_active = statement_timestamp(),\n"),
        ("ON CONFLICT (name) DO UPDATE\nSET exclusive_consumer_id = NULL, last_active = statement_timestamp(),\n"),
        ("tests/services/test_queue_kinds.py::test_a_dispatcher_queue",),
    ),
    Mutant(
        CAUSE,
        "a first use counts as vanished",
        "services/declaring.py",
        "                  WHEN %(known)s THEN 'vanished'\n",
        "                  WHEN %(known)s OR true THEN 'vanished'\n",
        (
            "tests/services/test_queue_kinds.py",
            "tests/services/test_healing.py",
        ),
    ),
    Mutant(
        PAUSED,
        "a claim does not look at the pause",
        "services/claiming.py",
        "    WHERE name = %(name)s AND paused_at IS NULL AND NOT exclusive\n",
        "    WHERE name = %(name)s AND NOT exclusive\n",
        ("tests/services/test_pause.py::test_nobody_claims_from_a_paused_queue_until_it_is_resumed",),
    ),
    Mutant(
        RELAXED,
        "a durable publish does not wait for the disk",
        "services/publishing.py",
        "PUBLISH if declaration.durable else PUBLISH_RELAXED",
        "PUBLISH_RELAXED",
        ("tests/services/test_durability.py",),
    ),
    Mutant(
        ALL_OR_NONE,
        "a binding that cannot be written is only logged",
        "services/declaring.py",
        (
            "    # Repeated for a new queue: finish_row() only logs an error, but the caller must see it.\n"
            "    _bind_declared(declaration, using)\n"
        ),
        ("    if not created:\n        _bind_declared(declaration, using)\n"),
        ("tests/services/test_topic_bindings.py::test_a_binding_that_cannot_be_written_is_no_secret",),
    ),
    Mutant(
        NOBODY_WAITS,
        "a publisher to a topic does not hold the bindings",
        "services/topics.py",
        ("    ORDER BY queue\n    FOR KEY SHARE OF binding\n"),
        "    ORDER BY queue\n",
        ("tests/services/test_topic_bindings.py::test_unbinding_waits_for_a_publisher_that_puts_a_message_there",),
    ),
    Mutant(
        NOBODY_WAITS,
        "a publisher to a topic does not hold the queues",
        "services/topics.py",
        ("    WHERE name = ANY (ARRAY(SELECT queue FROM binding))\n    ORDER BY name\n    FOR KEY SHARE\n"),
        ("    WHERE name = ANY (ARRAY(SELECT queue FROM binding))\n    ORDER BY name\n"),
        (
            "tests/services/test_topic_bindings.py::test_a_queue_that_is_deleted_by_hand_during_a_publish_gets_its_copy_as_an_orphan",
        ),
    ),
    Mutant(
        NOBODY_WAITS,
        "publishers to a topic lock the bindings for themselves",
        "services/topics.py",
        ("    ORDER BY queue\n    FOR KEY SHARE OF binding\n"),
        ("    ORDER BY queue\n    FOR UPDATE OF binding\n"),
        ("tests/services/test_topic_bindings.py::test_publishers_do_not_wait_for_each_other",),
    ),
    Mutant(
        NOBODY_WAITS,
        "queues that nobody uses are locked by each publish",
        "services/topics.py",
        "    WHERE name = ANY (ARRAY(SELECT queue FROM binding))\n",
        "    WHERE name = ANY (ARRAY(SELECT queue FROM django_pgqueue_topicbinding WHERE topic = %(topic)s))\n",
        ("tests/services/test_topic_bindings.py::test_queues_that_nobody_uses_are_not_locked",),
    ),
    Mutant(
        NOBODY_WAITS,
        "the reaper waits for bindings",
        "services/reaping.py",
        "    SELECT id FROM django_pgqueue_topicbinding WHERE queue = %(name)s FOR UPDATE SKIP LOCKED\n",
        "    SELECT id FROM django_pgqueue_topicbinding WHERE queue = %(name)s FOR UPDATE\n",
        ("tests/services/test_topic_bindings.py::test_the_reaper_gives_way_to_a_publisher_that_waits_for_it",),
    ),
    Mutant(
        NOBODY_WAITS,
        "a binding may come while its queue is reaped",
        "services/topics.py",
        "    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(queue)s FOR KEY SHARE\n",
        "    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(queue)s\n",
        ("tests/services/test_topic_bindings.py::test_a_binding_that_comes_while_a_queue_is_reaped_waits_for_it",),
    ),
    Mutant(
        INSERTED,
        "channels are called otherwise than the page says",
        "services/notifying.py",
        ('    plain = f"{prefix}:{name}"\n    if len(plain.encode()) <= 63:\n'),
        ('    plain = f"{prefix}:{name}"\n    if len(plain.encode()) <= 60:\n'),
        ("tests/services/test_sql_publish.py::test_notify_wakes_a_consumer_at_once",),
    ),
    Mutant(
        ONE_CONSUMER,
        "the owner is not compared again under the lock",
        "services/consumers.py",
        "    WHERE queue.exclusive_consumer_id IS NOT DISTINCT FROM stale.owner\n",
        "    WHERE true\n",
        (
            "tests/services/test_exclusive.py::test_candidates_that_saw_the_same_dead_owner_do_not_both_win",
            "tests/services/test_exclusive.py::test_of_many_candidates_for_a_dead_owner_one_wins",
        ),
    ),
    Mutant(
        ONE_CONSUMER,
        "a claim does not lock the row that names the owner",
        "services/claiming.py",
        ("AND exclusive AND exclusive_consumer_id = %(consumer)s\n    FOR SHARE\n"),
        "AND exclusive AND exclusive_consumer_id = %(consumer)s\n",
        ("tests/services/test_exclusive.py::test_a_claim_waits_for_a_change_of_the_owner_that_is_under_way",),
    ),
    Mutant(
        ONE_CONSUMER,
        "a process that claims becomes the owner",
        "services/claiming.py",
        "AND exclusive AND exclusive_consumer_id = %(consumer)s\n",
        "AND exclusive AND %(consumer)s::uuid IS NOT NULL\n",
        (
            "tests/services/test_exclusive.py::test_of_two_processes_one_handles_everything",
            "tests/services/test_exclusive.py::test_who_claims_by_hand_owns_the_queue_and_a_stranger_gets_nothing",
        ),
    ),
    Mutant(
        ONE_CONSUMER,
        "a forked child claims as its parent",
        "services/claiming.py",
        "    consumer = beliefs.claimers.setdefault(os.getpid(), uuid4())\n",
        ("    consumer = beliefs.claimers.setdefault(0, uuid4())\n    beliefs.claimers[os.getpid()] = consumer\n"),
        ("tests/services/test_exclusive.py::test_a_forked_child_is_another_claimer",),
    ),
    Mutant(
        ONE_CONSUMER,
        "a declare forgets the owner",
        "services/declaring.py",
        ("    dead_letter = excluded.dead_letter,\n    max_deliveries = excluded.max_deliveries\nRETURNING xmax = 0\n"),
        (
            "    dead_letter = excluded.dead_letter,\n"
            "    max_deliveries = excluded.max_deliveries,\n"
            "    exclusive_consumer_id = NULL\n"
            "RETURNING xmax = 0\n"
        ),
        ("tests/services/test_exclusive.py::test_declares_and_publishes_never_touch_the_owner",),
    ),
    Mutant(
        PAUSE,
        "a paused queue may be reaped",
        "services/reaping.py",
        ("WHERE auto_deleted\n  AND paused_at IS NULL\n  AND last_active"),
        ("WHERE auto_deleted\n  AND last_active"),
        ("tests/services/test_pause.py::test_a_paused_queue_is_not_reaped",),
    ),
    Mutant(
        IN_USE,
        "a preview names queues that hold messages",
        "services/reaping.py",
        "       LIMIT 1) IS NULL\nORDER BY name\n",
        "       LIMIT 0) IS NULL\nORDER BY name\n",
        ("tests/services/test_reaper.py::test_a_preview_names_no_queue_that_holds_a_message",),
    ),
    Mutant(
        GO_BACK,
        "what died again is sent again",
        "services/dead_letters.py",
        ("      AND id > %(after)s\n      AND dead_lettered_at <= %(before)s\n"),
        "      AND id > %(after)s AND %(before)s IS NOT NULL\n",
        ("tests/services/test_redrive.py::test_what_dies_meanwhile_for_the_first_time_is_for_the_next_redrive",),
    ),
    Mutant(
        GO_BACK,
        "the old count stays",
        "services/dead_letters.py",
        ("    lease_token = NULL,\n    delivery_count = 0,\n    dead_lettered_from = dead_letter_path ->> -2,\n"),
        ("    lease_token = NULL,\n    dead_lettered_from = dead_letter_path ->> -2,\n"),
        ("tests/services/test_redrive.py::test_deliveries_on_the_dead_letter_queue_do_not_count_either",),
    ),
    Mutant(
        GO_BACK,
        "a letter of a chain goes all the way back",
        "services/dead_letters.py",
        ("    WHERE dead_lettered_from = (SELECT name FROM queue)\n      AND id > %(after)s\n"),
        ("    WHERE dead_letter_path ? (SELECT name FROM queue)\n      AND id > %(after)s\n"),
        ("tests/services/test_redrive.py::test_a_letter_of_a_chain_goes_one_step_back",),
    ),
    Mutant(
        GO_BACK,
        "a redrive takes what somebody holds",
        "services/dead_letters.py",
        (
            "      AND dead_lettered_at <= %(before)s\n"
            "      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())\n"
            "      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))\n"
            "      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)\n"
            "      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)\n"
            "    ORDER BY dead_lettered_from, id\n"
        ),
        (
            "      AND dead_lettered_at <= %(before)s\n"
            "      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))\n"
            "      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)\n"
            "      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)\n"
            "    ORDER BY dead_lettered_from, id\n"
        ),
        ("tests/services/test_redrive.py::test_what_somebody_holds_is_left",),
    ),
    Mutant(
        GO_BACK,
        "a queue of a cycle is visited again",
        "services/dead_letters.py",
        "           CASE WHEN target <> name AND NOT path ? target THEN target END AS target\n",
        "           target\n",
        ("tests/cases/test_retry_letters_cases.py::test_b69_a_cycle_made_by_sql_is_left_after_one_round",),
    ),
    Mutant(
        GO_BACK,
        "a purge takes what comes in meanwhile",
        "services/operating.py",
        "      AND published_at <= %(before)s\n",
        "      AND %(before)s IS NOT NULL\n",
        ("tests/services/test_purge.py::test_what_comes_in_meanwhile_stays",),
    ),
    Mutant(
        RETURNED,
        "the reaper leaves no tombstone",
        "services/reaping.py",
        "SELECT name, 'reaped' FROM gone\n",
        "SELECT name, 'reaped' FROM gone WHERE false\n",
        ("tests/services/test_events.py::test_a_reaped_queue_is_revived",),
    ),
    Mutant(
        RETURNED,
        "a committed publish fails for its event",
        "services/declaring.py",
        ("        if not connection.get_autocommit():\n            raise\n        # The queue is committed,"),
        ("        if True:\n            raise\n        # The queue is committed,"),
        ("tests/services/test_events.py::test_a_committed_heal_whose_event_cannot_be_recorded_is_no_failure",),
    ),
    Mutant(
        RETURNED,
        "a rolled-back heal is told",
        "services/declaring.py",
        ("    session.once_committed(tell, using)\n\n\ndef _bind_declared"),
        ("    tell()\n\n\ndef _bind_declared"),
        ("tests/services/test_events.py::test_a_rollback_leaves_no_event_and_tells_nobody",),
    ),
    Mutant(
        SPARES,
        "it waits for the disk all the same",
        "services/publishing.py",
        "PUBLISH if declaration.durable else PUBLISH_RELAXED",
        "PUBLISH",
        ("tests/services/test_durability.py::test_only_a_durable_queue_waits_for_the_disk",),
    ),
    Mutant(
        SPARES,
        "the session's setting is changed",
        "services/publishing.py",
        "FROM set_config('synchronous_commit', 'off', true)\n",
        "FROM set_config('synchronous_commit', 'off', false)\n",
        ("tests/services/test_durability.py::test_the_setting_of_the_session_is_left_as_it_is",),
    ),
    Mutant(
        SPARES,
        "publish_many changes the session's setting",
        "services/publishing.py",
        'RELAX = "SET LOCAL synchronous_commit = off"',
        'RELAX = "SET synchronous_commit = off"',
        ("tests/services/test_durability.py::test_the_setting_of_the_session_is_left_as_it_is",),
    ),
    Mutant(
        SPARES,
        "the caller's transaction is relaxed",
        "services/publishing.py",
        "        ids = fetch_ids(connection, PUBLISH_IF_QUEUE, params)\n",
        (
            "        with connection.cursor() as cursor:\n"
            "            if not declaration.durable:\n"
            "                cursor.execute(RELAX)\n"
            "        ids = fetch_ids(connection, PUBLISH_IF_QUEUE, params)\n"
        ),
        ("tests/services/test_durability.py::test_inside_a_transaction_the_callers_commit_decides",),
    ),
    Mutant(
        MEMORY,
        "compressed payloads of the due walk count as they are stored",
        "services/claiming.py",
        (
            "           pg_column_size(payload) * CASE WHEN pg_column_compression(payload) IS NULL THEN 1 ELSE 16 END AS bytes\n"
            "    FROM"
        ),
        ("           pg_column_size(payload) AS bytes\n    FROM"),
        ("tests/consumer/test_memory.py::test_one_claim_is_cut_by_bytes",),
    ),
    Mutant(
        HISTORY,
        "the process is not noted",
        "services/dead_letters.py",
        (
            "                'process', (SELECT host || ':' || pid\n"
            "                            FROM django_pgqueue_queueconsumer\n"
            "                            WHERE id = item.leased_by),\n"
            "                'expires_at'"
        ),
        "                'expires_at'",
        ("tests/services/test_dead_letters.py::test_the_process_is_told_by_host_and_pid",),
    ),
    Mutant(
        HISTORY,
        "the last batch of a path is lost",
        "services/dead_letters.py",
        "    return storable(text if len(text) <= MAX_REASON_LENGTH else",
        "    return storable(text if True else",
        ("tests/services/test_dead_letters.py::test_the_reason_is_the_path_of_the_exception_and_its_text",),
    ),
    Mutant(
        NOT_HIDDEN,
        "due messages start behind the mark as well",
        "services/claiming.py",
        ("      AND read_after <= statement_timestamp()\n      AND (lease_expires_at IS NULL\n"),
        ("      AND read_after <= statement_timestamp() AND id > %(above)s\n      AND (lease_expires_at IS NULL\n"),
        ("tests/consumer/test_low_water.py::test_due_messages_are_not_hidden",),
    ),
    Mutant(
        SHORT,
        "the walk starts at the head whatever the mark is",
        "services/claiming.py",
        "          AND id > %(above)s\n",
        "          AND id > 0 * %(above)s\n",
        ("tests/consumer/test_low_water.py::test_behind_a_held_snapshot_claims_start_above_what_is_dead",),
    ),
    Mutant(
        TIMES,
        "microseconds are cut",
        "services/claiming.py",
        "datetime.fromtimestamp(min(max(seconds, EARLIEST), LATEST), zone)",
        "datetime.fromtimestamp(round(min(max(seconds, EARLIEST), LATEST), 3), zone)",
        ("tests/admin/test_message_times.py::test_they_are_those_of_the_row",),
    ),
    Mutant(
        TIMES,
        "they are in the project's zone",
        "services/claiming.py",
        "    zone = connection.timezone or ZoneInfo(connection.timezone_name)\n",
        "    zone = UTC\n",
        ("tests/admin/test_message_times.py::test_they_are_those_of_the_row",),
    ),
    Mutant(
        FOUND,
        "messages that wait for their time count as due",
        "services/diagnosing.py",
        (
            "               WHERE queue_id = queue.name AND read_after <= statement_timestamp()\n"
            "               ORDER BY read_after, id\n"
            "               LIMIT %(limit)s)\n"
            "              UNION ALL\n"
            "              (SELECT published_at"
        ),
        (
            "               WHERE queue_id = queue.name AND read_after <= 'infinity'\n"
            "               ORDER BY read_after, id\n"
            "               LIMIT %(limit)s)\n"
            "              UNION ALL\n"
            "              (SELECT published_at - interval '1 day'"
        ),
        ("tests/monitoring/test_diagnosis.py::test_nothing_is_found_where_nothing_is_wrong",),
    ),
    Mutant(
        FOUND,
        "a session that only reads holds back nothing",
        "services/diagnosing.py",
        "  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)\n",
        "  AND backend_xid IS NOT NULL\n",
        ("tests/monitoring/test_diagnosis.py::test_a_session_that_holds_back_vacuum",),
    ),
    Mutant(
        FOUND,
        "an invalid index is as good as any",
        "services/diagnosing.py",
        "SELECT (SELECT indisvalid AND indisready AND indoption",
        "SELECT (SELECT indoption",
        ("tests/monitoring/test_diagnosis.py::test_a_claim_index_that_claims_cannot_use",),
    ),
    Mutant(
        COUNTED,
        "a transaction's later publishes are not",
        "services/publishing.py",
        "        counts[name] += count\n",
        "",
        ("tests/monitoring/test_metrics.py::test_publishes_count_once_they_are_committed",),
    ),
    Mutant(
        COUNTED,
        "the hooks of two transactions share what they count",
        "services/publishing.py",
        "            counts = {}\n",
        "            counts.clear()\n",
        ("tests/monitoring/test_metrics.py::test_a_hook_that_publishes_counts_as_well",),
    ),
    Mutant(
        COUNTED,
        "what is not counted is not told",
        "services/counting.py",
        "                count(*) FILTER (WHERE walk = 3)) >= %(most)s",
        "                count(*) FILTER (WHERE walk = 3)) > %(most)s",
        ("tests/monitoring/test_metrics.py::test_a_scrape_looks_at_no_more_than_so_many",),
    ),
    Mutant(
        TOLD,
        "counts of one minute replace each other",
        "services/minutes.py",
        "SET handled = kept.handled + excluded.handled,\n",
        "SET handled = excluded.handled,\n",
        ("tests/services/test_history.py::test_counts_of_several_processes_add_up",),
    ),
    Mutant(
        TOLD,
        "what comes back counts as published again",
        "services/claiming.py",
        " // 60) if is_new else None\n",
        " // 60)\n",
        ("tests/services/test_history.py::test_what_was_published_is_what_was_settled_and_what_waits",),
    ),
    Mutant(
        TOLD,
        "what was published to one minute is replaced",
        "services/minutes.py",
        "    published = kept.published + excluded.published\n",
        "    published = excluded.published\n",
        ("tests/services/test_history.py::test_counts_of_several_processes_add_up",),
    ),
    Mutant(
        TOLD,
        "a message of any time makes a minute",
        "services/minutes.py",
        "WHERE minute > statement_timestamp() - %(age)s * interval '1 second' AND minute <= statement_timestamp()\n",
        "WHERE %(age)s > 0\n",
        ("tests/services/test_history.py::test_minutes_of_publishing_that_are_not_kept_are_dropped",),
    ),
    Mutant(
        RATED,
        "the oldest messages are taken for the newest",
        "services/minutes.py",
        ("    ORDER BY read_after DESC, id DESC\n    LIMIT %(most)s) AS newest\n"),
        ("    ORDER BY read_after, id\n    LIMIT %(most)s) AS newest\n"),
        ("tests/services/test_history.py::test_no_more_of_the_newest_messages_are_looked_at_than_so_many",),
    ),
    Mutant(
        RATED,
        "a look that was cut is taken for a whole one",
        "services/minutes.py",
        "sum(ages.values()) >= most)",
        "sum(ages.values()) > most)",
        ("tests/services/test_history.py::test_no_more_of_the_newest_messages_are_looked_at_than_so_many",),
    ),
    Mutant(
        FOUND,
        "a message published long ago tells of dead letters then",
        "services/minutes.py",
        ("min(minute)\n                    FILTER (WHERE handled > 0 OR failed > 0 OR dead_lettered > 0))"),
        "min(minute))",
        ("tests/monitoring/test_diagnosis.py::test_dead_letters_that_grow",),
    ),
    Mutant(
        COUNTED,
        "a delayed message waits from its publish on",
        "services/claiming.py",
        "(published_at if read_after is None else read_after)",
        "published_at",
        ("tests/monitoring/test_telemetry_metrics.py::test_the_wait_is_from_when_a_message_was_due",),
    ),
    Mutant(
        ENQUEUED,
        "a past run_after is refused",
        "services/session.py",
        "greatest(date_part('epoch', %(due)s::timestamptz - statement_timestamp()), 0)",
        "date_part('epoch', %(due)s::timestamptz - statement_timestamp())",
        ("tests/task_backend/test_task_backend.py::test_a_past_run_after_is_due_now",),
    ),
    Mutant(
        KNOWN,
        "RUNNING is what a worker noted",
        "services/tasks.py",
        "       item.lease_expires_at > statement_timestamp() AND item.lease_token = run.lease_token,\n",
        "       run.status = 'RUNNING',\n",
        ("tests/task_backend/test_task_worker.py::test_a_status_follows_from_the_lease_not_from_what_a_worker_noted",),
    ),
    Mutant(
        KNOWN,
        "a process that holds the message runs the task",
        "services/tasks.py",
        "       item.lease_expires_at > statement_timestamp() AND item.lease_token = run.lease_token,\n",
        "       item.lease_expires_at > statement_timestamp(),\n",
        ("tests/task_backend/test_task_worker.py::test_a_status_follows_from_the_lease_not_from_what_a_worker_noted",),
    ),
    Mutant(
        KNOWN,
        "an attempt that is noted twice counts twice",
        "services/tasks.py",
        (
            "    worker_ids = CASE WHEN run.lease_token = excluded.lease_token THEN run.worker_ids\n"
            "                      ELSE run.worker_ids || excluded.worker_ids END,\n"
        ),
        "    worker_ids = run.worker_ids || excluded.worker_ids,\n",
        ("tests/task_backend/test_task_worker.py::test_a_statement_that_is_sent_twice_changes_nothing",),
    ),
    Mutant(
        ONE,
        "an answer that got lost is a lost lease",
        "services/tasks.py",
        "WHERE id = %(id)s AND lease_token = %(token)s AND status = 'SUCCESSFUL'",
        "WHERE id = %(id)s AND lease_token = %(token)s AND status = 'DONE'",
        ("tests/task_backend/test_task_worker.py::test_a_statement_that_is_sent_twice_changes_nothing",),
    ),
    Mutant(
        ONE,
        "the end is noted without the lease",
        "services/tasks.py",
        "    SELECT id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s AND lease_token = %(token)s FOR UPDATE\n",
        "    SELECT id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s FOR UPDATE\n",
        ("tests/task_backend/test_task_worker.py::test_a_lost_lease_ends_the_attempt_silently",),
    ),
    Mutant(
        ONE,
        "a start without the lease",
        "services/tasks.py",
        "WHERE item.id = %(id)s AND item.lease_token = %(token)s\n",
        "WHERE item.id = %(id)s\n",
        ("tests/task_backend/test_task_worker.py::test_a_lost_lease_ends_the_attempt_silently",),
    ),
    Mutant(
        KEPT,
        "a dead letter's is forgotten",
        "services/tasks.py",
        "                        AND NOT EXISTS (SELECT FROM django_pgqueue_messagequeueitem AS item WHERE item.id = run.id)\n",
        "",
        ("tests/task_backend/test_task_backend.py::test_results_are_forgotten_after_their_time",),
    ),
    Mutant(
        KEPT,
        "it counts from the start",
        "services/tasks.py",
        (
            "                        AND coalesce(finished_at, last_attempted_at)\n"
            "                            < statement_timestamp() - %(age)s * interval '1 second'\n"
        ),
        "",
        ("tests/task_backend/test_task_backend.py::test_a_task_that_ended_just_now_is_remembered_however_long_it_ran",),
    ),
    Mutant(
        PUBLISHED,
        "it is asked through Django's cursors",
        "services/journaling.py",
        "        rows: list[tuple[Any, ...]] = connection.connection.execute(statement, params or None).fetchall()\n",
        (
            "        cursor = connection.cursor()\n"
            "        cursor.execute(statement, params or None)\n"
            "        rows: list[tuple[Any, ...]] = cursor.fetchall()\n"
        ),
        ("tests/testing/test_testing.py::test_noting_and_asking_runs_no_query_that_a_test_counts",),
    ),
    Mutant(
        FRESH,
        "a rolled-back declaration is believed",
        "services/beliefs.py",
        ("        if connection.get_autocommit():\n            key = self.key_of(connection, name)\n"),
        ("        if True:\n            key = self.key_of(connection, name)\n"),
        ("tests/testing/test_testing.py::FirstTests",),
    ),
    Mutant(
        FRESH,
        "a wake-up that was rolled back swallows the next one",
        "services/notifying.py",
        ("    if connection.get_autocommit():\n        # Set before sending,"),
        ("    if True:\n        # Set before sending,"),
        ("tests/testing/test_testing.py::FirstTests",),
    ),
)
