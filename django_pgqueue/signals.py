"""
Signals that report what happens to queues and messages. Only receivers format log lines.

The sender is the queue's name (a str), unless the signal says otherwise. If a receiver raises, Django logs the
exception (``send_robust``), and nothing else changes.
"""

import logging
from typing import Any

from django.dispatch import Signal, receiver

logger = logging.getLogger("django_pgqueue")

#: A queue's row was created, for the first time as far as is known. Not sent for a dead-letter queue that is created
#: together with another queue.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :transaction: the caller's; sent when it commits
#: :logged: DEBUG, ``queue created queue=… using=…``
queue_created = Signal()

#: A queue's row was created again: by a publish, a declare, a heartbeat, a consumer or a redrive.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param cause: ``"revived"`` if the reaper had deleted the row, which is normal; ``"vanished"`` if this process knew
#:     the queue and something else deleted its row
#: :param standing: whether it is a standing queue
#: :transaction: the caller's; sent when it commits
#: :logged: INFO if revived, WARNING if vanished, ``queue healed queue=… using=… cause=… standing=…``
queue_healed = Signal()

#: The reaper deleted an idle queue.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param idle_seconds: seconds since the queue was last in use
#: :transaction: the library's own; sent after its commit
#: :logged: INFO, ``queue reaped queue=… idle_seconds=…``
queue_reaped = Signal()

#: A queue was paused. Also sent if it was paused already.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :transaction: the caller's; sent when it commits
#: :logged: WARNING, ``queue paused queue=…``
queue_paused = Signal()

#: A queue was resumed. Also sent if it was not paused.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :transaction: the caller's; sent when it commits
#: :logged: WARNING, ``queue resumed queue=…``
queue_resumed = Signal()

#: A consumer became the owner of an exclusive queue.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param consumer: id of the new owner, a ``UUID``
#: :transaction: the library's own; sent after its commit
#: :logged: INFO, ``queue taken over queue=… consumer=…``
queue_taken_over = Signal()

#: Messages were published: in autocommit one signal for each call, otherwise one for each queue and transaction. The
#: signal is sent separately for each copy of a topic's message. The count may include messages that a savepoint rolled
#: back. Not sent if ``AUTOCOMMIT`` is off.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param count: number of messages
#: :transaction: the caller's; sent when it commits
#: :logged: no
messages_published = Signal()

#: A consumer settled messages whose handlers succeeded. With ``ack="early"``, messages whose handlers failed are
#: included. Messages whose lease was lost are not. Not sent for messages that ``Queue.ack()`` settles.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param count: number of messages
#: :transaction: the one that settles them; sent after its commit
#: :logged: no
messages_handled = Signal()

#: A handler raised, or returned the message as failed. Also sent for the last delivery, after which the message goes to
#: the dead-letter queue. Not sent for ``Reject`` or for a failure after an early ack.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param message: the ``Message``
#: :param error: the exception as text, or the reason of a ``Nack``
#: :param delay: seconds until the message is delivered again
#: :transaction: none; sent before the message is given back
#: :logged: WARNING, ``message failed queue=… id=… delivery=… error=… delay=…``
message_failed = Signal()

#: Messages were dead-lettered: rejected, delivered too often, impossible to decode, not matching the queue's schema,
#: or expired on a queue with a configured dead-letter queue.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param ids: list of the messages' ids
#: :param target: name of the dead-letter queue; ``None`` if the messages are parked where they are
#: :param reason: reason of the first message
#: :transaction: the caller's; sent when it commits
#: :logged: WARNING, ``messages dead-lettered queue=… target=… reason=… count=… ids=…``
messages_dead_lettered = Signal()

#: The reaper deleted messages whose TTL had passed.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param count: number of messages
#: :transaction: the library's own; sent after its commit
#: :logged: WARNING, ``messages expired queue=… count=…``
messages_expired = Signal()

#: Dead letters were sent back. One signal for each batch.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param count: number of messages
#: :transaction: the caller's; sent when it commits
#: :logged: INFO, ``messages redriven queue=… count=…``
messages_redriven = Signal()

#: Messages were purged. One signal for each batch.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param count: number of messages
#: :transaction: the caller's; sent when it commits
#: :logged: WARNING, ``messages purged queue=… count=…``
messages_purged = Signal()

#: Orphans were given back to their queue. One signal for each batch.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param count: number of messages
#: :transaction: the library's own; sent after its commit
#: :logged: WARNING, ``orphans adopted queue=… count=…``
orphans_adopted = Signal()

#: A live subscription missed messages. A full buffer is reported once until the subscription has caught up.
#:
#: :param sender: name of the topic
#: :param using: alias of the database
#: :param reason: ``"full"`` if its buffer was full, ``"disconnected"`` once it is connected again, ``"expired"`` if a
#:     large message was deleted before it was read
#: :param dropped: number of missed messages; ``None`` if it is not known
#: :transaction: none
#: :logged: WARNING, ``subscription lagged topic=… reason=… dropped=…``
subscription_lagged = Signal()

#: Messages could not be settled because the caller no longer holds their lease. Not sent by ``extend()``.
#:
#: :param sender: name of the queue
#: :param using: alias of the database
#: :param ids: list of the messages' ids
#: :transaction: the caller's; sent at once
#: :logged: WARNING, ``lease lost queue=… count=… ids=…``
lease_lost = Signal()

#: A consumer process has declared its queues and written its first heartbeat. It has not claimed yet.
#:
#: :param sender: id of the consumer, a ``UUID``
#: :param using: alias of the database
#: :param queues: list of the names of its queues
#: :transaction: the library's own; sent after its commit
#: :logged: INFO, ``consumer started consumer=… queues=…``
consumer_started = Signal()

#: A consumer process has ended. Its row is deleted, unless the database is unavailable.
#:
#: :param sender: id of the consumer, a ``UUID``
#: :param using: alias of the database
#: :param queues: list of the names of its queues
#: :transaction: none; sent before ``run()`` returns
#: :logged: INFO, ``consumer stopped consumer=… queues=…``
consumer_stopped = Signal()


@receiver(queue_created)
def log_queue_created(sender: str, **kwargs: Any) -> None:
    logger.debug("queue created queue=%s using=%s", sender, kwargs["using"])


@receiver(queue_healed)
def log_queue_healed(sender: str, *, using: str, cause: str, standing: bool, **kwargs: Any) -> None:
    # Reaping an idle queue is normal. A vanished queue was removed by something else.
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
