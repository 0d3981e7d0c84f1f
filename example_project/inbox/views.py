import json

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from example_project.inbox.models import Delivery
from example_project.inbox.queues import webhooks
from example_project.inbox.tasks import digest

try:
    from django.tasks import TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
except ImportError:  # Django 5.2, with the backport
    from django_tasks import TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist


@csrf_exempt
@require_POST
def receive(request: HttpRequest, source: str) -> JsonResponse:
    """Receive a webhook. Its audit record and its message are stored together, or neither is stored."""
    try:
        payload = json.loads(request.body)
        with transaction.atomic():
            delivery = Delivery.objects.create(source=source, size=len(request.body))
            webhooks.publish(payload, headers={"delivery": delivery.pk})
    except (ValueError, RecursionError) as error:  # not JSON, or (PayloadError) not storable
        return JsonResponse({"error": f"the body cannot be accepted as JSON: {error}"}, status=400)
    return JsonResponse({"delivery": delivery.pk}, status=202)


@csrf_exempt
@require_POST
def order_digest(request: HttpRequest, source: str) -> JsonResponse:
    """Enqueue a task that counts the summaries of a source."""
    return JsonResponse({"digest": digest.enqueue(source).id}, status=202)


@require_GET
def show_digest(request: HttpRequest, result_id: str) -> JsonResponse:
    """Return the status of a digest, and its counts if it is done."""
    try:
        result = digest.get_result(result_id)
    except TaskResultDoesNotExist:
        return JsonResponse({"error": "digest not found"}, status=404)
    is_done = result.status == TaskResultStatus.SUCCESSFUL
    return JsonResponse({"status": result.status, "counts": result.return_value if is_done else None})
