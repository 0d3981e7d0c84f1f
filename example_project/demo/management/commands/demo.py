"""The main job in one command."""

import json
import signal
import sys
from argparse import ArgumentParser
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from django_pgqueue.management.arguments import at_least, refusal
from example_project.demo import generator, report
from example_project.demo.main_job import MainJob, make_run
from example_project.demo.processes import ChildFailed


class Command(BaseCommand):
    help = (
        "Publish, consume and reap at the same time, in many processes, while queues that are in use are deleted. Then"
        " account for every message. The exit status is 1 if a message is lost, or if the run did not exercise"
        " everything that it is meant to test."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--messages", type=at_least(1), default=20_000, help="how many to publish (default: 20000)")
        parser.add_argument("--publishers", type=at_least(1), default=4, help="publisher processes (default: 4)")
        parser.add_argument("--consumers", type=at_least(1), default=2, help="consumer processes (default: 2)")
        parser.add_argument("--seconds", type=at_least(0.1), help="stop publishing after this many seconds")
        parser.add_argument("--input", metavar="FILE", help="JSON lines to publish, repeated if there are too few")
        parser.add_argument("--format", choices=("text", "json"), default="text")

    def handle(self, *args: Any, **options: Any) -> None:
        signal.signal(signal.SIGTERM, interrupt)
        bar = report.Bar(options["messages"])
        try:
            if options["input"]:
                generator.check(options["input"])
            run = make_run(**{key: options[key] for key in ("messages", "publishers", "seconds", "input")})
            with MainJob(run, options["consumers"], bar.show) as job:
                verdict = job.run()
                kept = job.keep() if verdict.problems else None
        except (generator.InputError, ChildFailed) as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            raise refusal(error) from error
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            bar.close()
        if options["format"] == "json":
            self.stdout.write(json.dumps(report.as_json(verdict)))
        else:
            self.stdout.write(report.as_text(verdict))
        if verdict.problems:
            raise CommandError("\n".join([*verdict.problems, f"The notes are in {kept}"]))


def interrupt(number: int, frame: FrameType | None) -> None:
    """End as by Ctrl-C: children are ended and tables dropped on the way out."""
    raise KeyboardInterrupt
