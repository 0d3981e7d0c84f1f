"""The list of queues, the page of one queue, and the pages of its operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.http import urlencode

from django_pgqueue.admin.base import ReadOnlyAdmin, may_operate
from django_pgqueue.admin.charts import chart
from django_pgqueue.admin.operations import OPERATIONS, REFUSALS, Operation
from django_pgqueue.admin.queue_columns import NUMBERS, QueueColumns
from django_pgqueue.conf import database_alias
from django_pgqueue.durations import duration
from django_pgqueue.models import MessageQueue, QueueConsumer
from django_pgqueue.monitoring.diagnosis import Limits
from django_pgqueue.monitoring.queue_numbers import numbers_of
from django_pgqueue.queues import queue_named
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import reaping, session


class QueueChangeList(ChangeList):
    """A page of queues together with their numbers."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        rows: list[Any] = list(self.result_list)
        numbers = numbers_of([row.name for row in rows], database_alias())
        now = session.now(database_alias())
        for row in rows:
            row.numbers, row.now = numbers[row.name], now
        self.result_list = rows


def bulk_action(verb: str, operation: Operation) -> Callable[..., None]:
    """Return the action that performs an operation on the selected queues."""

    @admin.action(description=operation.bulk_label, permissions=["operate"])
    def perform(model_admin: MessageQueueAdmin, request: HttpRequest, queryset: QuerySet[MessageQueue]) -> None:
        for row in queryset.order_by("name"):
            model_admin.perform(request, row, operation, {})

    perform.__name__ = f"{verb}_selected"
    return perform


@admin.register(MessageQueue)
class MessageQueueAdmin(QueueColumns, ReadOnlyAdmin):
    list_display = (
        "name",
        "condition",
        "activity",
        "published",
        "handled",
        "ready",
        "leased",
        "delayed",
        "dead",
        "oldest_due",
        "consumers",
        "last_used",
    )
    # No filters: the sidebar would leave too little room for the numbers.
    search_fields = ("name",)
    sortable_by = ("name", "last_used")
    ordering = ("name",)
    list_per_page = 50
    list_max_show_all = 200
    actions = tuple(bulk_action(verb, operation) for verb, operation in OPERATIONS.items() if operation.is_bulk)
    change_list_template = "admin/django_pgqueue/messagequeue/change_list.html"
    change_form_template = "admin/django_pgqueue/messagequeue/change_form.html"

    class Media:
        css = {"all": ("django_pgqueue/admin.css",)}
        js = ("django_pgqueue/refresh.js",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return QueueChangeList

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return may_operate(request)

    def perform(self, request: HttpRequest, row: MessageQueue, operation: Operation, data: dict[str, Any]) -> bool:
        """Perform an operation and show the user its outcome. Returns whether it succeeded."""
        try:
            outcome = operation.perform(queue_named(row.pk, database_alias()), data)
        except REFUSALS as error:
            self.message_user(request, f"{row.name}: {error}", messages.ERROR)
            return False
        self.log_change(request, row, outcome)
        self.message_user(request, f'"{row.name}": {outcome}', messages.SUCCESS)
        return True

    # --- Pages ---

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view
        return [
            path("reap/", view(self.reap_view), name="django_pgqueue_messagequeue_reap"),
            path(
                "<path:object_id>/operate/<str:verb>/",
                view(self.operate_view),
                name="django_pgqueue_messagequeue_operate",
            ),
            *super().get_urls(),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        age = reaping.last_run_age(database_alias())
        context = {
            "may_operate": may_operate(request),
            "reaper": "The reaper has never run." if age is None else f"The reaper ran {duration(age)} ago.",
            "reaper_is_late": age is None or age > Limits().reaper,
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        row = context["original"]
        using = database_alias()
        row.numbers, row.now = numbers_of([row.name], using)[row.name], session.now(using)
        items = reverse("admin:django_pgqueue_messagequeueitem_changelist")
        consumers = QueueConsumer.objects.using(using).filter(queues__contains=[row.name])
        context |= {
            "numbers": [(label, getattr(self, column)(row)) for column, label in NUMBERS],
            "condition": self.condition(row),
            "chart": chart(row.numbers),
            "operations": OPERATIONS if may_operate(request) else {},
            "quoted": quote(row.pk),
            "items_url": f"{items}?{urlencode({'queue': row.name})}",
            "dead_letters_url": f"{items}?{urlencode({'dead_from': row.name})}",
            "live_consumers": consumers.order_by("host", "pid"),
        }
        return super().render_change_form(request, context, *args, **kwargs)

    def operate_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Ask for confirmation, then perform the operation."""
        if not may_operate(request):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        operation = OPERATIONS.get(verb)
        if row is None or operation is None:
            raise Http404
        page = reverse("admin:django_pgqueue_messagequeue_change", args=[quote(row.pk)])
        form = operation.form(row, request.POST if request.method == "POST" else None, initial=request.GET.dict())
        if request.method == "POST" and form.is_valid() and self.perform(request, row, operation, form.cleaned_data):
            return HttpResponseRedirect(page)
        context = {
            **self.admin_site.each_context(request),
            "title": f"{operation.title}: {row.name}",
            "opts": self.opts,
            "original": row,
            "operation": operation,
            "form": form,
            "page": page,
            "media": self.media + form.media,
        }
        return TemplateResponse(request, "admin/django_pgqueue/messagequeue/operate.html", context)

    def reap_view(self, request: HttpRequest) -> HttpResponse:
        """Show what the reaper would do, then run it once."""
        if not may_operate(request):
            raise PermissionDenied
        reaper = Reaper(database_alias())
        back = reverse("admin:django_pgqueue_messagequeue_changelist")
        if request.method == "POST":
            reaped = reaper.run_once()
            outcome = (
                f"Queues deleted: {len(reaped.queues):,}. Messages expired: {reaped.expired:,}, dead-lettered:"
                f" {reaped.dead_lettered:,}, returned to their queues: {reaped.adopted:,}."
            )
            self.message_user(request, outcome, messages.SUCCESS)
            return HttpResponseRedirect(back)
        context = {
            **self.admin_site.each_context(request),
            "title": "Reap now",
            "opts": self.opts,
            "preview": reaper.preview(),
            "page": back,
            "media": self.media,
        }
        return TemplateResponse(request, "admin/django_pgqueue/messagequeue/reap.html", context)
