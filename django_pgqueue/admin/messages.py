"""The pages of messages. The lists read no payloads, and their queries have a time limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import DataError, OperationalError, transaction
from django.db.models import F, Func, QuerySet, TextField
from django.db.models.functions import Left
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_pgqueue.admin.base import ReadOnlyAdmin, may_operate
from django_pgqueue.admin.keyset import Key, Order
from django_pgqueue.conf import database_alias
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueConsumer
from django_pgqueue.services import session, settling
from django_pgqueue.services.counting import DEPTH_STATES

# Seconds. The list shows a warning instead of messages when it takes longer.
STATEMENT_TIMEOUT = 2.0
# Leased messages are searched among the first messages of a queue only.
SCAN_LIMIT = 5_000
# Of a payload, and of headers.
MAX_SHOWN_CHARS = 20_000

STATES = (*DEPTH_STATES, "orphaned")


class NameFilter(admin.SimpleListFilter):
    """A filter with a text field for the name, because there may be thousands of names."""

    template = "admin/django_pgqueue/messagequeueitem/name_filter.html"
    column: str

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        # Django omits a filter without lookups.
        return [("", "")]

    def choices(self, changelist: Any) -> Iterator[Any]:
        # The form keeps the other filters.
        yield {"others": [pair for pair in changelist.params.items() if pair[0] not in (self.parameter_name, "p")]}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        name = self.value()
        if not name:
            return queryset
        # PostgreSQL's text cannot contain NUL.
        return queryset.none() if "\0" in name else queryset.filter(**{self.column: name})


class QueueFilter(NameFilter):
    title, parameter_name, column = "queue", "queue", "queue_id"


class DeadFromFilter(NameFilter):
    title, parameter_name, column = "dead-lettered from", "dead_from", "dead_lettered_from"


class StateFilter(admin.SimpleListFilter):
    title, parameter_name = "state", "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [(state, state) for state in STATES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() not in STATES:
            return queryset
        chosen: QuerySet[Any] = getattr(queryset, str(self.value()))()
        if self.value() == "leased" and (queue := request.GET.get("queue")):
            # Claims take the first messages. Without this limit, the whole queue is read to find a few.
            return chosen.filter(pk__in=_head(queue))
        return chosen


def _head(queue: str) -> QuerySet[Any]:
    """Return the ids of a queue's first messages, with and without a due time."""
    walks = MessageQueueItem.objects.using(database_alias()).filter(queue=queue)
    due = walks.filter(read_after__isnull=False).order_by("read_after", "id").values("pk")[:SCAN_LIMIT]
    plain = walks.filter(read_after__isnull=True).order_by("id").values("pk")[:SCAN_LIMIT]
    return due.union(plain, all=True)


# Query parameters for the key that a page starts after or ends before.
AFTER, BEFORE = "after", "before"
NEWER, OLDER = "Newer", "Older"


class MessageChangeList(ChangeList):
    """A page of messages. It is empty, with a warning, if the query takes too long."""

    order: Order
    first_url: str
    previous_url: str | None = None
    next_url: str | None = None

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        self.place = {name: request.GET[name] for name in (AFTER, BEFORE) if name in request.GET}
        super().__init__(request, *args, **kwargs)

    @property
    def previous_label(self) -> str:
        return NEWER if self.order.descending else OLDER

    @property
    def next_label(self) -> str:
        return OLDER if self.order.descending else NEWER

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        for name in (AFTER, BEFORE):
            # They are not filters, and choosing another filter leads to the first page.
            self.params.pop(name, None)
            self.filter_params.pop(name, None)
        return super().get_queryset(request, exclude_parameters)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        ordering = super().get_ordering(request, queryset)
        self.order = Order.of(ordering)
        return ordering

    def get_results(self, request: HttpRequest) -> None:
        try:
            rows = self._find(request)
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != "57014":
                raise
            text = (
                f"The query took longer than {STATEMENT_TIMEOUT:g} seconds and was cancelled. Choose a queue or another"
                " state."
            )
            messages.warning(request, text)
            rows = []
        self.result_list = rows
        self.result_count, self.full_result_count, self.show_full_result_count = len(rows), None, False
        self.show_admin_actions, self.can_show_all = bool(rows), False
        self.multi_page = bool(self.previous_url or self.next_url)
        self.first_url = self.get_query_string()
        self.paginator = self.model_admin.get_paginator(request, rows, self.list_per_page)  # type: ignore[arg-type]

    def _find(self, request: HttpRequest) -> list[Any]:
        """Return the rows of the requested page, or of the first page if that one no longer exists."""
        if self.place:
            try:
                if rows := self._page(**self.place):
                    return rows
            except (ValueError, DataError):
                pass
            messages.info(request, "That page no longer exists. This is the first page.")
        return self._page()

    def _page(self, after: str | None = None, before: str | None = None) -> list[Any]:
        """Return the rows after one key or before another, and set the links to the neighboring pages."""
        text = before if after is None else after
        key = None if text is None else self.order.parse(text)
        is_backward = key is not None and after is None
        order = self.order.reverse if is_backward else self.order
        using = database_alias()
        with transaction.atomic(using=using):
            session.limit_statements(STATEMENT_TIMEOUT, using)
            # One row more than is shown, to know whether there is another page.
            found = order.rows(self.queryset, key, self.list_per_page + 1)
            now = session.now(using)
        rows = found[: self.list_per_page]
        for row in rows:
            row.now = now
        is_more = len(found) > len(rows)
        if is_backward:
            rows.reverse()
        if rows and (is_more if is_backward else key is not None):
            self.previous_url = self._url(BEFORE, rows[0])
        if rows and (is_more or is_backward):
            self.next_url = self._url(AFTER, rows[-1])
        return rows

    def _url(self, place: str, row: Any) -> str:
        return self.get_query_string({place: self.order.text(Key.of(row))})


@admin.register(MessageQueueItem)
class MessageQueueItemAdmin(ReadOnlyAdmin):
    list_display = (
        "id",
        "state",
        "queue_name",
        "published_at",
        "read_after",
        "expires_at",
        "delivery_count",
        "lease_expires_at",
        "dead_lettered_from",
    )
    list_filter = (QueueFilter, DeadFromFilter, StateFilter)
    # Sorting by any other column would read the whole table for one page.
    sortable_by = ("id",)
    ordering = ("-id",)
    show_full_result_count = False
    change_list_template = "admin/django_pgqueue/messagequeueitem/change_list.html"
    change_form_template = "admin/django_pgqueue/messagequeueitem/change_form.html"
    fieldsets = (
        (None, {"fields": ("id", "state", "queue_link", "pretty_payload", "pretty_headers")}),
        ("Times", {"fields": ("published_at", "read_after", "expires_at")}),
        (
            "Deliveries",
            {"fields": ("delivery_count", "lease_expires_at", "holder", "failure_history")},
        ),
        (
            "Dead letter or orphan",
            {"fields": ("orphaned_from", "dead_lettered_from", "dead_lettered_at", "dead_letter_path")},
        ),
    )

    class Media:
        css = {"all": ("django_pgqueue/admin.css",)}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return MessageChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[MessageQueueItem]:
        # Payloads can be megabytes long, and Python may be unable to hold them. A list shows no payloads. A message's
        # page shows the beginning as text.
        queryset: QuerySet[Any] = super().get_queryset(request)
        match = request.resolver_match
        if match is not None and str(match.url_name).endswith("_changelist"):
            return queryset.defer("payload", "headers", "failures")
        texts = queryset.annotate(payload_text=_pretty("payload"), headers_text=_pretty("headers"))
        page: QuerySet[MessageQueueItem] = texts.defer("payload", "headers")
        return page

    def get_ordering(self, request: HttpRequest) -> Any:
        """
        Follow the claim index if a queue is chosen.

        Ordered by id, the query would search the messages of all queues for those of a small one.
        """
        if not request.GET.get("queue"):
            return self.ordering
        if request.GET.get("state") == "leased":
            # The first messages: see StateFilter.
            return (F("read_after").asc(nulls_last=True), "id")
        return (F("read_after").desc(nulls_first=True), "-id")

    # --- Columns and fields ---

    @admin.display(description="state")
    def state(self, row: Any) -> str:
        return str(row.state(row.now if hasattr(row, "now") else session.now(database_alias())))

    @admin.display(description="queue")
    def queue_name(self, row: MessageQueueItem) -> str:
        return row.queue_id or f"{row.orphaned_from} (deleted)"

    @admin.display(description="queue")
    def queue_link(self, row: MessageQueueItem) -> SafeString | str:
        if row.queue_id is None:
            return self.queue_name(row)
        url = reverse("admin:django_pgqueue_messagequeue_change", args=[quote(row.queue_id)])
        return format_html('<a href="{}">{}</a>', url, row.queue_id)

    @admin.display(description="payload")
    def pretty_payload(self, row: Any) -> SafeString:
        return _shown(row.payload_text)

    @admin.display(description="headers")
    def pretty_headers(self, row: Any) -> SafeString:
        return _shown(row.headers_text)

    @admin.display(description="leased by")
    def holder(self, row: MessageQueueItem) -> str:
        if row.leased_by is None:
            return "-"
        consumer = QueueConsumer.objects.using(database_alias()).filter(pk=row.leased_by).first()
        return f"{row.leased_by} ({consumer or 'no longer running, or a manual claim'})"

    @admin.display(description="failures")
    def failure_history(self, row: MessageQueueItem) -> SafeString | str:
        lines = [
            tuple(str(each.get(key, "")) for key in ("at", "queue", "delivery_count", "process", "reason"))
            for each in row.failures or []
        ]
        if not lines:
            return "-"
        body = format_html_join(
            "", "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td><pre>{}</pre></td></tr>", reversed(lines)
        )
        return format_html(
            '<table class="pgqueue-failures"><thead><tr><th scope="col">at</th><th scope="col">queue</th>'
            '<th scope="col">delivery</th><th scope="col">process</th><th scope="col">reason</th></tr></thead>'
            "<tbody>{}</tbody></table>",
            body,
        )

    # --- Pages ---

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view(self.release_view)
        name = "django_pgqueue_messagequeueitem_release"
        return [path("<path:object_id>/release/", view, name=name), *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        row = context["original"]
        operate = may_operate(request)
        context |= {
            "may_release": operate and self.state(row) == "leased",
            "redrive_url": None,
        }
        origin = row.dead_lettered_from
        if operate and origin and MessageQueue.objects.using(database_alias()).filter(pk=origin).exists():
            url = reverse("admin:django_pgqueue_messagequeue_operate", args=[quote(origin), "redrive"])
            context["redrive_url"] = f"{url}?ids={row.pk}"
        return super().render_change_form(request, context, *args, **kwargs)

    def release_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Release a lease now, for a consumer that is known to have died."""
        if not may_operate(request) or request.method != "POST":
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None:
            raise Http404
        if row.lease_token is not None and settling.release_lease(row.pk, row.lease_token, database_alias()):
            self.log_change(request, row, "Lease released.")
            self.message_user(request, "The lease was released. The message is ready.", messages.SUCCESS)
        else:
            self.message_user(request, "The lease has already expired, or another consumer holds it.", messages.WARNING)
        return HttpResponseRedirect(reverse("admin:django_pgqueue_messagequeueitem_change", args=[quote(row.pk)]))


def _pretty(column: str) -> Left:
    return Left(Func(F(column), function="jsonb_pretty", output_field=TextField()), MAX_SHOWN_CHARS + 1)


def _shown(text: str) -> SafeString:
    cut = (
        format_html("<p>Only the first {} characters are shown.</p>", f"{MAX_SHOWN_CHARS:,}")
        if len(text) > MAX_SHOWN_CHARS
        else ""
    )
    return format_html('<pre class="pgqueue-json" tabindex="0">{}</pre>{}', text[:MAX_SHOWN_CHARS], cut)
