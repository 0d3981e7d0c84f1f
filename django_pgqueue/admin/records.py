"""The pages of topic bindings, queue events, consumers and task runs."""

import json
from typing import Any

from django import forms
from django.contrib import admin
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html

from django_pgqueue.admin.base import ReadOnlyAdmin, UncountedPaginator
from django_pgqueue.conf import database_alias
from django_pgqueue.exceptions import InvalidQueueName
from django_pgqueue.models import MessageQueue, QueueConsumer, QueueEvent, TaskRun, TopicBinding
from django_pgqueue.validation import check_name, check_ttl

# Of a JSON value.
MAX_SHOWN_CHARS = 10_000


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
    """Bindings: the queues that get a copy of a topic's messages. They can be added and deleted, but not changed."""

    form = TopicBindingForm
    fields = ("topic", "queue", "ttl")
    list_display = ("topic", "queue", "ttl", "created_at")
    search_fields = ("topic", "queue")

    def get_queryset(self, request: HttpRequest) -> QuerySet[TopicBinding]:
        return super().get_queryset(request).using(database_alias())

    def save_model(self, request: HttpRequest, obj: TopicBinding, form: Any, change: bool) -> None:  # noqa: FBT001
        using = database_alias()
        with transaction.atomic(using=using):
            # The reaper locks the queue first. This lock keeps it from meeting a binding that it has not locked.
            MessageQueue.objects.using(using).select_for_update(no_key=True).filter(name=obj.queue).first()
            obj.save(using=using)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[TopicBinding]) -> None:
        # One by one, in the order in which publishers lock bindings. A single statement could use another order.
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


@admin.register(TaskRun)
class TaskRunAdmin(ReadOnlyAdmin):
    """
    The tasks that workers have started, latest attempt first.

    A task that no worker has started yet exists only as a message.
    """

    list_display = ("id", "task", "queue", "status", "attempts", "last_attempted_at", "finished_at")
    list_filter = ("status",)
    # By equality: the table can be large, and there is no index for a text search.
    search_fields = ("id__exact",)
    search_help_text = "Search by result id or message id."
    ordering = ("-last_attempted_at",)
    show_full_result_count = False
    paginator = UncountedPaginator
    fields = (
        *("id", "task", "queue", "backend", "status", "attempts"),
        *("run_after", "enqueued_at", "started_at", "last_attempted_at", "finished_at"),
        *("arguments_shown", "return_value_shown", "errors_shown", "worker_ids"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[TaskRun]:
        runs = super().get_queryset(request)
        is_list = request.resolver_match is not None and str(request.resolver_match.url_name).endswith("_changelist")
        return runs.defer("arguments", "return_value", "errors") if is_list else runs

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> Any:
        # A result's id is the message's id, a hyphen and a key.
        return super().get_search_results(request, queryset, search_term.strip().partition("-")[0])

    @admin.display(description="attempts")
    def attempts(self, run: TaskRun) -> int:
        return len(run.worker_ids)

    @admin.display(description="arguments")
    def arguments_shown(self, run: TaskRun) -> str:
        return shown(run.arguments)

    @admin.display(description="return value")
    def return_value_shown(self, run: TaskRun) -> str:
        return shown(run.return_value)

    @admin.display(description="errors")
    def errors_shown(self, run: TaskRun) -> str:
        texts = (f"{error['exception_class_path']}\n{error['traceback']}" for error in run.errors)
        return format_html("<pre>{}</pre>", "\n".join(texts)) if run.errors else "-"


def shown(value: Any) -> str:
    """Return a JSON value as text for the page, truncated to ``MAX_SHOWN_CHARS``."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return format_html("<pre>{}</pre>", text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…")
