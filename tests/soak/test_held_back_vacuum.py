"""The short form of `held_back_vacuum`."""

import pytest

from tests.soak import held_back_vacuum

pytestmark = pytest.mark.full


def test_a_transaction_that_is_left_open_does_not_bring_the_queue_to_a_halt() -> None:
    """B83: consumers go on while vacuum is held back and what was handled piles up, and nothing is lost."""
    figures = held_back_vacuum.run(5, rate=100)
    assert figures["handled"] > 100
    # What was handled is still there, dead.
    assert max(dead for _, dead, *_ in figures["dead_tuples_table_bytes_index_bytes"]) > 100
