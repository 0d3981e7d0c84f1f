"""The models of the inbox: each webhook that was received, and its summary."""

from django.db import models


class Delivery(models.Model):
    """The audit record of a webhook, created in the transaction that publishes it."""

    source = models.TextField()
    size = models.PositiveIntegerField(help_text="The size of the request body, in bytes.")
    received_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "deliveries"

    def __str__(self) -> str:
        return f"{self.source} #{self.pk}"


class Summary(models.Model):
    """The summary of a webhook, created by the queue's handler."""

    # One to one, so that a message that is handled twice causes an error.
    delivery = models.OneToOneField(Delivery, on_delete=models.CASCADE)
    text = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "summaries"

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def describe(payload: object) -> str:
        """Return a one-line summary of a payload of any shape."""
        if not isinstance(payload, dict):
            return f"a JSON {type(payload).__name__}"
        body = payload.get("payload")
        details = body if isinstance(body, dict) else payload
        words = [payload.get("event"), details.get("action")]
        text = " ".join(word for word in words if isinstance(word, str))
        return text[:200] or f"keys: {', '.join(payload)}"[:200]
