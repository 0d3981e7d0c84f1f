#!/usr/bin/env python3
"""Django's command line, with a database out of the box."""

import os
import sys
from pathlib import Path

# Commands for which no database need be started.
WITHOUT_DATABASE = {"help", "version", "startapp", "startproject"}


def main() -> None:
    """Run the command that the arguments name, on `DATABASE_URL` or the development server."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    if needs_database(sys.argv[1:]):
        from django_pgqueue.devdb import DevDBError, database_url

        # In the environment, so that child processes use the same server.
        try:
            os.environ["DATABASE_URL"] = database_url(Path(__file__).resolve().parent / ".postgres")
        except DevDBError as error:
            sys.exit(f"manage.py: {error}")
    else:
        # The settings want one; nothing connects to it.
        os.environ.setdefault("DATABASE_URL", "postgres:///none")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


def needs_database(arguments: list[str]) -> bool:
    """Tell whether the command line may use a database."""
    if not arguments or {"--help", "-h", "--version"} & set(arguments):
        return False
    return arguments[0] not in WITHOUT_DATABASE


if __name__ == "__main__":
    main()
