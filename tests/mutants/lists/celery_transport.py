"""Mutants of celery_transport/."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import CELERY

MUTANTS = (
    Mutant(
        CELERY,
        "an ETA is for the worker to wait for",
        "celery_transport/channel.py",
        "delay=delay_of(message, to.using), ",
        "delay=0, ",
        ("tests/celery_transport/test_celery_transport.py::test_an_eta_is_a_delay_of_the_message",),
    ),
    Mutant(
        CELERY,
        "a task that reaches no queue is forgotten",
        "celery_transport/channel.py",
        "        if not (reached or is_transient or is_fanout):\n",
        "        if reached is None:\n",
        ("tests/celery_transport/test_celery_transport.py::test_a_task_that_would_reach_nobody_is_refused",),
    ),
    Mutant(
        CELERY,
        "a transient task is told to those who listen only",
        "celery_transport/channel.py",
        "        names = () if is_fanout else",
        "        names = () if is_fanout or is_transient else",
        ("tests/celery_transport/test_celery_transport.py::test_a_transient_task_has_a_row_too",),
    ),
    Mutant(
        CELERY,
        "a worker claims more than its prefetch",
        "celery_transport/channel.py",
        "        return most - sum(len(consumer.held) for consumer in list(self.consumers.values()))\n",
        "        return most\n",
        (
            "tests/celery_transport/test_celery_transport.py::test_a_worker_holds_what_its_prefetch_allows_and_gives_it_back",
        ),
    ),
    Mutant(
        CELERY,
        "a worker that ends keeps what it holds",
        "celery_transport/channel.py",
        ("        for tag in list(self.held):\n            self.settle(tag, RELEASE)\n"),
        "",
        (
            "tests/celery_transport/test_celery_transport.py::test_a_worker_holds_what_its_prefetch_allows_and_gives_it_back",
        ),
    ),
    Mutant(
        CELERY,
        "leases are not extended for long",
        "celery_transport/channel.py",
        "timeout=MAX_SECONDS)",
        "timeout=1)",
        ("tests/celery_transport/test_celery_transport.py::test_what_takes_longer_than_a_lease_runs_once",),
    ),
    Mutant(
        CELERY,
        "a refused task is done",
        "celery_transport/channel.py",
        'return Settlement(Outcome.REJECT, "rejected")',
        "return ACK",
        (
            "tests/celery_transport/test_celery_transport.py::test_a_task_that_kills_its_process_and_one_that_is_refused_are_dead_letters",
        ),
    ),
    Mutant(
        CELERY,
        "a requeued task does not count",
        "celery_transport/channel.py",
        'return Settlement(Outcome.NACK, "requeued by its worker", consumer.queue.retry_delay(held.message))',
        "return RELEASE",
        (
            "tests/celery_transport/test_celery_transport.py::test_a_task_that_kills_its_process_and_one_that_is_refused_are_dead_letters",
        ),
    ),
    Mutant(
        CELERY,
        "a broadcast is for live subscribers",
        "celery_transport/channel.py",
        "            self.connection.topic(exchange).bind(self.connection.queue(queue))\n",
        "            pass\n",
        ("tests/celery_transport/test_celery_transport.py::test_a_broadcast_reaches_each_worker_once",),
    ),
    Mutant(
        CELERY,
        "a broken connection stays",
        "celery_transport/transport.py",
        "        connections[self.using].close_if_unusable_or_obsolete()\n",
        "",
        ("tests/celery_transport/test_celery_transport.py::test_an_outage_costs_a_worker_nothing",),
    ),
    Mutant(
        CELERY,
        "a worker that cannot claim sits there",
        "celery_transport/channel.py",
        "            raise self.error\n",
        "            return False\n",
        ("tests/celery_transport/test_celery_transport.py::test_a_worker_without_the_tables_ends",),
    ),
)
