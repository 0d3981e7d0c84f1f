"""The tasks of the inbox, whose results are requested later."""

from collections import Counter

from example_project.inbox.models import Summary

try:
    from django.tasks import task
except ImportError:  # Django 5.2, with the backport
    from django_tasks import task


@task(queue_name="inbox.digests")
def digest(source: str) -> dict[str, int]:
    """Count the summaries of a source's webhooks, by text."""
    texts = Summary.objects.filter(delivery__source=source).values_list("text", flat=True)
    return dict(Counter(texts))
