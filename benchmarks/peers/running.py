"""A peer's processes: started, spoken to, and stopped. The protocol is that of ``wire.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import psycopg

from benchmarks.harness import PAYLOAD
from benchmarks.peers.catalog import Peer, Settings

FOLDER = Path(__file__).parent

# Seconds for a program to come up, for an answer, and for an end in an orderly way.
DEADLINE = 120.0
GRACE = 15.0

Numbers = tuple[int, ...]


class Program:
    """A process of a peer, and the lines that it has printed."""

    def __init__(self, command: Sequence[str], env: dict[str, str], errors: Path) -> None:
        self.name = f"{Path(command[1]).name} {' '.join(command[2:])}"
        self.lines: list[Numbers] = []
        self._errors = errors
        self._arrived = threading.Condition()
        self._ready = self._ended = False
        with errors.open("ab") as stderr:
            # In a session of its own, so that its children can be killed along.
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=errors.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def until_ready(self) -> None:
        self.wait(lambda: self._ready)

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def ask(self, *words: object) -> Numbers:
        """Give a line and return the answer to it."""
        count = len(self.lines)
        self.tell(*words)
        self.wait(lambda: len(self.lines) > count)
        return self.lines[count]

    def wait(self, condition: Callable[[], bool], timeout: float = DEADLINE) -> None:
        """Wait until the condition, which looks at ``lines``, holds."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: condition() or self._ended, timeout):
                raise TimeoutError(f"{self.name}: nothing within {timeout:.0f} s\n{self._said()}")
            if not condition():
                self.check()

    def check(self) -> None:
        """Raise ``RuntimeError`` if it has ended."""
        if self._ended:
            raise RuntimeError(f"{self.name} ended\n{self._said()}")

    def until_done(self) -> None:
        """Wait for the end of a program that ends by itself; raise ``RuntimeError`` if it failed."""
        self.wait(lambda: self._ended)
        if self._process.wait(GRACE):
            raise RuntimeError(f"{self.name} failed\n{self._said()}")

    def stop(self) -> None:
        """End it in an orderly way, and what is left of it by force."""
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGTERM)
            with self._arrived:
                self._arrived.wait_for(lambda: self._ended, GRACE)
        self.kill()

    def kill(self) -> None:
        """SIGKILL it and its children. Until it is waited for, its id cannot be another's."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            with self._arrived:
                if line == "READY\n":
                    self._ready = True
                else:
                    self.lines.append(tuple(map(int, line.split())))
                self._arrived.notify_all()
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-2_000:]


class Contender:
    """A peer with a database of its own on the server."""

    def __init__(self, peer: Peer, command: list[str], url: str, env: dict[str, str], errors: Path) -> None:
        self.peer = peer
        self.url = url
        self._command = [*command, str(FOLDER / peer.program)]
        self._env = {**os.environ, "PEERS_PAYLOAD": json.dumps(PAYLOAD), **env, "DATABASE_URL": url}
        self._errors = errors
        self._publishers: dict[str, Program] = {}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, peer: Peer, command: list[str], server_url: str, folder: Path) -> Iterator[Contender]:
        """Make its database and its tables; in the end, stop its publishers."""
        name = peer.name.replace(" ", "_")
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
        url = server_url.replace("/postgres?", f"/{name}?")
        with peer.service() as env:
            contender = cls(peer, command, url, dict(env), folder / f"{name}.log")
            contender._set_up()
            try:
                yield contender
            finally:
                for program in contender._publishers.values():
                    program.stop()

    def publisher(self, way: str = "") -> Program:
        """Return the publisher with these settings, the ordinary ones if none are named; it stays up."""
        way = way or next(iter(self.peer.publishing))
        if way not in self._publishers:
            self._publishers[way] = self._start("publisher", self.peer.publishing[way])
            self._publishers[way].until_ready()
        return self._publishers[way]

    @property
    def ordinary(self) -> Settings:
        """The workers' ordinary settings."""
        return next(iter(self.peer.working.values()))

    @property
    def best(self) -> str:
        """Name of the workers' best documented settings."""
        return list(self.peer.working)[-1]

    @contextlib.contextmanager
    def workers(self, mode: str, settings: Settings, count: int = 1) -> Iterator[list[Program]]:
        """Start workers; all set off once all are ready."""
        programs = [self._start(f"worker {mode}", settings) for _ in range(count)]
        try:
            for program in programs:
                program.until_ready()
            for program in programs:
                program.tell("go")
            yield programs
        finally:
            # All at once: each may take a while.
            threads = [threading.Thread(target=program.stop) for program in programs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def vacuum(self) -> None:
        """Clear what was done before away, and let the planner know what is there."""
        if self.peer.on_postgresql:
            with psycopg.connect(self.url, autocommit=True) as connection:
                connection.execute("VACUUM (ANALYZE)")

    def _start(self, words: str, settings: Settings) -> Program:
        options = [f"{key}={value}" for key, value in settings.items()]
        return Program([*self._command, *words.split(), *options], self._env, self._errors)

    def _set_up(self) -> None:
        program = self._start("setup", {})
        try:
            program.until_done()
        finally:
            program.stop()


class Course:
    """
    How many messages had started at which time, of the workers together, from what each reported.

    It begins when the last worker has its first message, unless more than half of all were done by then, and
    ends with the last message, or after ``cap`` seconds. Starting up is not part of it.
    """

    def __init__(self, reports: Sequence[Sequence[Numbers]], cap: float) -> None:
        self._workers = [([ns for ns, _ in lines], [count for _, count in lines]) for lines in reports if lines]
        firsts = sorted(times[0] for times, _ in self._workers)
        total = sum(counts[-1] for _, counts in self._workers)
        self.start = max(first for first in firsts if first == firsts[0] or self.started(first) <= total / 2)
        self.end = min(max(times[-1] for times, _ in self._workers), self.start + cap * 1e9)

    def started(self, ns: float) -> float:
        """Return how many messages had started by then."""
        return sum(interpolated(times, counts, ns) for times, counts in self._workers)

    def rates(self, parts: int = 1) -> list[float]:
        """Return messages a second in so many parts of equal time."""
        length = (self.end - self.start) / parts
        if length <= 0:
            raise ValueError("all messages started at once: too few to measure")
        bounds = [self.start + length * part for part in range(parts + 1)]
        counts = [self.started(bound) for bound in bounds]
        return [(after - before) / length * 1e9 for before, after in zip(counts, counts[1:], strict=False)]


def interpolated(times: Sequence[int], counts: Sequence[int], ns: float) -> float:
    place = bisect_right(times, ns)
    if place == 0:
        return 0
    if place == len(times):
        return counts[-1]
    before, after = times[place - 1], times[place]
    return counts[place - 1] + (counts[place] - counts[place - 1]) * (ns - before) / (after - before)
