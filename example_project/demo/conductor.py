"""What runs it all: starts the processes, watches them, reads their notes, and waits until nothing is left to do."""

import time
from pathlib import Path
from typing import Any

from example_project.demo.faults import if_there
from example_project.demo.ledger import Ledger
from example_project.demo.notes import Reader
from example_project.demo.processes import Agenda, Fleet
from example_project.demo.tables import fetch

# Seconds between two looks at everything.
TICK = 0.05

UNSETTLED = "SELECT count(*) FROM django_pgqueue_messagequeueitem WHERE dead_lettered_at IS NULL"


class Conductor:
    """One run. ``stalled``: seconds without any progress after which it is over, whatever is left."""

    def __init__(self, folder: Path, ledger: Ledger, fleet: Fleet, stalled: float) -> None:
        self.folder = folder
        self.ledger = ledger
        self.fleet = fleet
        self.agenda = Agenda()
        self.stalled = stalled
        self._reader = Reader(folder)

    def wait(self, seconds: float) -> None:
        """Let the run go on for this long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.tick()
            time.sleep(min(left, TICK))

    def tick(self) -> None:
        """Do what is due now."""
        self.agenda.run()
        self.fleet.supervise()
        self.read_notes()

    def read_notes(self) -> None:
        for source, note in self._reader.new():
            self.ledger.read(source, note)
            self.see(source, note)

    def see(self, source: str, note: dict[str, Any]) -> None:
        """Take a note that has just been read."""

    def settle(self) -> None:
        """Wait until every message has come to its end, or nothing changes any more: the ledger tells what is left."""
        left, since = -1, time.monotonic()
        while left and time.monotonic() - since < self.stalled:
            self.step()
            with if_there():
                count = fetch(UNSETTLED)[0][0]
                if count != left:
                    left, since = count, time.monotonic()

    def step(self) -> None:
        """What is done between two looks at what is left."""
        self.wait(TICK)
