"""What the inbox stores: each webhook that came in, and what it was about."""

from django.db import models


class Delivery(models.Model):
    """The audit row of a webhook, written in the transaction that publishes it."""

    source = models.TextField()
    size = models.PositiveIntegerField(help_text="The size of the request body, in bytes.")
    received_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "deliveries"

    def __str__(self) -> str:
        return f"{self.source} #{self.pk}"


class Summary(models.Model):
    """What a webhook was about, written by the queue's handler."""

    # One to one: a message that were handled twice would show.
    delivery = models.OneToOneField(Delivery, on_delete=models.CASCADE)
    text = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "summaries"

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def describe(payload: object) -> str:
        """Return one line about a webhook of whatever shape."""
        if not isinstance(payload, dict):
            return f"a JSON {type(payload).__name__}"
        body = payload.get("payload")
        details = body if isinstance(body, dict) else payload
        words = [payload.get("event"), details.get("action")]
        text = " ".join(word for word in words if isinstance(word, str))
        return text[:200] or f"keys: {', '.join(payload)}"[:200]
