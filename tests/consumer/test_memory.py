"""A worker's memory: bounded by bytes, however many messages it may hold."""

import base64
import os
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections
from django.db.models.functions import Now

from django_pgqueue import Queue
from django_pgqueue.consumer.claimer import CLAIM_BYTES
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.services import claiming
from tests.support.processes import Worker, worker
from tests.support.sessions import fetch
from tests.support.waiting import wait_until
from tests.testapp.models import Seen

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.full]

MEGABYTE = 1_000_000
# What a worker may need beside what it needs for small messages, in megabytes: what it holds (64 at the most,
# and one claim more) as objects, and one claim as it comes in. Bounded by number alone, the largest of these
# tests takes some 400 more.
MAX_MORE = 250


def fill(text: str, count: int) -> None:
    """Put messages with this text on the queue."""
    Queue("work").declare()
    fetch(
        "INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload)"
        " SELECT 'work', jsonb_build_object('sleep', 0.005, 'text', %s::text) FROM generate_series(1, %s)",
        [text, count],
    )


def peak(running: Worker) -> float:
    """Return the most megabytes that a process has had in memory so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{running.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def peak_with(text: str, count: int) -> tuple[float, int]:
    """Let a worker handle it all. Returns its peak in megabytes, and the most messages that were seen held."""
    fill(text, count)
    most = 0

    def is_done() -> bool:
        nonlocal most
        most = max(most, MessageQueueItem.objects.leased().count())
        return not MessageQueueItem.objects.exists()

    with worker(settings={"LEASE": 60}) as running:
        wait_until(is_done, 120)
        used = peak(running)
        assert running.stop() == 0
    # All of them, once: what a claim leaves the next one takes.
    assert Seen.objects.count() == count
    assert set(Seen.objects.values_list("attempt", flat=True)) == {1}
    Seen.objects.all().delete()
    return used, most


@pytest.fixture(scope="module")
def small(django_db_setup: None, django_db_blocker: Any) -> float:
    """The peak of a worker that handles as many small messages."""
    with django_db_blocker.unblock():
        try:
            used, most = peak_with("x", 200)
        finally:
            connections.close_all()
    # By number alone it would hold a hundred.
    assert most > 50
    return used


LARGE = {
    "incompressible": (base64.b64encode(os.urandom(MEGABYTE * 3 // 4)).decode(), 200, 75),
    "compressible": ("x" * MEGABYTE, 200, 100),
    "very large and compressible": ("x" * MEGABYTE * 10, 20, 15),
}


@pytest.mark.parametrize(("text", "count", "most"), LARGE.values(), ids=LARGE)
def test_a_worker_holds_what_fits_and_goes_on(small: float, text: str, count: int, most: int) -> None:
    """Its claims end at so many bytes, as they are stored or about as they will be, and are followed by others."""
    used, held = peak_with(text, count)
    assert used < small + MAX_MORE
    assert held <= most


@pytest.mark.parametrize("due", [False, True], ids=["ready", "due"])
@pytest.mark.parametrize(("text", "most"), [("x" * 10 * MEGABYTE, 5), ("x" * 200, 10)], ids=["large", "small"])
def test_one_claim_is_cut_by_bytes(text: str, most: int, due: bool) -> None:
    """It takes at least one, however large, says that there are more, and the next takes those."""
    fill(text, 10)
    if due:
        MessageQueueItem.objects.update(read_after=Now())
    seen: list[int] = []
    while True:
        claim = claiming.claim(
            declaration_of(Queue("work")), "default", limit=10, lease=60, consumer=uuid4(), most_bytes=CLAIM_BYTES
        )
        if not claim.messages:
            break
        assert len(claim.messages) <= most
        seen += [message.id for message in claim.messages]
        assert claim.more == (len(seen) < 10)
    assert len(set(seen)) == 10


def test_claims_by_hand_take_what_they_were_asked_for() -> None:
    """There the caller decides how many he can hold."""
    fill("x" * 5 * MEGABYTE, 10)
    assert len(Queue("work").claim(10)) == 10
