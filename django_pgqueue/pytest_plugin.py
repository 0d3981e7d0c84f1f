"""
Fixtures for pytest, found by its entry point. They stand on those of pytest-django.

Loaded in every run of pytest in the environment, before there are settings: nothing here looks at any until a fixture
is used.
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
    Give all of ``django_pgqueue.testing`` as one object: ``pgqueue.drain(orders)``.

    What was published counts from the test's beginning. Uses the fixture ``db``, or ``transactional_db`` where the
    test or a mark asks for it.
    """
    from django_pgqueue.testing.verbs import Verbs

    return Verbs()


@pytest.fixture
def captured_messages(db: None) -> Iterator[Captured]:
    """Give what the test publishes, to any queue, in order: see ``capture_published()``."""
    from django_pgqueue.testing import capture_published

    with capture_published() as captured:
        yield captured


@pytest.fixture
def live_consumer(transactional_db: None) -> Iterator[Callable[..., LiveConsumer]]:
    """
    Start a real consumer in threads: ``consumer = live_consumer(orders)``. It is stopped at the end of the test.

    Arguments as ``django_pgqueue.testing.live_consumer()``. The test commits, and is flushed at its end.
    """
    from django_pgqueue import testing

    with ExitStack() as stack:

        def start(*queues: Any, **options: Any) -> LiveConsumer:
            return stack.enter_context(testing.live_consumer(*queues, **options))

        yield start
