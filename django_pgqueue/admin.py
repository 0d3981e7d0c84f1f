"""The tables in the admin: queues and messages read-only, since they are changed through the library."""

from typing import Any

from django import forms
from django.contrib import admin
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from django_pgqueue.conf import database_alias
from django_pgqueue.exceptions import InvalidQueueName
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer, QueueEvent, TopicBinding
from django_pgqueue.validation import check_name, check_ttl


class UncountedPaginator(Paginator):  # type: ignore[type-arg]  # not generic at run time
    """Pages without COUNT(*): it looks for rows only up to a limit."""

    # Beyond this a page by offset would read too much; look for the message by id instead.
    most = 10_000

    @cached_property
    def count(self) -> int:
        # A bounded probe instead of a count: how many rows are there, up to the limit.
        rows: Any = self.object_list
        return len(rows.order_by().values_list("pk", flat=True)[: self.most])


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    actions = None

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        # Where the queues are: a router may send reads to a replica that lags behind.
        return super().get_queryset(request).using(database_alias())

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(MessageQueue)
class MessageQueueAdmin(ReadOnlyAdmin):
    list_display = (
        "name",
        "durable",
        "auto_deleted",
        "exclusive",
        "dead_letter",
        "max_deliveries",
        "paused_at",
        "last_active",
    )
    list_filter = ("auto_deleted", "durable", "exclusive")
    search_fields = ("name",)


class TopicBindingForm(forms.ModelForm):  # type: ignore[type-arg]  # not generic at run time
    def clean_topic(self) -> str:
        return self._clean_name("topic")

    def clean_queue(self) -> str:
        name = self._clean_name("queue")
        if not MessageQueue.objects.using(database_alias()).filter(name=name).exists():
            raise forms.ValidationError(f"There is no queue {name!r}.")
        return name

    def clean_ttl(self) -> float | None:
        try:
            return check_ttl(self.cleaned_data["ttl"])
        except ValueError as error:
            raise forms.ValidationError(str(error)) from error

    def _clean_name(self, field: str) -> str:
        try:
            return check_name(self.cleaned_data[field])
        except InvalidQueueName as error:
            raise forms.ValidationError(str(error)) from error


@admin.register(TopicBinding)
class TopicBindingAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    """Which queues get a copy of which topic's messages: bound and unbound here too, never edited."""

    form = TopicBindingForm
    fields = ("topic", "queue", "ttl")
    list_display = ("topic", "queue", "ttl", "created_at")
    search_fields = ("topic", "queue")

    def get_queryset(self, request: HttpRequest) -> QuerySet[TopicBinding]:
        return super().get_queryset(request).using(database_alias())

    def save_model(self, request: HttpRequest, obj: TopicBinding, form: Any, change: bool) -> None:  # noqa: FBT001
        using = database_alias()
        with transaction.atomic(using=using):
            # The reaper, which locks the queue first, must not meet a binding that it has not locked.
            MessageQueue.objects.using(using).select_for_update(no_key=True).filter(name=obj.queue).first()
            obj.save(using=using)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[TopicBinding]) -> None:
        # In the order in which publishers lock them: one statement for all would lock in another one.
        for binding in queryset.order_by("topic", "queue"):
            binding.delete()

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(QueueEvent)
class QueueEventAdmin(ReadOnlyAdmin):
    list_display = ("at", "queue", "kind")
    list_filter = ("kind",)
    search_fields = ("queue",)
    ordering = ("-id",)
    show_full_result_count = False
    paginator = UncountedPaginator


@admin.register(QueueConsumer)
class QueueConsumerAdmin(ReadOnlyAdmin):
    list_display = ("id", "host", "pid", "queues", "started_at", "last_heartbeat")


@admin.register(MessageQueueItem)
class MessageQueueItemAdmin(ReadOnlyAdmin):
    list_display = (
        "id",
        "queue_id",
        "published_at",
        "read_after",
        "expires_at",
        "delivery_count",
        "lease_expires_at",
        "orphaned_from",
        "dead_lettered_from",
    )
    # By any other column, the whole table would be read and sorted for one page.
    sortable_by = ("id",)
    ordering = ("-id",)
    show_full_result_count = False
    paginator = UncountedPaginator

    def get_queryset(self, request: HttpRequest) -> QuerySet[MessageQueueItem]:
        queryset = super().get_queryset(request)
        match = request.resolver_match
        if match is not None and str(match.url_name).endswith("_changelist"):
            # Payloads may be megabytes; a list shows none.
            return queryset.defer("payload", "headers", "failures")
        # The link to its queue: read along, or a router may look for it elsewhere.
        return queryset.select_related("queue")
