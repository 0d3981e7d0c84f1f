"""Wake consumers and live subscribers: channel names, and NOTIFY after commit."""

from __future__ import annotations

import logging
import time
from hashlib import blake2s

from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_pgqueue.conf import settings
from django_pgqueue.services import session
from django_pgqueue.services.beliefs import Key, beliefs

logger = logging.getLogger("django_pgqueue")


def notify(name: str, using: str) -> None:
    """Wake the consumers of a queue, at most once per NOTIFY_INTERVAL. Errors are only logged."""
    connection = connections[using]
    wake(connection, name, beliefs.key_of(connection, name))


# NOTIFY - wake the consumers of a queue. It runs as a separate statement after the commit: inside the publishing
# transaction it would serialize all commits of the database.
NOTIFY = "SELECT pg_notify(%(channel)s, '')"


def wake(connection: BaseDatabaseWrapper, name: str, key: Key) -> None:
    now = time.monotonic()
    if now - beliefs.notified.get(key, -1e9) < settings.NOTIFY_INTERVAL:
        return
    if connection.get_autocommit():
        # Set before sending, so that publishers in other threads do not send another notification meanwhile.
        # Not set inside a transaction, which sends the notification at its commit and may be rolled back.
        beliefs.notified[key] = now
    try:
        session.run_often(connection, NOTIFY, {"channel": channel(name)})
    except (DatabaseError, InterfaceError):
        # The message is committed, and a consumer that is not woken finds it by polling.
        beliefs.notified.pop(key, None)
        logger.warning("consumers not notified queue=%s", name, exc_info=True)


def channel(name: str) -> str:
    """Return the notification channel of a queue. Long names are hashed, as PostgreSQL limits channels to 63 bytes."""
    return _channel(settings.CHANNEL_PREFIX, name)


def topic_channel(topic: str) -> str:
    """Return the notification channel of a topic."""
    return _channel(f"{settings.CHANNEL_PREFIX} topic", topic)


def _channel(prefix: str, name: str) -> str:
    plain = f"{prefix}:{name}"
    if len(plain.encode()) <= 63:
        return plain
    return f"{prefix}#{blake2s(name.encode(), digest_size=16).hexdigest()}"
