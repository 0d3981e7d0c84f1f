"""
The prober process. It measures wake-ups once everything else has come to rest: each message finds its
queue empty and the consumers asleep.
"""

import random
import signal
import threading

from example_project.demo import generator
from example_project.demo.publisher import send_probe
from example_project.demo.queues import queues_of
from example_project.demo.run import Run

# Seconds between two probes: more than NOTIFY_INTERVAL, so that each of them wakes a consumer.
INTERVAL = (0.06, 0.08)


def main() -> None:
    """Publish the probes of the run that the environment names."""
    run = Run.current()
    assert run is not None
    probe = queues_of(run).probe
    payloads = generator.payloads(run.input, 0, 1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for _ in range(run.probes):
        if stop.wait(random.uniform(*INTERVAL)):
            return
        send_probe(probe, next(payloads))
