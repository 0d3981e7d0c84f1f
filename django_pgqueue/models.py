"""
The tables. Runtime statements are in ``sql.py``; these models are for migrations, admin and queries.

No column holds a message's state: it follows from the lease, the times and where the message came
from, so that a claim changes no indexed column (a heap-only update).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from django_pgqueue.constraints import ImmediateForeignKey

# What a name looks like to the database; ``validation.check_name`` asks for more.
NAME = r"^[^[:cntrl:][:space:]]([^[:cntrl:]]{0,253}[^[:cntrl:][:space:]])?$"


class ReadableDateTimeField(models.DateTimeField):  # type: ignore[type-arg]  # not generic at run time
    """
    A time that can always be read.

    The database holds times that Python cannot: infinity, before Christ, beyond the year 9999. One
    row with such a time, made by somebody's SQL, would break every list that it stands in; it is read
    as the first or last time that there is, with a day to spare for time zones.
    """

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Return the column as a query selects it."""
        first, last = "timestamptz '0001-01-02 00:00:00+00'", "timestamptz '9999-12-30 00:00:00+00'"
        return f"CASE WHEN {sql} < {first} THEN {first} WHEN {sql} > {last} THEN {last} ELSE {sql} END", (*params,) * 3

    def deconstruct(self) -> Any:
        """Return Django's own field, which is what the column is."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs


class MessageQueue(models.Model):
    """One queue. Rows are made by ``Queue.declare`` and by publishing, and removed by the reaper."""

    name = models.TextField(primary_key=True)
    durable = models.BooleanField(default=True, db_default=True)
    auto_deleted = models.BooleanField(
        default=False, db_default=False, help_text="Reaped when it is idle and holds no message."
    )
    exclusive = models.BooleanField(default=False, db_default=False)
    exclusive_consumer_id = models.UUIDField(null=True, editable=False)
    dead_letter = models.TextField(  # noqa: DJ001 - null is "not configured"
        null=True,
        help_text="The configured dead-letter queue. Null: the default, NAME.dead.",
    )
    max_deliveries = models.IntegerField(default=5, db_default=5)
    paused_at = ReadableDateTimeField(null=True)
    last_active = ReadableDateTimeField(db_default=Now(), help_text="Last declared, published to or consumed.")
    created_at = ReadableDateTimeField(db_default=Now())

    class Meta:
        db_table = "django_pgqueue_messagequeue"
        ordering = ("name",)
        constraints = (
            models.CheckConstraint(
                condition=Q(name__regex=NAME),
                name="django_pgqueue_queue_name",
            ),
            models.CheckConstraint(condition=Q(max_deliveries__gte=1), name="django_pgqueue_queue_max_deliveries"),
        )

    def __str__(self) -> str:
        return self.name


class QueueConsumer(models.Model):
    """
    One running consumer process, as of its last heartbeat.

    For people and for exclusive queues. Never part of claiming or of giving leases back: a lapsed
    lease lapses by its own deadline, whatever became of this row.
    """

    id = models.UUIDField(primary_key=True)
    host = models.TextField()
    pid = models.IntegerField()
    queues = models.JSONField()
    started_at = ReadableDateTimeField(db_default=Now())
    last_heartbeat = ReadableDateTimeField(db_default=Now())

    class Meta:
        db_table = "django_pgqueue_queueconsumer"

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class QueueEvent(models.Model):
    """
    What happened to a queue's row: reaped, revived, vanished. Kept for a week.

    The reaper's ``reaped`` is the tombstone: a queue that is made again after it was ``revived``. One
    that is made again without it, by a process that had known it, had ``vanished``.
    """

    class Kind(models.TextChoices):
        REAPED = "reaped"
        REVIVED = "revived"
        VANISHED = "vanished"

    id = models.BigAutoField(primary_key=True)
    queue = models.TextField()
    kind = models.TextField(choices=Kind.choices)
    at = ReadableDateTimeField(db_default=Now())

    class Meta:
        db_table = "django_pgqueue_queueevent"
        indexes = (
            models.Index(fields=("queue", "id"), name="django_pgqueue_event_queue_idx"),
            models.Index(fields=("at",), name="django_pgqueue_event_at_idx"),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.kind}"


class QueueMinute(models.Model):
    """
    What became of a queue's messages in one minute, for charts. Kept for a day.

    Consumers add to it with each heartbeat, so what a killed one had not told is missing. A minute in which
    nothing happened has no row. ``published`` is of the minute in which messages were published, and grows
    when each is first settled: what still waits is not in it.
    """

    id = models.BigAutoField(primary_key=True)
    queue = models.TextField()
    minute = ReadableDateTimeField()
    handled = models.BigIntegerField(default=0, db_default=0)
    failed = models.BigIntegerField(default=0, db_default=0)
    dead_lettered = models.BigIntegerField(default=0, db_default=0)
    published = models.BigIntegerField(default=0, db_default=0)

    class Meta:
        db_table = "django_pgqueue_queueminute"
        constraints = (models.UniqueConstraint(fields=("queue", "minute"), name="django_pgqueue_minute_unique"),)
        indexes = (models.Index(fields=("minute",), name="django_pgqueue_minute_idx"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.minute:%H:%M}"


class ReaperRun(models.Model):
    """The reaper's last run, whoever ran it: one row."""

    id = models.IntegerField(primary_key=True, default=1)
    finished_at = ReadableDateTimeField(db_default=Now())
    seconds = models.FloatField(help_text="How long it took.")
    report = models.JSONField(help_text="What it did, as reap_queues --format json tells it, and how many queues.")

    class Meta:
        db_table = "django_pgqueue_reaperrun"
        constraints = (models.CheckConstraint(condition=Q(id=1), name="django_pgqueue_reaperrun_one_row"),)

    def __str__(self) -> str:
        return f"{self.finished_at:%Y-%m-%d %H:%M:%S %Z}"


class TopicBinding(models.Model):
    """
    A queue that gets a copy of each message of a topic.

    No foreign key: a binding outlives a queue's row that was deleted by hand, and the copies wait for
    the queue as orphans. The reaper removes the bindings of a queue together with the queue.
    """

    id = models.BigAutoField(primary_key=True)
    topic = models.TextField()
    queue = models.TextField()
    ttl = models.FloatField(null=True, blank=True, help_text="Seconds. Null: the default. Infinity: never.")
    created_at = ReadableDateTimeField(db_default=Now())

    class Meta:
        db_table = "django_pgqueue_topicbinding"
        ordering = ("topic", "queue")
        constraints = (
            models.UniqueConstraint(fields=("topic", "queue"), name="django_pgqueue_binding_unique"),
            models.CheckConstraint(condition=Q(topic__regex=NAME), name="django_pgqueue_binding_topic"),
            models.CheckConstraint(condition=Q(ttl__isnull=True) | Q(ttl__gt=0), name="django_pgqueue_binding_ttl"),
        )
        indexes = (models.Index(fields=("queue",), name="django_pgqueue_binding_queue"),)

    def __str__(self) -> str:
        return f"{self.topic} to {self.queue}"


class TopicBody(models.Model):
    """A topic's message that does not fit into a notification: live subscribers read it, nobody takes it."""

    id = models.BigAutoField(primary_key=True)
    content = models.TextField(help_text="What the notification would have carried.")
    expires_at = ReadableDateTimeField()

    class Meta:
        db_table = "django_pgqueue_topicbody"
        indexes = (models.Index(fields=("expires_at",), name="django_pgqueue_body_expiry_idx"),)

    def __str__(self) -> str:
        return str(self.pk)


class TaskRun(models.Model):
    """
    What workers noted of a task: one row from its first attempt on, none before. ``id`` is its message's.

    Kept for ``TASK_RESULT_TTL`` after the task ended. ``status`` is as it was noted last: of a worker that died it
    goes on saying RUNNING, and what is true follows from the message, as the result's status does.
    """

    class Status(models.TextChoices):
        READY = "READY"
        RUNNING = "RUNNING"
        FAILED = "FAILED"
        SUCCESSFUL = "SUCCESSFUL"

    id = models.BigIntegerField(primary_key=True)
    queue = models.TextField()
    task = models.TextField(help_text="The dotted path of its function.")
    backend = models.TextField(help_text="The alias in TASKS.")
    key = models.TextField(help_text="The second half of the result's id, which nobody guesses.")
    status = models.TextField(choices=Status.choices)
    run_after = ReadableDateTimeField(null=True)
    enqueued_at = ReadableDateTimeField(null=True)
    started_at = ReadableDateTimeField()
    last_attempted_at = ReadableDateTimeField()
    finished_at = ReadableDateTimeField(null=True)
    worker_ids = models.JSONField(default=list, help_text="The consumers that started it, one for each attempt.")
    errors = models.JSONField(
        default=list,
        db_default=models.Value([], output_field=models.JSONField()),
        help_text="The last failures, oldest first: exception_class_path, traceback.",
    )
    arguments = models.JSONField(null=True, help_text="As in the message, once an attempt has ended: args, kwargs.")
    return_value = models.JSONField(null=True)
    lease_token = models.UUIDField(help_text="Of the last attempt.")

    class Meta:
        db_table = "django_pgqueue_taskrun"
        # What is written at the end of an attempt is not in it: a heap-only update.
        indexes = (models.Index(fields=("last_attempted_at",), name="django_pgqueue_run_attempt_idx"),)

    def __str__(self) -> str:
        return f"{self.task} {self.pk}"


class MessageQueueItemQuerySet(models.QuerySet["MessageQueueItem"]):
    """The states of a message that people see. Each message is in one of them."""

    def ready(self) -> MessageQueueItemQuerySet:
        """Messages that the next claim may take."""
        return self._waiting().exclude(read_after__gt=Now())

    def delayed(self) -> MessageQueueItemQuerySet:
        """Messages whose time has not come."""
        return self._waiting().filter(read_after__gt=Now())

    def leased(self) -> MessageQueueItemQuerySet:
        """Messages that a consumer holds."""
        return self.filter(lease_expires_at__gt=Now())

    def dead(self) -> MessageQueueItemQuerySet:
        """Messages that were set aside and that nobody holds."""
        return self._unheld().filter(queue__isnull=False, dead_lettered_at__isnull=False)

    def expired(self) -> MessageQueueItemQuerySet:
        """Messages whose TTL has passed and that the reaper has not met yet."""
        return self._unheld().filter(queue__isnull=False, dead_lettered_at__isnull=True, expires_at__lte=Now())

    def orphaned(self) -> MessageQueueItemQuerySet:
        """Messages whose queue row was deleted and that nobody holds."""
        return self._unheld().filter(queue__isnull=True)

    def _unheld(self) -> MessageQueueItemQuerySet:
        return self.exclude(lease_expires_at__gt=Now())

    def _waiting(self) -> MessageQueueItemQuerySet:
        return self._unheld().filter(queue__isnull=False, dead_lettered_at__isnull=True).exclude(expires_at__lte=Now())


class MessageQueueItem(models.Model):
    """
    One message.

    Every column but ``queue_id`` and ``payload`` has a database default, so a bare
    ``INSERT (queue_id, payload)`` from psql or a trigger is a valid publish.
    """

    id = models.BigAutoField(primary_key=True)
    # The constraint is ImmediateForeignKey below, and the claim index leads with the column, so
    # Django's own constraint and index are both left out.
    queue = models.ForeignKey(
        MessageQueue,
        models.DO_NOTHING,
        null=True,
        db_constraint=False,
        db_index=False,
        related_name="items",
    )
    payload = models.JSONField()
    headers = models.JSONField(default=dict, db_default=models.Value({}, output_field=models.JSONField()))
    published_at = ReadableDateTimeField(db_default=Now())
    read_after = ReadableDateTimeField(null=True, help_text="Due time. Null: published without a delay.")
    expires_at = ReadableDateTimeField(null=True, help_text="Null: never.")
    delivery_count = models.IntegerField(default=0, db_default=0)
    lease_expires_at = ReadableDateTimeField(null=True)
    lease_token = models.UUIDField(null=True)
    leased_by = models.UUIDField(null=True, help_text="The consumer that holds or last held it.")
    orphaned_from = models.TextField(  # noqa: DJ001 - exactly one of queue and orphaned_from is null
        null=True, help_text="The queue it belonged to when that queue's row was deleted."
    )
    dead_lettered_from = models.TextField(null=True)  # noqa: DJ001 - null is "never"
    dead_letter_path = models.JSONField(
        null=True, help_text="The queues that gave it up, in this order. None is visited twice."
    )
    dead_lettered_at = ReadableDateTimeField(null=True)
    failures = models.JSONField(
        null=True,
        help_text="The last failures, oldest first: at, queue, delivery_count, consumer, process, reason.",
    )

    objects = MessageQueueItemQuerySet.as_manager()

    class Meta:
        db_table = "django_pgqueue_messagequeueitem"
        indexes = (
            # Serves both walks of a claim (read_after null, read_after due), the foreign key's
            # look-up and the orphan trigger's. A claim changes none of its columns. The condition follows from
            # each search by queue, the foreign key's too, and not from one by id: with statistics from when the
            # table was emptied the planner would go through all of this index for ids, which it ends with.
            models.Index(
                fields=("queue", "read_after", "id"),
                condition=Q(queue__isnull=False),
                name="django_pgqueue_item_claim_idx",
            ),
            models.Index(
                fields=("expires_at",),
                condition=Q(expires_at__isnull=False),
                name="django_pgqueue_item_expiry_idx",
            ),
            models.Index(
                fields=("orphaned_from", "id"),
                condition=Q(orphaned_from__isnull=False),
                name="django_pgqueue_item_orphan_idx",
            ),
            # What redrive walks.
            models.Index(
                fields=("dead_lettered_from", "id"),
                condition=Q(dead_lettered_from__isnull=False),
                name="django_pgqueue_item_dead_idx",
            ),
        )
        constraints = (
            ImmediateForeignKey(field="queue", name="django_pgqueue_item_queue_fk"),
            # Makes it loud when the orphan trigger is disabled: a message must know where it belongs.
            models.CheckConstraint(
                condition=Q(queue__isnull=False, orphaned_from__isnull=True)
                | Q(queue__isnull=True, orphaned_from__isnull=False),
                name="django_pgqueue_item_queue_or_orphan",
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue_id or self.orphaned_from}/{self.pk}"

    def state(self, now: datetime) -> str:
        """Return the word for this message's state at ``now``, which should be the database's time."""
        if self.lease_expires_at is not None and self.lease_expires_at > now:
            return "leased"
        if self.queue_id is None:
            return "orphaned"
        if self.dead_lettered_at is not None:
            return "dead"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        if self.read_after is not None and self.read_after > now:
            return "delayed"
        return "ready"
