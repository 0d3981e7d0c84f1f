"""The child processes of a run."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from django.conf import settings

from example_project.demo.run import Run

# Seconds that children get to end after SIGTERM.
GRACE = 30.0
# Lines of a child's output that an error quotes.
QUOTED = 15


class ChildFailed(RuntimeError):
    """A child process ended, or did not end, as it should not have."""


class Child:
    """A process of a run. What it prints goes to a file."""

    def __init__(self, run: Run, role: str, arguments: Sequence[str]) -> None:
        self.role = role
        self.log = Path(run.folder) / f"{role}.{time.monotonic_ns()}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=settings.BASE_DIR,
                env=run.environment(role),
                # Held open as long as this process lives: see lifeline.py.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C in the terminal is for the parent, which ends its children in order.
                start_new_session=True,
            )

    @property
    def source(self) -> str:
        """The name of its notes."""
        return f"{self.role}-{self.process.pid}"

    def has_ended(self) -> bool:
        """Tell whether it has ended well. Raises ``ChildFailed`` if it has ended otherwise."""
        status = self.process.poll()
        if status:
            lines = self.log.read_text(errors="replace").splitlines()[-QUOTED:]
            raise ChildFailed("\n".join([f"the {self.role} ended with status {status}:", *lines]))
        return status == 0

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)


def stop(children: Iterable[Child]) -> None:
    """End children by SIGTERM, and see that they end well. Raises ``ChildFailed`` if one does not."""
    children = list(children)
    for child in children:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for child in children:
        try:
            child.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"the {child.role} did not end within {GRACE:.0f} seconds") from error
        # One that has only just been started dies of the signal, for want of a handler.
        if child.process.returncode != -signal.SIGTERM:
            child.has_ended()


def end(children: Iterable[Child]) -> None:
    """End children by whatever it takes."""
    children = list(children)
    for child in children:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for child in children:
        try:
            child.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        if child.process.stdin:
            child.process.stdin.close()


def manage(*arguments: str) -> list[str]:
    """Return the arguments for a command of manage.py."""
    return [str(settings.BASE_DIR / "manage.py"), *arguments]


def part(name: str, *arguments: str) -> list[str]:
    """Return the arguments for a part of the demo."""
    return ["-m", "example_project.demo.child", name, *arguments]
