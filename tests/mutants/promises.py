"""
The mutants: for each promise of README's table, changes that break it and the tests that notice.

``old`` must stand exactly once in ``file``, a path inside the package.
"""

from tests.mutants.mutant import Mutant

NEVER_WAIT = "publishers never wait for each other"
OWN_TRANSACTION = "a publish is part of the caller's transaction"
NOT_LOST = "a committed message is not lost"
DELIVERED_AGAIN = "a message whose consumer dies is delivered again"
FENCED = "fencing: a stale consumer cannot touch the next owner's claim"
POISON = "a message that kills its worker stops, and takes no other with it"
IN_USE = "a queue in use is not reaped, a reaped one comes back"
BAD_INPUT = "bad input is refused before any SQL is sent"
LOUD = "a standing queue that vanished stays loud"
CLOCK = "only the database's clock counts"

MATCH = "AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))\n"

MUTANTS = (
    Mutant(
        NEVER_WAIT,
        "a publish in a transaction locks the queue's row for itself",
        "sql.py",
        "FOR KEY SHARE OF queue\n",
        "FOR UPDATE OF queue\n",
        ("tests/test_publishing.py::test_sixteen_open_publishers_wait_for_no_lock",),
    ),
    Mutant(
        NEVER_WAIT,
        "the refresh runs in the caller's transaction",
        "services.py",
        "        ids = fetch_ids(connection, sql.PUBLISH_IF_QUEUE",
        "        _refresh(connection, declaration, key)\n        ids = fetch_ids(connection, sql.PUBLISH_IF_QUEUE",
        ("tests/test_publishing.py::test_sixteen_open_publishers_wait_for_no_lock",),
    ),
    Mutant(
        NEVER_WAIT,
        "the refresh waits for the row",
        "sql.py",
        "    WHERE name = %(name)s\n"
        "      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'\n"
        "    FOR NO KEY UPDATE SKIP LOCKED\n",
        "    WHERE name = %(name)s\n"
        "      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'\n"
        "    FOR NO KEY UPDATE\n",
        ("tests/test_declaring.py::test_the_refresh_never_waits_and_looks_again_at_the_next_publish",),
    ),
    Mutant(
        NEVER_WAIT,
        "a heal names the key column",
        "sql.py",
        "    ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()\n"
        "    RETURNING name, xmax = 0 AS created\n",
        "    ON CONFLICT (name) DO UPDATE SET name = excluded.name\n    RETURNING name, xmax = 0 AS created\n",
        ("tests/test_healing.py::test_a_heal_and_an_open_publisher_do_not_wait_for_each_other",),
    ),
    Mutant(
        OWN_TRANSACTION,
        "a heal leaves a row that is there again as it is",
        "sql.py",
        "    ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()\n"
        "    RETURNING name, xmax = 0 AS created\n",
        "    ON CONFLICT (name) DO NOTHING\n    RETURNING name, xmax = 0 AS created\n",
        ("tests/test_healing.py::test_a_heal_and_an_open_publisher_do_not_wait_for_each_other",),
    ),
    Mutant(
        OWN_TRANSACTION,
        "inside a transaction the plain INSERT is used",
        "services.py",
        "fetch_ids(connection, sql.PUBLISH_IF_QUEUE, params)",
        "fetch_ids(connection, sql.PUBLISH, params)",
        ("tests/test_healing.py",),
    ),
    Mutant(
        OWN_TRANSACTION,
        "the foreign key is checked at COMMIT",
        "constraints.py",
        '" ON DELETE SET NULL NOT DEFERRABLE"',
        '" ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED"',
        ("tests/test_healing.py", "tests/test_schema.py"),
    ),
    Mutant(
        OWN_TRANSACTION,
        "the wake-up is sent inside the transaction",
        "services.py",
        "        _follow_commit(connection, declaration, key, 1)\n        return message_id\n",
        "        _follow_commit(connection, declaration, key, 1)\n        notify(declaration.name, using)\n"
        "        return message_id\n",
        ("tests/test_publishing.py",),
    ),
    Mutant(
        NOT_LOST,
        "the reaper deletes queues that hold messages",
        "sql.py",
        "           LIMIT 1) IS NULL\n    RETURNING name",
        "           LIMIT 0) IS NULL\n    RETURNING name",
        ("tests/test_reaper.py",),
    ),
    Mutant(
        NOT_LOST,
        "the reaper deletes without locking first",
        "services.py",
        "        if cursor.fetchone() is None:\n            return False\n        cursor.execute(sql.LOCK_BINDINGS",
        "        cursor.execute(sql.LOCK_BINDINGS",
        ("tests/test_reaper.py",),
    ),
    Mutant(
        NOT_LOST,
        "messages on standing queues expire by default",
        "queues.py",
        "settings.EPHEMERAL_TTL if self._auto_deleted else settings.DEFAULT_TTL",
        "settings.EPHEMERAL_TTL",
        ("tests/test_publishing.py::test_only_auto_deleted_queues_have_a_ttl_by_default",),
    ),
    Mutant(
        NOT_LOST,
        "messages expire under a live lease",
        "sql.py",
        "    WHERE expires_at <= statement_timestamp()\n"
        "      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())\n",
        "    WHERE expires_at <= statement_timestamp()\n",
        ("tests/test_reaper.py::test_nothing_expires_under_a_live_lease",),
    ),
    Mutant(
        NOT_LOST,
        "orphans are not adopted",
        "reaper.py",
        "        self._adopt(reaped)\n",
        "",
        ("tests/test_orphans.py::test_the_reaper_adopts_where_nobody_consumes",),
    ),
    Mutant(
        NOT_LOST,
        "the orphan trigger does not stamp",
        "migrations/0001_initial.py",
        "SET orphaned_from = queue_id, queue_id = NULL\n",
        "SET orphaned_from = NULL\n",
        ("tests/test_orphans.py::test_messages_of_a_deleted_queue_are_handled_once_it_is_there_again",),
    ),
    Mutant(
        DELIVERED_AGAIN,
        "a lapsed lease is never ready",
        "sql.py",
        "          AND id > %(above)s\n"
        "          AND (lease_expires_at IS NULL\n"
        "               OR (lease_expires_at <= statement_timestamp() AND NOT %(skip_suspects)s))\n",
        "          AND id > %(above)s\n          AND lease_expires_at IS NULL\n",
        ("tests/test_claiming.py",),
    ),
    Mutant(
        DELIVERED_AGAIN,
        "a claim deletes at once the lease that is to lapse",
        "sql.py",
        "    SET lease_expires_at = statement_timestamp() + %(lease)s * interval '1 second',\n        lease_token",
        "    SET lease_expires_at = 'infinity',\n        lease_token",
        ("tests/test_claiming.py",),
    ),
    Mutant(
        FENCED,
        "an ack matches the id alone",
        "sql.py",
        "      " + MATCH + "    ORDER BY id\n    FOR UPDATE\n)\nDELETE",
        "    ORDER BY id\n    FOR UPDATE\n)\nDELETE",
        ("tests/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "a nack matches the id alone",
        "sql.py",
        "      " + MATCH + "    ORDER BY id\n    FOR UPDATE\n), fit",
        "    ORDER BY id\n    FOR UPDATE\n), fit",
        ("tests/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "an extension matches the id alone",
        "sql.py",
        "      " + MATCH + "    ORDER BY id\n    FOR UPDATE SKIP LOCKED\n), extended",
        "    ORDER BY id\n    FOR UPDATE SKIP LOCKED\n), extended",
        ("tests/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "a rejection matches the id alone",
        "sql.py",
        "ELSE (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))",
        "ELSE true",
        ("tests/test_settling.py",),
    ),
    Mutant(
        FENCED,
        "giving back matches the id alone",
        "sql.py",
        "      " + MATCH + "    ORDER BY id\n    FOR UPDATE\n)\nUPDATE",
        "    ORDER BY id\n    FOR UPDATE\n)\nUPDATE",
        ("tests/test_settling.py::test_releasing_takes_the_delivery_back",),
    ),
    Mutant(
        FENCED,
        "a lost lease is not told",
        "services.py",
        "    if lost:\n        raise LeaseLost(queue, lost)\n",
        "",
        ("tests/test_settling.py",),
    ),
    Mutant(
        POISON,
        "deliveries are not counted when claimed",
        "sql.py",
        "        delivery_count = delivery_count + 1\n",
        "        delivery_count = delivery_count\n",
        ("tests/test_claiming.py",),
    ),
    Mutant(
        POISON,
        "a suspect is claimed with others",
        "sql.py",
        "THEN 1 ELSE %(limit)s END",
        "THEN %(limit)s ELSE %(limit)s END",
        ("tests/test_claiming.py",),
    ),
    Mutant(
        POISON,
        "a consumer takes a suspect beside what it holds",
        "consumer.py",
        "            suspects=self._is_alone(before),\n",
        "            suspects=True,\n",
        ("tests/test_consumer.py",),
    ),
    Mutant(
        POISON,
        "what was delivered too often is claimed again",
        "sql.py",
        "    WHERE candidate.delivery_count < queue.max_deliveries\n",
        "    WHERE true\n",
        ("tests/test_claiming.py",),
    ),
    Mutant(
        IN_USE,
        "publishing does not refresh the queue",
        "services.py",
        "    _warn_of_other_transaction(connection)\n    _refresh(connection, declaration, key)\n    believed",
        "    _warn_of_other_transaction(connection)\n    believed",
        ("tests/test_declaring.py", "tests/test_reaper.py"),
    ),
    Mutant(
        IN_USE,
        "the heartbeat does not touch",
        "sql.py",
        "), touched AS (\n    UPDATE django_pgqueue_messagequeue\n    SET last_active = statement_timestamp()\n",
        "), touched AS (\n    UPDATE django_pgqueue_messagequeue\n    SET last_active = last_active\n",
        ("tests/test_declaring.py", "tests/test_reaper.py"),
    ),
    Mutant(
        IN_USE,
        "an auto-deleted queue is not healed",
        "services.py",
        "    if believed and not declaration.auto_deleted:\n",
        "    if believed:\n",
        ("tests/test_healing.py",),
    ),
    Mutant(
        IN_USE,
        "the reaper does not look again under its lock",
        "sql.py",
        "  AND paused_at IS NULL\n"
        "  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'\n"
        "FOR UPDATE SKIP LOCKED\n",
        "  AND paused_at IS NULL\nFOR UPDATE\n",
        ("tests/test_reaper.py",),
    ),
    Mutant(
        BAD_INPUT,
        "payloads go to the server unchecked",
        "message.py",
        '    if "\\\\u0000" in text or not _has_text_keys(value, MAX_DEPTH)',
        "    if not _has_text_keys(value, MAX_DEPTH)",
        ("tests/test_payloads.py",),
    ),
    Mutant(
        BAD_INPUT,
        "names go to the server unchecked",
        "validation.py",
        "    if not name.isprintable() or name != name.strip():\n",
        "    if False:\n",
        ("tests/test_payloads.py",),
    ),
    Mutant(
        LOUD,
        "a standing queue is healed as well",
        "services.py",
        "        raise QueueNotFound(declaration.name) from error\n",
        "        pass\n",
        ("tests/test_healing.py",),
    ),
    Mutant(
        CLOCK,
        "a delay counts from the transaction's start",
        "sql.py",
        "SELECT queue.name, %(payload)s::jsonb, %(headers)s::jsonb,\n       statement_timestamp() + %(delay)s",
        "SELECT queue.name, %(payload)s::jsonb, %(headers)s::jsonb,\n       now() + %(delay)s",
        ("tests/cases/test_transaction_cases.py",),
    ),
    Mutant(
        CLOCK,
        "a delay is computed from the application's clock",
        "services.py",
        '        "delay": outgoing.delay,\n',
        '        "delay": outgoing.delay and outgoing.delay + time.time() - time.clock_gettime(time.CLOCK_REALTIME),\n',
        ("tests/cases/test_transaction_cases.py",),
    ),
    Mutant(
        CLOCK,
        "idleness is computed from the application's clock",
        "services.py",
        "_run(using, sql.IDLE_QUEUES, idle_for=idle_for)",
        "_run(using, sql.IDLE_QUEUES, idle_for=idle_for + time.clock_gettime(time.CLOCK_REALTIME) - time.time())",
        ("tests/cases/test_transaction_cases.py",),
    ),
)
