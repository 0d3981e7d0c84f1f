"""
Letting time pass.

Leases, delays, expiry and idleness depend on the database's clock, which a test cannot change. The times in the rows
are moved back instead: moving them back by ten seconds has the same effect as waiting for ten seconds.
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

# The due time that marks a parked dead letter.
PARKED = datetime(9000, 1, 1, tzinfo=UTC)


def advance(seconds: Seconds, *, using: str | None = None) -> None:
    """
    Make time pass for the queues of a database. ``seconds`` is a number or a ``timedelta``.

    All times in this package's tables are moved back: due times, expiry times, ends of leases, last uses of queues,
    heartbeats of consumers, tombstones and runs of the reaper, and the times at which messages were published or
    dead-lettered. As a result, delays end, messages expire, leases lapse, queues become idle, and exclusive consumers
    count as dead. The cached declarations of queues in this process age, too.

    Nothing else changes: not Python's clock, the project's own tables, the minutes in the charts, the texts in a
    message's failures, or the timers of a running consumer. Nothing is processed either: an expired message remains
    until the reaper runs. Inside ``atomic()``, the changes are part of the transaction.
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
    Let the lease of a claimed message expire now, as if its worker had been stopped for that long.

    The next claim takes the message again, as a suspect, and settling the first claim then raises ``LeaseLost``. Until
    the message is claimed again, the first claim can still be settled. Raises ``LeaseLost`` if the lease is already
    lost.
    """
    held = MessageQueueItem.objects.using(alias_of(message.queue, using)).filter(
        pk=message.id, lease_token=message.token
    )
    if not held.update(lease_expires_at=Now()):
        raise LeaseLost(message.queue, [message.id])
