"""Stop claims of queues, by all consumers, until they are resumed."""

from django_pgqueue.management.verbs import QueuesCommand
from django_pgqueue.queues import Queue


class Command(QueuesCommand):
    help = "Stop claims of queues, by all consumers, until they are resumed."
    done = "paused"

    def act(self, queue: Queue) -> None:
        queue.pause()
