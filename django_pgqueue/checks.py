"""System checks. Their ids are django_pgqueue.E001 and so on; the docs list them."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Sequence
from typing import Any, get_args

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections

from django_pgqueue.backoff import check_backoff
from django_pgqueue.conf import SETTING_TYPES, settings
from django_pgqueue.monitoring import diagnosis
from django_pgqueue.services import diagnosing, publishing
from django_pgqueue.validation import MAX_COUNT, MAX_SECONDS

# At most 24 characters, because the prefix, " topic#" and the hash of a long name must fit into the 63 bytes of a
# channel. With a colon, queue "b:c" of prefix "a" and queue "c" of prefix "a:b" would share a channel.
CHANNEL_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,24}")


def check_engine(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E001: the database is not PostgreSQL, or an alias does not exist."""
    # Of any type: another check reports a wrong type.
    alias: Any = settings.DATABASE
    aliases = (("DATABASE", alias), ("LISTEN_DATABASE", settings.LISTEN_DATABASE or alias))
    for key, name in aliases:
        if not isinstance(name, str) or name not in django_settings.DATABASES:
            return [Error(f"PGQUEUE: {key} is not a database alias: {name!r}.", id="django_pgqueue.E001")]
    wrong: list[CheckMessage] = [
        Error(
            f"The database {name!r} is {connections[name].vendor}; django_pgqueue needs PostgreSQL.",
            hint=f"Point PGQUEUE[{key!r}] at a PostgreSQL alias.",
            id="django_pgqueue.E001",
        )
        for key, name in aliases
        if connections[name].vendor != "postgresql"
    ]
    return wrong[:1]


def check_settings(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E002: an unknown key. E003: a value of the wrong type or range. W004: queues in use may be reaped."""
    configured = getattr(django_settings, "PGQUEUE", {})
    if not isinstance(configured, dict):
        return [Error("PGQUEUE must be a dict.", id="django_pgqueue.E003")]
    found: list[CheckMessage] = []
    for key, value in configured.items():
        if key not in SETTING_TYPES:
            nearest = difflib.get_close_matches(str(key), SETTING_TYPES, n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"The settings are {', '.join(sorted(SETTING_TYPES))}."
            found.append(Error(f"PGQUEUE has no setting {key!r}.", hint=hint, id="django_pgqueue.E002"))
        elif problem := _problem(key, value):
            found.append(Error(f"PGQUEUE[{key!r}] {problem}, not {value!r}.", id="django_pgqueue.E003"))
    if not found:
        longest = max(settings.DECLARE_TTL, settings.HEARTBEAT_INTERVAL)
        if 3 * longest > settings.REAP_IDLE_AFTER:
            found.append(
                Warning(
                    f"PGQUEUE: REAP_IDLE_AFTER ({settings.REAP_IDLE_AFTER} s) is less than three times the longest of"
                    f" DECLARE_TTL and HEARTBEAT_INTERVAL ({longest} s): queues in use may be reaped.",
                    id="django_pgqueue.W004",
                )
            )
    return found


def _problem(key: str, value: Any) -> str:
    """Return what is wrong with a setting's value, or an empty string."""
    if key == "BACKOFF":
        try:
            check_backoff(value)
        except (ValueError, AttributeError) as error:
            return f"is not a back-off ({error})"
        return ""
    hint = SETTING_TYPES[key]
    allowed = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None:
        return "" if type(None) in allowed else "must have a value"
    if key == "CHANNEL_PREFIX":
        is_good = isinstance(value, str) and CHANNEL_PREFIX.fullmatch(value)
        return "" if is_good else "must be 1 to 24 letters, digits, dots, hyphens or underscores"
    if str in allowed:
        return "" if isinstance(value, str) else "must be a str"
    if isinstance(value, bool) or not isinstance(value, (int, float) if float in allowed else int):
        return "must be a number"
    most = MAX_SECONDS if float in allowed else MAX_COUNT
    if value > most:
        return f"must be at most {most}"
    return "" if value > 0 or (key == "NOTIFY_INTERVAL" and value == 0) else "must be more than 0"


def check_foreign_key(app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E005: the messages' foreign key is missing, deferrable, not validated or not ON DELETE SET NULL."""
    alias = settings.DATABASE
    if not _is_migrated(alias, databases):
        return []
    state = diagnosing.foreign_key_state(alias)
    if state is None:
        problems = ["is missing"]
    else:
        words = ("is not ON DELETE SET NULL", "is deferrable", "is not validated", "has its triggers disabled")
        problems = [word for word, is_good in zip(words, state, strict=True) if not is_good]
    if not problems:
        return []
    return [
        Error(
            f"The foreign key {publishing.FOREIGN_KEY_NAME} {' and '.join(problems)}: publishing could lose messages"
            " or fail at COMMIT.",
            hint=(
                "Drop it if it exists, then run: ALTER TABLE django_pgqueue_messagequeueitem ADD CONSTRAINT"
                f" {publishing.FOREIGN_KEY_NAME} FOREIGN KEY (queue_id) REFERENCES django_pgqueue_messagequeue (name)"
                " ON DELETE SET NULL NOT DEFERRABLE"
            ),
            id="django_pgqueue.E005",
        )
    ]


def check_schema(app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E006, E007, W008, E009: the claim index, the orphan trigger, autovacuum, the server's version."""
    alias = settings.DATABASE
    return diagnosis.examine_schema(alias) if _is_migrated(alias, databases) else []


def _is_migrated(alias: str, databases: Sequence[str] | None) -> bool:
    """Return whether this database is to be checked and has the tables."""
    if alias not in (databases or ()) or connections[alias].vendor != "postgresql":
        return False
    return "django_pgqueue_messagequeueitem" in connections[alias].introspection.table_names()
