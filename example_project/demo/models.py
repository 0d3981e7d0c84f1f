"""What publishers and handlers write beside the queue, to see that it commits with it."""

from django.db import models


class Mark(models.Model):
    """
    One write in the transaction of a publish ("published") or of an atomic ack ("handled").

    Not unique: a second one for the same message is what the ledger looks for.
    """

    message_id = models.BigIntegerField()
    what = models.TextField()

    def __str__(self) -> str:
        return f"{self.what} {self.message_id}"
