"""
The mutants of what stands on publishing and claiming: topics, owners, causes, pauses.

As in ``promises.py``.
"""

from tests.mutants.mutant import Mutant

EVERYBODY = "every subscriber gets every message"
ALL_OR_NONE = "a topic's publish is all or none"
ONE_OWNER = "an exclusive queue has one owner at a time"
CAUSE = "a heal says why"
PAUSED = "a paused queue is not claimed from"
RELAXED = "only a non-durable publish outside a transaction does not wait for the disk"

MUTANTS = (
    Mutant(
        EVERYBODY,
        "the size of a notification is counted in characters",
        "services.py",
        "    fits = len(content.encode()) + 1 <= MAX_NOTIFICATION_BYTES\n",
        "    fits = len(content) + 1 <= MAX_NOTIFICATION_BYTES\n",
        ("tests/test_subscriptions.py",),
    ),
    Mutant(
        EVERYBODY,
        "the first reader of a body takes it away",
        "sql.py",
        'TOPIC_BODY = "SELECT content FROM django_pgqueue_topicbody WHERE id = %(id)s"',
        'TOPIC_BODY = "DELETE FROM django_pgqueue_topicbody WHERE id = %(id)s RETURNING content"',
        ("tests/test_subscriptions.py",),
    ),
    Mutant(
        EVERYBODY,
        "a subscriber's buffer has no bound",
        "subscriptions.py",
        "            while len(self._contents) > self._most or (",
        "            while False and (",
        ("tests/test_subscription_limits.py",),
    ),
    Mutant(
        EVERYBODY,
        "live subscribers are told before the commit",
        "services.py",
        "    if connection.in_atomic_block:\n        transaction.on_commit(tell, using=using, robust=True)\n",
        "    if False:\n        transaction.on_commit(tell, using=using, robust=True)\n",
        ("tests/test_topics.py", "tests/test_subscriptions.py"),
    ),
    Mutant(
        EVERYBODY,
        "what comes through a topic goes to queues that nobody uses",
        "sql.py",
        "                        AND auto_deleted\n"
        "                        AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second')\n"
        "    ORDER BY queue\n",
        "                        AND false)\n    ORDER BY queue\n",
        ("tests/test_queue_kinds.py::test_a_tenant_exchange",),
    ),
    Mutant(
        ALL_OR_NONE,
        "a bound queue whose row is gone gets nothing",
        "sql.py",
        "    FROM binding LEFT JOIN bound ON bound.name = binding.queue\n",
        "    FROM binding JOIN bound ON bound.name = binding.queue\n",
        ("tests/test_topics.py::test_a_bound_queue_whose_row_was_deleted_by_hand_loses_nothing",),
    ),
    Mutant(
        ALL_OR_NONE,
        "the reaper leaves the bindings of a queue that it removes",
        "sql.py",
        "    DELETE FROM django_pgqueue_topicbinding WHERE queue IN (SELECT name FROM gone)\n",
        "    DELETE FROM django_pgqueue_topicbinding WHERE queue IN (SELECT name FROM gone) AND false\n",
        ("tests/test_topics.py::test_reaping_a_queue_ends_its_bindings",),
    ),
    Mutant(
        ONE_OWNER,
        "anybody claims from an exclusive queue",
        "sql.py",
        "AND exclusive AND exclusive_consumer_id = %(consumer)s\n",
        "AND exclusive\n",
        ("tests/test_queue_kinds.py::test_a_dispatcher_queue",),
    ),
    Mutant(
        ONE_OWNER,
        "the owner is taken over while it lives",
        "sql.py",
        "                        AND owner.last_heartbeat >"
        " statement_timestamp() - %(patience)s * interval '1 second')\n",
        "                        AND false)\n",
        ("tests/test_queue_kinds.py::test_a_dispatcher_queue",),
    ),
    Mutant(
        ONE_OWNER,
        "a declare takes the owner away",
        "sql.py",
        "ON CONFLICT (name) DO UPDATE\nSET last_active = statement_timestamp(),\n",
        "ON CONFLICT (name) DO UPDATE\nSET exclusive_consumer_id = NULL, last_active = statement_timestamp(),\n",
        ("tests/test_queue_kinds.py::test_a_dispatcher_queue",),
    ),
    Mutant(
        CAUSE,
        "a first use counts as vanished",
        "sql.py",
        "                  WHEN %(known)s THEN 'vanished'\n",
        "                  WHEN %(known)s OR true THEN 'vanished'\n",
        ("tests/test_queue_kinds.py", "tests/test_healing.py"),
    ),
    Mutant(
        PAUSED,
        "a claim does not look at the pause",
        "sql.py",
        "    WHERE name = %(name)s AND paused_at IS NULL AND NOT exclusive\n",
        "    WHERE name = %(name)s AND NOT exclusive\n",
        ("tests/test_pause.py::test_nobody_claims_from_a_paused_queue_until_it_is_resumed",),
    ),
    Mutant(
        RELAXED,
        "a durable publish does not wait for the disk",
        "services.py",
        "sql.PUBLISH if declaration.durable else sql.PUBLISH_RELAXED",
        "sql.PUBLISH_RELAXED",
        ("tests/test_durability.py",),
    ),
)
