"""The processes of a run: started, ended in every way, and started again, as a process manager would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import clock
from tests.chaos.plan import SETTINGS, Role

ROOT = Path(__file__).resolve().parent.parent.parent

# Seconds that a process gets to end after SIGTERM; consumers are told a shorter grace.
PATIENCE = 30.0
# Lines of its output that a problem quotes.
QUOTED = 5


class Slot:
    """The place of one process. ``shift``: seconds by which the clock of the next one is wrong."""

    def __init__(self, role: Role, folder: Path, urls: dict[str, str]) -> None:
        self.role = role
        self.shift = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = folder
        self._log = folder / f"{role.name}.log"
        self._environment = environment(urls)

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def start(self) -> None:
        """Start its process, unless one is there."""
        if self.process is not None:
            return
        mine = (self.name, str(self._folder)) if self.role.part == "publish" else ()
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.child", self.role.part, *mine, *self.role.arguments],
                cwd=ROOT,
                env={**self._environment, clock.VARIABLE: str(self.shift)},
                # Held open as long as this process lives: see child.py.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Of its own, so that a Ctrl-C is not for it; in this session, so that the system ends
                # it also when it is stopped while this process goes away.
                process_group=0,
            )

    def send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL it."""
        self.send(signal.SIGKILL)
        self._gone()

    def terminate(self) -> None:
        """SIGTERM it, also when it is stopped."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)

    def wait(self) -> str:
        """Wait for its end after SIGTERM, and return what was wrong with that."""
        if self.process is None:
            return ""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name} did not end within {PATIENCE:.0f} s of SIGTERM"
        self._gone()
        # One that was just being started dies of the signal, for want of a handler.
        return "" if status in (0, -signal.SIGTERM) else self._ended(status)

    def unexpected_end(self) -> str:
        """Return what is wrong when it ended by itself, which none should."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return ""
        self._gone()
        return self._ended(status)

    def _ended(self, status: int) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-QUOTED:]
        return f"{self.name} ended with status {status}: {' | '.join(lines)}"

    def _gone(self) -> None:
        assert self.process is not None
        self.process.wait()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process = None


class Fleet:
    """All the processes. ``problems`` collects those that ended by themselves or would not end."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.problems: list[str] = []

    def __getitem__(self, name: str) -> Slot:
        return self.slots[name]

    def of_kind(self, *kinds: str) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.role.kind in kinds]

    def start(self) -> None:
        for slot in self.slots.values():
            slot.start()

    def supervise(self) -> None:
        """Start those again that ended by themselves."""
        for slot in self.slots.values():
            if problem := slot.unexpected_end():
                self.problems.append(problem)
                slot.start()

    def stop(self, slots: Sequence[Slot]) -> None:
        """End processes by SIGTERM."""
        for slot in slots:
            slot.terminate()
        for slot in slots:
            if problem := slot.wait():
                self.problems.append(problem)

    def end(self) -> None:
        """End all processes by whatever it takes."""
        for slot in self.slots.values():
            if slot.process is not None:
                slot.kill()


def environment(urls: dict[str, str]) -> dict[str, str]:
    """Return the environment of the processes on the database of these URLs, by variable."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
        "PGQUEUE_SETTINGS": json.dumps(SETTINGS),
        "PYTHONWARNINGS": "error",
        **urls,
    }


class Agenda:
    """What is to be done later: a worker continued, a process started again."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Any]] = []

    def add(self, seconds: float, action: Any) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def run(self, *, everything: bool = False) -> None:
        """Do what is due, or everything now."""
        now = time.monotonic()
        due = [action for at, action in self._due if everything or at <= now]
        self._due = [(at, action) for at, action in self._due if not everything and at > now]
        for action in due:
            action()
