"""
Starts a part of a run in a process of its own: ``python -m example_project.demo.child PART ARGUMENT…``.

A part is a module with a function ``main``, or a command of manage.py. No process of a run outlives it, also when
the run is killed: the one that starts the others holds the other end of their standard input, which the kernel
closes whatever way it ends.
"""

import importlib
import os
import signal
import sys
import threading
import time

# Seconds that a process has to end in good order when the run is gone.
GRACE = 10.0


def main(part: str, *arguments: str) -> None:
    threading.Thread(target=watch_parent, name="lifeline", daemon=True).start()
    # Before the part is imported: it imports models.
    import django

    django.setup()
    from example_project.demo import notes
    from example_project.demo.run import FOLDER_VARIABLE, ROLE_VARIABLE

    notes.open_file(os.environ[FOLDER_VARIABLE], os.environ[ROLE_VARIABLE])
    notes.follow_signals()
    if "." in part:
        importlib.import_module(part).main(*arguments)
    else:
        from django.core.management import execute_from_command_line

        execute_from_command_line(["manage.py", part, *arguments])


def watch_parent() -> None:
    """End this process when its standard input ends."""
    # Not through sys.stdin, whose lock would be held when the interpreter shuts down.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
