"""What the live page shows."""

from typing import Any

from django.db import models


class Note(models.Model):
    """A line that somebody wrote, for all who look at the page."""

    text = models.CharField(max_length=500)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.text

    def as_data(self) -> dict[str, Any]:
        """Return it as the stream tells it."""
        return {"id": self.pk, "text": self.text}
