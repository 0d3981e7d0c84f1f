"""Starts a part of a run in a process of its own, with the clock that it is to have: `python -m tests.chaos.child`."""

import os
import sys

from tests.chaos import clock

if __name__ == "__main__":
    if shift := float(os.environ.get(clock.VARIABLE, "0")):
        clock.shift(shift)
    from example_project.demo.child import main

    main(*sys.argv[1:])
