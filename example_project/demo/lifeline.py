"""
No process of a run outlives it, also when the run is killed.

The one that starts the others holds the other end of their standard input, which the kernel closes
whatever way it ends.
"""

import os
import signal
import threading
import time

# Seconds that a process has to end in good order.
GRACE = 15.0


def watch() -> None:
    """End this process when its standard input ends."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    # Not through sys.stdin, whose lock would be held when the interpreter shuts down.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
