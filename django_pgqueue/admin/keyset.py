"""
Keyset pagination of messages: a page is found by the key of the row just before or just after it.

All pages cost the same, however deep they are. Messages that are added or deleted meanwhile do not shift them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.db.models import BooleanField, DateTimeField, F, Func, Q, QuerySet, TextField, Value
from django.db.models.functions import Cast

MAX_ID = 2**63 - 1


class Key(NamedTuple):
    """The position of a row. ``due`` is its due time as PostgreSQL's text, which can hold any timestamp."""

    id: int
    due: str | None = None

    @classmethod
    def of(cls, row: Any) -> Key:
        return cls(row.pk, row.due_text)


@dataclass(frozen=True)
class Order:
    """
    An order of messages: by id, or ``by_due`` along a queue's claim index.

    By due time, messages without one come last, or first if the order is ``descending``.
    """

    by_due: bool
    descending: bool

    @classmethod
    def of(cls, ordering: Sequence[Any]) -> Order:
        """Return the order for an ordering, whose first item is a string (the id) or an expression (the due time)."""
        first = ordering[0]
        if isinstance(first, str):
            return cls(by_due=False, descending=first.startswith("-"))
        return cls(by_due=True, descending=first.descending)

    @property
    def reverse(self) -> Order:
        return Order(self.by_due, not self.descending)

    def text(self, key: Key) -> str:
        """Return a key as it is written in a URL."""
        return f"{key.due or ''}_{key.id}" if self.by_due else str(key.id)

    def parse(self, text: str) -> Key:
        """Return the key that a URL contains. Raises ``ValueError`` if it is no key, or a key of another order."""
        found = re.fullmatch(r"([\w :.+-]{0,40})_(\d{1,19})" if self.by_due else r"()(\d{1,19})", text, re.ASCII)
        if found is None or int(found[2]) > MAX_ID:
            raise ValueError(f"not a key: {text!r:.80}")
        return Key(int(found[2]), found[1] or None)

    def rows(self, queryset: QuerySet[Any], key: Key | None, limit: int) -> list[Any]:
        """
        Return up to ``limit`` rows after a key (None: the first rows).

        By due time this takes two queries: in a single one, the rows after the key would not be a range of the index.
        Raises ``django.db.DataError`` if the key's due time is not a timestamp.
        """
        queryset = queryset.annotate(due_text=Cast("read_after", TextField()))
        found: dict[int, Any] = {}
        for is_due in self._walks(key):
            walk = queryset if is_due is None else queryset.filter(read_after__isnull=not is_due)
            if key is not None and (is_due is None or is_due == (key.due is not None)):
                walk = walk.filter(self._behind(key))
            # A message that is released between the two queries is in both.
            found |= {row.pk: row for row in walk.order_by(*self._terms())[: limit - len(found)] if row.pk not in found}
            if len(found) == limit:
                break
        return list(found.values())

    def _walks(self, key: Key | None) -> list[bool | None]:
        """Return the queries after a key: whether each is for messages with a due time (None: one query, by id)."""
        if not self.by_due:
            return [None]
        walks: list[bool | None] = [False, True] if self.descending else [True, False]
        return walks if key is None else walks[walks.index(key.due is not None) :]

    def _terms(self) -> list[str]:
        sign = "-" if self.descending else ""
        # The due time is named even where it is always NULL. Otherwise the planner does not recognize the index order.
        return [f"{sign}read_after", f"{sign}id"] if self.by_due else [f"{sign}id"]

    def _behind(self, key: Key) -> Any:
        if key.due is None:
            return Q(id__lt=key.id) if self.descending else Q(id__gt=key.id)
        there = Row(Cast(Value(key.due), DateTimeField()), Value(key.id))
        return Behind(Row(F("read_after"), F("id")), there, arg_joiner=" < " if self.descending else " > ")


class Row(Func):
    """A row value: several values that are compared as a whole."""

    function = "ROW"
    output_field = TextField()


class Behind(Func):
    """A comparison of two row values."""

    template = "%(expressions)s"
    output_field = BooleanField()
