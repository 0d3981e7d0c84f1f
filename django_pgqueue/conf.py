"""
The settings, all in one dict: ``PGQUEUE = {"LEASE": 120, …}``.

They are read live, so ``override_settings`` works. Seconds are numbers.
"""

from typing import Any, get_type_hints

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured


class Settings:
    """Each annotated attribute is a key of ``PGQUEUE``, its value the default."""

    #: Alias of the database that holds the queues. ``Queue(using=…)`` and ``Topic(using=…)`` name another, which
    #: needs the tables too.
    DATABASE: str = "default"
    #: Alias over which consumers and live subscribers LISTEN, where that of the queues goes through a transaction
    #: pooler: one that goes to the same database, but to the server itself. ``None``: the alias of the queues.
    LISTEN_DATABASE: str | None = None
    #: Seconds for which a process believes that a queue which it declared is there and fresh. Publishers mark a
    #: queue as in use at most once in that time, all processes together.
    DECLARE_TTL: float = 15
    #: Seconds between two heartbeats of a consumer process, which mark its queues as in use. One that missed three
    #: counts as gone, and another may take over its exclusive queues.
    HEARTBEAT_INTERVAL: float = 60
    #: Seconds since it was last declared, published to or consumed after which an auto-deleted queue may be reaped,
    #: if it holds no message and is not paused. Topics leave out bound queues that are idle for so long.
    REAP_IDLE_AFTER: float = 3600
    #: Default TTL of messages on auto-deleted queues: seconds after they are due. ``None``: they wait until handled.
    #: ``Queue(ttl=…)`` and ``publish(ttl=…)`` say otherwise.
    EPHEMERAL_TTL: float | None = 300
    #: Default TTL of messages on standing queues: seconds after they are due. ``None``: they wait until handled.
    #: ``Queue(ttl=…)`` and ``publish(ttl=…)`` say otherwise.
    DEFAULT_TTL: float | None = None
    #: Seconds for which a claim lasts without being extended. A consumer extends its leases three times as often,
    #: so that messages of one that was killed wait no longer than this. ``Queue(lease=…)`` says otherwise.
    LEASE: float = 60
    #: How often a message may be claimed before it goes to the dead-letter queue. Declaring a queue writes it to
    #: the queue's row, which is what counts. ``Queue(max_deliveries=…)`` says otherwise.
    MAX_DELIVERIES: int = 5
    #: Delay before a failed message is delivered again: ``base * factor ** (deliveries - 1)`` seconds, but no more
    #: than ``max``, then give or take a share of up to ``jitter``. A key that is left out is as by default.
    #: ``Queue(backoff=…)`` says otherwise, and may be a function.
    BACKOFF: dict[str, float] = {"base": 1, "factor": 2, "max": 3600, "jitter": 0.1}
    #: How many messages of one queue a consumer process holds at once. Never fewer than it handles at once; with
    #: ``max_deliveries=1`` not more either. ``consume_queues --prefetch`` says otherwise.
    PREFETCH: int = 100
    #: Seconds between two looks at a queue that nobody woke. While notifications do not arrive it is one second
    #: at the most.
    POLL_INTERVAL: float = 5
    #: Seconds between two wake-ups of one queue by one process, at the least. 0: each publish wakes.
    NOTIFY_INTERVAL: float = 0.05
    #: How the names of the notification channels begin. Channels belong to the database and not to a
    #: schema: of several installations in one database, each needs another.
    CHANNEL_PREFIX: str = "django_pgqueue"
    #: Seconds for which the result of a task is kept after its end; that of a dead letter as long as that is
    #: there. ``None``: for ever.
    TASK_RESULT_TTL: float | None = 86_400
    #: Largest payload, in bytes of UTF-8 JSON. The headers of a message may be as large again.
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
