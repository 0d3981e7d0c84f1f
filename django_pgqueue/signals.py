"""
What happens to queues and messages, told as it happens. Receivers format, nobody else does.

The sender of each is the string name of the queue (``consumer_*``: the consumer's id). A receiver
that raises is logged by Django (``send_robust``) and changes nothing.

=======================  =======================================================================
signal                   arguments
=======================  =======================================================================
queue_created            using
queue_healed             using, standing (bool): a queue that this process had known was gone
queue_reaped             using, idle_seconds
message_failed           using, message, error, delay (seconds until it is delivered again)
messages_dead_lettered   using, ids, target (None: parked where they are), reason
messages_expired         using, count
orphans_adopted          using, count
lease_lost               using, ids
consumer_started         using, queues
consumer_stopped         using, queues
=======================  =======================================================================
"""

import logging
from typing import Any

from django.dispatch import Signal, receiver

logger = logging.getLogger("django_pgqueue")

queue_created = Signal()
queue_healed = Signal()
queue_reaped = Signal()
message_failed = Signal()
messages_dead_lettered = Signal()
messages_expired = Signal()
orphans_adopted = Signal()
lease_lost = Signal()
consumer_started = Signal()
consumer_stopped = Signal()


@receiver(queue_created)
def log_queue_created(sender: str, **kwargs: Any) -> None:
    logger.debug("queue created queue=%s using=%s", sender, kwargs["using"])


@receiver(queue_healed)
def log_queue_healed(sender: str, *, using: str, standing: bool, **kwargs: Any) -> None:
    # An auto-deleted queue is expected to go away when it is idle, a standing one never is.
    level = logging.WARNING if standing else logging.INFO
    logger.log(level, "queue healed queue=%s using=%s standing=%s", sender, using, standing)


@receiver(queue_reaped)
def log_queue_reaped(sender: str, *, idle_seconds: float, **kwargs: Any) -> None:
    logger.info("queue reaped queue=%s idle_seconds=%.0f", sender, idle_seconds)


@receiver(message_failed)
def log_message_failed(sender: str, *, message: Any, error: str, delay: float, **kwargs: Any) -> None:
    # The text of an exception may quote the payload, so only its type is logged.
    logger.warning(
        "message failed queue=%s id=%s delivery=%s error=%s delay=%.1f",
        sender,
        message.id,
        message.delivery_count,
        error.partition(":")[0],
        delay,
    )


@receiver(messages_dead_lettered)
def log_messages_dead_lettered(sender: str, *, ids: list[int], target: str | None, reason: str, **kwargs: Any) -> None:
    logger.warning(
        "messages dead-lettered queue=%s target=%s reason=%s count=%s ids=%s",
        sender,
        target,
        reason,
        len(ids),
        ids[:10],
    )


@receiver(messages_expired)
def log_messages_expired(sender: str, *, count: int, **kwargs: Any) -> None:
    logger.warning("messages expired queue=%s count=%s", sender, count)


@receiver(orphans_adopted)
def log_orphans_adopted(sender: str, *, count: int, **kwargs: Any) -> None:
    logger.warning("orphans adopted queue=%s count=%s", sender, count)


@receiver(lease_lost)
def log_lease_lost(sender: str, *, ids: list[int], **kwargs: Any) -> None:
    logger.warning("lease lost queue=%s count=%s ids=%s", sender, len(ids), ids[:10])


@receiver(consumer_started)
def log_consumer_started(sender: Any, *, queues: list[str], **kwargs: Any) -> None:
    logger.info("consumer started consumer=%s queues=%s", sender, ",".join(queues))


@receiver(consumer_stopped)
def log_consumer_stopped(sender: Any, *, queues: list[str], **kwargs: Any) -> None:
    logger.info("consumer stopped consumer=%s queues=%s", sender, ",".join(queues))
