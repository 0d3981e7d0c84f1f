"""
The pages of the docs, followed as a reader follows them.

A page is a list of fenced blocks. What is done with each tells its language, and a comment above it:

=========================  ==================================================================================
```python                  run, in one Python process for the page, with the project's settings
<!-- file: PATH -->        it is the content of that file of the project
<!-- add to: PATH -->      it is added to the end of that file
```bash                    run line by line; what runs for ever runs beside what follows, and is stopped at the end
```sql                     run on the project's database
<!-- fails: SQLSTATE -->   so does the SQL below it, with this error
<!-- prints -->            what the block before writes; `…` stands for anything
<!-- output of: WORDS -->  what the command that runs beside the page and has these words in it writes in time
```json, yaml, ini, toml   parsed
<!-- not run: REASON -->   nothing, and the reason is on the list of a test
=========================  ==================================================================================

What a page makes on the server itself (databases, roles) it calls "shop_…". Ports become free ones.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import yaml

import dev
from tests.consumer.test_health import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
# The distribution, in quotes or not.
REQUIREMENT = re.compile(r"""(["']?)\bdjango-pg-messagequeue(\[[a-z,]+\])?\1""")

# Seconds that a command, a block, an expected line gets.
WAIT_TIMEOUT = 120.0

BLOCK = re.compile(
    r"(?P<comment>(?:^ *<!-- [^\n]* -->\n+)?)^(?P<indent> *)```(?P<language>[a-z{}-]+)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(
    r"<!-- (?P<word>file|add to|not run|fails|output of|prints|from|benchmark)(?:: (?P<argument>.*?))? -->"
)

# What a page makes on the server, and the ports that it answers at.
MADE = re.compile(r"\bshop(?=_\w)|(?<=DATABASE )shop\b")
PORT = re.compile(r"(?<=-port )\d{4}\b|(?<=localhost:)\d{4}\b")

# These run until they are told to stop.
ENDLESS = re.compile(
    r"consume_queues(?!.*(--drain|--max-messages))|heartbeat_queues(?!.*--once)|runserver|--watch"
    r"|reap_queues.*--interval|celery .*worker"
)


@dataclass(frozen=True)
class Block:
    """A fenced block, and what the comment above it says of it."""

    line: int
    language: str
    code: str
    word: str = ""
    argument: str = ""


def blocks(text: str) -> list[Block]:
    """Return the blocks of a page. Those of MyST (```{toctree}) are none."""
    found = []
    for match in BLOCK.finditer(text):
        if match["language"].startswith("{"):
            continue
        comment = COMMENT.search(match["comment"])
        word, argument = (comment["word"], comment["argument"] or "") if comment else ("", "")
        indent = len(match["indent"])
        code = "".join(line[indent:] if line.strip() else line for line in match["code"].splitlines(keepends=True))
        found.append(Block(text.count("\n", 0, match.start("code")), match["language"], code, word, argument))
    return found


@dataclass
class Running:
    """A command that runs beside the page."""

    command: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """End it as a supervisor does. It has to end well."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(WAIT_TIMEOUT)
        # runserver has no answer to SIGTERM of its own.
        assert status == 0 or "runserver" in self.command, f"{self.command}: status {status}\n{self.log.read_text()}"


class Shell:
    """The Python process of a page: blocks share their names, `await` works, threads go on between blocks."""

    DRIVER = """
import ast, asyncio, inspect, io, json, os, sys, traceback, warnings
warnings.simplefilter("default")
import django; django.setup()
replies, sys.stdout = sys.stdout, io.StringIO()
names = {"__name__": "__main__"}
loop = asyncio.new_event_loop()
for line in sys.stdin:
    block, error = json.loads(line), None
    if block is not None:
        sys.stdout.seek(0); sys.stdout.truncate()
        try:
            code = compile(block["code"], block["where"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if inspect.iscoroutine(result):
                loop.run_until_complete(result)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps({"error": error, "output": sys.stdout.getvalue()}), file=replies, flush=True)
loop.close()
"""

    def __init__(self, python: Path, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [str(python), "-c", self.DRIVER],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, where: str) -> None:
        reply = self._ask({"code": code, "where": where})
        assert reply["error"] is None, f"{where}:\n{reply['error']}"

    def output(self) -> str:
        """Return what the last block has written so far."""
        return str(self._ask(None)["output"])

    def _ask(self, block: dict[str, str] | None) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(block) + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        return reply

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WAIT_TIMEOUT)
        self._process.stdout.close()


@dataclass
class Project:
    """
    A reader's folder, environment and database.

    In what the page says the database is called "shop"; here it is `database`, on the server that `server`, in libpq's
    variables, tells of.
    """

    folder: Path
    venv: Path
    wheel: Path
    database: str
    server: dict[str, str]
    settings_module: str = "shop.settings"
    #: What stands for what in Python, beside the database's name.
    replaced: dict[str, str] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    _ports: dict[str, int] = field(default_factory=dict)
    _shell: Shell | None = None
    # Returns what the block before has written so far.
    _written: Callable[[], str] = str

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "TMPDIR", "PIP_CONFIG_FILE")}
        return {
            **kept,
            **self.server,
            "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.venv),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(self.folder),
            "DJANGO_SETTINGS_MODULE": self.settings_module,
        }

    def follow(self, page: Path) -> None:
        """Do what a page says, block by block, and stop at the first that does not hold."""
        try:
            for block in blocks(page.read_text()):
                self._do(block, f"{page.name}:{block.line}")
        finally:
            self._stop_shell()
            while self.running:
                self.running.pop().stop()

    def _do(self, block: Block, where: str) -> None:
        by_word: dict[str, Callable[[Block, str], None]] = {
            "file": self._write_file,
            "add to": self._add_to_file,
            "not run": lambda block, where: None,
            "from": _is_part_of_its_file,
            "fails": self._fails,
            "prints": self._prints,
            "output of": self._output_of,
        }
        by_language: dict[str, Callable[[Block, str], None]] = {
            "python": self._python,
            "bash": self._bash,
            "sql": self._sql,
            **dict.fromkeys(PARSERS, _parse),
        }
        done = by_word.get(block.word) or by_language.get(block.language)
        assert done, f"{where}: nothing is known of a block in {block.language!r} after {block.word!r}"
        done(block, where)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Return what its database answers."""
        with psycopg.connect(**self._address()) as session:
            return session.execute(statement).fetchall()

    # --- Blocks ---

    def _write_file(self, block: Block, where: str) -> None:
        path = self.folder / block.argument
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._as_here(block.code))
        # It imported what was there before.
        self._stop_shell()

    def _add_to_file(self, block: Block, where: str) -> None:
        path = self.folder / block.argument
        assert path.exists(), f"{where}: there is no {block.argument} to add to"
        path.write_text(f"{path.read_text().rstrip()}\n\n\n{self._as_here(block.code)}")
        self._stop_shell()

    def _python(self, block: Block, where: str) -> None:
        if self._shell is None:
            self._shell = Shell(self.venv / "bin" / "python", self.folder, self.environment)
        self._shell.run(self._as_here(block.code), where)
        self._written = self._shell.output

    def _bash(self, block: Block, where: str) -> None:
        written = []
        for line in block.code.replace("\\\n", "").splitlines():
            if line.strip() and not line.startswith("#"):
                written.append(self._command(line, where))
        self._written = lambda: "".join(written)

    def _command(self, line: str, where: str) -> str:
        line = REQUIREMENT.sub(lambda found: f"'{self.wheel}{found[2] or ''}'", line)
        line = line.replace("pip install ", f"{shlex.join(dev.installer(self.venv / 'bin' / 'python'))} ")
        line = PORT.sub(lambda found: str(self._port(found[0])), line)
        if ENDLESS.search(line):
            self._start(line)
            return ""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, f"{where}: {line}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, line: str) -> None:
        log = self.folder / f".log-{len(self.running)}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self.running.append(Running(line, process, log))
        for port in re.findall(r"-port (\d+)", line):
            wait_until(lambda port=port: _is_taken(int(port)), WAIT_TIMEOUT / 4, what=f"an answer at {port}: {line}")

    def _sql(self, block: Block, where: str) -> None:
        with psycopg.connect(**self._address(), autocommit=True) as session:
            cursor = session.execute(MADE.sub(self.database, block.code))
            rows = cursor.fetchall() if cursor.description else []
        self._written = lambda: "".join(f"{' | '.join(map(str, row))}\n" for row in rows)

    def _fails(self, block: Block, where: str) -> None:
        try:
            self._sql(block, where)
        except psycopg.Error as error:
            assert error.sqlstate == block.argument, f"{where}: {error.sqlstate}: {error}"
        else:
            raise AssertionError(f"{where}: this does not fail")

    def _prints(self, block: Block, where: str) -> None:
        _expect(block.code, self._written, where)

    def _output_of(self, block: Block, where: str) -> None:
        found = [each for each in self.running if block.argument in each.command]
        assert len(found) == 1, f"{where}: {len(found)} running commands have {block.argument!r} in them"
        _expect(block.code, found[0].log.read_text, where)

    # --- Its surroundings ---

    def _as_here(self, code: str) -> str:
        code = code.replace('"NAME": "shop', f'"NAME": "{self.database}')
        for there, here in self.replaced.items():
            code = code.replace(there, here)
        return code

    def _port(self, there: str) -> int:
        return self._ports.setdefault(there, free_port())

    def _address(self) -> dict[str, str]:
        return {name.removeprefix("PG").lower(): value for name, value in self.server.items()} | {
            "dbname": self.database
        }

    def _stop_shell(self) -> None:
        if self._shell is not None:
            self._shell.stop()
            self._shell = None

    @contextmanager
    def copied(self, folder: Path, database: str) -> Iterator[Project]:
        """Give another project like this one, on a copy of its database. What is made of that name goes at the end."""
        import shutil

        shutil.copytree(self.folder, folder)
        with psycopg.connect(**self._address() | {"dbname": "postgres"}, autocommit=True) as admin:
            admin.execute(f'CREATE DATABASE "{database}" TEMPLATE "{self.database}"')
            try:
                settings = folder / "shop" / "settings.py"
                settings.write_text(settings.read_text().replace(f'"{self.database}"', f'"{database}"'))
                yield Project(folder, self.venv, self.wheel, database, self.server, self.settings_module)
            finally:
                for name in _made(admin, "pg_database", "datname", database):
                    admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
                for name in _made(admin, "pg_roles", "rolname", database):
                    admin.execute(f'DROP ROLE "{name}"')


def _made(admin: psycopg.Connection[Any], catalogue: Any, column: Any, prefix: str) -> list[str]:
    rows = admin.execute(f"SELECT {column} FROM {catalogue} WHERE starts_with({column}, %s)", [prefix]).fetchall()
    return [name for (name,) in rows]


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def build_wheel(folder: Path) -> Path:
    """Build the distribution, and return the file."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return next(folder.glob("*.whl"))


def _ini(text: str) -> None:
    # systemd's and PgBouncer's files have keys twice, without values, and comments.
    configparser.ConfigParser(strict=False, allow_no_value=True, interpolation=None).read_string(text)


PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "ini": _ini,
    "toml": tomllib.loads,
    "cron": lambda text: [_cron(line) for line in text.splitlines()],
}


def _cron(line: str) -> None:
    assert re.fullmatch(r"([\d*/,-]+ ){5}.*\S|[A-Z]+=.*|#.*|", line), f"not a line of a crontab: {line}"


def _parse(block: Block, where: str) -> None:
    try:
        PARSERS[block.language](block.code)
    except Exception as error:
        raise AssertionError(f"{where}: {error}") from error


def _is_part_of_its_file(block: Block, where: str) -> None:
    text = (ROOT / block.argument).read_text()
    assert block.code.strip() and block.code in text, f"{where}: this is not in {block.argument}"


def _expect(expected: str, written: Callable[[], str], where: str) -> None:
    """Wait until the lines were written, among others or alone."""
    pattern = "".join(f"{re.escape(line).replace('…', '.*')}\n" for line in expected.splitlines())
    deadline = time.monotonic() + WAIT_TIMEOUT / 4
    while not re.search(f"^{pattern}", written() if written().endswith("\n") else f"{written()}\n", re.MULTILINE):
        assert time.monotonic() < deadline, f"{where}: expected\n{expected}\nbut this was written:\n{written()}"
        time.sleep(0.05)
