"""The table in which the handlers of the tests note what they were given."""

from django.db import models
from django.db.models.functions import Now


class Seen(models.Model):
    """One start of a handler: which message, in which process, at which delivery."""

    msg_id = models.BigIntegerField()
    worker = models.IntegerField()
    attempt = models.IntegerField()
    at = models.DateTimeField(db_default=Now())

    class Meta:
        app_label = "testapp"

    def __str__(self) -> str:
        return f"{self.msg_id}/{self.attempt}"
