"""
The mutants of topics: bindings, live subscribers, the listener that they share.

As in ``mutants_list.py``.
"""

from tests.mutants_list import Mutant
from tests.mutants_operating import ALL_OR_NONE, EVERYBODY

NOBODY_WAITS = "publishers to a topic, unbinding and the reaper get out of each other's way"
HARMLESS = "a slow, dead or deaf subscriber harms nobody, and is told what it missed"

MUTANTS = (
    Mutant(
        ALL_OR_NONE,
        "copies for an auto-deleted queue that was deleted by hand never expire",
        "queues.py",
        "        return settings.EPHEMERAL_TTL if self._ttl is None and self._auto_deleted else self._ttl\n",
        "        return self._ttl\n",
        ("tests/test_topics.py::test_copies_for_an_auto_deleted_queue_that_was_deleted_by_hand_expire",),
    ),
    Mutant(
        ALL_OR_NONE,
        "a binding that is rolled back is written by the next declare",
        "topics.py",
        "            services.once_committed(lambda: queue.add_binding(self.name), self.using)\n",
        "            queue.add_binding(self.name)\n",
        ("tests/test_topic_bindings.py::test_a_binding_is_part_of_the_transaction",),
    ),
    Mutant(
        ALL_OR_NONE,
        "a binding that cannot be written is only logged",
        "services.py",
        "    # Once more where it was created: there an error is only logged, and here the caller has to know.\n"
        "    _bind_declared(declaration, using)\n",
        "    if not created:\n        _bind_declared(declaration, using)\n",
        ("tests/test_topic_bindings.py::test_a_binding_that_cannot_be_written_is_no_secret",),
    ),
    Mutant(
        NOBODY_WAITS,
        "a publisher to a topic does not hold the bindings",
        "sql.py",
        "    ORDER BY queue\n    FOR KEY SHARE OF binding\n",
        "    ORDER BY queue\n",
        ("tests/test_topic_bindings.py::test_unbinding_waits_for_a_publisher_that_puts_a_message_there",),
    ),
    Mutant(
        NOBODY_WAITS,
        "a publisher to a topic does not hold the queues",
        "sql.py",
        "    WHERE name = ANY (ARRAY(SELECT queue FROM binding))\n    ORDER BY name\n    FOR KEY SHARE\n",
        "    WHERE name = ANY (ARRAY(SELECT queue FROM binding))\n    ORDER BY name\n",
        (
            "tests/test_topic_bindings.py"
            "::test_a_queue_that_is_deleted_by_hand_during_a_publish_gets_its_copy_as_an_orphan",
        ),
    ),
    Mutant(
        NOBODY_WAITS,
        "publishers to a topic lock the bindings for themselves",
        "sql.py",
        "    ORDER BY queue\n    FOR KEY SHARE OF binding\n",
        "    ORDER BY queue\n    FOR UPDATE OF binding\n",
        ("tests/test_topic_bindings.py::test_publishers_do_not_wait_for_each_other",),
    ),
    Mutant(
        NOBODY_WAITS,
        "queues that nobody uses are locked by each publish",
        "sql.py",
        "    WHERE name = ANY (ARRAY(SELECT queue FROM binding))\n",
        "    WHERE name = ANY (ARRAY(SELECT queue FROM django_pgqueue_topicbinding WHERE topic = %(topic)s))\n",
        ("tests/test_topic_bindings.py::test_queues_that_nobody_uses_are_not_locked",),
    ),
    Mutant(
        NOBODY_WAITS,
        "the reaper waits for bindings",
        "sql.py",
        "    SELECT id FROM django_pgqueue_topicbinding WHERE queue = %(name)s FOR UPDATE SKIP LOCKED\n",
        "    SELECT id FROM django_pgqueue_topicbinding WHERE queue = %(name)s FOR UPDATE\n",
        ("tests/test_topic_bindings.py::test_the_reaper_gives_way_to_a_publisher_that_waits_for_it",),
    ),
    Mutant(
        NOBODY_WAITS,
        "a binding may come while its queue is reaped",
        "sql.py",
        "    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(queue)s FOR KEY SHARE\n",
        "    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(queue)s\n",
        ("tests/test_topic_bindings.py::test_a_binding_that_comes_while_a_queue_is_reaped_waits_for_it",),
    ),
    Mutant(
        NOBODY_WAITS,
        "the admin binds a queue that is just reaped",
        "admin/records.py",
        "            MessageQueue.objects.using(using).select_for_update(no_key=True).filter(name=obj.queue).first()\n",
        "",
        ("tests/test_topic_admin.py::test_a_queue_that_is_just_reaped_is_waited_for",),
    ),
    Mutant(
        EVERYBODY,
        "a thread of the listener goes on where another has begun",
        "listener.py",
        "            if self._thread is not threading.current_thread():\n",
        "            if self._thread is None:\n",
        ("tests/test_subscriptions.py::test_one_that_opens_while_the_last_one_closes_is_the_only_one",),
    ),
    Mutant(
        EVERYBODY,
        "closing a subscription takes the listener's lock",
        "listener.py",
        "        ear.is_removed = True\n",
        "        with self._lock:\n            ear.is_removed = True\n",
        ("tests/test_live_messages.py::test_closing_takes_no_lock",),
    ),
    Mutant(
        EVERYBODY,
        "what is dropped without a word goes on listening",
        "subscriptions.py",
        "            finalize(self, self._subscription.close)\n",
        "",
        ("tests/test_live_messages.py",),
    ),
    Mutant(
        HARMLESS,
        "a callback that raises SystemExit ends its subscription",
        "subscriptions.py",
        "                except BaseException:\n",
        "                except Exception:\n",
        ("tests/test_subscriptions.py::test_what_a_callback_raises_is_logged_and_ends_nothing",),
    ),
    Mutant(
        HARMLESS,
        "a callback's connection is left as it is",
        "subscriptions.py",
        "                if guard.after():\n",
        "                if False:\n",
        ("tests/test_subscriptions.py::test_a_callback_that_breaks_its_connection_breaks_nothing_else",),
    ),
    Mutant(
        HARMLESS,
        "a notification of anything ends a subscription",
        "subscriptions.py",
        '        case {"id": str(message_id), "payload": payload, "headers": dict(headers)}:\n',
        '        case {"id": message_id, "payload": payload, "headers": headers}:\n',
        ("tests/test_subscription_limits.py::test_b15_notifications_that_are_no_messages_do_no_harm",),
    ),
    Mutant(
        HARMLESS,
        "a blocked loop gathers a call for each message",
        "subscriptions.py",
        "                if not is_asked:\n",
        "                if True:\n",
        ("tests/test_live_messages.py::test_a_loop_that_is_blocked_loses_the_oldest_and_gathers_nothing_else",),
    ),
    Mutant(
        HARMLESS,
        "each lost message is told",
        "subscriptions.py",
        "            is_new = bool(dropped) and not self._is_lagging\n",
        "            is_new = bool(dropped)\n",
        ("tests/test_subscription_limits.py",),
    ),
    Mutant(
        HARMLESS,
        "a reconnect is kept secret",
        "subscriptions.py",
        "            if self._was_connected:\n",
        "            if False:\n",
        ("tests/test_subscription_limits.py",),
    ),
    Mutant(
        HARMLESS,
        "a buffer is not bounded in size",
        "subscriptions.py",
        "                self._characters > BUFFER_CHARACTERS and len(self._contents) > 1\n",
        "                False\n",
        ("tests/test_subscription_limits.py::test_the_buffer_is_bounded_in_size_as_well",),
    ),
)
