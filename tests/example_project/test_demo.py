"""``manage.py demo`` as people run it: a process that starts many others and leaves nothing behind."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from example_project.demo import generator
from example_project.demo.run import with_search_path
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent

KEYS = {
    "published",
    "handled",
    "redelivered",
    "expired",
    "dead",
    "orphaned",
    "lost",
    "queues_deleted",
    "queues_reaped",
    "healed",
    "adopted",
    "seconds",
    "throughput",
    "wakeup_p50_ms",
    "wakeup_p99_ms",
}


class Demo:
    """Runs the demo, with a folder for its temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "TMPDIR": str(self.folder),
        }
        command = [sys.executable, str(ROOT / "manage.py"), "demo", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        self.started.append(subprocess.Popen(command, env=environment, text=True, **streams))
        return self.started[-1]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=180)
        return process.returncode, out, err

    def children(self) -> set[int]:
        """Return the processes that belong to a run in this folder, by what their environment says."""
        wanted = f"PGQUEUE_DEMO_RUN={self.folder}".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in path.read_bytes():
                    found.add(int(path.parent.name))
            except OSError:  # ended meanwhile, or another user's
                continue
        return found

    def leftovers(self) -> list[Any]:
        """Return files, processes and schemas that are there."""
        with psycopg.connect(os.environ["DATABASE_URL"]) as session:
            schemas = session.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'pgqueue_demo_%'").fetchall()
        return [*self.folder.iterdir(), *self.children(), *schemas]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    for process in demo.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_small_run_balances(demo: Demo):
    """One JSON object and nothing else is printed; every message is accounted for; nothing stays behind."""
    status, out, err = demo.run("--messages", "600", "--publishers", "2", "--format", "json")
    assert (status, err) == (0, ""), out
    figures = json.loads(out)
    assert figures.keys() >= KEYS
    assert figures["published"] == 600
    assert figures["published"] == figures["handled"] + figures["expired"] + figures["dead"]
    assert (figures["lost"], figures["orphaned"], figures["problems"]) == (0, 0, [])
    for key in ("queues_deleted", "queues_reaped", "healed", "adopted", "wakeup_p50_ms", "throughput"):
        assert figures[key] > 0, key
    assert demo.leftovers() == []


@pytest.mark.full
def test_a_run_that_proves_nothing_fails(demo: Demo):
    """Too short for anything to happen: exit status 1, the reason, and where the notes are."""
    status, out, err = demo.run("--messages", "1", "--seconds", "0.1")
    assert status == 1
    assert "The ledger does not balance." in out
    assert "not exercised: no publisher healed a queue" in err
    kept = re.search(r"The notes are in (\S+)", err)
    assert kept is not None
    assert list(Path(kept[1]).glob("publisher*.notes"))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it(demo: Demo, number: signal.Signals):
    """Ctrl-C or SIGTERM: exit status 130, no child, no table, no file. On a terminal there was a bar."""
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    process = demo.start("--messages", "50000", stderr=stderr)
    os.close(stderr)
    shown = ""
    # Read as it comes, or a full terminal would block the demo.
    while not re.search(r"handled: .*50000.*published=\d+", shown):
        assert select.select([terminal], [], [], 60)[0], shown
        shown += os.read(terminal, 10_000).decode()
    children = demo.children()
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    assert len(children) >= 4
    wait_until(lambda: demo.leftovers() == [])
    assert "Traceback" not in shown + os.read(terminal, 100_000).decode()
    os.close(terminal)


@pytest.mark.full
def test_what_a_killed_run_leaves_is_taken_away(demo: Demo):
    """SIGKILL: its processes end by themselves, and the next run drops its tables."""
    process = demo.start("--messages", "50000")
    wait_until(lambda: list(demo.folder.glob("*/publisher0-*.notes")), timeout=60)
    assert demo.children()
    process.kill()
    process.wait()
    wait_until(lambda: not demo.children(), timeout=40)
    (folder,) = demo.folder.iterdir()
    assert f"pgqueue_demo_{json.loads((folder / 'run.json').read_text())['id']}" in str(demo.leftovers())
    demo.run("--messages", "1", "--seconds", "0.1")
    assert "pgqueue_demo" not in "".join(str(one) for one in demo.leftovers() if isinstance(one, tuple))


@pytest.mark.parametrize(
    ("text", "clue"),
    [(None, "cannot be read"), ("", "contains no payload"), ('{"a": 1}\n\n{"a": \n', "line 3, is not JSON")],
)
def test_bad_input_is_refused_before_anything_starts(demo: Demo, tmp_path: Path, text: str | None, clue: str):
    """A file that is missing, empty or not JSON lines: one line of error, exit status 1."""
    file = tmp_path / "input.jsonl"
    if text is not None:
        file.write_text(text)
    status, out, err = demo.run("--input", str(file))
    assert (status, out) == (1, "")
    assert clue in err
    assert "Traceback" not in err


def test_a_short_file_is_cycled(tmp_path: Path):
    """The publishers together take each line in turn, and start again at the end."""
    file = tmp_path / "input.jsonl"
    file.write_text("1\n\n2\n3\n")
    assert generator.check(str(file)) == 3
    taken = [generator.payloads(str(file), first, 2) for first in range(2)]
    assert [next(taken[number % 2]) for number in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_generated_events_have_the_sizes_they_should():
    """Between half a kilobyte and 30, small ones more often, each with an id of its own."""
    events = generator.payloads(None, 0, 1)
    made = [next(events) for _ in range(500)]
    sizes = sorted(len(json.dumps(event)) for event in made)
    assert 400 < sizes[0] < 700
    assert 20_000 < sizes[-1] < 31_000
    assert sizes[250] < 10_000
    assert len({event["id"] for event in made}) == 500


@pytest.mark.parametrize(
    "url",
    [
        "postgres://postgres@/postgres?host=%2Fsome%2Ffolder",
        "postgres://user:secret@localhost:5432/name",
        "postgres://user@localhost/name?options=-c%20work_mem%3D8MB",
    ],
)
def test_the_search_path_is_added_to_the_url(url: str):
    """What was in the URL stays, other server options too."""
    with_path = with_search_path(url, "schema_1")
    options = psycopg.conninfo.conninfo_to_dict(with_path)
    before = psycopg.conninfo.conninfo_to_dict(url)
    assert options.pop("options").endswith("-c search_path=schema_1")
    assert {key: value for key, value in before.items() if key != "options"} == options
    assert before.get("options", "") in with_path.replace("%20", " ").replace("%3D", "=")
