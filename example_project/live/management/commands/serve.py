from argparse import ArgumentParser
from typing import Any

import uvicorn
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    help = "Serve the example project over ASGI, which its live page requires, until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--port", type=int, default=8000, help="the port to listen on (default: 8000; 0: any free port)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        # Streams never end on their own. Without a limit, the server would wait for them.
        uvicorn.run("example_project.asgi:application", port=options["port"], timeout_graceful_shutdown=2)
