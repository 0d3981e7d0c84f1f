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
        "the message is due, and nobody holds it",
        f"{WAITING}\n    AND (read_after IS NULL OR read_after <= statement_timestamp())",
    ),
    "delayed": ("the message is not due yet", f"{WAITING}\n    AND read_after > statement_timestamp()"),
    "leased": ("a consumer holds the message", "lease_expires_at > statement_timestamp()"),
    "dead": (
        "the message was dead-lettered, and nobody holds it",
        f"queue_id IS NOT NULL AND dead_lettered_at IS NOT NULL\n    AND {UNHELD}",
    ),
    "expired": (
        "the TTL of the message has passed, and the reaper has not processed the message yet",
        f"queue_id IS NOT NULL AND dead_lettered_at IS NULL\n    AND {UNHELD}\n"
        "    AND expires_at <= statement_timestamp()",
    ),
    "orphaned": (
        "the message's queue was deleted, and nobody holds the message",
        f"queue_id IS NULL\n    AND {UNHELD}",
    ),
}

HEAD = """\
# Tables

This page describes the tables, for people who use psql. They are the tables of ordinary Django models
(`django_pgqueue.models`), and their names are fixed. Times are by the database's clock. Columns are NOT NULL unless
their type says null. The indexes of primary keys are not listed.

You can safely read the tables. To settle, redrive, purge or pause, use the library or its [commands](commands.md): they
lock rows in an order that prevents deadlocks, and they report what they did. You may delete a queue's row: a trigger
turns the queue's messages into orphans, which return when the queue exists again. [Permissions](permissions.md) lists
the privileges that each job needs.
"""

STATES_HEAD = """\
## The states of a message

No column stores the state of a message. The state follows from the lease, the times and the origin of the message, so a
claim changes no indexed column. Each message is in exactly one state. `MessageQueueItem.objects.ready()`, `.delayed()`
and so on return the same messages as these queries.
"""

STATES_TAIL = """\
### More about the states

Nothing has to run when a lease lapses: the message is then ready by definition. The messages of a paused queue can be
ready too, but they are not claimed. If somebody consumes a dead-letter queue, its messages are claimed like any others.
Parked messages have a `read_after` in the year 9000. This query shows how many messages of a queue each consumer holds:

```sql
SELECT leased_by, count(*) FROM django_pgqueue_messagequeueitem
WHERE queue_id = 'orders' AND lease_expires_at > statement_timestamp()
GROUP BY leased_by;
```
"""

PUBLISH = f"""\
## Publish with SQL

You can publish from psql, a trigger or another program. All other columns have defaults:

```sql
{INSERT}```

The queue must exist. Otherwise the statement raises a foreign-key violation (23503), immediately and not at COMMIT.
Set `read_after` for a delay, `expires_at` for a TTL (the default TTLs in the settings do not apply to SQL), and
`headers` as a JSON object. Do not set other columns. The insert does not mark the queue as in use, so something else
must do this for an auto-deleted queue.

Consumers find the message when they next poll, within [POLL_INTERVAL](settings.md). This statement wakes them earlier.
Send it after the commit, because inside the transaction it makes all commits of the database wait in line:

```sql
{NOTIFY}```

`django_pgqueue` is the [CHANNEL_PREFIX](settings.md). If the whole name is longer than 63 bytes, it is hashed, which
only the library can do. [Publish with SQL](sql.md) describes all of this in detail.
"""

#: What the models do not say of a column: of one table, or of all.
COLUMNS = {
    "id": "primary key",
    "queue": "the queue's name",
    "created_at": "when the row was created",
    "messagequeue.name": "primary key; `check_name` describes the valid names",
    "messagequeue.durable": "if false, publishes outside a transaction do not wait for the disk, so a crash of the"
    " server may lose messages",
    "messagequeue.exclusive": "whether only one consumer at a time may claim",
    "messagequeue.exclusive_consumer_id": "the owner of an exclusive queue: `django_pgqueue_queueconsumer.id`."
    " Null: no owner",
    "messagequeue.max_deliveries": "the number of deliveries after which a message moves to the dead-letter queue",
    "messagequeue.paused_at": "when the queue was paused. Null: it is not paused. Declarations never change this",
    "queueconsumer.id": "a new id each time a process starts",
    "queueconsumer.host": "the machine on which the process runs",
    "queueconsumer.pid": "the process id on that machine",
    "queueconsumer.queues": "an array of the names of its queues",
    "queueconsumer.started_at": "the time of its first heartbeat",
    "queueconsumer.last_heartbeat": "the time of its last heartbeat; after three intervals without one,"
    " the consumer counts as dead",
    "queueevent.kind": "`reaped`, `revived` or `vanished`",
    "queueevent.at": "when it happened",
    "queueminute.minute": "the start of the minute",
    "queueminute.handled": "messages that were handled in this minute",
    "queueminute.failed": "deliveries that failed and are retried",
    "queueminute.dead_lettered": "messages that consumers dead-lettered",
    "queueminute.published": "messages that were published in this minute and have been settled by a consumer since",
    "reaperrun.id": "always 1",
    "reaperrun.finished_at": "when the run ended",
    "taskrun.queue": "the queue that its message came from",
    "taskrun.status": "the last recorded status: `READY`, `RUNNING`, `FAILED` or `SUCCESSFUL`",
    "taskrun.id": "the id of the task's message",
    "taskrun.run_after": "the time before which the task was not to run. Null: no delay",
    "taskrun.enqueued_at": "when the task was enqueued, by the clock of the process that enqueued it",
    "taskrun.started_at": "when the first attempt started",
    "taskrun.last_attempted_at": "when the last attempt started",
    "taskrun.finished_at": "when the task succeeded or finally failed. Null: neither has happened",
    "taskrun.return_value": "the value that the task returned",
    "topicbinding.topic": "the topic's name",
    "topicbody.expires_at": "when the reaper may delete the row",
    "messagequeueitem.id": "primary key; assigned in ascending order, but messages may be committed in another order",
    "messagequeueitem.queue_id": "the queue that the message is on. Null: an orphan",
    "messagequeueitem.payload": "the message",
    "messagequeueitem.headers": "a JSON object",
    "messagequeueitem.published_at": "when it was inserted",
    "messagequeueitem.delivery_count": "how often the message was claimed since it came to this queue or was redriven;"
    " claims that were given back before the handler started do not count",
    "messagequeueitem.lease_expires_at": "when the lease ends or ended. Null: nobody holds the message",
    "messagequeueitem.lease_token": "the fencing token of the last claim; statements that settle the message name it",
    "messagequeueitem.dead_lettered_from": "the queue that last dead-lettered the message. Null: none, or the message"
    " was redriven",
    "messagequeueitem.dead_lettered_at": "when it was last dead-lettered",
}

#: What each index is for.
INDEXES = {
    "django_pgqueue_event_queue_idx": "to check whether a queue was reaped before it was created again",
    "django_pgqueue_event_at_idx": "to find events that are a week old",
    "django_pgqueue_minute_idx": "to find minutes that are a day old",
    "django_pgqueue_run_attempt_idx": "to find runs that the reaper removes",
    "django_pgqueue_binding_queue": "to find the bindings of a queue that is reaped",
    "django_pgqueue_body_expiry_idx": "to find bodies that the reaper removes",
    "django_pgqueue_item_claim_idx": "for claims and all other searches for messages by queue",
    "django_pgqueue_item_expiry_idx": "to find messages that the reaper expires",
    "django_pgqueue_item_orphan_idx": "to find orphans to adopt",
    "django_pgqueue_item_dead_idx": "to find dead letters to redrive",
}

#: What each constraint is for.
CONSTRAINTS = {
    "django_pgqueue_queue_name": "names are readable",
    "django_pgqueue_queue_max_deliveries": "each message can be delivered at least once",
    "django_pgqueue_minute_unique": "one row for each queue and minute",
    "django_pgqueue_reaperrun_one_row": "the table has only one row",
    "django_pgqueue_binding_unique": "one copy for each queue",
    "django_pgqueue_binding_topic": "names are readable",
    "django_pgqueue_binding_ttl": "copies do not expire immediately",
    "django_pgqueue_item_queue_fk": "a publish to a missing queue fails immediately",
    "django_pgqueue_item_queue_or_orphan": "each message has either a queue or the name of its deleted queue",
}

#: What there is of tables beside columns, indexes and constraints.
MORE = {
    "django_pgqueue_messagequeue": "Django itself creates the index `…_like` on `name`.\n\n"
    "**Trigger** `django_pgqueue_orphan_messages`: before a row is deleted, the trigger stores the queue's name in"
    " `orphaned_from` of its messages and clears their queue.",
}


def page() -> str:
    """Return what docs/tables.md should be."""
    found = list(apps.get_app_config("django_pgqueue").get_models())
    demand(INDEXES, [index.name for model in found for index in model._meta.indexes], "index")
    demand(CONSTRAINTS, [each.name for model in found for each in model._meta.constraints], "constraint")
    used = {key for model in found for field in model._meta.local_fields for key in words_of(field)}
    assert not set(COLUMNS) - used, f"take out of COLUMNS what no column needs: {', '.join(set(COLUMNS) - used)}"
    overview = table(
        ("table", "one row describes"),
        [(f"[{model._meta.db_table}](#{model._meta.db_table})", summary(model)) for model in found],
    )
    states = "\n".join(
        f"### {state}\n\n{sentence(meaning)}\n\n```sql\n{query(state)}```\n" for state, (meaning, _) in STATES.items()
    )
    return "\n".join([HEAD, overview, *map(section, found), STATES_HEAD, states, STATES_TAIL, PUBLISH])


def query(state: str) -> str:
    """Return the statement that finds the messages in a state."""
    return f"SELECT id FROM django_pgqueue_messagequeueitem\nWHERE {STATES[state][1]};\n"


def section(model: type[models.Model]) -> str:
    """Return what the page says of one table."""
    meta = model._meta
    parts = [f"## {meta.db_table}", plain(model.__doc__ or "")]
    parts += [table(("column", "type", "default", "meaning"), [column(field) for field in meta.local_fields])]
    rows = [(code(index.name), code(definition(model, index)), INDEXES[index.name]) for index in meta.indexes]
    rows += [(code(each.name), code(rule(model, each)), CONSTRAINTS[each.name]) for each in meta.constraints]
    if rows:
        parts += [table(("index or constraint", "definition", "purpose"), rows)]
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
    return code(field.column), kind, default(field), plain(str(field.help_text)) or sentence(COLUMNS[keys[0]])


def sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


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
