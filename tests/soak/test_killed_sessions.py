"""The short form of `killed_sessions`."""

import pytest

from tests.soak import killed_sessions

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.full]


def test_a_worker_whose_sessions_are_all_killed_again_and_again_loses_nothing() -> None:
    """Its loops' and its handlers' sessions: all is handled, effects are there once, each loss is told once."""
    figures = killed_sessions.run(6)
    assert figures["lost"] == 0
    assert figures["rounds"] >= 4
