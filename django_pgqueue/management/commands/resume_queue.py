"""Start claims of paused queues again."""

from django_pgqueue.management.verbs import QueuesCommand
from django_pgqueue.queues import Queue


class Command(QueuesCommand):
    help = "Let consumers claim messages of paused queues again."
    epilog = """
    The consumers of the queues are woken.

    Exit status: 0 if all queues were resumed. 1 if a queue does not exist (the others are resumed), or the database
    reports an error or is unavailable.

    Signals: SIGTERM or SIGINT ends the command like any other program.

    Output: "resumed NAME" for each queue.
    """
    done = "resumed"

    def act(self, queue: Queue) -> None:
        queue.resume()
