"""What the commands share: arguments that say what is wrong with them, signals, errors."""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import TextIO, TypeVar

from django.core.management.base import CommandError
from django.db import DatabaseError

logger = logging.getLogger("django_pgqueue")

Number = TypeVar("Number", int, float)


def at_least(least: Number) -> Callable[[str], Number]:
    """Return an argparse type: a number like ``least`` that is not smaller."""
    kind = type(least)

    def parse(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            number = None
        # Written so that NaN fails too.
        if number is None or not least <= number < 1e12:
            raise argparse.ArgumentTypeError(f"must be a number of at least {least}, not {text!r}")
        return number

    return parse


def while_read(write: Callable[[], object], stop: threading.Event) -> Callable[[], None]:
    """Return ``write``, for a loop that ends, by ``stop``, when nobody reads its output any more."""

    def write_once() -> None:
        try:
            write()
        except BrokenPipeError:
            # What is left in the buffer is written when the process ends: to nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop.set()

    return write_once


@contextmanager
def on_stop_signal(stop: Callable[[], object]) -> Iterator[None]:
    """
    Call ``stop`` at each SIGTERM and SIGINT, and restore the handlers afterwards.

    It is called in a thread of its own: a signal may interrupt the main thread inside the lock of
    the very ``threading.Event`` that ``stop`` sets, and would wait for itself. What a handler may
    do is put to a ``SimpleQueue``, which is reentrant.

    Only the main thread may have signal handlers; elsewhere this does nothing but say so.
    """
    received: SimpleQueue[int | None] = SimpleQueue()

    def handle(number: int, frame: FrameType | None) -> None:
        received.put(number)

    def forward() -> None:
        while received.get() is not None:
            stop()

    with ExitStack() as stack:
        if current_thread() is main_thread():
            Thread(target=forward, name="pgqueue signals", daemon=True).start()
            stack.callback(received.put, None)
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, handle))
        else:
            logger.debug("not in the main thread: signals do not stop this command thread=%s", current_thread().name)
        yield


@contextmanager
def progress_line(stream: TextIO, verb: str) -> Iterator[Callable[[int], object]]:
    """
    Give what takes a number as it grows: on a terminal it is shown, elsewhere it is not.

    SIGINT and SIGTERM end the command in the middle, and it says how far it came.
    """
    done = 0
    is_shown = stream.isatty()

    def progress(count: int) -> None:
        nonlocal done
        done = count
        if is_shown:
            stream.write(f"\r{verb} {count:,}")

    with ExitStack() as stack:
        if current_thread() is main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        try:
            yield progress
        except KeyboardInterrupt:
            raise CommandError(f"stopped, {verb} {done} messages", returncode=130) from None
        finally:
            if is_shown:
                stream.write("\r\033[K")


def refusal(error: DatabaseError) -> CommandError:
    """Return what a command says when the database refuses it: one line."""
    text = str(error).strip()
    return CommandError(f"the database refuses: {text.splitlines()[0] if text else type(error).__name__}")
