"""Stop claims of queues, by all consumers, until they are resumed."""

from django_pgqueue.management.verbs import QueuesCommand
from django_pgqueue.queues import Queue


class Command(QueuesCommand):
    help = "Stop consumers from claiming messages of the queues, until they are resumed."
    epilog = """
    Publishing continues, and running handlers finish. Consumers give back their other messages within
    POLL_INTERVAL. A paused queue is not reaped. Pausing a paused queue changes nothing.

    Exit status: 0 if all queues were paused. 1 if a queue does not exist (the others are paused), or the database
    reports an error or is unavailable.

    Signals: SIGTERM or SIGINT ends the command like any other program.

    Output: "paused NAME" for each queue.
    """
    done = "paused"

    def act(self, queue: Queue) -> None:
        queue.pause()
