"""
The tables. These models are for migrations, the admin and queries; ``services/`` uses SQL.

No column stores a message's state, which follows from the lease, the times and the message's origin. A claim therefore
changes no indexed column, and is a heap-only update.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from django_pgqueue.constraints import ImmediateForeignKey

# ``validation.check_name`` is stricter.
NAME_PATTERN = r"^[^[:cntrl:][:space:]]([^[:cntrl:]]{0,253}[^[:cntrl:][:space:]])?$"


class ReadableDateTimeField(models.DateTimeField):  # type: ignore[type-arg]  # not generic at run time
    """
    A time that can always be read.

    The database can store times that Python cannot represent: infinity, and years before 1 or after 9999. One such row,
    written by hand, would break every list that contains it. These times are read as the first or last possible time,
    less a day for time zones.
    """

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Return the SQL that selects the column."""
        first, last = "timestamptz '0001-01-02 00:00:00+00'", "timestamptz '9999-12-30 00:00:00+00'"
        return f"CASE WHEN {sql} < {first} THEN {first} WHEN {sql} > {last} THEN {last} ELSE {sql} END", (*params,) * 3

    def deconstruct(self) -> Any:
        """Return Django's own field, because the column has its type."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs


class MessageQueue(models.Model):
    """One queue. Rows are created by ``Queue.declare()`` and by publishing, and deleted by the reaper."""

    name = models.TextField(primary_key=True)
    durable = models.BooleanField(default=True, db_default=True)
    auto_deleted = models.BooleanField(
        default=False, db_default=False, help_text="Whether the queue is reaped when it is idle and empty."
    )
    exclusive = models.BooleanField(default=False, db_default=False)
    exclusive_consumer_id = models.UUIDField(null=True, editable=False)
    dead_letter = models.TextField(  # noqa: DJ001 - null is "not configured"
        null=True,
        help_text="The configured dead-letter queue. Null: the default, NAME.dead.",
    )
    max_deliveries = models.IntegerField(default=5, db_default=5)
    paused_at = ReadableDateTimeField(null=True)
    last_active = ReadableDateTimeField(
        db_default=Now(), help_text="When the queue was last declared, published to or consumed."
    )
    created_at = ReadableDateTimeField(db_default=Now())

    class Meta:
        db_table = "django_pgqueue_messagequeue"
        ordering = ("name",)
        constraints = (
            models.CheckConstraint(
                condition=Q(name__regex=NAME_PATTERN),
                name="django_pgqueue_queue_name",
            ),
            models.CheckConstraint(condition=Q(max_deliveries__gte=1), name="django_pgqueue_queue_max_deliveries"),
        )

    def __str__(self) -> str:
        return self.name


class QueueConsumer(models.Model):
    """
    One running consumer process, as of its last heartbeat.

    The rows are for people, and for finding the owners of exclusive queues. Claims and leases do not use them: a lease
    expires at its own deadline, whether this row exists or not.
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
    An event of a queue's row: reaped, revived or vanished. Kept for a week.

    The reaper writes ``reaped``, which is the tombstone. If a queue is created again after a tombstone, the
    event is ``revived``. If there is no tombstone, but the process that creates the queue had seen it before, the event
    is ``vanished``.
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
    The counts of a queue's messages in one minute, for charts. Kept for a day.

    Consumers add their counts with each heartbeat, so the latest counts of a killed consumer are missing. A minute
    without any messages has no row. ``published`` counts the messages that were published in this minute. Each one is
    added when it is first settled, so waiting messages are not included.
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
    """The last run of any reaper, in one row."""

    id = models.IntegerField(primary_key=True, default=1)
    finished_at = ReadableDateTimeField(db_default=Now())
    seconds = models.FloatField(help_text="The duration of the run.")
    report = models.JSONField(help_text="What the run did, as in reap_queues --format json, with the number of queues.")

    class Meta:
        db_table = "django_pgqueue_reaperrun"
        constraints = (models.CheckConstraint(condition=Q(id=1), name="django_pgqueue_reaperrun_one_row"),)

    def __str__(self) -> str:
        return f"{self.finished_at:%Y-%m-%d %H:%M:%S %Z}"


class TopicBinding(models.Model):
    """
    A queue that gets a copy of each message of a topic.

    There is no foreign key: if a queue's row is deleted by hand, its bindings remain and the copies wait as orphans.
    The reaper deletes a queue together with its bindings.
    """

    id = models.BigAutoField(primary_key=True)
    topic = models.TextField()
    queue = models.TextField()
    ttl = models.FloatField(null=True, blank=True, help_text="In seconds. Empty: the default. Infinity: never.")
    created_at = ReadableDateTimeField(db_default=Now())

    class Meta:
        db_table = "django_pgqueue_topicbinding"
        ordering = ("topic", "queue")
        constraints = (
            models.UniqueConstraint(fields=("topic", "queue"), name="django_pgqueue_binding_unique"),
            models.CheckConstraint(condition=Q(topic__regex=NAME_PATTERN), name="django_pgqueue_binding_topic"),
            models.CheckConstraint(condition=Q(ttl__isnull=True) | Q(ttl__gt=0), name="django_pgqueue_binding_ttl"),
        )
        indexes = (models.Index(fields=("queue",), name="django_pgqueue_binding_queue"),)

    def __str__(self) -> str:
        return f"{self.topic} to {self.queue}"


class TopicBody(models.Model):
    """A topic's message that does not fit into a notification. All live subscribers read it from here."""

    id = models.BigAutoField(primary_key=True)
    content = models.TextField(help_text="The content of the notification.")
    expires_at = ReadableDateTimeField()

    class Meta:
        db_table = "django_pgqueue_topicbody"
        indexes = (models.Index(fields=("expires_at",), name="django_pgqueue_body_expiry_idx"),)

    def __str__(self) -> str:
        return str(self.pk)


class TaskRun(models.Model):
    """
    The run of a task. Workers write it from the first attempt on. ``id`` is the id of its message.

    Kept for ``TASK_RESULT_TTL`` after the task has ended. ``status`` is the last status that a worker wrote. It stays
    RUNNING if the worker dies; the status of the task's result also takes the message into account.
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
    key = models.TextField(help_text="The random second half of the result's id.")
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
    arguments = models.JSONField(null=True, help_text="The args and kwargs of the message, once an attempt has ended.")
    return_value = models.JSONField(null=True)
    lease_token = models.UUIDField(help_text="The token of the last attempt's lease.")

    class Meta:
        db_table = "django_pgqueue_taskrun"
        # The index contains no column that the end of an attempt writes, so that is a heap-only update.
        indexes = (models.Index(fields=("last_attempted_at",), name="django_pgqueue_run_attempt_idx"),)

    def __str__(self) -> str:
        return f"{self.task} {self.pk}"


class MessageQueueItemQuerySet(models.QuerySet["MessageQueueItem"]):
    """Filters by the state of messages. Each message is in exactly one state."""

    def ready(self) -> MessageQueueItemQuerySet:
        """Messages that the next claim may take."""
        return self._waiting().exclude(read_after__gt=Now())

    def delayed(self) -> MessageQueueItemQuerySet:
        """Messages that are not due yet."""
        return self._waiting().filter(read_after__gt=Now())

    def leased(self) -> MessageQueueItemQuerySet:
        """Messages that a consumer holds."""
        return self.filter(lease_expires_at__gt=Now())

    def dead(self) -> MessageQueueItemQuerySet:
        """Messages that were dead-lettered and that nobody holds."""
        return self._unheld().filter(queue__isnull=False, dead_lettered_at__isnull=False)

    def expired(self) -> MessageQueueItemQuerySet:
        """Messages whose TTL has passed and that the reaper has not removed yet."""
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

    Every column except ``queue_id`` and ``payload`` has a database default, so a plain ``INSERT (queue_id, payload)``
    from psql or a trigger is a valid publish.
    """

    id = models.BigAutoField(primary_key=True)
    # Django's own constraint and index are omitted: ImmediateForeignKey below is the constraint, and the claim index
    # starts with this column.
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
    read_after = ReadableDateTimeField(
        null=True, help_text="When it becomes due. Empty if it was published without a delay."
    )
    expires_at = ReadableDateTimeField(null=True, help_text="When it expires. Empty: never.")
    delivery_count = models.IntegerField(default=0, db_default=0)
    lease_expires_at = ReadableDateTimeField(null=True)
    lease_token = models.UUIDField(null=True)
    leased_by = models.UUIDField(null=True, help_text="The consumer that holds or last held it.")
    orphaned_from = models.TextField(  # noqa: DJ001 - exactly one of queue and orphaned_from is null
        null=True, help_text="The queue it belonged to when that queue's row was deleted."
    )
    dead_lettered_from = models.TextField(null=True)  # noqa: DJ001 - null is "never"
    dead_letter_path = models.JSONField(
        null=True, help_text="The queues that dead-lettered it, in order. No queue is visited twice."
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
            # For both walks of a claim (read_after is null, read_after is due), and for the searches of the foreign key
            # and the orphan trigger. A claim changes none of its columns. The condition is implied by each search by
            # queue, including the foreign key's, but not by a search by id. Without it, and with statistics from when
            # the table was empty, the planner would scan this index for ids.
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
            # For redrives.
            models.Index(
                fields=("dead_lettered_from", "id"),
                condition=Q(dead_lettered_from__isnull=False),
                name="django_pgqueue_item_dead_idx",
            ),
        )
        constraints = (
            ImmediateForeignKey(field="queue", name="django_pgqueue_item_queue_fk"),
            # Raises an error if the orphan trigger is disabled, so that no message loses the name of its queue.
            models.CheckConstraint(
                condition=Q(queue__isnull=False, orphaned_from__isnull=True)
                | Q(queue__isnull=True, orphaned_from__isnull=False),
                name="django_pgqueue_item_queue_or_orphan",
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue_id or self.orphaned_from}/{self.pk}"

    def state(self, now: datetime) -> str:
        """Return the name of this message's state at ``now``, which should be the database's time."""
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
