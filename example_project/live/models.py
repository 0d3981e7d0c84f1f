"""The model of the live page."""

from typing import Any

from django.db import models


class Note(models.Model):
    """A note that is shown to everybody who has the page open."""

    text = models.CharField(max_length=500)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.text

    def as_data(self) -> dict[str, Any]:
        """Return the note as the stream sends it."""
        return {"id": self.pk, "text": self.text}
