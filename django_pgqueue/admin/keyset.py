"""
Pages of messages that are found by a key, that of the row before or behind them.

Each costs the same, however deep it is, and messages that come and go meanwhile shift none of them.
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
    """Where a row stands. ``due`` is its due time, as text of the database's: of any time that there is."""

    id: int
    due: str | None = None

    @classmethod
    def of(cls, row: Any) -> Key:
        return cls(row.pk, row.due_text)


@dataclass(frozen=True)
class Order:
    """
    An order of messages: by id, or ``by_due`` along a queue's claim index.

    By due time those without one come last, or first where it is ``descending``.
    """

    by_due: bool
    descending: bool

    @classmethod
    def of(cls, ordering: Sequence[Any]) -> Order:
        """Return the order that an ordering begins with: a text for the id, or an expression for the due time."""
        first = ordering[0]
        if isinstance(first, str):
            return cls(by_due=False, descending=first.startswith("-"))
        return cls(by_due=True, descending=first.descending)

    @property
    def reverse(self) -> Order:
        return Order(self.by_due, not self.descending)

    def text(self, key: Key) -> str:
        """Return a key as it stands in a URL."""
        return f"{key.due or ''}_{key.id}" if self.by_due else str(key.id)

    def parse(self, text: str) -> Key:
        """Return the key of a URL. Raises ``ValueError`` for what is none, or one of another order."""
        found = re.fullmatch(r"([\w :.+-]{0,40})_(\d{1,19})" if self.by_due else r"()(\d{1,19})", text, re.ASCII)
        if found is None or int(found[2]) > MAX_ID:
            raise ValueError(f"not a key: {text!r:.80}")
        return Key(int(found[2]), found[1] or None)

    def rows(self, queryset: QuerySet[Any], key: Key | None, limit: int) -> list[Any]:
        """
        Return up to ``limit`` rows behind a key (None: the first ones).

        By due time these are two walks: as one statement, what is behind the key would be no range of the index.
        Raises ``django.db.DataError`` where the key's time is none.
        """
        queryset = queryset.annotate(due_text=Cast("read_after", TextField()))
        found: dict[int, Any] = {}
        for is_due in self._walks(key):
            walk = queryset if is_due is None else queryset.filter(read_after__isnull=not is_due)
            if key is not None and (is_due is None or is_due == (key.due is not None)):
                walk = walk.filter(self._behind(key))
            # A message that is given back between the two walks stands in both.
            found |= {row.pk: row for row in walk.order_by(*self._terms())[: limit - len(found)] if row.pk not in found}
            if len(found) == limit:
                break
        return list(found.values())

    def _walks(self, key: Key | None) -> list[bool | None]:
        """Return the walks from a key on: of what has a due time, and of what has none. One of None: by id."""
        if not self.by_due:
            return [None]
        walks: list[bool | None] = [False, True] if self.descending else [True, False]
        return walks if key is None else walks[walks.index(key.due is not None) :]

    def _terms(self) -> list[str]:
        sign = "-" if self.descending else ""
        # The due time also where all have none: without it the planner does not see that the index is in this order.
        return [f"{sign}read_after", f"{sign}id"] if self.by_due else [f"{sign}id"]

    def _behind(self, key: Key) -> Any:
        if key.due is None:
            return Q(id__lt=key.id) if self.descending else Q(id__gt=key.id)
        there = Row(Cast(Value(key.due), DateTimeField()), Value(key.id))
        return Behind(Row(F("read_after"), F("id")), there, arg_joiner=" < " if self.descending else " > ")


class Row(Func):
    """Several values as one, that is compared as a whole."""

    function = "ROW"
    output_field = TextField()


class Behind(Func):
    """A comparison of two rows."""

    template = "%(expressions)s"
    output_field = BooleanField()
