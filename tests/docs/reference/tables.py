"""docs/tables.md: tables, columns, indexes and constraints, from the models; states and a bare publish, in SQL."""

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.db import connection, models
from django.db.models import Q
from django.db.models.fields import NOT_PROVIDED

from django_pgqueue.constraints import ImmediateForeignKey
from tests.docs.reference.markdown import code, demand, plain, table

#: A publish, for psql or a trigger.
INSERT = """\
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload) VALUES ('orders', '{"order_id": 42}');
"""
#: What wakes the consumers of the queue of `INSERT`.
NOTIFY = "SELECT pg_notify('django_pgqueue:orders', '');\n"

UNHELD = "(lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())"
UNEXPIRED = "(expires_at IS NULL OR expires_at > statement_timestamp())"
WAITING = f"queue_id IS NOT NULL AND dead_lettered_at IS NULL\n    AND {UNHELD}\n    AND {UNEXPIRED}"

#: The states of a message: what each means, and its condition.
STATES = {
    "ready": (
        "a claim may take it",
        f"{WAITING}\n    AND (read_after IS NULL OR read_after <= statement_timestamp())",
    ),
    "delayed": ("its time has not come", f"{WAITING}\n    AND read_after > statement_timestamp()"),
    "leased": ("a consumer holds it", "lease_expires_at > statement_timestamp()"),
    "dead": (
        "it was set aside, and nobody holds it",
        f"queue_id IS NOT NULL AND dead_lettered_at IS NOT NULL\n    AND {UNHELD}",
    ),
    "expired": (
        "its TTL has passed; the reaper takes it next",
        f"queue_id IS NOT NULL AND dead_lettered_at IS NULL\n    AND {UNHELD}\n"
        "    AND expires_at <= statement_timestamp()",
    ),
    "orphaned": ("its queue's row was deleted, and nobody holds it", f"queue_id IS NULL\n    AND {UNHELD}"),
}

HEAD = """\
# Tables

For whoever looks with psql. The tables are ordinary Django models (`django_pgqueue.models`); their names are fixed.
Times are by the database's clock. What is not said to be null is NOT NULL. The indexes of primary keys are not listed.

Reading harms nothing. Settle, redrive, purge and pause by the library or its [commands](commands.md): they take rows in
an order in which nobody waits for the other for ever, and tell what they did. A queue's row may be deleted: a trigger
makes orphans of its messages, which come back when the queue is there again. [Permissions](permissions.md) tells what
each job needs.
"""

STATES_HEAD = """\
## The states of a message

No column holds it: it follows from the lease, the times and where the message came from, so that a claim changes no
indexed column. Each message is in one state. `MessageQueueItem.objects.ready()`, `.delayed()` and so on say the same.
"""

STATES_TAIL = """\
### What else there is to know

A lease that has lapsed needs nobody to end it: such a message is ready by definition. A paused queue's messages are
ready too, but not claimed. What lies on a dead-letter queue is claimed from there like any other message if somebody
consumes it; what is parked has a `read_after` in the year 9000. Who holds how many of a queue:

```sql
SELECT leased_by, count(*) FROM django_pgqueue_messagequeueitem
WHERE queue_id = 'orders' AND lease_expires_at > statement_timestamp()
GROUP BY leased_by;
```
"""

PUBLISH = f"""\
## A publish in SQL

From psql, a trigger or another program. All other columns have defaults:

```sql
{INSERT}```

The queue must be there: otherwise it is a foreign-key violation (23503), at once and not at COMMIT. Set `read_after`
for a delay, `expires_at` for a TTL (the default TTLs of the settings are not for SQL), `headers` as a JSON object;
leave the rest alone. The insert does not mark the queue as in use, so that an auto-deleted one needs somebody who does.

Consumers find the message when they look next, within [POLL_INTERVAL](settings.md). This wakes them
earlier; send it after the commit, because within the transaction it makes all commits of the database stand in line:

```sql
{NOTIFY}```

`django_pgqueue` is the [CHANNEL_PREFIX](settings.md). What is longer than 63 bytes in all is hashed,
which takes the library.
"""

#: What the models do not say of a column: of one table, or of all.
COLUMNS = {
    "id": "primary key",
    "queue": "the queue's name",
    "created_at": "when the row was made",
    "messagequeue.name": "primary key; see `check_name` for what a name may be",
    "messagequeue.durable": "false: publishes outside a transaction do not wait for the disk, so that a crash of the"
    " server may take messages",
    "messagequeue.exclusive": "one consumer at a time claims",
    "messagequeue.exclusive_consumer_id": "which: `django_pgqueue_queueconsumer.id`. Null: nobody",
    "messagequeue.max_deliveries": "after so many deliveries a message goes to the dead-letter queue",
    "messagequeue.paused_at": "since when claims are stopped. Null: they are not. No declaration writes it",
    "queueconsumer.id": "a new one each time that a process starts",
    "queueconsumer.host": "where it runs",
    "queueconsumer.pid": "its process id there",
    "queueconsumer.queues": "array of the names of its queues",
    "queueconsumer.started_at": "its first heartbeat",
    "queueconsumer.last_heartbeat": "three intervals old: it counts as gone",
    "queueevent.kind": "`reaped`, `revived` or `vanished`",
    "queueevent.at": "when",
    "queueminute.minute": "its beginning",
    "queueminute.handled": "messages handled in it",
    "queueminute.failed": "deliveries that failed and are retried",
    "queueminute.dead_lettered": "messages given up by consumers",
    "queueminute.published": "messages published in it, of those that a consumer has settled since",
    "reaperrun.id": "1",
    "reaperrun.finished_at": "when it ended",
    "taskrun.queue": "the queue that its message came from",
    "taskrun.status": "as it was noted last: `READY`, `RUNNING`, `FAILED` or `SUCCESSFUL`",
    "taskrun.id": "that of the task's message",
    "taskrun.run_after": "when it was to run. Null: at once",
    "taskrun.enqueued_at": "by the clock of the process that enqueued it",
    "taskrun.started_at": "its first attempt",
    "taskrun.last_attempted_at": "its last attempt",
    "taskrun.finished_at": "when it succeeded or was given up. Null: neither",
    "taskrun.return_value": "what it returned",
    "topicbinding.topic": "the topic's name",
    "topicbody.expires_at": "when the reaper may remove it",
    "messagequeueitem.id": "primary key; rises in the order of publishing, but commits come in any order",
    "messagequeueitem.queue_id": "the queue it is on. Null: an orphan",
    "messagequeueitem.payload": "the message",
    "messagequeueitem.headers": "an object",
    "messagequeueitem.published_at": "when it was inserted",
    "messagequeueitem.delivery_count": "how often it was claimed since it came to this queue or was redriven; not"
    " counting"
    " what was given back before it started",
    "messagequeueitem.lease_expires_at": "until when it is held; in the past: the lease has lapsed. Null: nobody"
    " holds it",
    "messagequeueitem.lease_token": "another one for each claim: who settles must know it",
    "messagequeueitem.dead_lettered_from": "the queue that gave it up last. Null: none, or it was redriven",
    "messagequeueitem.dead_lettered_at": "when that was",
}

#: What each index is for.
INDEXES = {
    "django_pgqueue_event_queue_idx": "was a queue reaped before it was made again?",
    "django_pgqueue_event_at_idx": "what is a week old",
    "django_pgqueue_minute_idx": "what is a day old",
    "django_pgqueue_run_attempt_idx": "what the reaper removes",
    "django_pgqueue_binding_queue": "the bindings of a queue that is reaped",
    "django_pgqueue_body_expiry_idx": "what the reaper removes",
    "django_pgqueue_item_claim_idx": "claims, and all else that looks for messages by queue",
    "django_pgqueue_item_expiry_idx": "what the reaper expires",
    "django_pgqueue_item_orphan_idx": "orphans to adopt",
    "django_pgqueue_item_dead_idx": "what redrive walks",
}

#: What each constraint is for.
CONSTRAINTS = {
    "django_pgqueue_queue_name": "a name that can be read",
    "django_pgqueue_queue_max_deliveries": "a message can be delivered",
    "django_pgqueue_minute_unique": "one row a queue and minute",
    "django_pgqueue_reaperrun_one_row": "one row",
    "django_pgqueue_binding_unique": "one copy for each queue",
    "django_pgqueue_binding_topic": "a name that can be read",
    "django_pgqueue_binding_ttl": "a copy lives for a while",
    "django_pgqueue_item_queue_fk": "a publish to a queue that is not there fails at once",
    "django_pgqueue_item_queue_or_orphan": "a message knows where it belongs",
}

#: What there is of tables beside columns, indexes and constraints.
MORE = {
    "django_pgqueue_messagequeue": "The index `…_like` on `name` is one that Django makes of its own"
    " accord.\n\n**Trigger** `django_pgqueue_orphan_messages`, before a row is deleted: its messages"
    " get `orphaned_from`, and no queue.",
}


def page() -> str:
    """Return what docs/tables.md should be."""
    found = list(apps.get_app_config("django_pgqueue").get_models())
    demand(INDEXES, [index.name for model in found for index in model._meta.indexes], "index")
    demand(CONSTRAINTS, [each.name for model in found for each in model._meta.constraints], "constraint")
    used = {key for model in found for field in model._meta.local_fields for key in words_of(field)}
    assert not set(COLUMNS) - used, f"take out of COLUMNS what no column needs: {', '.join(set(COLUMNS) - used)}"
    overview = table(
        ("table", "a row is"),
        [(f"[{model._meta.db_table}](#{model._meta.db_table})", summary(model)) for model in found],
    )
    states = "\n".join(
        f"### {state}\n\n{meaning[0].upper()}{meaning[1:]}.\n\n```sql\n{query(state)}```\n"
        for state, (meaning, _) in STATES.items()
    )
    return "\n".join([HEAD, overview, *map(section, found), STATES_HEAD, states, STATES_TAIL, PUBLISH])


def query(state: str) -> str:
    """Return the statement that finds the messages in a state."""
    return f"SELECT id FROM django_pgqueue_messagequeueitem\nWHERE {STATES[state][1]};\n"


def section(model: type[models.Model]) -> str:
    """Return what the page says of one table."""
    meta = model._meta
    parts = [f"## {meta.db_table}", plain(model.__doc__ or "")]
    parts += [table(("column", "type", "default", "what it is"), [column(field) for field in meta.local_fields])]
    rows = [(code(index.name), code(definition(model, index)), INDEXES[index.name]) for index in meta.indexes]
    rows += [(code(each.name), code(rule(model, each)), CONSTRAINTS[each.name]) for each in meta.constraints]
    if rows:
        parts += [table(("index or constraint", "definition", "what for"), rows)]
    parts += [MORE[meta.db_table]] if meta.db_table in MORE else []
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def summary(model: type[models.Model]) -> str:
    return plain(model.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".")


def words_of(field: models.Field) -> list[str]:
    """Return the keys of `COLUMNS` that are for a column which its model says nothing of."""
    table_name = field.model._meta.db_table.removeprefix("django_pgqueue_")
    keys = [f"{table_name}.{field.column}", field.column]
    return [] if field.help_text else [key for key in keys if key in COLUMNS][:1]


def column(field: models.Field) -> tuple[str, str, str, str]:
    """Return the row of one column."""
    kind = f"{field.db_type(connection)}{', null' if field.null else ''}"
    keys = words_of(field)
    assert field.help_text or keys, f"write words in tables.COLUMNS for {field.model._meta.db_table}.{field.column}"
    return code(field.column), kind, default(field), plain(str(field.help_text)) or COLUMNS[keys[0]]


def default(field: models.Field) -> str:
    """Return the database's default of a column."""
    if isinstance(field, models.AutoField | models.BigAutoField):
        return "identity"
    value = getattr(field, "db_default", NOT_PROVIDED)
    if value is NOT_PROVIDED:
        return ""
    if isinstance(value, models.functions.Now):
        return code("statement_timestamp()")
    return code(str(getattr(value, "value", value)).lower())


def definition(model: type[models.Model], index: models.Index) -> str:
    """Return columns and condition of an index."""
    columns = ", ".join(model._meta.get_field(name).column for name in index.fields)
    return f"({columns})" + (f" WHERE {sql(model, index.condition)}" if index.condition else "")


def rule(model: type[models.Model], constraint: models.BaseConstraint) -> str:
    """Return what a constraint demands."""
    if isinstance(constraint, models.UniqueConstraint):
        return f"UNIQUE ({', '.join(model._meta.get_field(name).column for name in constraint.fields)})"
    if isinstance(constraint, ImmediateForeignKey):
        return "FOREIGN KEY (queue_id) REFERENCES django_pgqueue_messagequeue (name) ON DELETE SET NULL NOT DEFERRABLE"
    assert isinstance(constraint, models.CheckConstraint)
    return f"CHECK ({sql(model, constraint.condition)})"


def sql(model: type[models.Model], condition: Any) -> str:
    """Return a condition of an index or constraint as SQL."""
    return f" {condition.connector} ".join(terms(model, condition))


def terms(model: type[models.Model], condition: Q) -> Iterator[str]:
    operators = {"gte": ">=", "gt": ">", "exact": "=", "regex": "~"}
    for child in condition.children:
        if isinstance(child, Q):
            text = sql(model, child)
            yield f"({text})" if len(child.children) > 1 else text
            continue
        name, _, lookup = child[0].partition("__")
        column = model._meta.get_field(name).column
        if lookup == "isnull":
            yield f"{column} IS {'' if child[1] else 'NOT '}NULL"
        else:
            value = f"'{child[1]}'" if isinstance(child[1], str) else child[1]
            yield f"{column} {operators[lookup or 'exact']} {value}"
