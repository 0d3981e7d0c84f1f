"""Mutants of admin/."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import ALLOWED, NOBODY_WAITS, PAGED

MUTANTS = (
    Mutant(
        NOBODY_WAITS,
        "the admin binds a queue that is just reaped",
        "admin/records.py",
        "            MessageQueue.objects.using(using).select_for_update(no_key=True).filter(name=obj.queue).first()\n",
        "",
        ("tests/admin/test_topic_admin.py::test_a_queue_that_is_just_reaped_is_waited_for",),
    ),
    Mutant(
        ALLOWED,
        "a user who may look may operate",
        "admin/base.py",
        "django_pgqueue.change_messagequeue",
        "django_pgqueue.view_messagequeue",
        ("tests/admin/test_admin_operations.py::test_who_may_only_look_can_do_nothing",),
    ),
    Mutant(
        ALLOWED,
        "it is not written down",
        "admin/queues.py",
        "        self.log_change(request, row, outcome)\n",
        "",
        ("tests/admin/test_admin_operations.py::test_a_queue_is_paused_and_resumed",),
    ),
    Mutant(
        ALLOWED,
        "a purge takes any name",
        "admin/operations.py",
        "        if name != self.row.name:\n",
        "        if not name:\n",
        ("tests/admin/test_admin_operations.py::test_a_purge_wants_the_name_typed",),
    ),
    Mutant(
        PAGED,
        "what is due at the same time as the last message is left out",
        "admin/keyset.py",
        "Value(key.id))\n",
        "Value(0))\n",
        ("tests/admin/test_message_pages.py::test_each_message_is_on_one_page",),
    ),
    Mutant(
        PAGED,
        "each page begins at the first walk",
        "admin/keyset.py",
        "walks[walks.index(key.due is not None) :]",
        "walks",
        ("tests/admin/test_message_pages.py::test_each_message_is_on_one_page",),
    ),
    Mutant(
        PAGED,
        "a queue's messages without a due time are read by id alone",
        "admin/keyset.py",
        '        return [f"{sign}read_after", f"{sign}id"] if self.by_due else [f"{sign}id"]\n',
        '        return [f"{sign}id"]\n',
        ("tests/admin/test_message_pages.py::test_a_page_in_the_middle_reads_no_more_than_it_shows",),
    ),
    Mutant(
        PAGED,
        "a wrong key is an error",
        "admin/messages.py",
        "            except (ValueError, DataError):\n",
        "            except ZeroDivisionError:\n",
        ("tests/admin/test_message_pages.py::test_what_is_no_key_gives_the_first_page",),
    ),
)
