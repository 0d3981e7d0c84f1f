"""
docs/findings.md: what each finding of `check --database` and `diagnose_queues` means, and which test provokes it.

`python -m tests.docs.findings` writes the page; a test compares it.
"""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from django.core.checks import ERROR, INFO, WARNING

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "findings.md"

HEAD = """\
# Findings

`manage.py check --database default` reports E001 to E009 and E011 to E013. Run it with each deployment.
`manage.py diagnose_queues` reports all findings. Run it when something seems wrong, or regularly by cron. It changes
nothing. Its exit status is 0 if nothing is wrong, 2 if there are errors or the database cannot be queried, and 1 if
there are warnings and `--fail-level warning` is set. `--format json` prints the findings for programs. The command
reports at most twenty findings of each kind.

The tests named below each finding provoke it on a real server.
"""

LEVELS = {ERROR: "error", WARNING: "warning", INFO: "for your information"}

Test = TypeVar("Test", bound=Callable[..., object])

_provoking: dict[str, list[str]] = {}


def provokes(number: str) -> Callable[[Test], Test]:
    """Mark a test as one that makes the trouble of a finding."""

    def mark(test: Test) -> Test:
        _provoking.setdefault(number, []).append(f"{test.__module__.replace('.', '/')}.py::{test.__name__}")
        return test

    return mark


def tests_of(number: str) -> list[str]:
    """Return the tests that provoke a finding."""
    return sorted(set(_provoking.get(number, [])))


def page() -> str:
    """Return what docs/findings.md should be."""
    from django_pgqueue.monitoring.findings import FINDINGS

    for module in ("tests.monitoring.test_diagnosis", "tests.task_backend.test_task_backend"):
        importlib.import_module(module)
    parts = [HEAD]
    for number, kind in FINDINGS.items():
        provoked = ", ".join(f"`{test}`" for test in tests_of(number))
        parts.append(
            f'<a id="{number.lower()}"></a>\n\n## {number} {kind.title}\n\n*{LEVELS[kind.level]}.* {kind.meaning}\n\n'
            f"**Remedy:** {kind.remedy}\n\n**Provoked by** {provoked}\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    # This module is __main__ here; the tests mark themselves in the one of its name.
    findings = importlib.import_module("tests.docs.findings")
    PAGE.write_text(findings.page())
