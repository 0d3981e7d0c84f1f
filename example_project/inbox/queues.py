from django_pgqueue import Message, Queue
from example_project.inbox.models import Summary

webhooks = Queue("inbox.webhooks", max_deliveries=5)


@webhooks.handler(ack="atomic")
def summarize(message: Message) -> None:
    """Store the summary of a webhook. The ack is committed with it, so there is exactly one summary."""
    Summary.objects.create(
        delivery_id=message.headers["delivery"],
        text=Summary.describe(message.payload),
    )
