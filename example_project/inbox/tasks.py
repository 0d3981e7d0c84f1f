"""What the inbox does now and then, and whose result somebody asks for."""

from collections import Counter

from example_project.inbox.models import Summary

try:
    from django.tasks import task
except ImportError:  # Django 5.2, with the backport
    from django_tasks import task


@task(queue_name="inbox.digests")
def digest(source: str) -> dict[str, int]:
    """Count what the webhooks of a source were about."""
    texts = Summary.objects.filter(delivery__source=source).values_list("text", flat=True)
    return dict(Counter(texts))
