"""
Many processes that do the same thing at the same moment, without the price of starting each.

One process sets Django up and then forks its members, which have sessions of their own. A member's
work is a function of a module, named `module:function`, called as `function(number, *arguments)`;
arguments and results are JSON.
"""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.support.processes import ROOT, environment


class Crew:
    """Members in other processes; their numbers count from 0."""

    def __init__(self, process: "subprocess.Popen[str]", pids: list[int]) -> None:
        self._process = process
        self.pids = pids

    def start(self, *arguments: Any) -> None:
        """Release all members at once, with the same arguments."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()

    def results(self) -> list[Any]:
        """Wait for what `start()` began, and return the members' results in their order."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the crew has ended"
        results, errors = json.loads(line)
        assert not errors, "\n".join(errors)
        return list(results)

    def each(self, *arguments: Any) -> list[Any]:
        """Let each member work once, and return their results."""
        self.start(*arguments)
        return self.results()


@contextmanager
def crew(
    count: int,
    function: str,
    settings: Mapping[str, Any] | None = None,
    url: str | None = None,
) -> Iterator[Crew]:
    """Start `count` members that do `function`; `settings` and `url` as `workers.environment` takes them."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import django; django.setup(); import {__name__} as crew; crew.main({count}, {function!r})",
        ],
        cwd=ROOT,
        env=environment(settings=settings, url=url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the crew did not start"
    try:
        yield Crew(process, json.loads(line))
    finally:
        # It ends when its members have answered.
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main(count: int, function: str) -> None:
    """Be the crew's process. Django is set up."""
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)
    ours: list[Connection] = []
    members = []
    for number in range(count):
        mine, theirs = context.Pipe()
        ours.append(mine)
        member = context.Process(target=work, args=(number, call, barrier, theirs, ours), daemon=True)
        member.start()
        theirs.close()
        members.append(member)
    say([member.pid for member in members])
    for line in sys.stdin:
        for connection in ours:
            connection.send(json.loads(line))
        answers = [connection.recv() for connection in ours]
        say([[result for result, _ in answers], [error for _, error in answers if error]])
    # Daemons: what still runs is terminated.


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def work(
    number: int, call: Callable[..., Any], barrier: Any, connection: Connection, parents: list[Connection]
) -> None:
    """Be a member: wait for orders until the parent is gone."""
    for each in parents:
        # Inherited: a member that kept them open would never see the end of its own.
        each.close()
    # The parent's orders come through its pipe alone.
    os.close(0)
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        barrier.wait(60)
        try:
            answer = call(number, *arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)
