"""
What takes minutes: a module a question, `python -m tests.soak.NAME --seconds 300`.

Each has a `run(seconds, …)` that returns figures, and raises AssertionError where the outcome is
wrong. The tests call it for a few seconds. From the command line it gets a test database of its own.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import django
from django.apps import apps

if not apps.ready:
    # Run from the command line: the modules below import models.
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()


def main(run: Callable[[float], Mapping[str, Any]], *, seconds: float) -> None:
    """Run it on a new test database and print the figures as JSON; `seconds` is the default length."""
    from django.test.utils import setup_databases, teardown_databases

    from tests.support import cluster

    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=seconds, help=f"how long to go on (default: {seconds:g})")
    options = parser.parse_args()
    try:
        made = setup_databases(verbosity=0, interactive=False)
        print(json.dumps(run(options.seconds), indent=2))
        teardown_databases(made, verbosity=0)
    finally:
        cluster.stop()
