"""
Fixtures for pytest, which finds them by an entry point. They use the fixtures of pytest-django.

This module is loaded in every run of pytest in the environment, before settings are configured. It does not access
settings until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_pgqueue.testing import Captured, LiveConsumer
    from django_pgqueue.testing.verbs import Verbs


@pytest.fixture
def pgqueue(db: None) -> Verbs:
    """
    Return the functions of ``django_pgqueue.testing`` as one object: ``pgqueue.drain(orders)``.

    Only messages published since the start of the test are considered. Uses the fixture ``db``, or
    ``transactional_db`` if the test or a mark requests it.
    """
    from django_pgqueue.testing.verbs import Verbs

    return Verbs()


@pytest.fixture
def captured_messages(db: None) -> Iterator[Captured]:
    """Capture the messages that the test publishes, to any queue, in order. See ``capture_published()``."""
    from django_pgqueue.testing import capture_published

    with capture_published() as captured:
        yield captured


@pytest.fixture
def live_consumer(transactional_db: None) -> Iterator[Callable[..., LiveConsumer]]:
    """
    Return a function that starts a real consumer in threads: ``consumer = live_consumer(orders)``.

    The consumer is stopped at the end of the test. The arguments are those of
    ``django_pgqueue.testing.live_consumer()``. The test commits, and the database is flushed at its end.
    """
    from django_pgqueue import testing

    with ExitStack() as stack:

        def start(*queues: Any, **options: Any) -> LiveConsumer:
            return stack.enter_context(testing.live_consumer(*queues, **options))

        yield start
