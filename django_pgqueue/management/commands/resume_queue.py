"""Start claims of paused queues again."""

from django_pgqueue.management.verbs import QueuesCommand
from django_pgqueue.queues import Queue


class Command(QueuesCommand):
    help = "Start claims of paused queues again."
    done = "resumed"

    def act(self, queue: Queue) -> None:
        queue.resume()
