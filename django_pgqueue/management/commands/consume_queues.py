"""Run the handlers of queues."""

import logging
import os
import sys
import threading
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from django.core.management.base import CommandError
from django.db import DatabaseError
from django.utils.module_loading import import_string

from django_pgqueue.consumer.consumer import Consumer
from django_pgqueue.consumer.handler import Handler
from django_pgqueue.consumer.health import Health
from django_pgqueue.management.arguments import at_least, on_stop_signal, refusal
from django_pgqueue.management.explained import ExplainedCommand
from django_pgqueue.queue_internals import make_handler
from django_pgqueue.queues import Queue, queue_named
from django_pgqueue.task_backend import queues

logger = logging.getLogger("django_pgqueue")

# Seconds after the grace, and after a second signal, in which the process has to end by itself.
EXIT_TIMEOUT = 5.0
EXIT_NOW_TIMEOUT = 2.0


class Command(ExplainedCommand):
    help = "Run the handlers and tasks of the named queues, or of all queues that have any."
    epilog = """
    All queues must be in the same database. The process declares its queues, writes heartbeats, extends leases and
    listens for notifications. If the database is unavailable, it waits. Handlers are declared in queues.py modules.
    With --handler, a queue that is not declared in this project keeps the attributes in its row, or is created as
    Queue(NAME).

    Exit status: 0 if a signal ended it, if --drain found nothing more to do, or if --max-messages messages were
    handled. Handlers that run longer than --grace do not change this: their leases expire. 1 if it could not start:
    there is no handler, a function cannot be imported, the queues are in several databases, a port is in use, or the
    database reports an error. Also 1 if the database kept it from ending.

    Signals: after the first SIGTERM or SIGINT it stops claiming, gives running handlers --grace seconds to finish, and
    gives the other messages back at once, without counting a delivery. After the second signal it does not wait for
    handlers. If the database keeps it from ending, it ends 5 seconds after the grace period, or 2 seconds after the
    second signal. SIGKILL loses no message: the leases expire and the messages are delivered again.

    Output: only log messages. With --verbosity 2 the last line is "handled N messages".
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="queues (default: all with a handler)")
        parser.add_argument("--handler", metavar="PATH", help="dotted path of a function to run as the handler")
        parser.add_argument(
            "--concurrency",
            type=at_least(1),
            help="messages of a queue to handle at once, at least 1 (default: as declared)",
        )
        parser.add_argument(
            "--prefetch",
            type=at_least(1),
            help="messages of a queue to hold at once, at least 1 (default: PREFETCH)",
        )
        parser.add_argument("--drain", action="store_true", help="exit when no message is ready or held")
        parser.add_argument("--max-messages", type=at_least(1), help="exit after this many messages, at least 1")
        parser.add_argument(
            "--grace",
            type=at_least(0.0),
            default=30.0,
            help="seconds that running handlers get after SIGTERM, at least 0 (default: 30)",
        )
        self._add_monitoring(parser)

    def _add_monitoring(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--health-port",
            type=at_least(0),
            metavar="PORT",
            help="port for HTTP probes, at least 0: /livez (restart it if this fails) and /readyz (it is working)",
        )
        parser.add_argument(
            "--health-host", default="0.0.0.0", help="address for the probes (default: 0.0.0.0, all addresses)"
        )
        parser.add_argument(
            "--health-file",
            type=Path,
            metavar="PATH",
            help="file that is written every 5 seconds while the process is alive",
        )
        parser.add_argument(
            "--health-target",
            type=at_least(0.0),
            metavar="SECONDS",
            help="longest time that a message may be due before /readyz fails, at least 0 (default: no limit)",
        )

        parser.add_argument(
            "--metrics-port",
            type=at_least(0),
            metavar="PORT",
            help="port for Prometheus, at least 0: /metrics (needs the extra prometheus)",
        )
        parser.add_argument(
            "--metrics-host", default="0.0.0.0", help="address for Prometheus (default: 0.0.0.0, all addresses)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            consumer = Consumer(
                handlers_of(list(dict.fromkeys(options["names"])), options["handler"]),
                concurrency=options["concurrency"],
                prefetch=options["prefetch"],
                drain=options["drain"],
                max_messages=options["max_messages"],
                grace=options["grace"],
            )
        except (ValueError, LookupError, ImportError) as error:
            raise CommandError(str(error)) from error
        is_process = getattr(self, "_called_from_command_line", False)
        with ExitStack() as stack:

            def stop() -> None:
                is_second = consumer.is_stopping
                consumer.stop(now=is_second)
                if is_process:
                    timer = threading.Timer(
                        EXIT_NOW_TIMEOUT if is_second else options["grace"] + EXIT_TIMEOUT, end_stuck
                    )
                    timer.daemon = True
                    timer.start()
                    stack.callback(timer.cancel)

            stack.enter_context(on_stop_signal(stop))
            self._tell_health(stack, consumer, options)
            self._tell_metrics(stack, consumer, options)
            try:
                handled = consumer.run()
            except DatabaseError as error:
                raise refusal(error) from error
        if options["verbosity"] > 1:
            self.stdout.write(f"handled {handled} messages")
        if consumer.has_abandoned and is_process:
            # Daemon threads don't hold up the end, but the threads of an executor do (sync_to_async,
            # a handler's own pool): the interpreter would wait for those handlers.
            end_now(0)

    def _tell_health(self, stack: ExitStack, consumer: Consumer, options: dict[str, Any]) -> None:
        file, port = options["health_file"], options["health_port"]
        if file is None and port is None:
            if options["health_target"] is not None:
                raise CommandError("--health-target needs --health-port or --health-file")
            return
        if file is not None and (file.is_dir() or not file.name):
            raise CommandError(f"--health-file: {file} is a directory")
        address = None if port is None else (options["health_host"], port)
        health = Health(consumer, options["health_target"])
        try:
            stack.enter_context(health.reporting(file=file, address=address))
        except (OSError, OverflowError) as error:
            raise CommandError(f"--health-file or --health-port: {error}") from error

    def _tell_metrics(self, stack: ExitStack, consumer: Consumer, options: dict[str, Any]) -> None:
        if options["metrics_port"] is None:
            return
        try:
            from django_pgqueue.monitoring import prometheus
        except ImportError as error:
            if not (error.name or "prometheus_client").startswith("prometheus_client"):
                raise
            raise CommandError("--metrics-port needs: pip install django-pg-messagequeue[prometheus]") from error
        try:
            server = prometheus.serve(options["metrics_port"], options["metrics_host"], consumer.using)
        except (OSError, OverflowError) as error:
            raise CommandError(f"--metrics-port: {error}") from error
        stack.callback(server.server_close)
        stack.callback(server.shutdown)


def end_stuck() -> None:
    """End the process while ``run()`` is stuck: its statement waits for a lock, or the server does not answer."""
    logger.error("the database delays the shutdown, leases expire")
    end_now(1)


def end_now(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def handlers_of(names: list[str], path: str | None) -> list[Handler]:
    """Return the registered handlers of these queues, or the function at ``path`` for each of them."""
    if path is None:
        handlers = queues.handlers_of(names)
        if not handlers:
            raise LookupError(
                "no handler is registered; declare one with @queue.handler in a queues.py module,"
                " or name the queues of tasks in TASKS"
            )
        return handlers
    if not names:
        raise LookupError("--handler needs the names of queues")
    function = import_string(path)
    return [make_handler(queue_or_bare(name), function) for name in names]


def queue_or_bare(name: str) -> Queue:
    """Return the queue as this project or its row defines it. Without a server: with the default attributes."""
    try:
        return queue_named(name)
    except DatabaseError:
        return Queue(name)
