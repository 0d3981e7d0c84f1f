import json

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from example_project.inbox.models import Delivery
from example_project.inbox.queues import webhooks


@csrf_exempt
@require_POST
def receive(request: HttpRequest, source: str) -> JsonResponse:
    """Take a webhook in: its audit row and its message are stored together, or neither is."""
    try:
        payload = json.loads(request.body)
        with transaction.atomic():
            delivery = Delivery.objects.create(source=source, size=len(request.body))
            webhooks.publish(payload, headers={"delivery": delivery.pk})
    except (ValueError, RecursionError) as error:  # not JSON, or (PayloadError) not storable
        return JsonResponse({"error": f"the body cannot be taken as JSON: {error}"}, status=400)
    return JsonResponse({"delivery": delivery.pk}, status=202)
