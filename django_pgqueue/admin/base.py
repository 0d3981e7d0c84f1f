"""Base classes of the pages: read-only, on the queues' database, without COUNT(*)."""

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from django_pgqueue.conf import database_alias


class UncountedPaginator(Paginator):  # type: ignore[type-arg]  # not generic at run time
    """A paginator without COUNT(*): it counts rows only up to ``max_rows``."""

    # A page at a larger offset would read too many rows.
    max_rows = 10_000

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return len(rows.order_by().values_list("pk", flat=True)[: self.max_rows])


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    actions: tuple[str | Callable[..., Any], ...] | None = None
    # Facets use COUNT(*).
    show_facets = admin.ShowFacets.NEVER

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        # Not through a router, which may send reads to a replica that lags behind.
        return super().get_queryset(request).using(database_alias())

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def may_operate(request: HttpRequest) -> bool:
    """
    Return whether the user may operate queues: perform operations on them, release leases and reap.

    The "change" permission of queues grants this. No form uses it to change a queue.
    """
    return bool(request.user.has_perm("django_pgqueue.change_messagequeue"))
