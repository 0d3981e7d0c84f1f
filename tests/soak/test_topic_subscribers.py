"""Subscribers that come and go, for a few seconds."""

import pytest

from tests.soak import topic_subscribers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.full]


def test_b82_each_subscriber_has_what_was_published_while_it_was_there() -> None:
    """B82: 4 publishers of 500 messages, 20 subscribers that join, leave and are reaped."""
    figures = topic_subscribers.run(0, messages=500)
    assert figures["published"] >= 4 * 300
    assert figures["copies"] > figures["published"]
    assert figures["rolled_back"]
    assert set(figures["left"]) == {"unbound", "idle"}
