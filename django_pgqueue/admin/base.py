"""What the pages share: read-only, on the queues' database, without COUNT(*)."""

from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from django_pgqueue.conf import database_alias


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
    actions: tuple[str, ...] | None = None
    # They are counted with COUNT(*).
    show_facets = admin.ShowFacets.NEVER

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        # Where the queues are: a router may send reads to a replica that lags behind.
        return super().get_queryset(request).using(database_alias())

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def may_operate(request: HttpRequest) -> bool:
    """Tell whether the user may pause, redrive, purge: whoever may change queues, which nobody does in a form."""
    return bool(request.user.has_perm("django_pgqueue.change_messagequeue"))
