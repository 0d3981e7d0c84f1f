"""
What an operator does to a queue, as pages: each says what it will do, asks, does it through the library,
tells what came of it, and writes that to the admin's log.
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

# What one request redrives or purges at the most, so that it ends in time.
MAX_MESSAGES = 10_000
# Seconds that a canary gets: the request waits for it.
CANARY_TIMEOUT = 20.0


class OperationForm(forms.Form):
    """A form that knows its queue."""

    def __init__(self, row: MessageQueue, *args: Any, **kwargs: Any) -> None:
        self.row = row
        super().__init__(*args, **kwargs)


class PurgeForm(OperationForm):
    name = forms.CharField(label="Queue", help_text="Type the name of the queue.", strip=False)
    limit = forms.IntegerField(
        min_value=1, max_value=MAX_MESSAGES, initial=MAX_MESSAGES, help_text="At most this many."
    )

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if name != self.row.name:
            raise ValidationError(f"This is not the name of the queue, {self.row.name!r}.")
        return name


class RedriveForm(OperationForm):
    ids = forms.CharField(
        required=False, help_text="Only these, separated by commas. Empty: all.", widget=forms.TextInput
    )
    reason = forms.CharField(
        required=False, strip=False, help_text="Only those with this text in the reason of their last failure."
    )
    limit = forms.IntegerField(
        min_value=1, max_value=MAX_MESSAGES, initial=MAX_MESSAGES, help_text="At most this many."
    )
    canary = forms.IntegerField(
        min_value=1,
        required=False,
        help_text=(
            f"So many go first; the others follow if these are settled within {CANARY_TIMEOUT:.0f} seconds and none"
            " dies again."
        ),
    )

    def clean_ids(self) -> list[int] | None:
        text: str = self.cleaned_data["ids"]
        try:
            return [int(part) for part in text.split(",")] if text.strip() else None
        except ValueError as error:
            raise ValidationError("Numbers, separated by commas.") from error


class PublishForm(OperationForm):
    payload = forms.CharField(widget=forms.Textarea(attrs={"rows": 6, "class": "vLargeTextField"}), help_text="JSON.")
    delay = forms.FloatField(min_value=0, initial=0, help_text="Seconds until it is due.")

    def clean_payload(self) -> Any:
        try:
            return json.loads(self.cleaned_data["payload"])
        except (ValueError, RecursionError) as error:
            raise ValidationError(f"This is not JSON: {error}") from error


@dataclass(frozen=True)
class Operation:
    """One thing that can be done to a queue."""

    title: str
    explanation: str
    #: Does it, with the form's data, and returns what came of it, in words.
    perform: Callable[[Queue, dict[str, Any]], str]
    form: type[OperationForm] = OperationForm
    is_destructive: bool = False


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
        "No consumer claims from the queue until it is resumed. What is being handled ends normally; publishing goes"
        " on.",
        _pause,
    ),
    "resume": Operation("Resume", "Consumers claim from the queue again.", _resume),
    "redrive": Operation(
        "Redrive",
        "Dead letters of this queue go back to it, with a fresh count of deliveries and with their history.",
        _redrive,
        RedriveForm,
    ),
    "publish": Operation("Publish a message", "It is handled as every other.", _publish, PublishForm),
    "purge": Operation(
        "Purge",
        "What waits on the queue, delayed messages and dead letters on it included, is deleted for good. What a"
        " consumer holds stays.",
        _purge,
        PurgeForm,
        is_destructive=True,
    ),
}

# What the library refuses, in words that are fit for the page.
REFUSALS = (PGQueueError, ValueError, RuntimeError)
