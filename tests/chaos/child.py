"""Starts a part of a run in a process of its own: `python -m tests.chaos.child PART ARGUMENT…`."""

import os
import signal
import sys
import threading
import time

from tests.chaos import clock

# Seconds that a process has to end when the run is gone.
GRACE = 10.0


def watch_parent() -> None:
    """End this process when its standard input ends: the run holds the other end, until it ends in any way."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def main(part: str, *arguments: str) -> None:
    threading.Thread(target=watch_parent, daemon=True).start()
    if shift := float(os.environ.get(clock.VARIABLE, "0")):
        clock.shift(shift)
    import django

    django.setup()
    if part == "publish":
        from tests.chaos import publisher

        publisher.main(*arguments)
    elif part == "subscribe":
        from tests.chaos import subscriber

        subscriber.main()
    else:
        from django.core.management import execute_from_command_line

        execute_from_command_line(["manage.py", part, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
