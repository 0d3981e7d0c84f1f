"""Runs the demo: starts its processes, watches them, and closes the ledger."""

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from example_project.demo import processes, tables
from example_project.demo.ledger import Ledger, Verdict
from example_project.demo.notes import Reader
from example_project.demo.processes import Child, ChildFailed, manage, part
from example_project.demo.queues import queues_of
from example_project.demo.run import REAP_INTERVAL, Run, new_id

# Seconds between two looks at everything.
TICK = 0.1
# Seconds without any progress after which the run is over, whatever is left.
STALLED = 90.0
# The share of handled messages after which a consumer is killed while it holds messages.
KILL_AFTER = 0.3


class Conductor:
    """
    One run, as a context manager: it leaves no process, no table and, unless ``keep()`` was called, no
    file. ``watch`` is called with the ledger several times a second.
    """

    def __init__(
        self,
        *,
        messages: int,
        publishers: int,
        consumers: int,
        seconds: float | None,
        input: str | None,
        watch: Callable[[Ledger], None],
    ) -> None:
        folder = tempfile.mkdtemp(prefix="pgqueue-demo-")
        self.run_ = Run(new_id(), folder, messages, publishers, seconds, input)
        self.queues = queues_of(self.run_)
        self.auto_deleted = [queue.name for queue in self.queues.auto_deleted]
        self.ledger = Ledger(frozenset(self.auto_deleted))
        self.consumer_count = consumers
        self.watch = watch
        self._reader = Reader(Path(folder))
        self._children: list[Child] = []
        self._consumers: list[Child] = []
        self._visitors: dict[str, Child] = {}
        self._keeps_folder = False

    def __enter__(self) -> "Conductor":
        return self

    def __exit__(self, *error: object) -> None:
        # A second Ctrl-C must not leave processes or tables behind.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            processes.end(self._children)
            tables.drop(self.run_)
        finally:
            if not self._keeps_folder:
                shutil.rmtree(self.run_.folder)
            for number, handler in before.items():
                signal.signal(number, handler)

    def keep(self) -> str:
        """Keep the folder with the notes and the processes' output, and return its name."""
        self._keeps_folder = True
        return self.run_.folder

    def run(self) -> Verdict:
        """Run it all. Raises ``ChildFailed`` when a process ends that should not."""
        self.run_.save()
        tables.make(self.run_)
        for queue in [*self.queues.consumed, *self.queues.visited]:
            queue.declare()
        reaper = self._start("reaper", manage("reap_queues", "--interval", str(REAP_INTERVAL)))
        self._consumers = [self._start_consumer() for _ in range(self.consumer_count)]
        saboteur = self._start("saboteur", part("saboteur"))
        publishers = [
            self._start(f"publisher{number}", part("publisher", str(number))) for number in range(self.run_.publishers)
        ]
        while sum(publisher.has_ended() for publisher in publishers) < len(publishers):
            self._tick(saboteur, reaper, *self._consumers)
        processes.stop([saboteur])
        self._settle(reaper)
        self._read()
        self.ledger.rest()
        prober = self._start("prober", part("prober"))
        while not prober.has_ended():
            self._tick(reaper, *self._consumers)
        self._settle(reaper)
        for visitor in self._visitors.values():
            self._wait(visitor)
        processes.stop([*self._consumers, reaper])
        self._finish()
        self._read()
        remains = tables.remains(self.auto_deleted)
        # For the analysis of a failed run, because the tables are dropped.
        (Path(self.run_.folder) / "remains.txt").write_text(f"killed: {self.ledger.killed}\n{remains}\n")
        return self.ledger.close(remains, time.time())

    # --- Its parts ---

    def _start(self, role: str, arguments: list[str]) -> Child:
        child = Child(self.run_, role, arguments)
        self._children.append(child)
        return child

    def _start_consumer(self) -> Child:
        names = [queue.name for queue in self.queues.consumed]
        return self._start("consumer", manage("consume_queues", *names, "--prefetch", "20"))

    def _settle(self, reaper: Child) -> None:
        """Wait until every message has come to its end."""
        left, since = -1, time.monotonic()
        while count := tables.fetch(tables.UNSETTLED)[0][0]:
            self._tick(reaper, *self._consumers)
            if count != left:
                left, since = count, time.monotonic()
            elif time.monotonic() - since > STALLED:
                # The ledger tells what is left.
                return

    def _finish(self) -> None:
        """Run reaper and consumers once more, for what the others may have left when they were stopped."""
        names = [queue.name for queue in [*self.queues.consumed, *self.queues.visited]]
        for role, arguments in (
            ("reaper", manage("reap_queues")),
            ("consumer", manage("consume_queues", *names, "--drain")),
        ):
            self._wait(self._start(role, arguments))

    def _wait(self, child: Child) -> None:
        deadline = time.monotonic() + STALLED
        while not child.has_ended():
            if time.monotonic() > deadline:
                raise ChildFailed(f"the {child.role} did not end within {STALLED:.0f} seconds")
            time.sleep(TICK)

    def _tick(self, *running: Child) -> None:
        time.sleep(TICK)
        for child in running:
            if child.has_ended():
                raise ChildFailed(f"the {child.role} ended before it was told to")
        self._visit()
        self._read()
        is_time = len(self.ledger.handled) >= KILL_AFTER * self.run_.messages and not self.ledger.is_quiet
        if is_time and not self.ledger.killed:
            self._kill(self._consumers[0])
        self.watch(self.ledger)

    def _visit(self) -> None:
        """See that a consumer runs for each visited queue that has something to consume."""
        names = [queue.name for queue in self.queues.visited]
        for (name,) in tables.fetch(tables.TO_CONSUME, names):
            if name not in self._visitors or self._visitors[name].has_ended():
                self._visitors[name] = self._start("visitor", manage("consume_queues", name, "--drain"))

    def _kill(self, consumer: Child) -> None:
        """Kill a consumer, once it holds messages, and start another."""
        if tables.fetch(tables.HOLDS, consumer.process.pid)[0][0]:
            consumer.process.kill()
            consumer.process.wait()
            self.ledger.killed.add(consumer.source)
            self._consumers[0] = self._start_consumer()

    def _read(self) -> None:
        for source, note in self._reader.new():
            self.ledger.read(source, note)
