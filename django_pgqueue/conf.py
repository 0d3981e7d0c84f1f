"""
The settings, all in one dict: ``PGQUEUE = {"LEASE": 120, …}``.

They are read when they are used, so ``override_settings`` works. Seconds are numbers.
"""

from typing import Any, get_type_hints

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured


class Settings:
    """Each annotated attribute is a key of ``PGQUEUE``, its value the default."""

    #: Alias of the database that holds the queues. ``Queue(using=…)`` and ``Topic(using=…)`` name another one, which
    #: must have the tables too.
    #:
    #: :allowed: a key of ``DATABASES`` whose database is PostgreSQL (findings E001 and E024)
    #: :read: at each use
    #: :example: ``PGQUEUE = {"DATABASE": "queues"}``
    DATABASE: str = "default"

    #: Alias on which consumers and live subscribers LISTEN. Needed if ``DATABASE`` goes through a transaction
    #: pooler: this alias must then reach the same database on the server itself. ``None`` means ``DATABASE``.
    #:
    #: :allowed: a key of ``DATABASES`` whose database is PostgreSQL, or ``None`` (findings E001 and E024)
    #: :read: by a consumer when it starts
    #: :example: ``PGQUEUE = {"LISTEN_DATABASE": "direct"}``
    LISTEN_DATABASE: str | None = None

    #: How long a process trusts that a queue it has declared exists and is marked as in use. When processes publish,
    #: all of them together mark a queue as in use at most once in this time.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0; at most a third of ``REAP_IDLE_AFTER`` (finding W004)
    #: :read: at each use
    #: :example: ``PGQUEUE = {"DECLARE_TTL": 30}``
    DECLARE_TTL: float = 15

    #: Time between two heartbeats of a consumer process. A heartbeat marks the consumer's queues as in use. A consumer
    #: that has missed three counts as gone, and another one may take over its exclusive queues.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0; at most a third of ``REAP_IDLE_AFTER`` (finding W004)
    #: :read: by a consumer when it starts
    #: :example: ``PGQUEUE = {"HEARTBEAT_INTERVAL": 30}``
    HEARTBEAT_INTERVAL: float = 60

    #: How long an auto-deleted queue must be idle (not declared, published to or consumed) before it may be reaped. A
    #: queue that is paused or holds a message is not reaped. Topics skip bound queues that have been idle for as long.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0; at least three times ``DECLARE_TTL`` and ``HEARTBEAT_INTERVAL`` (finding W004)
    #: :read: at each use
    #: :example: ``PGQUEUE = {"REAP_IDLE_AFTER": 86400}``
    REAP_IDLE_AFTER: float = 3600

    #: Default TTL of messages on auto-deleted queues, counted from when they are due. ``None`` means that they never
    #: expire. ``Queue(ttl=…)`` and ``publish(ttl=…)`` override it.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0, or ``None``
    #: :read: at each use
    #: :example: ``PGQUEUE = {"EPHEMERAL_TTL": 60}``
    EPHEMERAL_TTL: float | None = 300

    #: Default TTL of messages on standing queues, counted from when they are due. ``None`` means that they never
    #: expire. ``Queue(ttl=…)`` and ``publish(ttl=…)`` override it.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0, or ``None``
    #: :read: at each use
    #: :example: ``PGQUEUE = {"DEFAULT_TTL": 604800}``
    DEFAULT_TTL: float | None = None

    #: How long a claim lasts if it is not extended. A consumer extends its leases three times in that period, so the
    #: messages of a killed consumer wait at most this long. ``Queue(lease=…)`` overrides it.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0
    #: :read: at each use; by a consumer when it starts
    #: :example: ``PGQUEUE = {"LEASE": 120}``
    LEASE: float = 60

    #: How often a message may be claimed before it goes to the dead-letter queue. The value that counts is the one in
    #: the queue's row, where declaring the queue stores it. ``Queue(max_deliveries=…)`` overrides it.
    #:
    #: :unit: deliveries
    #: :allowed: a whole number greater than 0
    #: :read: at each use
    #: :example: ``PGQUEUE = {"MAX_DELIVERIES": 10}``
    MAX_DELIVERIES: int = 5

    #: Delay before a failed message is delivered again: ``base * factor ** (deliveries - 1)`` seconds, at most ``max``
    #: seconds, varied at random by a share of up to ``jitter``. A missing key has its default. ``Queue(backoff=…)``
    #: overrides it, and may be a function.
    #:
    #: :allowed: ``base`` and ``max`` 0 or greater, ``factor`` 1 or greater, ``jitter`` 0 to 1; no other keys
    #: :read: at each use
    #: :example: ``PGQUEUE = {"BACKOFF": {"base": 5, "max": 600}}``
    BACKOFF: dict[str, float] = {"base": 1, "factor": 2, "max": 3600, "jitter": 0.1}

    #: How many messages of one queue a consumer process holds at once. It always holds at least as many as it handles
    #: at once, and no more than that if ``max_deliveries`` is 1. ``consume_queues --prefetch`` overrides it.
    #:
    #: :unit: messages
    #: :allowed: a whole number greater than 0
    #: :read: by a consumer when it starts
    #: :example: ``PGQUEUE = {"PREFETCH": 20}``
    PREFETCH: int = 100

    #: How often a consumer checks a queue without being woken. While notifications do not arrive, it checks at least
    #: every second.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0
    #: :read: at each use
    #: :example: ``PGQUEUE = {"POLL_INTERVAL": 2.5}``
    POLL_INTERVAL: float = 5

    #: Shortest time between two notifications that one process sends for one queue. With 0, each publish notifies.
    #:
    #: :unit: seconds
    #: :allowed: a number, 0 or greater
    #: :read: at each use
    #: :example: ``PGQUEUE = {"NOTIFY_INTERVAL": 0.5}``
    NOTIFY_INTERVAL: float = 0.05

    #: First part of the names of the notification channels. Channels belong to the database, not to a schema: if
    #: several installations share a database, each needs its own prefix.
    #:
    #: :allowed: 1 to 24 letters, digits, dots, hyphens or underscores
    #: :read: at each use; by a consumer when it starts
    #: :example: ``PGQUEUE = {"CHANNEL_PREFIX": "shop_staging"}``
    CHANNEL_PREFIX: str = "django_pgqueue"

    #: How long the result of a task is kept after the task has ended. The result of a dead-lettered task is kept at
    #: least as long as its message. ``None`` means forever.
    #:
    #: :unit: seconds
    #: :allowed: a number greater than 0, or ``None``
    #: :read: at each use
    #: :example: ``PGQUEUE = {"TASK_RESULT_TTL": 604800}``
    TASK_RESULT_TTL: float | None = 86_400

    #: Largest payload, measured as UTF-8 JSON. The same limit applies separately to the headers of a message.
    #:
    #: :unit: bytes
    #: :allowed: a whole number greater than 0
    #: :read: at each use
    #: :example: ``PGQUEUE = {"MAX_PAYLOAD_BYTES": 1048576}``
    MAX_PAYLOAD_BYTES: int = 16 * 1024 * 1024

    def __getattribute__(self, name: str) -> Any:
        if name.isupper():
            configured = getattr(django_settings, "PGQUEUE", None) or {}
            if name in configured:
                return configured[name]
        return super().__getattribute__(name)


settings = Settings()

#: Name and type of every setting.
SETTING_TYPES = get_type_hints(Settings)


def database_alias(using: str | None = None) -> str:
    """Return the alias to use: ``using`` if given, else ``PGQUEUE["DATABASE"]``."""
    alias = using or settings.DATABASE
    if alias not in django_settings.DATABASES:
        raise ImproperlyConfigured(
            f"PGQUEUE: there is no database alias {alias!r}; DATABASES has {sorted(django_settings.DATABASES)}"
        )
    return alias
