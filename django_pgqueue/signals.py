"""
What happens to queues and messages, told as it happens. Receivers format, nobody else does.

The sender of each is the name of the queue, a str (``consumer_*``: the consumer's id, a UUID). A receiver
that raises is logged by Django (``send_robust``) and changes nothing.

=======================  =======================================================================
signal                   arguments
=======================  =======================================================================
queue_created            using
queue_healed             using, cause ("revived": the reaper had removed it; "vanished": this process
                         had known it, and no reaper removed it), standing (bool)
queue_reaped             using, idle_seconds
queue_paused             using
queue_resumed            using
queue_taken_over         using, consumer: the new owner of an exclusive queue
messages_published       using, count
messages_handled         using, count
message_failed           using, message, error, delay (seconds until it is delivered again)
messages_dead_lettered   using, ids, target (None: parked where they are), reason
messages_expired         using, count
messages_redriven        using, count
messages_purged          using, count
orphans_adopted          using, count
subscription_lagged      using, reason ("full", "disconnected", "expired"), dropped (messages; None: not
                         known). The sender is the name of the topic.
lease_lost               using, ids
consumer_started         using, queues
consumer_stopped         using, queues
=======================  =======================================================================
"""

import logging
from typing import Any

from django.dispatch import Signal, receiver

logger = logging.getLogger("django_pgqueue")

#: A queue's row was made, for the first time as far as is known. Inside a transaction: when that commits. Not sent
#: for a dead-letter queue that is made along with another queue.
queue_created = Signal()
#: A queue's row was made again: by a publish, a declare, a heartbeat, a consumer or a redrive. Inside a
#: transaction: when that commits.
queue_healed = Signal()
#: The reaper has deleted an idle queue, and that is committed.
queue_reaped = Signal()
#: A queue was paused, also where it was paused already. Inside a transaction: when that commits.
queue_paused = Signal()
#: A queue was resumed, also where it was not paused. Inside a transaction: when that commits.
queue_resumed = Signal()
#: A consumer became the owner of an exclusive queue, and that is committed.
queue_taken_over = Signal()
#: Messages were published, and are committed: once for each call in autocommit, once for each queue and
#: transaction otherwise. Copies of a topic's message are told one by one. May count what a savepoint rolled back.
#: Not sent where AUTOCOMMIT is off.
messages_published = Signal()
#: A consumer settled messages whose handlers ended well, and that is committed. With ``ack="early"`` also those
#: whose handlers failed. With that and with ``ack="atomic"`` one whose lease was lost counts too. Not sent for what
#: ``Queue.ack()`` settles.
messages_handled = Signal()
#: A handler raised, or named the message in what it returned; before the message is given back. Sent as well for
#: the last delivery, after which it goes to the dead-letter queue. Not for ``Reject``, nor for a failure after an
#: early ack.
message_failed = Signal()
#: Messages were set aside: rejected, delivered too often, undecodable, not of the queue's schema, or expired where a
#: dead-letter queue is configured. Inside a transaction: when that commits.
messages_dead_lettered = Signal()
#: The reaper has deleted messages whose TTL had passed, and that is committed.
messages_expired = Signal()
#: Dead letters were sent back: once for each batch. Inside a transaction: when that commits.
messages_redriven = Signal()
#: Messages were purged: once for each batch. Inside a transaction: when that commits.
messages_purged = Signal()
#: Orphans were given back to their queue, and that is committed: once for each batch.
orphans_adopted = Signal()
#: A live subscription missed messages. That its buffer is full is told once until it has caught up.
subscription_lagged = Signal()
#: Messages could not be settled, because their lease is no longer the caller's. At once, inside a transaction too.
#: Not sent by ``extend()``.
lease_lost = Signal()
#: A consumer process has declared its queues and written its first heartbeat; before it claims.
consumer_started = Signal()
#: A consumer process has ended. Its row is gone, unless the database is away.
consumer_stopped = Signal()


@receiver(queue_created)
def log_queue_created(sender: str, **kwargs: Any) -> None:
    logger.debug("queue created queue=%s using=%s", sender, kwargs["using"])


@receiver(queue_healed)
def log_queue_healed(sender: str, *, using: str, cause: str, standing: bool, **kwargs: Any) -> None:
    # A queue that was idle is reaped rightly. One that vanished was removed by something else.
    level = logging.INFO if cause == "revived" else logging.WARNING
    logger.log(level, "queue healed queue=%s using=%s cause=%s standing=%s", sender, using, cause, standing)


@receiver(queue_reaped)
def log_queue_reaped(sender: str, *, idle_seconds: float, **kwargs: Any) -> None:
    logger.info("queue reaped queue=%s idle_seconds=%.0f", sender, idle_seconds)


@receiver(queue_paused)
def log_queue_paused(sender: str, **kwargs: Any) -> None:
    logger.warning("queue paused queue=%s", sender)


@receiver(queue_resumed)
def log_queue_resumed(sender: str, **kwargs: Any) -> None:
    logger.warning("queue resumed queue=%s", sender)


@receiver(queue_taken_over)
def log_queue_taken_over(sender: str, *, consumer: Any, **kwargs: Any) -> None:
    logger.info("queue taken over queue=%s consumer=%s", sender, consumer)


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
    # As above; the whole reason is in the message's history.
    logger.warning(
        "messages dead-lettered queue=%s target=%s reason=%s count=%s ids=%s",
        sender,
        target,
        reason.partition(":")[0],
        len(ids),
        ids[:10],
    )


@receiver(messages_expired)
def log_messages_expired(sender: str, *, count: int, **kwargs: Any) -> None:
    logger.warning("messages expired queue=%s count=%s", sender, count)


@receiver(messages_redriven)
def log_messages_redriven(sender: str, *, count: int, **kwargs: Any) -> None:
    logger.info("messages redriven queue=%s count=%s", sender, count)


@receiver(messages_purged)
def log_messages_purged(sender: str, *, count: int, **kwargs: Any) -> None:
    logger.warning("messages purged queue=%s count=%s", sender, count)


@receiver(subscription_lagged)
def log_subscription_lagged(sender: str, *, reason: str, dropped: int | None, **kwargs: Any) -> None:
    logger.warning("subscription lagged topic=%s reason=%s dropped=%s", sender, reason, dropped)


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
