"""The queues of a run, declared in its processes and nowhere else."""

from dataclasses import dataclass

from django_pgqueue import Queue
from example_project.demo import handlers
from example_project.demo.run import Run


@dataclass(frozen=True)
class Queues:
    """
    ``standing`` queues stay. ``live`` ones are auto-deleted and always consumed. ``visited`` ones are
    auto-deleted and consumed only while they hold messages: in between they fall idle and are reaped.
    ``probe`` gets one message at a time, to measure wake-ups.
    """

    standing: list[Queue]
    live: list[Queue]
    visited: list[Queue]
    probe: Queue

    @property
    def auto_deleted(self) -> list[Queue]:
        return [*self.live, *self.visited]

    @property
    def consumed(self) -> list[Queue]:
        """Those that consumers take all the time."""
        return [*self.standing, *self.live, self.probe]


def queues_of(run: Run) -> Queues:
    """Return the queues of a run, with their handlers registered."""
    queues = Queues(
        standing=[
            Queue(run.queue_name("standing.late")),
            Queue(run.queue_name("standing.atomic")),
            Queue(run.queue_name("standing.letters"), dead_letter=run.queue_name("letters")),
        ],
        live=[Queue(run.queue_name(f"live.{ack}"), auto_deleted=True) for ack in ("late", "atomic", "async")],
        visited=[Queue(run.queue_name(f"visited.{ack}"), auto_deleted=True) for ack in ("late", "atomic")],
        probe=Queue(run.queue_name("probe")),
    )
    for queue in [*queues.standing, *queues.auto_deleted]:
        if queue.name.endswith("atomic"):
            queue.handler(ack="atomic", concurrency=2)(handlers.handle_atomic)
        elif queue.name.endswith("async"):
            queue.handler(concurrency=4)(handlers.handle_async)
        else:
            queue.handler(concurrency=2)(handlers.handle)
    queues.probe.handler(handlers.handle_probe)
    return queues


if run := Run.current():
    queues = queues_of(run)
