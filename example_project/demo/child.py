"""Starts a part of the demo in a process of its own: ``python -m example_project.demo.child PART``."""

import importlib
import sys

import django

if __name__ == "__main__":
    # Before the part is imported: it imports models.
    django.setup()
    importlib.import_module(f"example_project.demo.{sys.argv[1]}").main(*sys.argv[2:])
