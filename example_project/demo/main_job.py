"""The demo: publishers, consumers and the reaper at once, while queues are deleted and a consumer is killed."""

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from example_project.demo import faults, notes, tables
from example_project.demo.conductor import Conductor
from example_project.demo.ledger import Verdict
from example_project.demo.processes import ChildFailed, Fleet, Role
from example_project.demo.queues import queues_of
from example_project.demo.run import REAP_INTERVAL, SETTINGS, Run, new_id
from example_project.demo.strict import StrictLedger
from example_project.demo.tables import fetch

STALLED = 90.0
# A consumer is killed, while it holds messages, once this share of them was handled.
KILL_AFTER = 0.3
# Seconds for which it is watched at a time until it holds some.
HOLDS_WITHIN = 0.2
# Seconds between two deletions, and looks after which any queue suits.
INTERVAL = (0.3, 0.9)
LOOKS = 50

# What a consumer could take now, or after its queue is made again. Dead letters are not it, and what
# has expired is the reaper's.
TO_CONSUME = """
SELECT DISTINCT coalesce(queue_id, orphaned_from)
FROM django_pgqueue_messagequeueitem
WHERE coalesce(queue_id, orphaned_from) = ANY (%s)
  AND (read_after IS NULL OR read_after <= statement_timestamp())
  AND (expires_at IS NULL OR expires_at > statement_timestamp())
  AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
"""
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


class MainJob(Conductor):
    """
    One run, as a context manager: it leaves no process, no table and, unless ``keep()`` was called, no
    file. ``watch`` is called with the ledger several times a second.
    """

    ledger: StrictLedger

    def __init__(self, run: Run, consumers: int, watch: Callable[[StrictLedger], None]) -> None:
        self.run_ = run
        self.queues = queues_of(run)
        self.auto_deleted = [queue.name for queue in self.queues.auto_deleted]
        ledger = StrictLedger(frozenset(self.auto_deleted), SETTINGS["LEASE"])
        folder = Path(run.folder)
        super().__init__(folder, ledger, Fleet(folder), STALLED)
        self.watch = watch
        self._keeps_folder = False
        for role in self._roles(consumers):
            self.fleet.add(role, run.environment())

    def _roles(self, consumers: int) -> list[Role]:
        consumed = [queue.name for queue in self.queues.consumed]
        visited = [queue.name for queue in self.queues.visited]
        return [
            Role("reaper0", "reap_queues", ("--interval", str(REAP_INTERVAL))),
            *(
                Role(f"consumer{number}", "consume_queues", (*consumed, "--prefetch", "20"))
                for number in range(consumers)
            ),
            *(
                Role(f"publisher{number}", "example_project.demo.load", (str(number),), ends=True)
                for number in range(self.run_.publishers)
            ),
            *(
                Role(f"visitor{number}", "consume_queues", (name, "--drain"), ends=True)
                for number, name in enumerate(visited)
            ),
            Role("prober", "example_project.demo.load", ("probes",), ends=True),
            # What the others may have left when they were stopped.
            Role("last_reaper", "reap_queues", ends=True),
            Role("last_consumer", "consume_queues", (*consumed, *visited, "--drain"), ends=True),
        ]

    def __enter__(self) -> "MainJob":
        return self

    def __exit__(self, *error: object) -> None:
        # A second Ctrl-C must not leave processes or tables behind.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.fleet.stop(list(self.fleet.slots.values()))
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
        notes.open_file(self.folder, "faults")
        self.fleet.start("reaper", "consumer", "publisher")
        self._delete_queues()
        self.settle()
        self.ledger.rest()
        self._until_ended("prober")
        self.settle()
        self._until_ended("visitor", starts=False)
        self._stop("consumer", "reaper")
        self._until_ended("last_reaper")
        self._until_ended("last_consumer")
        self.read_notes()
        remains = tables.remains(self.auto_deleted)
        # For the analysis of a failed run, because the tables are dropped.
        (self.folder / "remains.txt").write_text(f"killed: {self.ledger.killed}\n{remains}\n")
        return self.ledger.close(remains)

    def tick(self) -> None:
        super().tick()
        self._check()
        self._visit()
        self.watch(self.ledger)

    def step(self) -> None:
        super().step()
        self._kill()

    def _check(self) -> None:
        if self.fleet.problems:
            raise ChildFailed("\n".join(self.fleet.problems))

    def _stop(self, *kinds: str) -> None:
        self.fleet.stop(self.fleet.of_kind(*kinds))
        self._check()

    def _until_ended(self, kind: str, *, starts: bool = True) -> None:
        """Wait for processes that end by themselves. Raises ``ChildFailed`` when they do not."""
        if starts:
            self.fleet.start(kind)
        deadline = time.monotonic() + STALLED
        while running := [slot.name for slot in self.fleet.of_kind(kind) if slot.process]:
            if time.monotonic() > deadline:
                raise ChildFailed(f"{', '.join(running)} did not end within {STALLED:.0f} seconds")
            self.step()

    # --- What happens meanwhile ---

    def _delete_queues(self) -> None:
        """Delete the row of an auto-deleted queue now and then, while there are publishers."""
        wants_messages = True
        while any(slot.process for slot in self.fleet.of_kind("publisher")):
            self.wait(random.uniform(*INTERVAL))
            self._kill()
            name = self._find(wants_messages=wants_messages)
            if cut_loose := faults.delete_queue(name):
                notes.note("deleted", queue=name, orphans=cut_loose[0])
            wants_messages = not wants_messages

    def _find(self, *, wants_messages: bool) -> str:
        """Return in turn a queue that holds messages, which are cut loose, and one that is in use and empty."""
        # A visited queue is deleted only while it holds messages: empty, it is the reaper's.
        live = [queue.name for queue in self.queues.live]
        for _ in range(LOOKS):
            if found := fetch(MOST_LOADED, self.auto_deleted) if wants_messages else fetch(EMPTY, live):
                return found[0][0]
            self.step()
        return random.choice(live)

    def _visit(self) -> None:
        """See that a consumer runs for each visited queue that has something to consume."""
        names = [queue.name for queue in self.queues.visited]
        for (name,) in fetch(TO_CONSUME, names):
            self.fleet[f"visitor{names.index(name)}"].start()

    def _kill(self) -> None:
        """Kill a consumer once, while it holds messages, and start another."""
        is_time = len(self.ledger.handled) >= KILL_AFTER * self.run_.messages and not self.ledger.is_quiet
        consumer = self.fleet["consumer0"]
        if is_time and not self.ledger.killed and faults.hold(consumer, self.wait, HOLDS_WITHIN):
            self.ledger.killed.add(consumer.source)
            consumer.kill()
            consumer.start()


def make_run(**options: object) -> Run:
    """Return a run with a folder of its own."""
    return Run(id=new_id(), folder=tempfile.mkdtemp(prefix="pgqueue-demo-"), **options)
