"""The deadlock hunt, for a few seconds."""

import pytest

from tests.soak import deadlock_hunt

pytestmark = pytest.mark.full


def test_no_statement_deadlocks_and_no_publish_waits_for_a_lock() -> None:
    """Sixteen sessions do everything at once; each thing was done, and the ledger balances."""
    figures = deadlock_hunt.run(8)
    verbs = [verb.__name__ for verb in deadlock_hunt.Hammer(deadlock_hunt.random.Random()).verbs]
    assert [verb for verb in (*verbs, *deadlock_hunt.HAPPENED) if not figures["done"].get(verb)] == []
