"""
Time that passes.

Leases, delays, expiry and idleness are decided by the database's clock, which no test can turn. So the rows are moved
instead: a time in a row that is ten seconds further back is what ten seconds later would be.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.apps import apps
from django.db import models, transaction
from django.db.models import F
from django.db.models.functions import Now

from django_pgqueue.exceptions import LeaseLost
from django_pgqueue.message import Message
from django_pgqueue.models import MessageQueueItem, QueueMinute
from django_pgqueue.services.beliefs import beliefs
from django_pgqueue.testing.names import alias_of
from django_pgqueue.validation import Seconds, check_seconds

# A dead letter that is parked is due then, and known by it.
PARKED = datetime(9000, 1, 1, tzinfo=UTC)


def advance(seconds: Seconds, *, using: str | None = None) -> None:
    """
    Let so many seconds (a number or a ``timedelta``) pass for the queues of a database.

    Each time that stands in a row of the queue's tables is moved back by them: due times, expiries, ends of leases,
    last uses of queues, heartbeats of consumers, the reaper's tombstones and runs, the times of publishing and dying.
    So delays end, messages expire, leases lapse, queues fall idle, owners are missed. What this process believes of the
    queues that it declared grows older, too.

    Nothing else is moved: not Python's clock, nor the project's own tables, nor the charts' minutes, the texts of a
    message's failures, the timers of a consumer that runs. Nothing is done, either: a message that expires is still
    there until the reaper comes. Part of the transaction, if there is one.
    """
    seconds = check_seconds(seconds, "seconds", zero=False)
    alias = alias_of(None, using)
    step = timedelta(seconds=seconds)
    with transaction.atomic(using=alias):
        for model in apps.get_app_config("django_pgqueue").get_models():
            names = {field.name for field in model._meta.fields if isinstance(field, models.DateTimeField)}
            if model is MessageQueueItem:
                names.remove("read_after")
                waiting = MessageQueueItem.objects.using(alias).filter(read_after__lt=PARKED)
                waiting.update(read_after=F("read_after") - step)
            if names and model is not QueueMinute:
                model._default_manager.using(alias).update(**{name: F(name) - step for name in names})
    beliefs.age(seconds)


def lapse_lease(message: Message, *, using: str | None = None) -> None:
    """
    Let the lease of a claimed message end now, as if its worker had been stopped for that long.

    The next claim takes the message again, as a suspect, and then settling the first claim raises ``LeaseLost``, which
    this raises too where the lease is lost already. Until somebody claims it, the first claim can still be settled.
    """
    held = MessageQueueItem.objects.using(alias_of(message.queue, using)).filter(
        pk=message.id, lease_token=message.token
    )
    if not held.update(lease_expires_at=Now()):
        raise LeaseLost(message.queue, [message.id])
