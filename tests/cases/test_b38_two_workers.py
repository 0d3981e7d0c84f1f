"""Case B38: several processes, one of them stopped and continued, never handle a message twice."""

import random
import signal
import time
from contextlib import ExitStack

import pytest
from django.db.models import Count

from django_pgqueue import Queue
from tests.support import payloads, wait_until
from tests.testapp.models import Seen
from tests.workers import worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

MESSAGES = 600


def test_every_message_is_handled_exactly_once() -> None:
    """Four workers that claim 1 to 20 at a time; pauses shorter than half of the lease take nothing away."""
    ids = Queue("work").publish_many([{}] * MESSAGES)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker("--prefetch", str(prefetch), "--concurrency", "1", settings={"LEASE": 10}))
            for prefetch in (1, 4, 9, 20)
        ]
        while payloads_left() and all(running.is_running for running in workers):
            unlucky = random.choice(workers)
            unlucky.send(signal.SIGSTOP)
            time.sleep(0.3)
            unlucky.send(signal.SIGCONT)
            time.sleep(0.2)
        wait_until(lambda: not payloads_left(), 60)
        assert [running.stop() for running in workers] == [0, 0, 0, 0]
        assert [running.output for running in workers] == ["", "", "", ""]
    assert sorted(Seen.objects.values_list("msg_id", flat=True)) == ids
    assert not Seen.objects.values("msg_id").annotate(times=Count("id")).filter(times__gt=1).exists()
    assert set(Seen.objects.values_list("attempt", flat=True)) == {1}


def payloads_left() -> bool:
    return bool(payloads("work"))
