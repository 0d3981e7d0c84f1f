"""The processes of a run: started, ended in every way, and started again, as a process manager would."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from example_project.demo.run import FOLDER_VARIABLE, ROLE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]

# Seconds that a process gets to end after SIGTERM; consumers are told a shorter grace.
END_TIMEOUT = 30.0
# Lines of its output that a problem quotes.
QUOTED = 15


class ChildFailed(RuntimeError):
    """A process ended, or did not end, as it should not have."""


@dataclass(frozen=True)
class Role:
    """
    One process of a run: ``part`` of ``child.py`` with its arguments.

    ``ends``: it ends by itself, with status 0. ``is_pooled``: its database is behind PgBouncer.
    """

    name: str
    part: str
    arguments: tuple[str, ...] = ()
    ends: bool = False
    is_pooled: bool = False

    @property
    def kind(self) -> str:
        return self.name.rstrip("0123456789")


class Slot:
    """The place of one process. What it prints goes to a file."""

    def __init__(self, role: Role, folder: Path, environment: dict[str, str], starter: str | None) -> None:
        self.role = role
        self.environment = {**environment, FOLDER_VARIABLE: str(folder), ROLE_VARIABLE: role.name}
        self.process: subprocess.Popen[bytes] | None = None
        self._log = folder / f"{role.name}.log"
        self._has_session = starter is None
        self._command = [sys.executable, "-m", starter or "example_project.demo.child", role.part, *role.arguments]

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def source(self) -> str:
        """The name of its notes."""
        return f"{self.name}-{self.pid}"

    def start(self) -> None:
        """Start its process, unless one is there."""
        if self.process is not None:
            return
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={**os.environ, **self.environment},
                # Held open as long as this process lives: see child.py.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is not for it. With a session of its own a process gets its own share of the CPU, too.
                # Where processes are stopped by SIGSTOP, they stay in this session, so that the system ends them
                # when this process goes away meanwhile.
                **({"start_new_session": True} if self._has_session else {"process_group": 0}),
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send(signal.SIGKILL)
        self._gone()

    def wait(self) -> str:
        """Wait for its end after SIGTERM, and return what was wrong with that."""
        if self.process is None:
            return ""
        try:
            status = self.process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name} did not end within {END_TIMEOUT:.0f} s of SIGTERM"
        self._gone()
        # One that was just being started dies of the signal, for want of a handler.
        return "" if status in (0, -signal.SIGTERM) else self._ended(status)

    def unexpected_end(self) -> str:
        """Return what is wrong when it ended by itself and should not have."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return ""
        self._gone()
        return "" if self.role.ends and status == 0 else self._ended(status)

    def _ended(self, status: int) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-QUOTED:]
        return "\n".join([f"{self.name} ended with status {status}:", *lines])

    def _gone(self) -> None:
        if self.process is None:
            return
        self.process.wait()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process = None


class Fleet:
    """All the processes. ``problems`` collects those that ended by themselves or would not end."""

    def __init__(self, folder: Path, starter: str | None = None) -> None:
        self.folder = folder
        self.starter = starter
        self.slots: dict[str, Slot] = {}
        self.problems: list[str] = []

    def __getitem__(self, name: str) -> Slot:
        return self.slots[name]

    def add(self, role: Role, environment: dict[str, str]) -> None:
        self.slots[role.name] = Slot(role, self.folder, environment, self.starter)

    def of_kind(self, *kinds: str) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.role.kind in kinds]

    def start(self, *kinds: str) -> None:
        for slot in self.of_kind(*kinds):
            slot.start()

    def supervise(self) -> None:
        """Start again what ended by itself and should not have."""
        for slot in self.slots.values():
            if problem := slot.unexpected_end():
                self.problems.append(problem)
                slot.start()

    def stop(self, slots: Sequence[Slot]) -> None:
        """End processes by SIGTERM, also those that are stopped."""
        for slot in slots:
            slot.send(signal.SIGTERM)
            slot.send(signal.SIGCONT)
        self.problems += [problem for slot in slots if (problem := slot.wait())]

    def end(self) -> None:
        """End all processes by SIGKILL."""
        for slot in self.slots.values():
            slot.kill()


class Agenda:
    """What is to be done later: a process continued or started again."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Callable[[], object]]] = []

    def add(self, seconds: float, action: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def run(self, *, everything: bool = False) -> None:
        """Do what is due, or everything now."""
        now = time.monotonic()
        due = [action for at, action in self._due if everything or at <= now]
        self._due = [(at, action) for at, action in self._due if not everything and at > now]
        for action in due:
            action()
