"""Both tables in the admin, read-only: queues and messages are changed through the library."""

from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from django_pgqueue.conf import database_alias
from django_pgqueue.models import MessageQueue, MessageQueueItem


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
        "last_active",
    )
    list_filter = ("auto_deleted", "durable", "exclusive")
    search_fields = ("name",)


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
