"""
The operations on a queue.

Each has a page that explains the operation and asks for confirmation. The operation then runs through the library, and
its outcome is shown to the user and written to the admin's log.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from django_pgqueue.exceptions import PGQueueError
from django_pgqueue.models import MessageQueue
from django_pgqueue.queues import Queue

# For one request, so that it does not take too long.
MAX_MESSAGES = 10_000
# Seconds that the request waits for a canary.
CANARY_TIMEOUT = 20.0


class OperationForm(forms.Form):
    """A form for one queue."""

    def __init__(self, row: MessageQueue, *args: Any, **kwargs: Any) -> None:
        self.row = row
        super().__init__(*args, **kwargs)


class PurgeForm(OperationForm):
    name = forms.CharField(label="Queue", help_text="Type the name of the queue to confirm.", strip=False)
    limit = forms.IntegerField(
        min_value=1, max_value=MAX_MESSAGES, initial=MAX_MESSAGES, help_text="At most this many."
    )

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if name != self.row.name:
            raise ValidationError(f"This is not the name of the queue {self.row.name!r}.")
        return name


class RedriveForm(OperationForm):
    ids = forms.CharField(
        required=False, help_text="Comma-separated message ids. Leave empty for all.", widget=forms.TextInput
    )
    reason = forms.CharField(
        required=False, strip=False, help_text="Only dead letters whose last failure contains this text."
    )
    limit = forms.IntegerField(
        min_value=1, max_value=MAX_MESSAGES, initial=MAX_MESSAGES, help_text="At most this many."
    )
    canary = forms.IntegerField(
        min_value=1,
        required=False,
        help_text=(
            "Try this many first. The rest follow only if these are handled within"
            f" {CANARY_TIMEOUT:.0f} seconds and none fails again."
        ),
    )

    def clean_ids(self) -> list[int] | None:
        text: str = self.cleaned_data["ids"]
        try:
            return [int(part) for part in text.split(",")] if text.strip() else None
        except ValueError as error:
            raise ValidationError("Enter numbers separated by commas.") from error


class PublishForm(OperationForm):
    payload = forms.CharField(widget=forms.Textarea(attrs={"rows": 6, "class": "vLargeTextField"}), help_text="JSON.")
    delay = forms.FloatField(min_value=0, initial=0, help_text="Seconds until the message is due.")

    def clean_payload(self) -> Any:
        try:
            return json.loads(self.cleaned_data["payload"])
        except (ValueError, RecursionError) as error:
            raise ValidationError(f"Enter valid JSON: {error}") from error


@dataclass(frozen=True)
class Operation:
    """An operation on a queue."""

    title: str
    explanation: str
    #: Performs the operation with the form's cleaned data, and returns the outcome as text.
    perform: Callable[[Queue, dict[str, Any]], str]
    form: type[OperationForm] = OperationForm
    is_destructive: bool = False
    #: Whether the list of queues has an action for it, which asks for nothing and performs it on all selected queues.
    is_bulk: bool = False

    @property
    def bulk_label(self) -> str:
        """The label of that action."""
        return f"{self.title} selected queues"


def _pause(queue: Queue, data: dict[str, Any]) -> str:
    queue.pause()
    return "Paused."


def _resume(queue: Queue, data: dict[str, Any]) -> str:
    queue.resume()
    return "Resumed."


def _redrive(queue: Queue, data: dict[str, Any]) -> str:
    count = queue.redrive(
        data["limit"],
        ids=data["ids"],
        reason=data["reason"] or None,
        canary=data["canary"],
        canary_timeout=CANARY_TIMEOUT,
    )
    return f"Redriven: {count:,} messages."


def _purge(queue: Queue, data: dict[str, Any]) -> str:
    return f"Purged: {queue.purge(data['limit']):,} messages."


def _publish(queue: Queue, data: dict[str, Any]) -> str:
    return f"Published: message {queue.publish(data['payload'], delay=data['delay'])}."


OPERATIONS = {
    "pause": Operation(
        "Pause",
        "Consumers claim no more messages from this queue until it is resumed. Messages that are already claimed are"
        " handled, and publishing continues.",
        _pause,
        is_bulk=True,
    ),
    "resume": Operation("Resume", "Consumers claim messages from this queue again.", _resume, is_bulk=True),
    "redrive": Operation(
        "Redrive",
        "Dead letters of this queue return to it. Their delivery count restarts, and their failure history is kept.",
        _redrive,
        RedriveForm,
    ),
    "publish": Operation("Publish a message", "It will be handled like any other message.", _publish, PublishForm),
    "purge": Operation(
        "Purge",
        "Messages that wait in this queue are permanently deleted, including delayed messages and dead letters that are"
        " stored in it. Messages that a consumer holds are kept.",
        _purge,
        PurgeForm,
        is_destructive=True,
    ),
}

# The library's errors whose text can be shown to the user.
REFUSALS = (PGQueueError, ValueError, RuntimeError)
