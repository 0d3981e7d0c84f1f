import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from example_project.live.forms import NoteForm
from example_project.live.models import Note
from example_project.live.queues import notes

# How many notes the page shows, and how many are told again to who comes back.
SHOWN = 100
# Nothing stands in the page itself: scripts and styles are files, and only ours.
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'"


@require_GET
def page(request: HttpRequest) -> HttpResponse:
    return show(request, NoteForm())


@require_POST
def post(request: HttpRequest) -> HttpResponse:
    """Store a note and tell it to everybody: both, or neither."""
    form = NoteForm(request.POST)
    if not form.is_valid():
        return show(request, form, status=400)
    with transaction.atomic():
        note = form.save()
        notes.publish(note.as_data())
    return redirect("live:page")


def show(request: HttpRequest, form: NoteForm, status: int = 200) -> HttpResponse:
    shown = list(Note.objects.all()[:SHOWN])
    context = {"form": form, "notes": shown, "most": SHOWN, "is_live": isinstance(request, ASGIRequest)}
    response = render(request, "live/page.html", context, status=status)
    response["Content-Security-Policy"] = POLICY
    return response


@require_GET
async def stream(request: HttpRequest) -> HttpResponseBase:
    """Tell notes as they are written, as server-sent events, until the browser goes away."""
    if not isinstance(request, ASGIRequest):
        # A WSGI server would wait for the end of what has none.
        return HttpResponse("This needs an ASGI server.\n", status=501, content_type="text/plain")
    # The browser sends the header when it comes back by itself, the page the parameter when it begins.
    last = request.headers.get("Last-Event-ID") or request.GET.get("after", "")
    response = StreamingHttpResponse(
        events(int(last) if last.isdecimal() and len(last) < 19 else 0), content_type="text/event-stream"
    )
    response["Cache-Control"] = "no-cache, no-transform"
    # For nginx: hand each event on at once.
    response["X-Accel-Buffering"] = "no"
    return response


async def events(last: int) -> AsyncIterator[str]:
    """Yield the notes after number ``last`` and those that come, some of them twice."""
    async with notes.listen() as messages:
        gaps = None
        while True:
            if gaps != messages.gaps:
                # Listening first and reading then leaves no moment between.
                gaps = messages.gaps
                for note in await sync_to_async(notes_since, thread_sensitive=False)(last):
                    yield event(note)
                    last = max(last, note["id"])
            try:
                async with asyncio.timeout(settings.LIVE_HEARTBEAT):
                    message = await anext(messages)
            except TimeoutError:
                # A comment. It keeps proxies from closing a quiet connection.
                yield ": still here\n\n"
            else:
                yield event(message.payload)
                last = max(last, message.payload["id"])


def event(note: dict[str, Any]) -> str:
    return f"id: {note['id']}\ndata: {json.dumps(note)}\n\n"


def notes_since(last: int) -> list[dict[str, Any]]:
    """
    Return what somebody who has heard up to number ``last`` may not have, the oldest first.

    Numbers are given before they are committed, so a smaller one may come later: some are told again. Runs in
    the few threads that the process has for such things, so that a thousand streams make no thousand connections.
    """
    try:
        newest = Note.objects.filter(pk__gt=last - SHOWN)[:SHOWN]
        return [note.as_data() for note in reversed(newest)]
    finally:
        # Django would close it at the end of the request, which may be hours from now.
        connection.close()
