"""
The settings, all in one dict: ``PGQUEUE = {"LEASE": 120, …}``.

They are read live, so ``override_settings`` works. Seconds are numbers.
"""

from typing import Any, get_type_hints

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured


class Settings:
    """Each annotated attribute is a key of ``PGQUEUE``, its value the default."""

    #: Alias of the database that holds the queues.
    DATABASE: str = "default"
    #: Alias used for LISTEN, where DATABASE goes through a transaction pooler. None: DATABASE.
    LISTEN_DATABASE: str | None = None
    #: Seconds for which a process believes that a queue it declared is there and fresh.
    DECLARE_TTL: float = 15
    #: Seconds between two heartbeats of a consumer process.
    HEARTBEAT_INTERVAL: float = 60
    #: Seconds without a publisher or consumer after which an auto-deleted queue may be reaped.
    REAP_IDLE_AFTER: float = 3600
    #: Default TTL, in seconds, of messages on auto-deleted queues.
    EPHEMERAL_TTL: float | None = 300
    #: Default TTL, in seconds, of messages on standing queues. None: they wait until handled.
    DEFAULT_TTL: float | None = None
    #: Seconds for which a claim lasts without being extended.
    LEASE: float = 60
    #: How often a message may be claimed before it goes to the dead-letter queue.
    MAX_DELIVERIES: int = 5
    #: Delay before a failed message is delivered again, in seconds.
    BACKOFF: dict[str, float] = {"base": 1, "factor": 2, "max": 3600, "jitter": 0.1}
    #: How many messages of one queue a consumer process holds at once.
    PREFETCH: int = 100
    #: Seconds between two looks at a queue that nobody woke.
    POLL_INTERVAL: float = 5
    #: Seconds between two wake-ups of one queue by one process, at the least.
    NOTIFY_INTERVAL: float = 0.05
    #: How the names of the notification channels begin. Channels belong to the database and not to a
    #: schema: of several installations in one database, each needs another.
    CHANNEL_PREFIX: str = "django_pgqueue"
    #: Largest payload, in bytes of UTF-8 JSON.
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
