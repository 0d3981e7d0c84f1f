"""
The protocol between the benchmark and a peer's program, and its side in Python.

``PROGRAM setup``
    Make the peer's tables in the empty database at ``DATABASE_URL`` (a URL for libpq; the server is
    on a unix socket, whose folder is the URL's parameter ``host``), and exit. Each peer has a
    database to itself on the same server.

``PROGRAM publisher [KEY=VALUE ...]``
    Connect, print ``READY``, and obey the lines of stdin. Each is answered with one line of integers;
    times are nanoseconds of CLOCK_MONOTONIC.

    ``one SECONDS``  publish the payload one by one, each a commit of its own, for so long.
                     Answer: ``COUNT START END``
    ``many COUNT``   publish so many by the peer's way for many, 1,000 a call; where it has none,
                     1,000 in a transaction. COUNT is a multiple of 1,000. Answer: ``COUNT START END``
    ``tag NUMBER``   publish one whose payload has ``"tag": NUMBER`` as well.
                     Answer: ``1 START END``, where END is when the publish returned
    ``left``         Answer: how many messages are stored that are not done (ready or being worked on)
    ``clear``        delete all messages, done ones too. Answer: ``0``

``PROGRAM worker MODE [KEY=VALUE ...]``
    Import and connect what can be before the first claim, print ``READY``, wait for a line on stdin,
    then run the peer's own worker until killed: SIGTERM ends it in an orderly way. The handler has the
    payload as an object (where the peer hands out bytes, the handler decodes them) and calls
    ``handled(payload)``, which depends on MODE:

    ``count``  count only. A thread or timer prints ``NS COUNT`` at once for the first message and
               then every 20 ms if there are new ones: how many have started so far, and when the
               last of them did. A handler of many calls ``handled`` once for all of them.
    ``note``   print ``TAG NS`` for each message as it starts: its tag and the time
    ``hold``   the same, and then never return (until killed)

The settings, KEY=VALUE, are those of ``catalog.py``. A program whose stdin ends exits at once: the
benchmark is gone. Lines are written in one piece and past any buffer, since several processes may share a
stdout. Nothing else may go there.

The payload (about 500 bytes of JSON) is in the environment, ``PEERS_PAYLOAD``. The programs run in
environments of their own, so this needs nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

PAYLOAD: dict[str, Any] = json.loads(os.environ.get("PEERS_PAYLOAD", "{}"))
URL = os.environ.get("DATABASE_URL", "")

# How many are published in one call of ``many``.
BULK = 1_000

# Seconds between two reports of a worker that counts.
REPORT_INTERVAL = 0.02


def say(*words: object) -> None:
    """Print a line in one piece, past the buffers."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def tagged(number: int) -> dict[str, Any]:
    return {**PAYLOAD, "tag": number}


def main(setup: Callable[[], None], publisher: Callable[..., None], worker: Callable[..., None]) -> None:
    """Do what the command line says: its ``KEY=VALUE`` become keyword arguments."""
    verb, *arguments = sys.argv[1:]
    words = [argument for argument in arguments if "=" not in argument]
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    {"setup": setup, "publisher": publisher, "worker": worker}[verb](*words, **options)


# --- Publishing -----------------------------------------------------------------------------------


class Publisher(Protocol):
    """What a peer's program does for ``publisher``."""

    def one(self, payload: dict[str, Any]) -> object: ...
    def many(self, payloads: Sequence[dict[str, Any]]) -> object: ...
    def left(self) -> int: ...
    def clear(self) -> object: ...


def serve(publisher: Publisher) -> None:
    """Obey the lines of stdin."""
    say("READY")
    for line in sys.stdin:
        verb, _, argument = line.strip().partition(" ")
        say(*ANSWERS[verb](publisher, argument))


def publish_one_by_one(publisher: Publisher, seconds: str) -> tuple[int, ...]:
    count, start = 0, time.monotonic_ns()
    end = start + int(float(seconds) * 1e9)
    while (now := time.monotonic_ns()) < end:
        publisher.one(PAYLOAD)
        count += 1
    return count, start, now


def publish_many(publisher: Publisher, count: str) -> tuple[int, ...]:
    start = time.monotonic_ns()
    for _ in range(int(count) // BULK):
        publisher.many([PAYLOAD] * BULK)
    return int(count), start, time.monotonic_ns()


def publish_tagged(publisher: Publisher, number: str) -> tuple[int, ...]:
    start = time.monotonic_ns()
    publisher.one(tagged(int(number)))
    return 1, start, time.monotonic_ns()


def clear(publisher: Publisher, _argument: str) -> tuple[int, ...]:
    publisher.clear()
    return (0,)


ANSWERS: dict[str, Callable[[Publisher, str], tuple[int, ...]]] = {
    "one": publish_one_by_one,
    "many": publish_many,
    "tag": publish_tagged,
    "left": lambda publisher, _argument: (publisher.left(),),
    "clear": clear,
}


async def aserve(publisher: Any) -> None:
    """Obey the lines of stdin, for a publisher whose methods are coroutine functions."""
    say("READY")
    for line in sys.stdin:
        verb, _, argument = line.strip().partition(" ")
        if verb == "one":
            say(*await apublish_one_by_one(publisher, argument))
        elif verb == "many":
            start = time.monotonic_ns()
            for _ in range(int(argument) // BULK):
                await publisher.many([PAYLOAD] * BULK)
            say(argument, start, time.monotonic_ns())
        elif verb == "tag":
            start = time.monotonic_ns()
            await publisher.one(tagged(int(argument)))
            say(1, start, time.monotonic_ns())
        else:
            # left, and clear, which returns nothing.
            say(await getattr(publisher, verb)() or 0)


async def apublish_one_by_one(publisher: Any, seconds: str) -> tuple[int, ...]:
    count, start = 0, time.monotonic_ns()
    end = start + int(float(seconds) * 1e9)
    while (now := time.monotonic_ns()) < end:
        await publisher.one(PAYLOAD)
        count += 1
    return count, start, now


# --- Working --------------------------------------------------------------------------------------

_mode = "count"
_count = 0
_last = 0
_reported = 0


def start_worker(mode: str) -> None:
    """Set what the handler does. ``wait_for_go`` has to follow, before the first claim."""
    global _mode
    _mode = mode


def wait_for_go() -> None:
    """Tell that the worker is ready and wait until all are."""
    say("READY")
    sys.stdin.readline()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    report()


def report() -> None:
    """Report what this process handles from now on. A process that is forked off has to call it itself."""
    if _mode == "count":
        threading.Thread(target=_report, daemon=True).start()


def handled(*payloads: dict[str, Any]) -> None:
    """Be the handler of these messages."""
    global _count, _last
    if _mode == "count":
        _count += len(payloads)
        _last = time.monotonic_ns()
        if not _reported:
            _tell()
        return
    for payload in payloads:
        say(payload["tag"], time.monotonic_ns())
    if _mode == "hold":
        time.sleep(3600)


async def ahandled(*payloads: dict[str, Any]) -> None:
    """Be the handler, on an event loop."""
    if _mode != "hold":
        handled(*payloads)
        return
    for payload in payloads:
        say(payload["tag"], time.monotonic_ns())
    await asyncio.sleep(3600)


def _end_with_stdin() -> None:
    # Not by sys.stdin, whose lock this thread would hold at the interpreter's end.
    while os.read(0, 1):
        pass
    os._exit(1)


def _report() -> None:
    while True:
        time.sleep(REPORT_INTERVAL)
        if _count != _reported:
            _tell()


def _tell() -> None:
    global _reported
    _reported = _count
    say(_last, _reported)
