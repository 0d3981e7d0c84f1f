"""The short form of debug_memory: B108. What holds for a thread's log in general is in tests/runtime/test_loop.py."""

import pytest

from tests.soak import debug_memory

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.full
def test_b108_commands_that_run_with_debug_on_keep_no_queries():
    """Idle at a quick poll, then at work in four threads: the log is empty before each message, memory stays."""
    assert debug_memory.run(5)["queries_kept"] == 0
