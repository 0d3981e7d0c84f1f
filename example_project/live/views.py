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

# On the page. A page that reconnects also gets this many earlier notes again.
MAX_NOTES = 100
# Scripts and styles are files of this site. The page contains none inline.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'"
)


@require_GET
def page(request: HttpRequest) -> HttpResponse:
    return show(request, NoteForm())


@require_POST
def post(request: HttpRequest) -> HttpResponse:
    """Store a note and publish it to everybody. Both happen, or neither."""
    form = NoteForm(request.POST)
    if not form.is_valid():
        return show(request, form, status=400)
    with transaction.atomic():
        note = form.save()
        notes.publish(note.as_data())
    return redirect("live:page")


def show(request: HttpRequest, form: NoteForm, status: int = 200) -> HttpResponse:
    newest = list(Note.objects.all()[:MAX_NOTES])
    context = {"form": form, "notes": newest, "max_notes": MAX_NOTES, "is_live": isinstance(request, ASGIRequest)}
    response = render(request, "live/page.html", context, status=status)
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    return response


@require_GET
async def stream(request: HttpRequest) -> HttpResponseBase:
    """Send notes as server-sent events when they are posted, until the browser closes the connection."""
    if not isinstance(request, ASGIRequest):
        # A WSGI server would wait for the end of the stream, which never ends.
        return HttpResponse("This needs an ASGI server.\n", status=501, content_type="text/plain")
    # The browser sends the header when it reconnects. The page sends the parameter when it opens the stream.
    last = request.headers.get("Last-Event-ID") or request.GET.get("after", "")
    response = StreamingHttpResponse(
        events(int(last) if last.isdecimal() and len(last) < 19 else 0), content_type="text/event-stream"
    )
    response["Cache-Control"] = "no-cache, no-transform"
    # nginx then forwards each event at once.
    response["X-Accel-Buffering"] = "no"
    return response


async def events(last: int) -> AsyncIterator[str]:
    """Yield the notes after the id ``last``, and then new notes. Some notes are sent twice."""
    async with notes.listen() as messages:
        gaps = None
        while True:
            if gaps != messages.gaps:
                # The table is read after listening has begun, so no note is missed in between.
                gaps = messages.gaps
                for note in await sync_to_async(notes_since, thread_sensitive=False)(last):
                    yield event(note)
                    last = max(last, note["id"])
            try:
                async with asyncio.timeout(settings.LIVE_HEARTBEAT):
                    message = await anext(messages)
            except TimeoutError:
                # A comment, which keeps proxies from closing an idle connection.
                yield ": still here\n\n"
            else:
                yield event(message.payload)
                last = max(last, message.payload["id"])


def event(note: dict[str, Any]) -> str:
    return f"id: {note['id']}\ndata: {json.dumps(note)}\n\n"


def notes_since(last: int) -> list[dict[str, Any]]:
    """
    Return the notes that a reader may not have after the id ``last``, the oldest first.

    An id is assigned before it is committed, so a smaller id can become visible later. Therefore some notes are sent
    again. This function runs in one of a few threads, so that a thousand streams do not open a thousand connections.
    """
    try:
        newest = Note.objects.filter(pk__gt=last - MAX_NOTES)[:MAX_NOTES]
        return [note.as_data() for note in reversed(newest)]
    finally:
        # Django would close it at the end of the request, which may be hours later.
        connection.close()
