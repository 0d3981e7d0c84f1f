"""docs/settings.md: every key of PGQUEUE."""

import inspect
import json
import re

from django_pgqueue import checks
from django_pgqueue.conf import SETTING_TYPES, Settings
from django_pgqueue.monitoring.findings import FINDINGS
from django_pgqueue.validation import MAX_COUNT, MAX_SECONDS
from tests.reference.markdown import code, demand, finding, plain, table

HEAD = f"""\
# Settings

All are keys of one dict in the project's settings. What is left out is as by default.

```python
PGQUEUE = {{
    "LEASE": 120,
    "MAX_DELIVERIES": 10,
}}
```

They are read when they are used and never kept at import, so that `override_settings` works. A running consumer goes
on with the `LEASE`, `PREFETCH`, `HEARTBEAT_INTERVAL`, `CHANNEL_PREFIX` and `LISTEN_DATABASE` that it began with: change
the settings and restart the processes. Let all processes of a project have the same.

Seconds are numbers, whole or not. An unknown key is {finding("E002")}, with the nearest name; a value of the wrong type
or range is {finding("E003")}. Both are errors of Django's system check: with them none of the [commands](commands.md)
starts but `diagnose_queues`, which reports them as `manage.py check` does.
"""

#: Of those that are no seconds; texts and mappings have none.
UNITS = {"MAX_DELIVERIES": "deliveries", "PREFETCH": "messages", "MAX_PAYLOAD_BYTES": "bytes"}

#: What the checks ask of values that are no numbers.
ALLOWED = {
    "DATABASE": "a key of `DATABASES` whose database is PostgreSQL",
    "LISTEN_DATABASE": "as `DATABASE`, or `None`",
    "BACKOFF": "`base` and `max` from 0, `factor` from 1, `jitter` from 0 to 1; no other keys",
    "CHANNEL_PREFIX": "1 to 24 letters, digits, dots, hyphens or underscores",
}

#: Another value than the default, for the line that shows how to change it.
EXAMPLES = {
    "DATABASE": "queues",
    "LISTEN_DATABASE": "direct",
    "DECLARE_TTL": 30,
    "HEARTBEAT_INTERVAL": 30,
    "REAP_IDLE_AFTER": 86_400,
    "EPHEMERAL_TTL": 60,
    "DEFAULT_TTL": 604_800,
    "LEASE": 120,
    "MAX_DELIVERIES": 10,
    "BACKOFF": {"base": 5, "max": 600},
    "PREFETCH": 20,
    "POLL_INTERVAL": 2.5,
    "NOTIFY_INTERVAL": 0.5,
    "CHANNEL_PREFIX": "shop_staging",
    "TASK_RESULT_TTL": 604_800,
    "MAX_PAYLOAD_BYTES": 1_048_576,
}


def page() -> str:
    """Return what docs/settings.md should be."""
    demand(EXAMPLES, SETTING_TYPES, "setting's example")
    meanings = comments()
    demand(meanings, SETTING_TYPES, "setting with a comment in conf.py")
    overview = table(
        ("key", "default", "unit", "what it is"),
        [
            (f"[{key}](#{key.lower()})", code(default(key)), unit(key), meanings[key].partition(". ")[0].rstrip("."))
            for key in SETTING_TYPES
        ],
    )
    return "\n".join([HEAD, overview, *(section(key, meanings[key]) for key in SETTING_TYPES)])


def section(key: str, meaning: str) -> str:
    """Return what the page says of one key."""
    facts = {
        "type": code(type_name(key)),
        "default": code(default(key)),
        "unit": unit(key),
        "allowed": allowed(key),
        "checked by": ", ".join(map(finding, checked_by(key))),
        "to change it": code(f"PGQUEUE = {{{json.dumps(key)}: {EXAMPLES[key]!r}}}").replace("'", '"'),
    }
    return f"## {key}\n\n{meaning}\n\n" + "".join(f"* {name}: {fact}\n" for name, fact in facts.items() if fact)


def comments() -> dict[str, str]:
    """Return what the comments of conf.py say of each key."""
    found: dict[str, str] = {}
    lines: list[str] = []
    for line in inspect.getsource(Settings).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            lines.append(text.removeprefix("#:").strip())
        elif (key := re.match(r"([A-Z_]+):", text)) and lines:
            found[key[1]] = plain(" ".join(lines))
            lines = []
    return found


def default(key: str) -> str:
    return json.dumps(getattr(Settings, key)).replace("null", "None")


def type_name(key: str) -> str:
    kind = SETTING_TYPES[key]
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


def unit(key: str) -> str:
    return "seconds" if is_allowed(key, 1.5) else UNITS.get(key, "")


def is_allowed(key: str, value: object) -> bool:
    return not checks._problem(key, value)


def allowed(key: str) -> str:
    """Return the range of a key, found by asking the check."""
    if key in ALLOWED:
        return ALLOWED[key]
    kind = "a number" if is_allowed(key, 1.5) else "a whole number"
    least = "0 or more" if is_allowed(key, 0) else "more than 0"
    (most,) = (most for most in (MAX_COUNT, MAX_SECONDS) if is_allowed(key, most) and not is_allowed(key, most + 1))
    nothing = ", or `None`" if is_allowed(key, None) else ""
    years = " (a hundred years)" if most == MAX_SECONDS else ""
    return f"{kind}, {least} and at most {most:,}{years}{nothing}"


def checked_by(key: str) -> list[str]:
    """Return the findings that a value of this key can cause."""
    names = re.compile(rf"\b{key}\b")
    found = [number for number, kind in FINDINGS.items() if names.search(f"{kind.meaning} {kind.remedy}")]
    return sorted({"E003", *found}, key=list(FINDINGS).index)
