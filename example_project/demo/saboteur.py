"""
The saboteur process. Now and then it deletes the row of an auto-deleted queue by plain SQL: in turn one that holds
messages, which are cut loose, and one that is in use and empty.
"""

import random
import signal
import threading

from django.db import OperationalError, connection, transaction

from example_project.demo.notes import note
from example_project.demo.queues import queues_of
from example_project.demo.run import Run

# Seconds between two deletions, and between two looks for a queue that suits.
INTERVAL = (0.3, 0.9)
LOOK = 0.02
# Looks after which any queue suits.
LOOKS = 50

MOST_LOADED = """
SELECT queue_id
FROM django_pgqueue_messagequeueitem
WHERE queue_id = ANY (%s)
GROUP BY queue_id
ORDER BY count(*) * random() DESC
LIMIT 1
"""
EMPTY = """
SELECT name
FROM django_pgqueue_messagequeue
WHERE name = ANY (%s)
  AND NOT EXISTS (SELECT FROM django_pgqueue_messagequeueitem WHERE queue_id = name)
ORDER BY random()
LIMIT 1
"""


def delete(name: str) -> None:
    """Delete a queue's row, if there is one, and note how many messages that cut loose."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            # Locked first, so that nobody publishes to it between the count and the deletion.
            cursor.execute("SELECT FROM django_pgqueue_messagequeue WHERE name = %s FOR UPDATE", [name])
            cursor.execute("SELECT count(*) FROM django_pgqueue_messagequeueitem WHERE queue_id = %s", [name])
            orphans = cursor.fetchone()[0]
            cursor.execute("DELETE FROM django_pgqueue_messagequeue WHERE name = %s", [name])
            deleted = cursor.rowcount
    except OperationalError:
        # A deadlock with a consumer that settles: the deletion and the settling lock the same
        # messages, each in its own order. The server picks one of them to fail; nothing is lost.
        return
    if deleted:
        note("deleted", queue=name, orphans=orphans)


def find(statement: str, names: list[str]) -> str | None:
    """Return the queue that a statement finds."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [names])
        row = cursor.fetchone()
    return row[0] if row else None


def main() -> None:
    """Delete queues of the run that the environment names until told to stop."""
    run = Run.current()
    assert run is not None
    queues = queues_of(run)
    # A visited queue is deleted only while it holds messages: empty, it is the reaper's.
    live, any_of_them = ([queue.name for queue in some] for some in (queues.live, queues.auto_deleted))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    wants_messages = True
    while not stop.wait(random.uniform(*INTERVAL)):
        for _ in range(LOOKS):
            name = find(MOST_LOADED, any_of_them) if wants_messages else find(EMPTY, live)
            if name or stop.wait(LOOK):
                break
        delete(name or random.choice(live))
        wants_messages = not wants_messages


if __name__ == "__main__":
    main()
